"""Pipeline schedules as data: who computes which chunk of which micro-batch in what order. Knows no plan, no model."""

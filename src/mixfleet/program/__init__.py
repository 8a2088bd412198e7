"""Plans become programs: an ordered list of actions for every device, which both interpreters read."""

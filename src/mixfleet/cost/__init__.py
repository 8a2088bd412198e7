"""Pure functions that price compute, communication, memory and money. Each question is answered in one place."""

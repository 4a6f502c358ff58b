"""Measurements of Moonstep, each with the command that repeats it."""

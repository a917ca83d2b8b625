"""Timing of this rank: recorders, and the code that turns their data into timelines and traces."""

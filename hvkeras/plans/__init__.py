"""Plans: what a collective consists of, and how often this rank has entered it."""

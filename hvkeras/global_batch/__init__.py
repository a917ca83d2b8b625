"""Training of scripts for one process on all ranks: each rank gets the whole batch and computes its rows of it."""

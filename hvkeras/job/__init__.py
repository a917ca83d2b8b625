"""The job that this process takes part in: its state, its process sets, and what ends it."""

"""The job that this process belongs to: its state, its process sets, and its failures."""

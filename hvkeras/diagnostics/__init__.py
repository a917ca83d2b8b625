"""Profiling of a rank: the store of spans, and its readers: record, timeline and trace."""

"""The public collectives, and the dispatch of planned collectives to the backend."""

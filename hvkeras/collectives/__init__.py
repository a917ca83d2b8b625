"""The collectives that users call, and the dispatch of planned collectives to the backend."""

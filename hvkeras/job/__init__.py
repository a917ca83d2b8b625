"""The job of this process: its session, process sets, and failure handling."""

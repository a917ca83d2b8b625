"""`hvkeras run` and related commands: start a job's ranks, show their output, and end them all when one fails.

One `agent` process per host starts the ranks and forwards their output. The launcher (`run`) starts the agents,
directly on this host and over ssh on others, serves the job's control channel, and decides how the job has ended.
"""

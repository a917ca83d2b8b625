"""`hvkeras run` and related commands: start a job's ranks, show their output, and end them all when one fails.

One `agent` process per host starts the ranks and forwards their output. The launcher (`run`) starts the agents,
directly on this host and over ssh on others, and shows output.
What follows when a process ends is decided by the job's membership: `fixed_membership`, or `elastic_membership` around
the state machine `elastic_driver`. `restarts` starts a job again as a whole.
"""

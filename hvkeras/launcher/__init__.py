"""`hvkeras run` and related commands: start a job's ranks, show their output, and end all if one fails.

One `agent` process per host starts the ranks and forwards their output. The launcher starts the agents, directly on
this host and over ssh on others, and shows the output. When a process ends, the job's membership decides what to do:
`membership.FixedMembership`, or `elastic_membership` with its state machine `elastic_driver`. `restarts` restarts all
ranks of a job.
"""

"""`hvkeras run` and its kin: starts a job's ranks, shows their output, and ends them all when one fails.

One `agent` process a host starts the ranks and passes on what they print; the launcher (`run`) starts the
agents, here directly and elsewhere over ssh, serves the job's control channel, and judges.
"""

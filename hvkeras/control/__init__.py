"""A small authenticated channel between ranks: addresses, liveness, agreement and failures.

One server (in rank 0, or in `hvkeras run`) and one client a rank. Every peer proves that it knows
the job's secret before anything it says is read; messages are JSON, sealed with a session key, and
carry no tensors. Once all ranks are there the server stops listening: nobody else can join.
"""

"""A small authenticated channel between ranks for addresses, liveness checks, agreement and failure reports.

There is one server (in rank 0 or in `hvkeras run`) and one client per rank. Every peer must prove that it knows the
job's secret before its messages are read. Messages are JSON, authenticated with a session key, and carry no tensors.
Once all ranks are connected, the server stops listening, so nobody else can join.
"""

"""A small authenticated channel between ranks for addresses, liveness checks, agreement and failure reports.

A process learns its rank, and where the ranks meet, from its launcher: `launch_environments`.

There is one server (in rank 0 or in `hvkeras run`) and one client per rank. Every peer must authenticate with the job's
secret before its messages are read. Messages are JSON, authenticated with a session key, and carry no tensors. Once all
ranks are connected, the server stops listening, so nobody else can join.

- Transport: `wire` (authentication, frames), `messages`, `connection` (client side), `message_server` (server side,
  which passes messages to a `handler`).
- The server of a job: `server` (its handler: connected, lost and failed ranks) and `ranks`.
- Agreement between ranks: `coordinator`, with `stalls`, `join`, `stop_agreement` and `deadlocks` (mismatched
  collectives, late ranks). `sync_points` and `wait_graph` compute which ranks wait for which.
- Jobs on many hosts: `relay` (a process per host between its ranks and the server) and `relayed_ranks` (the
  server's view of the ranks behind it).
- A rank: `client`, with `heartbeat`, `exchange` (all-gather of values), `clock` and `process_exit`.
- Connection setup: `rendezvous` and `announcements`. `cause` describes why a job ends.
- Progress: `activity` (phase, step and callback of this process), `location` (its position in the user's code).
- Elastic jobs: `membership_channel` between launcher and workers.
"""

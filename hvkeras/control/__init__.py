"""A small authenticated channel between ranks for addresses, liveness checks, agreement and failure reports.

There is one server (in rank 0 or in `hvkeras run`) and one client per rank. Every peer must prove that it knows the
job's secret before its messages are read. Messages are JSON, authenticated with a session key, and carry no tensors.
Once all ranks are connected, the server stops listening, so nobody else can join.

- Bytes: `wire` (proof, frames), `messages` (what is said), `connection` (a peer's end), `message_server` (the other
  end, which hands what it receives to a `handler`).
- The server of a job: `server` (its handler: who is there, lost, at fault), `ranks`, and what ranks agree on:
  `coordinator`, with `deadlocks` (mismatched collectives, late ranks; from `meetings`, who waits for whom, and
  `circles`), `stalls`, `join` and `stop_agreement`.
- Between server and ranks, in jobs on many hosts: `relay` (a process on each host, one more handler), `relay_start`
  (which rank starts it), `relayed` (its ranks, as the server sees them).
- A rank: `client`, with `heartbeat`, `exchange` (values of all ranks), `clock` and `process_exit`.
- How they find each other: `rendezvous` (who is missing, until when), `announcements`. `cause` is why a job ends.
- An elastic job's launcher and workers: `membership_channel`.
"""

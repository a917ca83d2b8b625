"""How a process learns its rank and peers: one pure function per launcher, tried in a fixed order.

The order is a contract: our own launcher, then launchers that start processes, then TF_CONFIG
(which may be left over in a shell), then Slurm (whose variables are also set in batch scripts that
start nothing).
"""

from __future__ import annotations

from hvkeras.launch_environments.launch import Launch, Rendezvous

__all__ = ["Launch", "Rendezvous"]

"""What the jobs of a benchmark are for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvkeras.bench.peers import Peer
    from hvkeras.bench.ranks import Ranks

ONE = "local"  # the backend of the job of one process


@dataclass(frozen=True)
class Plan:
    """What a job is for.

    Attributes:
        kind: `allreduce` or `step`.
        backend: The engine; "" for MPI alone, or for processes that do not communicate.
        ranks: How many ranks the benchmark is about; a job of one process has fewer.
        peer: Whether the engine is also used directly, without hvkeras.
        jit: Whether steps are also compiled by XLA, where the engine can.
        pin: Whether each rank gets a core of its own.
        timeout: Seconds until all must be over.
        shared: The folder of the benchmark, where jobs leave files for each other.
        port: Where rank 0 calls.
        key: What it shows there.
    """

    kind: str
    backend: str
    ranks: int
    peer: bool
    jit: bool
    pin: bool
    timeout: float
    shared: str
    port: int = 0
    key: str = ""


@dataclass(frozen=True)
class Stage:
    """What participants of a job share.

    Attributes:
        plan: What the job is for.
        ranks: The ranks.
        memory: Bytes by which the engine's start raised the peak of this rank's memory, or None.
        peer: The engine used directly, or None.
    """

    plan: Plan
    ranks: Ranks
    memory: int | None
    peer: Peer | None

"""The plans of a benchmark's jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvkeras.bench.peers import Peer
    from hvkeras.bench.ranks import Ranks

ONE = "local"  # the backend of the single-process job


@dataclass(frozen=True)
class Plan:
    """What a job measures, and how.

    Attributes:
        kind: `allreduce` or `step`.
        backend: The engine; "" for MPI alone, or for processes that do not communicate.
        ranks: The number of ranks in the benchmark; the single-process job has fewer.
        peer: Whether to also measure the engine used directly, without hvkeras.
        jit: Whether to also compile steps with XLA, if the engine supports it.
        optimizer: The optimizer of the steps, one of `hvkeras.bench.models.OPTIMIZERS`.
        plain: Whether to also time engines with the update of the optimizer not compiled.
        pin: Whether each rank is pinned to its own core.
        timeout: Seconds until the benchmark must be over.
        shared: The folder of the benchmark, through which jobs exchange files.
        port: The port that rank 0 connects to.
        key: The secret that it sends there.
    """

    kind: str
    backend: str
    ranks: int
    peer: bool
    jit: bool
    optimizer: str
    plain: bool
    pin: bool
    timeout: float
    shared: str
    port: int = 0
    key: str = ""


@dataclass(frozen=True)
class Stage:
    """The context shared by the participants of a job.

    Attributes:
        plan: The plan of the job.
        ranks: The ranks.
        memory: Bytes by which starting the engine raised this rank's peak memory, or None.
        peer: The engine used directly, or None.
    """

    plan: Plan
    ranks: Ranks
    memory: int | None
    peer: Peer | None

"""The plans of a benchmark's jobs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvkeras.bench.peers import Peer
    from hvkeras.bench.ranks import BenchmarkRanks

ONE = "local"  # the backend of the single-process job
TCP = "TCP"  # in place of a backend: plain streams between hosts
SILENT = ("", TCP)  # in place of a backend, where no engine starts
UNLIMITED = "no limit"
AT = " at "  # between a size or model and the bandwidth at which it is measured


def without_rate(work: str) -> str:
    """Return the size or model of a piece of work that may name a bandwidth, such as `1MiB at 1gbit`."""
    return work.partition(AT)[0]


def rate_of(work: str) -> float:
    """Return the bandwidth that a piece of work names, in bytes per second; infinite if it names none.

    Raises:
        ValueError: It is no bandwidth such as `100mbit`.
    """
    _, at, text = work.partition(AT)
    return float("inf") if not at or text == UNLIMITED else bytes_per_second(text)


def bytes_per_second(rate: str) -> float:
    """Read a bandwidth as `tc` does: `100mbit`, `2.5gbit`.

    Raises:
        ValueError: It is no such text.
    """
    found = re.fullmatch(r"([\d.]+)([kmg])bit", rate)
    if found is None:
        raise ValueError("a bandwidth is a number with kbit, mbit or gbit")
    return float(found[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[found[2]] / 8


@dataclass(frozen=True)
class BenchmarkPlan:
    """What a job measures, and how.

    Attributes:
        kind: `allreduce` or `step`.
        backend: The engine; "" for MPI alone, or for processes that do not communicate; `TCP`.
        ranks: The number of ranks in the benchmark; the single-process job has fewer.
        peer: Whether to also measure the engine used directly, without hvkeras.
        jit: Whether to also compile steps with XLA, if the engine supports it.
        optimizer: The optimizer of the steps, one of `hvkeras.bench.models.OPTIMIZERS`.
        plain: Whether to also time engines with the update of the optimizer not compiled.
        pin: Whether each rank is pinned to its own core.
        timeout: Seconds until the benchmark must be over.
        shared: The folder of the benchmark, through which jobs exchange files.
        links: The number of allreduces in a chain; 0 for one that suits the size.
        shard: Whether to also time engines with an update that the ranks share.
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
    links: int = 0
    shard: bool = False


@dataclass(frozen=True)
class Stage:
    """The context shared by the participants of a job.

    Attributes:
        plan: The plan of the job.
        ranks: The ranks.
        memory: Bytes by which starting the engine raised this rank's peak memory, or None.
        peer: The engine used directly, or None.
    """

    plan: BenchmarkPlan
    ranks: BenchmarkRanks
    memory: int | None
    peer: Peer | None

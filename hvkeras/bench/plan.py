"""Plans of a benchmark's jobs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvkeras.bench.peers import Peer
    from hvkeras.bench.ranks import BenchmarkRanks

ONE = "local"  # the backend of the single-process job
TCP = "TCP"  # in place of a backend: plain streams between hosts
NO_ENGINE = ("", TCP)  # in place of a backend, where no engine starts
UNLIMITED = "no limit"
AT = " at "  # between a size or model and the bandwidth at which it is measured


def without_rate(work: str) -> str:
    """Return the size or model of a piece of work, without a bandwidth as in `1MiB at 1gbit`."""
    return work.partition(AT)[0]


def rate_of(work: str) -> float:
    """Return the bandwidth of a piece of work, in bytes per second; infinite if it has none.

    Raises:
        ValueError: The bandwidth is invalid.
    """
    _, at, text = work.partition(AT)
    return float("inf") if not at or text == UNLIMITED else bytes_per_second(text)


def bytes_per_second(rate: str) -> float:
    """Parse a bandwidth in the format of `tc`: `100mbit`, `2.5gbit`.

    Raises:
        ValueError: The format is invalid.
    """
    found = re.fullmatch(r"([\d.]+)([kmg])bit", rate)
    if found is None:
        raise ValueError("a bandwidth is a number with kbit, mbit or gbit")
    return float(found[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[found[2]] / 8


@dataclass(frozen=True)
class BenchmarkPlan:
    """Measurements of a job.

    Attributes:
        kind: `allreduce` or `step`.
        backend: The engine; "" for MPI alone, or for processes without communication; `TCP`.
        ranks: Number of ranks in the benchmark; the single-process job has fewer.
        peer: Whether to also measure the engine without hvkeras.
        jit: Whether to also compile steps with XLA, if the engine supports it.
        optimizer: Optimizer of the steps, one of `hvkeras.bench.models.OPTIMIZERS`.
        plain: Whether to also time engines without compiling the optimizer's update.
        pin: Whether each rank is pinned to its own core.
        timeout: Seconds until the benchmark must complete.
        shared: Folder of the benchmark, through which jobs exchange files.
        links: Number of allreduces in a chain; 0 to choose it by size.
        shard: Whether to also time engines with a sharded update.
        compressions: The compressions with which to also time engines.
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
    compressions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stage:
    """Context shared by the participants of a job.

    Attributes:
        plan: Plan of the job.
        memory: Bytes by which the start of the engine raised this rank's peak memory, or None.
        peer: The engine used without hvkeras, or None.
    """

    plan: BenchmarkPlan
    ranks: BenchmarkRanks
    memory: int | None
    peer: Peer | None

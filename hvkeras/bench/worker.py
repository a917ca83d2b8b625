"""What each rank of a job of `hvkeras bench` runs: it does what it is asked, and otherwise waits."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvkeras.bench.line import Line, LineClosedError
from hvkeras.bench.machine import spread
from hvkeras.bench.memory import PeakMemory
from hvkeras.launch_environments import detect_launch
from hvkeras.threads import usable_cores

if TYPE_CHECKING:
    from hvkeras.bench.contestant import Contestant
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
    """What contestants of a job share.

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


def main(folder: Path) -> None:
    """Takes part in a benchmark until it is over.

    Args:
        folder: The folder of the job, with the plan.
    """
    plan = Plan(**json.loads((folder / "plan.json").read_text()))
    launch = detect_launch()
    if plan.pin:
        os.sched_setaffinity(0, {spread(usable_cores())[launch.rank]})  # before TensorFlow starts its threads
    import hvkeras
    from hvkeras import context
    from hvkeras.bench.ranks import Ranks

    memory: int | None = None
    if plan.backend:
        import tensorflow as tf  # noqa: F401 - its own memory is not the engine's

        before = PeakMemory()
        hvkeras.init(plan.backend)
        memory = before.rise()
        job = context.current()
    else:
        job = context.init_without_engine()
    ranks = Ranks(job, plan.timeout)
    line = Line.to(plan.port, plan.key) if ranks.rank == 0 else None
    pids = ranks.gather(os.getpid())
    if line is not None:
        line.send(pids)
    try:
        _serve(Stage(plan, ranks, memory, _peer(plan, ranks)), line)
    except LineClosedError:
        sys.exit("hvkeras: the benchmark has gone")
    hvkeras.shutdown()


def _peer(plan: Plan, ranks: Ranks) -> Peer | None:
    if not plan.peer:
        return None
    from hvkeras.bench.peers import direct

    return direct(ranks.job.backend, ranks)


def _serve(stage: Stage, line: Line | None) -> None:
    from hvkeras.bench import contestant

    ranks = stage.ranks
    found: list[Contestant] = []
    while True:
        request = ranks.gather(line.receive() if line is not None else None)[0]
        what, arguments = request[0], request[1:]
        answer: Any = None
        if what == "end":
            return
        if what == "work":
            found = []
            _, reason, _ = ranks.together(functools.partial(_extend, found, stage, arguments[0]))
            answer = [[one.row.to_json() for one in found], reason]
        else:
            one = found[arguments[0]]
            if what == "time":
                answer = [contestant.timed(one, arguments[1], ranks), one.row.to_json()]
            else:
                {"prepare": contestant.prepare, "finish": contestant.finish}[what](one, ranks)
                answer = one.row.to_json()
        if line is not None:
            line.send(answer)


def _extend(found: list[Contestant], stage: Stage, work: str) -> None:
    found.extend(_contestants(stage, work))


def _contestants(stage: Stage, work: str) -> Sequence[Contestant]:
    make: Callable[..., Sequence[Contestant]]
    if stage.plan.kind == "allreduce":
        from hvkeras.bench.allreduce import contestants as make
    else:
        from hvkeras.bench.step import contestants as make
    return make(stage, work)

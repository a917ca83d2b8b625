"""Program of the ranks in a job of `hvkeras bench`: serve requests of the benchmark process."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hvkeras
from hvkeras.bench import participant
from hvkeras.bench.channel import Channel, ChannelClosedError
from hvkeras.bench.participant import PeakMemory
from hvkeras.bench.plan import NO_ENGINE, BenchmarkPlan, Stage
from hvkeras.bench.ranks import BenchmarkRanks
from hvkeras.control.launch_environments import detect_launch
from hvkeras.host.machine import spread, usable_cores
from hvkeras.job.session import current_session
from hvkeras.startup import init_without_engine

if TYPE_CHECKING:
    from hvkeras.bench.peers import Peer


def main(folder: Path) -> None:
    """Participate in a benchmark until it ends.

    Args:
        folder: Folder of the job, which contains the plan.
    """
    plan = BenchmarkPlan(**json.loads((folder / "plan.json").read_text()))
    launch = detect_launch()
    if plan.pin:
        os.sched_setaffinity(0, {spread(usable_cores())[launch.rank]})  # before TensorFlow starts its threads
    memory: int | None = None
    if plan.backend not in NO_ENGINE:
        import tensorflow as tf  # noqa: F401 - imported first, so that its memory is not attributed to the engine

        before = PeakMemory()
        hvkeras.init(plan.backend)
        memory = before.rise()
        session = current_session()
    else:
        session = init_without_engine()
    ranks = BenchmarkRanks(session, plan.timeout)
    channel = Channel.to(folder) if ranks.rank == 0 else None
    pids = ranks.gather(os.getpid())
    if channel is not None:
        channel.send(pids)
    try:
        _serve(Stage(plan, ranks, memory, _peer(plan, ranks)), channel)
    except ChannelClosedError:
        sys.exit("hvkeras: the benchmark has exited")
    hvkeras.shutdown()


def _peer(plan: BenchmarkPlan, ranks: BenchmarkRanks) -> Peer | None:
    if not plan.peer:
        return None
    from hvkeras.bench.peers import direct  # noqa: PLC0415 - imports TensorFlow

    return direct(ranks.session.backend, ranks)


def _serve(stage: Stage, channel: Channel | None) -> None:
    ranks = stage.ranks
    found: list[participant.Participant] = []
    while True:
        request = ranks.gather(channel.receive() if channel is not None else None)[0]
        what, arguments = request[0], request[1:]
        answer: Any = None
        if what == "end":
            return
        if what == "work":
            found = []
            _, reason, _ = ranks.run_on_all(functools.partial(_extend, found, stage, arguments[0]))
            answer = [[one.row.to_json() for one in found], reason]
        else:
            one = found[arguments[0]]
            if what == "time":
                calls, part = arguments[1:]
                answer = [*participant.timed(one, calls, part, ranks), one.row.to_json()]
            else:
                {"prepare": participant.prepare, "finish": participant.finish}[what](one, ranks)
                answer = one.row.to_json()
        if channel is not None:
            channel.send(answer)


def _extend(found: list[participant.Participant], stage: Stage, work: str) -> None:
    found.extend(_participants(stage, work))


def _participants(stage: Stage, work: str) -> Sequence[participant.Participant]:
    make: Callable[..., Sequence[participant.Participant]]
    if stage.plan.kind == "allreduce":
        from hvkeras.bench.allreduce import participants as make  # noqa: PLC0415 - imports TensorFlow
    else:
        from hvkeras.bench.step import participants as make  # noqa: PLC0415 - imports TensorFlow
    return make(stage, work)

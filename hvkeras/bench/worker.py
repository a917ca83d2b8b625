"""What each rank of `hvkeras bench` runs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hvkeras.bench.machine import spread
from hvkeras.bench.row import Row
from hvkeras.launch_environments import detect_launch
from hvkeras.threads import usable_cores

if TYPE_CHECKING:
    from hvkeras.bench.engines import Engine
    from hvkeras.bench.ranks import Ranks

PLAN, RESULT, PROGRESS = "plan.json", "result.json", "progress"


@dataclass
class Plan:
    """What to do, as the launcher tells all ranks.

    Attributes:
        kind: `allreduce` or `step`.
        backends: The engines.
        sizes: Sizes of the allreduces.
        models: Names of the models.
        seconds: Seconds for each size or model.
        rounds: Rounds instead of seconds, or None.
        peers: Whether Horovod and `tf.distribute` are used directly as well.
        jit: Whether steps are also compiled by XLA.
        pin: Whether each rank gets a core of its own.
        timeout: Seconds until all must be over.
    """

    kind: str
    backends: list[str]
    sizes: list[str]
    models: list[str]
    seconds: float
    rounds: int | None
    peers: bool
    jit: bool
    pin: bool
    timeout: float

    def write(self, folder: Path) -> None:
        """Leaves it in the folder of the job."""
        (folder / PLAN).write_text(json.dumps(asdict(self)))


def main(folder: Path) -> None:
    """Takes part in a benchmark; rank 0 leaves the rows in the folder, size by size or model by model.

    Args:
        folder: The folder of the job, with the plan.
    """
    plan = Plan(**json.loads((folder / PLAN).read_text()))
    launch = detect_launch()
    if plan.pin:
        os.sched_setaffinity(0, {spread(usable_cores())[launch.rank]})  # before TensorFlow starts its threads
    from hvkeras import context

    job = context.init_without_engine()
    from hvkeras.bench.engines import start_all, stop_all
    from hvkeras.bench.ranks import Ranks

    ranks = Ranks(job, plan.timeout, folder / PROGRESS)
    engines = start_all(plan.backends, ranks)
    rows: list[Row] = []

    def done(more: list[Row]) -> None:
        rows.extend(more)
        if ranks.rank == 0:
            new = folder / f"{RESULT}.new"
            new.write_text(json.dumps([row.to_json() for row in rows]))
            os.replace(new, folder / RESULT)

    _measure(plan, engines, ranks, done)
    ranks.show(1.0, "done")
    stop_all(engines, ranks)
    context.shutdown()


def _measure(plan: Plan, engines: Sequence[Engine], ranks: Ranks, done: Callable[[list[Row]], None]) -> None:
    from hvkeras.bench import allreduce, step
    from hvkeras.bench.models import MODELS
    from hvkeras.bench.rounds import Effort

    if plan.kind == "allreduce":
        allreduce.measure(plan.sizes, engines, ranks, Effort(plan.seconds, plan.rounds, allreduce.BLOCK), plan.peers,
                          done)
    else:
        step.measure([MODELS[name] for name in plan.models], engines, ranks,
                     Effort(plan.seconds, plan.rounds, step.BLOCK), plan.peers, plan.jit, done)

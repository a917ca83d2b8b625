"""Several engines, started side by side in the processes of one job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvkeras import context
from hvkeras.backends import backend_class
from hvkeras.backends.interface import Backend, Start
from hvkeras.bench.memory import PeakMemory
from hvkeras.bench.ranks import Ranks
from hvkeras.errors import MachineError, explain

_BEFORE_TENSORFLOW = "tfdist"  # it has to start before TensorFlow is used, by other engines too


@dataclass
class Engine:
    """A backend that was asked for.

    Attributes:
        name: Its name.
        backend: The engine; not to be used if there is a reason.
        reason: Why it cannot serve, or "".
        memory: Bytes by which its start raised the peak of this rank's resident memory; None if unknown.
    """

    name: str
    backend: Backend
    reason: str = ""
    memory: int | None = None


def start_all(names: Sequence[str], ranks: Ranks) -> list[Engine]:
    """Starts engines one after the other on all ranks.

    Args:
        names: Their names.
        ranks: The ranks.

    Returns:
        The engines in the order of `names`, those that cannot serve with the reason.
    """
    engines = {}
    for name in sorted(names, key=lambda each: each != _BEFORE_TENSORFLOW):
        ranks.show(0.0, f"starting {name}")
        engine = Engine(name, backend_class(name)())
        _, engine.reason, _ = ranks.together(lambda: _require(engine, ranks))  # noqa: B023  # called at once
        if not engine.reason:
            _, engine.reason, _ = ranks.together(lambda: _start(engine, ranks))  # noqa: B023
        engines[name] = engine
    return [engines[name] for name in names]


def _require(engine: Engine, ranks: Ranks) -> None:
    """Raises MachineError unless the engine says that it can serve this job."""
    available = engine.backend.availability()
    reason = engine.backend.objection(ranks.job.launch) if available.ok else available.reason
    if reason:
        raise MachineError(reason)


def _start(engine: Engine, ranks: Ranks) -> None:
    job, memory = ranks.job, PeakMemory()
    with context.served_by(engine.backend):
        counted = engine.backend.start(Start(job.topology, job.control, job.launch, job.settings))
    if job.hooks is not None:
        job.hooks.renew_signals()
    if counted != ranks.size:
        raise MachineError(explain("The engine must count the ranks of the job", engine=engine.backend.engine,
                                   ranks=ranks.size, counted=counted))
    engine.memory = memory.rise()


def stop_all(engines: Sequence[Engine], ranks: Ranks) -> None:
    """Stops those that serve, on all ranks."""
    for engine in engines:
        if not engine.reason:
            ranks.together(engine.backend.stop)

"""The job that this process belongs to."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hvkeras.autograph import exclude_from_autograph
from hvkeras.errors import NotInitializedError, explain

if TYPE_CHECKING:
    from hvkeras.backends.interface import Backend
    from hvkeras.control.client import ControlClient
    from hvkeras.host.topology import Topology
    from hvkeras.job.failure import FailureHooks
    from hvkeras.launch_environments import Launch
    from hvkeras.plans.entry_counts import EntryCounts
    from hvkeras.settings import Settings


@dataclass(frozen=True)
class Job:
    """What every part of hvkeras needs to know about the running job.

    Attributes:
        launch: How this process was launched.
        settings: The settings in force.
        topology: Ranks and hosts.
        backend: The started engine.
        entries: The counts of entered collectives.
        control: The control channel; None for a single process.
        hooks: The hooks that end the job when a rank fails; None for a single process.
        gpus: What each rank computes on, see `hvkeras.backends.interface.Start`; empty for a single process.
    """

    launch: Launch
    settings: Settings
    topology: Topology
    backend: Backend
    entries: EntryCounts
    control: ControlClient | None
    hooks: FailureHooks | None
    gpus: tuple[str, ...] = ()


_job: Job | None = None
_numbers = itertools.count(1)
_number = [0]  # of the present job among those of this process


def current_job() -> Job:
    """Returns the running job.

    Raises:
        NotInitializedError: `init()` has not been called, or `shutdown()` has.
    """
    if _job is None:
        raise NotInitializedError(explain("hvkeras must be initialised first", "call hvd.init() before this"))
    return _job


def is_initialized() -> bool:
    """Returns whether `init()` has been called and `shutdown()` has not."""
    return _job is not None


def replace_job(job: Job | None) -> Job | None:
    """Sets the running job, for `init()`, `shutdown()` and tests.

    Args:
        job: The new job, or None.

    Returns:
        The previous job, or None.
    """
    global _job
    before, _job = _job, job
    _number[:] = [next(_numbers)]
    return before


def job_number() -> int:
    """Returns the number of the present job in this process; the ranks of an elastic job are another one each time."""
    return _number[0]


exclude_from_autograph(__name__)

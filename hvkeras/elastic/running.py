"""`hvd.elastic.run`: calls a training function with the last commit's state, as often as it takes."""

from __future__ import annotations

import atexit
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvkeras import context
from hvkeras.elastic.commits import CommitFile
from hvkeras.elastic.state import State
from hvkeras.errors import HorovodInternalError, HostsUpdatedInterrupt, UsageError, explain
from hvkeras.output import prints_at, say

if TYPE_CHECKING:
    from hvkeras.control.client import ControlClient

_numbers = itertools.count()  # of the calls, which are the same in every process that runs the script


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a training function, whose first parameter is a state, so that it goes on from the last commit.

    Before each call, every rank gets rank 0's state: that of the last commit. A lost rank ends all processes;
    `hvkeras run --reset-limit N` starts them again, up to N times, and the script gets to this function anew. A
    `HorovodInternalError` that all ranks raise while none is lost has the function called again in the same processes.

    Example:
        state = hvd.elastic.TensorFlowKerasState(model, epoch=0)

        @hvd.elastic.run
        def train(state):
            while state.epoch < 10:
                model.fit(x, y, epochs=1)
                state.epoch += 1
                state.commit()

        train(state)

    Args:
        func: The function.

    Returns:
        A function with the same parameters, which returns what the function does.
    """
    return run_fn(func, _start_anew)


def run_fn(func: Callable[..., Any], reset: Callable[[], Any]) -> Callable[..., Any]:
    """Decorates a training function as `run` does, with an own way to build the job anew.

    Args:
        func: The function.
        reset: Builds the job anew in all its processes.

    Returns:
        As `run`.
    """

    @functools.wraps(func)
    def go_on(state: State, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(state, State):
            raise UsageError(explain("The first argument of an elastic function must be a state",
                                     "pass hvd.elastic.TensorFlowKerasState(model)", received=state))
        commits = _commits()
        state.keep_commits_in(commits)
        committed = None
        if commits is not None:
            committed = commits.read()
            atexit.register(_forget, commits, context.current().control)
        if committed is not None:
            state.take(committed)
            state.restore()
        shared = False
        while True:
            if not shared:
                state.sync()
            try:
                return func(state, *args, **kwargs)
            except HorovodInternalError as error:
                if _is_over():
                    raise
                _tell(f"trains again from the last commit after {type(error).__name__}: {error}")
                state.restore()
                shared = False
            except HostsUpdatedInterrupt as interrupt:
                shared = interrupt.skip_sync
            reset()
            state.on_reset()
    return go_on


def _commits() -> CommitFile | None:
    """Where rank 0 keeps its commits for the case that the job is started again."""
    job = context.current()
    number = next(_numbers)
    if job.topology.rank:
        return None
    if job.settings.elastic_dir:
        return CommitFile(Path(job.settings.elastic_dir), number)
    if job.topology.size > 1 and number == 0:
        _tell("keeps commits in memory alone, which a lost rank ends with all others. HINT: start the script with"
              " hvkeras run --reset-limit 3")
    return None


def _tell(text: str) -> None:
    job = context.current()
    if job.topology.rank == 0 and prints_at(job.settings, "WARNING"):
        say(f"hvd.elastic.run {text}")


def _is_over() -> bool:
    """Whether a rank is lost: then this process ends as well."""
    control = context.current().control
    return control is not None and control.cause is not None


def _forget(commits: CommitFile, control: ControlClient | None) -> None:
    """Removes the commits of a job that has come to its end; one that failed may be started again."""
    if control is None or control.cause is None:
        commits.remove()


def _start_anew() -> None:
    backend = context.current().backend.name
    context.shutdown()
    context.init(backend)

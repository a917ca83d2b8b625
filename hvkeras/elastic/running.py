"""`hvd.elastic.run`: calls a training function with the last commit's state, as often as necessary."""

from __future__ import annotations

import atexit
import functools
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

from hvkeras.elastic.commits import CommitFile
from hvkeras.elastic.state import State
from hvkeras.errors import HorovodInternalError, HostsUpdatedInterrupt, PeerError, UsageError, explain
from hvkeras.host.commit_files import remove_commits
from hvkeras.host.console import in_words, prints_at, say
from hvkeras.job.state import Job, current_job
from hvkeras.startup import init, shutdown

Function = TypeVar("Function", bound=Callable[..., Any])

_numbers = itertools.count()  # indices of the calls, the same in every process that runs the script


def run(func: Function) -> Function:
    """Decorates a training function, whose first parameter is a state, so that it resumes from the last commit.

    Before each call, every rank gets rank 0's state, which is that of the last commit. When a rank is lost, all
    processes end; `hvkeras run --reset-limit N` restarts them up to N times, and the script reaches this function
    again. If all ranks raise a `HorovodInternalError` and none is lost, the function is called again in the same
    processes.

    The end of the function is a commit, too. If a rank is lost after it, the state is as the function left it. A
    function that returned None is not called again. A function that returned another value is called again, to return
    that value, so it should find in the state that nothing is left to do.

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
        A function with the same parameters and the same return value.
    """
    return run_fn(func, _reinitialize)


def run_fn(func: Function, reset: Callable[[], Any]) -> Function:
    """Decorates a training function as `run` does, with a custom function that rebuilds the job.

    Args:
        func: The function.
        reset: Rebuilds the job in all its processes.

    Returns:
        As for `run`.
    """

    @functools.wraps(func)
    def run_with_state(state: State, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(state, State):
            raise UsageError(explain("The first argument of an elastic function must be a state",
                                     "pass hvd.elastic.TensorFlowKerasState(model)", received=state))
        commits, over = _begin(state)
        if over:
            return None
        shared = True
        while True:
            if not shared:
                state.sync()
            try:
                result = func(state, *args, **kwargs)
                if commits is not None:  # the end is a commit, too
                    state.save()
                    commits.write(state.saved(), result is None)
                return result
            except HorovodInternalError as error:
                if _is_over():
                    raise
                _say_on_rank_0(f"restarts from the last commit after {type(error).__name__}: {error}")
                state.restore()
                shared = False
            except HostsUpdatedInterrupt as interrupt:
                shared = interrupt.skip_sync
            reset()
            state.on_reset()
    return cast(Function, run_with_state)


def _begin(state: State) -> tuple[CommitFile | None, bool]:
    """Gives all ranks the state to resume with; returns rank 0's commit file, and whether training is over."""
    number, job = next(_numbers), current_job()
    commits = _commits(number)
    state.keep_commits_in(commits)
    over = commits is not None and _resume_from(state, commits)
    state.sync()
    removes = number == 0 and commits is not None and not job.settings.run_commits
    over, removes = _decided_by_rank_0([over, removes], f"elastic function {number}")
    if removes:
        atexit.register(_remove_commits_at_exit, job, Path(job.settings.elastic_dir).absolute())
    return commits, over


def _commits(number: int) -> CommitFile | None:
    """Returns the file in which rank 0 keeps its commits for a restart of the job, if any."""
    job = current_job()
    if job.topology.rank:
        return None
    if job.settings.elastic_dir:
        return CommitFile(Path(job.settings.elastic_dir).absolute(), number, job.topology.size)
    if job.topology.size > 1 and number == 0:
        _say_on_rank_0("keeps commits in memory only, where they are lost if a rank is lost. HINT: start the script"
                       " with hvkeras run --reset-limit 3")
    return None


def _resume_from(state: State, commits: CommitFile) -> bool:
    """Restores a state from the last commit; returns whether the training function had finished by then."""
    commit = commits.read()
    if commit is None:
        return False
    if commit.note:
        _say_on_rank_0(f"resumes from the commit before the last one: {commit.note}")
    if commit.saved is None:  # the state does not outlive its process
        return False
    state.take(commit.saved)
    state.restore()
    size = current_job().topology.size
    if commit.ranks not in (0, size):
        _say_on_rank_0(f"resumes on {size} rank{'s' * (size > 1)} what {commit.ranks} have committed: the"
                       " data that hvd.shard deals out, the global batch, and steps within an epoch are not the same")
    if commit.over:
        _say_on_rank_0("does not call the function again, which had finished before the job was restarted")
    return commit.over


def _decided_by_rank_0(own: list[bool], key: str) -> list[bool]:
    """Returns rank 0's values, since only rank 0 has commits."""
    job = current_job()
    decision: list[bool] = own if job.control is None else job.control.gather(key, own, job.settings.start_timeout)[0]
    return decision


def _say_on_rank_0(text: str) -> None:
    job = current_job()
    if job.topology.rank == 0 and prints_at(job.settings, "WARNING"):
        say(f"hvd.elastic.run {text}")


def _is_over() -> bool:
    """Whether a rank was lost, in which case this process ends as well."""
    control = current_job().control
    return control is not None and control.cause is not None


def _remove_commits_at_exit(job: Job, folder: Path) -> None:
    """Removes the commits once all ranks have ended successfully; a failed job may be restarted from them.

    Under `hvkeras run`, the launcher does so if it can.
    """
    if job.control is None:
        if not hasattr(sys, "last_type"):  # Python sets it when it prints a traceback
            remove_commits(folder)
        return
    if job.control.cause is not None or job.control.detached or job.hooks is None or job.hooks.exits_with_failure:
        return
    warned = False

    def on_missing(ranks: list[int], waited: float) -> None:
        nonlocal warned
        if waited > job.settings.stall_warning > 0 and not warned and job.topology.rank == 0:
            warned = True
            say(f"rank 0 removes the commits of hvd.elastic when all ranks have ended, and waits for {in_words(ranks)}")

    try:
        job.control.gather("the end of an elastic job", None, job.settings.stall_shutdown or float("inf"), on_missing)
    except PeerError:
        return
    if job.topology.rank == 0:
        remove_commits(folder)


def _reinitialize() -> None:
    backend = current_job().backend.name
    shutdown()
    init(backend)

"""`hvd.elastic.run`: calls a training function with the last commit's state, as often as necessary."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

import tensorflow as tf

from hvkeras.collectives.broadcasts import broadcast_object
from hvkeras.collectives.operations import Max
from hvkeras.collectives.reductions import allreduce
from hvkeras.compat import graphs
from hvkeras.control.cause import Cause
from hvkeras.data.accounts import accounts, keeps_accounts
from hvkeras.elastic.commits import CommitFile, commit_file, remove_commits_at_exit, say_on_rank_0
from hvkeras.elastic.shared_slots import LostPartsError
from hvkeras.elastic.state import State
from hvkeras.elastic.worker_membership import WorkerMembership, membership
from hvkeras.errors import HorovodInternalError, HostsUpdatedInterrupt, UsageError, explain
from hvkeras.job.failure import STUCK_AFTER
from hvkeras.job.preemption import PreemptionSignal
from hvkeras.job.session import Change, changes, current_session
from hvkeras.training.session_services import restart_with_services

Function = TypeVar("Function", bound=Callable[..., Any])

MIB = 1024**2
_numbers = itertools.count()  # indices of the calls, the same in every process that runs the script


def run(func: Function) -> Function:
    """Decorates a training function, whose first parameter is a state, so that it resumes from the last commit.

    Before each call, every rank gets the state of the last commit. What happens when a rank is lost depends on how the
    job was started:

    - `hvkeras run --min-np` or `--host-discovery-script`: the other ranks keep their processes, and call the function
      again with new ranks and a new size. New processes join them at the next commit. On a backend that cannot start
      again in a process (`tfdist`), the script restarts in each of them, with the commit from its memory.
    - `hvkeras run --reset-limit N`: all processes end and are started again, up to N times; the script reaches this
      function again.
    - Otherwise the job ends.

    If all ranks raise a `HorovodInternalError` and none is lost, the function is called again in the same processes.

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
    return run_fn(func, _restart_session)


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
        members = membership()
        if members is not None and state.must_restart and not members.is_waiting:
            members.require_restarts()
        if members is not None and members.restarts and state.saved() is None:
            say_on_rank_0(f"restarts all ranks when one is lost, as backend {current_session().backend.name} cannot"
                          f" start again in a process, and {type(state).__name__} has no saved() to outlive it")
            members = None
        call = (_Call(state, next(_numbers), reset) if members is None
                else _CallThatSurvives(state, next(_numbers), reset, members))
        return call.run(lambda: func(state, *args, **kwargs))
    return cast(Function, run_with_state)


class _Call:
    """One call of an elastic function.

    Args:
        state: The state.
        number: The index of the call.
        reset: Rebuilds the job.
    """

    def __init__(self, state: State, number: int, reset: Callable[[], Any]) -> None:
        self._state, self._number, self._reset = state, number, reset
        self._commits: CommitFile | None = None
        self._preemption: PreemptionSignal | None = None
        self._is_over = False  # whether the function has returned None by the last commit
        self._is_synchronized = False
        self._is_rebuilt = False  # since the state was reset

    def run(self, function: Callable[[], Any]) -> Any:
        """Calls the function until it returns; None if it had finished before this process was started."""
        if not self._begin():
            return None
        self._listen()
        try:
            return self._run(function)
        finally:
            self._state.commit_on(None)
            if self._preemption is not None:
                self._preemption.forget()

    def _listen(self) -> None:
        """Makes SIGTERM commit before the job ends, if a commit outlives it."""
        if current_session().settings.elastic_dir:
            self._preemption = PreemptionSignal(f"elastic function {self._number}",
                                                range(current_session().topology.size))
            self._preemption.listen()
            self._state.commit_on(self._preemption)

    def _run(self, function: Callable[[], Any]) -> Any:
        rebuild = False
        while True:
            try:
                if rebuild:
                    self._rebuild()
                    self._is_rebuilt = True
                if not self._is_synchronized:
                    self._synchronize()
                rebuild = False
                if self._is_over:
                    return None
                if self._is_rebuilt:
                    self._go_on()
                    self._is_rebuilt = False
                result = function()
                self._finish(result)
                return result
            except HostsUpdatedInterrupt as interrupt:
                self._is_synchronized = interrupt.skip_sync
            except Exception as error:
                if not self._may_recover(error):
                    raise
                self._state.restore()
                self._is_synchronized = False
            rebuild = True

    def _begin(self) -> bool:
        """Prepares the state; returns whether there is anything left to do."""
        session, number = current_session(), self._number
        self._keep_commits()
        over = self._resume()
        self._synchronize()
        removes = number == 0 and self._commits is not None and not session.settings.run_commits
        over, removes = _decided_by_rank_0([over, removes], f"elastic function {number}")
        if removes:
            remove_commits_at_exit(session)
        return not over

    def _resume(self) -> bool:
        """Restores the last commit on the rank that has one; returns whether the function had finished by then."""
        return self._commits is not None and _resume_from(self._state, self._commits)

    def _keep_commits(self) -> None:
        if self._commits is not None:
            self._commits.abandon()
        self._commits = commit_file(self._number)
        self._state.keep_commits_in(self._commits)

    def _synchronize(self) -> None:
        """Gives all ranks the state of rank 0, which is that of the last commit."""
        try:
            self._state.sync()
        except LostPartsError as error:
            self._go_back_to_disk(error)
            self._state.sync()
        if keeps_accounts():
            self._state.data_positions = broadcast_object(self._state.data_positions, name="the positions in the data")
            accounts().restore(self._state.data_positions)
        self._is_synchronized = True

    def _go_back_to_disk(self, error: LostPartsError) -> None:
        """Restores the last commit on disk, as ranks were lost with all copies of a part of the one in memory."""
        commit = self._commits.read() if self._commits is not None else None
        is_there, = _decided_by_rank_0([commit is not None and commit.saved is not None],
                                       f"elastic function {self._number} goes back to disk")
        if not is_there:
            raise error
        before = self._state.steps_made() or 0
        self._state.reshard()
        if self._commits is not None:
            self._is_over = _resume_from(self._state, self._commits)
        further = before - (self._state.steps_made() or 0)
        say_on_rank_0("goes back to the last commit on disk" + f", {further} steps further" * (further > 0) + ", as all"
                      " ranks that had some parts of the optimizer's state were lost")

    def _finish(self, result: Any) -> None:
        """Commits the end of the function, if the job may be restarted."""
        if self._commits is not None or self._state.is_shared:
            self._state.note_commit()
        whole = self._state.whole(self._commits is not None)
        if self._commits is not None:
            self._commits.write(whole, result is None, self._state.data_positions)

    def _may_recover(self, error: Exception) -> bool:
        """Whether the function can be called again in this process after an exception."""
        if not isinstance(error, HorovodInternalError) or _has_failed():
            return False
        say_on_rank_0(f"restarts from the last commit after {type(error).__name__}: {error}")
        return True

    def _rebuild(self) -> None:
        """Rebuilds the job."""
        self._reset()

    def _go_on(self) -> None:
        """Adapts the state to the ranks, on all of which it is the same: reset callbacks may call collectives."""
        self._state.on_reset()


class _CallThatSurvives(_Call):
    """A call in a job whose survivors go on when a rank is lost."""

    def __init__(self, state: State, number: int, reset: Callable[[], Any], members: WorkerMembership) -> None:
        super().__init__(state, number, reset)
        self._members = members
        self._why, self._since = "", 0.0
        self._has_logged_memory = False
        self._repeated: int | None = None

    def run(self, function: Callable[[], Any]) -> Any:
        self._members.enter(self._number)
        self._state.check_hosts_with(self._hosts_have_changed, lambda: self._members.must_leave)
        try:
            return super().run(function)
        finally:
            self._members.leave()
            self._state.check_hosts_with(None)

    def _listen(self) -> None:
        """Makes the commit that lets workers leave come at the next step; see `WorkerMembership` for SIGTERM."""
        members = self._members
        self._state.commit_on(PreemptionSignal(f"elastic function {self._number}",
                                               range(current_session().topology.size),
                                     lambda: members.must_leave_soon))

    def _begin(self) -> bool:
        if self._members.is_waiting:
            begins = self._join(self._state.commit_number if self._receives_handover() else -1)
        else:
            begins = super()._begin()
        if begins and self._members.has_joined_others:
            self._members.has_joined_others, self._is_rebuilt = False, True
        self._members.begun(self._restart_when_stuck)
        return begins

    def _log_memory(self) -> None:
        """Says once how much memory commits take of an optimizer whose update the ranks share."""
        own, others = self._state.memory_of_parts()
        if others and not self._has_logged_memory and not self._members.handed_over(self._number):
            self._has_logged_memory = True
            say_on_rank_0(f"keeps parts of the optimizer's state in memory with each commit: {own / MIB:,.3g} MiB of"
                          f" this rank, and {others / MIB:,.3g} MiB of others that may be lost")

    def _resume(self) -> bool:
        if not self._receives_handover():
            return not self._members.has_joined_at_start and super()._resume()
        return self._is_over

    def _receives_handover(self) -> bool:
        """Restores the commit that this process has kept while its program restarted; False if there is none."""
        handed = self._members.handed_over(self._number)
        if handed is None:
            return False
        state = self._state
        state.take(handed["saved"])
        state.restore()
        state.data_positions, state.commit_number = handed["positions"], handed["number"]
        self._is_over = handed["is_over"]
        self._why, self._since, self._repeated = handed["why"], handed["since"], handed["repeated"]
        return True

    def _synchronize(self) -> None:
        super()._synchronize()
        state = self._state
        state.commit_number, self._is_over = broadcast_object((state.commit_number, self._is_over),
                                                              name="the last commit")
        state.steps_at_commit = state.steps_made()
        state.newest_commit = state.saved(), state.data_positions, state.commit_number
        self._log_memory()

    def _finish(self, result: Any) -> None:
        session = current_session()
        self._state.note_commit()
        self._is_over = result is None
        if self._members.restarts:
            self._hand_over()
        whole = self._state.whole(self._commits is not None)
        if self._commits is not None:
            self._commits.write(whole, self._is_over, self._state.data_positions)
        if session.control is not None:  # until then, a rank that is lost is missed by the others
            session.control.gather(f"the end of elastic function {self._number}", None, session.settings.stall_shutdown
                               or float("inf"))

    def _may_recover(self, error: Exception) -> bool:
        session, began = current_session(), time.monotonic()
        cause = None if session.hooks is None else session.hooks.is_consequence(error)
        if cause is None and (_has_failed() or not isinstance(error, HorovodInternalError)):
            return False
        self._why = cause.sentence() if cause is not None else f"{type(error).__name__}: {error}"
        self._since = self._since or began
        now, then = self._state.steps_made(), self._state.steps_at_commit
        self._repeated = None if now is None or then is None else now - then
        return True

    def _rebuild(self) -> None:
        self._since = self._since or time.monotonic()
        if self._members.restarts:
            self._restart()
        if not self._join(self._state.commit_number):
            self._is_over = True
            return
        if self._reset is not _restart_session:
            self._reset()

    def _go_on(self) -> None:
        super()._go_on()
        if self._since:
            self._log_resumption()

    def _hand_over(self) -> None:
        """Keeps the commit for the time when this process has restarted its program."""
        state = self._state
        self._members.keep(self._number, {
            "saved": state.saved(), "positions": state.data_positions, "number": state.commit_number,
            "is_over": self._is_over, "why": self._why, "since": self._since,
            "repeated": self._repeated})

    def _restart_when_stuck(self, cause: Cause) -> None:
        """Restarts the program, from another thread than the one that does not come back from a collective."""
        if self._state.newest_commit is None or self._state.newest_commit[0] is None:
            return  # there is nothing to go on from: the launcher will replace this process
        saved, positions, number = self._state.newest_commit
        self._members.keep(self._number, {"saved": saved, "positions": positions, "number": number, "is_over": False,
                                          "why": cause.sentence(), "since": time.monotonic() - STUCK_AFTER,
                                          "repeated": None})
        self._members.restart(number, is_stuck=True)

    def _restart(self) -> None:
        """Restarts the program, once no rank needs this one's engine any more."""
        session = current_session()
        self._hand_over()
        if not self._why and session.control is not None:
            session.control.gather("all ranks restart", None, session.settings.start_timeout)
        self._members.restart(self._state.commit_number, is_stuck=bool(self._why))

    def _log_resumption(self) -> None:
        size, seconds = current_session().topology.size, time.monotonic() - self._since
        change = Change(size, self._members.commit, self._repeated if self._why else 0, seconds, self._why)
        changes().append(change)
        if current_session().topology.rank == 0:
            self._members.notify_change(change)
            say_on_rank_0(change.sentence())
        self._why, self._since, self._repeated = "", 0.0, None

    def _join(self, commit: int) -> bool:
        """Joins the next ranks; returns False if they have finished this function."""
        joined = self._members.join_next(commit, self._number)
        if joined:
            self._keep_commits()
            self._listen()
        self._is_synchronized = False
        return joined

    def _hosts_have_changed(self) -> bool:
        """Whether any rank knows that workers wait to join, or must leave; called by all ranks at a commit."""
        with graphs.eagerly():
            changed = allreduce(tf.constant([int(self._members.hosts_changed)]), op=Max,
                                name="whether hosts have changed")
            return bool(changed[0] > 0)


def _resume_from(state: State, commits: CommitFile) -> bool:
    """Restores a state from the last commit; returns whether the training function had finished by then."""
    commit = commits.read()
    if commit is None:
        return False
    if commit.note:
        say_on_rank_0(f"resumes from the commit before the last one: {commit.note}")
    if commit.saved is None:  # the state does not outlive its process
        return False
    state.take(commit.saved)
    state.restore()
    state.data_positions = commit.positions
    size = current_session().topology.size
    if commit.ranks not in (0, size) and not commit.positions:
        say_on_rank_0(f"resumes on {size} rank{'s' * (size > 1)} what {commit.ranks} have committed: the"
                       " data that hvd.shard deals out, the global batch, and steps within an epoch are not the same")
    if commit.over:
        say_on_rank_0("does not call the function again, which had finished before the job was restarted")
    return commit.over


def _decided_by_rank_0(own: list[bool], key: str) -> list[bool]:
    """Returns rank 0's values, since only rank 0 has commits."""
    session = current_session()
    if session.control is None:
        return own
    decision: list[bool] = session.control.gather(key, own, session.settings.start_timeout)[0]
    return decision


def _has_failed() -> bool:
    """Whether a rank was lost, in which case this process ends as well unless it survives that."""
    control = current_session().control
    return control is not None and control.cause is not None


def _restart_session() -> None:
    restart_with_services(current_session())

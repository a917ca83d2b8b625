"""`hvd.elastic.run`: call a training function with the state of the last commit until it completes."""

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
from hvkeras.elastic.commits import CommitFile, commit_file, log_on_rank_0, remove_commits_at_exit
from hvkeras.elastic.shared_slots import LostShardsError
from hvkeras.elastic.state import State
from hvkeras.elastic.worker_membership import WorkerMembership, membership
from hvkeras.errors import HorovodInternalError, HostsUpdatedInterrupt, UsageError, explain
from hvkeras.job.failure import STUCK_AFTER
from hvkeras.job.preemption import PreemptionSignal
from hvkeras.job.session import Change, changes, current_session
from hvkeras.training.session_services import restart_with_services

Function = TypeVar("Function", bound=Callable[..., Any])

MIB = 1024**2
_call_indices = itertools.count()  # the same on every rank, as all run the same script


def run(func: Function) -> Function:
    """Decorate a training function, whose first parameter is a state, so that it resumes from the last commit.

    Before each call, every rank restores the last commit. The reaction to the loss of a rank depends on the launcher:

    - `hvkeras run --min-np` or `--host-discovery-script`: the other processes continue, and call the function again
      with new ranks and a new size. New processes join at the next commit. With a backend that starts only once per
      process (`tfdist`), each process restarts its script with the commit from its memory.
    - `hvkeras run --reset-limit N`: all processes terminate and are restarted, up to N times. The script calls this
      function again.
    - Otherwise the job ends.

    If all ranks raise a `HorovodInternalError` and none is lost, the function is called again in the same processes.

    The return of the function is also a commit, from which the job resumes if a rank is lost later. A function that
    returned None is not called again. A function that returned another value is called again to return that value; it
    should detect from the state that no work is left.

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
        func: Training function.

    Returns:
        Function with the same parameters and return value.
    """
    return run_fn(func, _restart_session)


def run_fn(func: Function, reset: Callable[[], Any]) -> Function:
    """Decorate a training function like `run`, with a custom function that reinitializes the job.

    Args:
        func: Training function.
        reset: Function that reinitializes the job; called in all its processes.

    Returns:
        Function with the same parameters and return value.
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
            log_on_rank_0(f"restarts all ranks when one is lost, because backend {current_session().backend.name}"
                          f" starts only once per process, and {type(state).__name__} does not implement saved()")
            members = None
        call = (_Call(state, next(_call_indices), reset) if members is None
                else _SurvivingCall(state, next(_call_indices), reset, members))
        return call.run(lambda: func(state, *args, **kwargs))
    return cast(Function, run_with_state)


class _Call:
    """One call of an elastic function."""

    def __init__(self, state: State, index: int, reset: Callable[[], Any]) -> None:
        self._state, self._index, self._reset = state, index, reset
        self._commits: CommitFile | None = None
        self._preemption: PreemptionSignal | None = None
        self._is_done = False  # whether the function had returned None at the last commit
        self._is_synchronized = False
        self._is_rebuilt = False  # since the state was reset

    def run(self, function: Callable[[], Any]) -> Any:
        if not self._prepare():
            return None
        self._watch_for_preemption()
        try:
            return self._run(function)
        finally:
            self._state.set_preemption_signal(None)
            if self._preemption is not None:
                self._preemption.forget()

    def _watch_for_preemption(self) -> None:
        # A commit on SIGTERM is useful only if it is on disk.
        if current_session().settings.elastic_dir:
            self._preemption = PreemptionSignal(f"elastic function {self._index}",
                                                range(current_session().topology.size))
            self._preemption.listen()
            self._state.set_preemption_signal(self._preemption)

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
                if self._is_done:
                    return None
                if self._is_rebuilt:
                    self._call_reset_callbacks()
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

    def _prepare(self) -> bool:
        """Prepare the state; return False if the function has already completed."""
        session, index = current_session(), self._index
        self._open_commit_file()
        is_done = self._restore_last_commit()
        self._synchronize()
        removes_commits = index == 0 and self._commits is not None and not session.settings.run_commits
        is_done, removes_commits = _values_of_rank_0([is_done, removes_commits], f"elastic function {index}")
        if removes_commits:
            remove_commits_at_exit(session)
        return not is_done

    def _restore_last_commit(self) -> bool:
        return self._commits is not None and _restore_commit(self._state, self._commits)

    def _open_commit_file(self) -> None:
        if self._commits is not None:
            self._commits.abandon()
        self._commits = commit_file(self._index)
        self._state.write_commits_to(self._commits)

    def _synchronize(self) -> None:
        # Rank 0 has restored the last commit.
        try:
            self._state.sync()
        except LostShardsError as error:
            self._restore_from_disk(error)
            self._state.sync()
        if keeps_accounts():
            self._state.data_positions = broadcast_object(self._state.data_positions, name="the positions in the data")
            accounts().restore(self._state.data_positions)
        self._is_synchronized = True

    def _restore_from_disk(self, error: LostShardsError) -> None:
        """Restore the last commit on disk, because all in-memory copies of a shard were lost."""
        commit = self._commits.read() if self._commits is not None else None
        exists, = _values_of_rank_0([commit is not None and commit.saved is not None],
                                    f"elastic function {self._index} restores a commit from disk")
        if not exists:
            raise error
        before = self._state.steps_made() or 0
        self._state.reshard()
        if self._commits is not None:
            self._is_done = _restore_commit(self._state, self._commits)
        earlier = before - (self._state.steps_made() or 0)
        log_on_rank_0("restores the last commit on disk" + f", {earlier} steps earlier" * (earlier > 0)
                      + ", because all copies of some shards of the optimizer's state were lost")

    def _finish(self, result: Any) -> None:
        """Commit the final state, if the job may be restarted."""
        if self._commits is not None or self._state.is_shared:
            self._state.record_commit()
        full_state = self._state.gather_full_state(self._commits is not None)
        if self._commits is not None:
            self._commits.write(full_state, result is None, self._state.data_positions)

    def _may_recover(self, error: Exception) -> bool:
        if not isinstance(error, HorovodInternalError) or _has_lost_rank():
            return False
        log_on_rank_0(f"restarts from the last commit after {type(error).__name__}: {error}")
        return True

    def _rebuild(self) -> None:
        self._reset()

    def _call_reset_callbacks(self) -> None:
        self._state.on_reset()


class _SurvivingCall(_Call):
    """Call in a job whose remaining ranks continue when a rank is lost."""

    def __init__(self, state: State, index: int, reset: Callable[[], Any], membership: WorkerMembership) -> None:
        super().__init__(state, index, reset)
        self._membership = membership
        self._reason, self._change_began = "", 0.0  # of the current change of ranks
        self._has_logged_memory = False
        self._repeated_steps: int | None = None

    def run(self, function: Callable[[], Any]) -> Any:
        self._membership.enter(self._index)
        self._state.set_host_checks(self._hosts_have_changed, lambda: self._membership.must_leave)
        try:
            return super().run(function)
        finally:
            self._membership.leave()
            self._state.set_host_checks(None)

    def _watch_for_preemption(self) -> None:
        # Commit at the next step when workers must leave soon; see `WorkerMembership` for SIGTERM.
        membership = self._membership
        self._state.set_preemption_signal(PreemptionSignal(f"elastic function {self._index}",
                                               range(current_session().topology.size),
                                               lambda: membership.must_leave_soon))

    def _prepare(self) -> bool:
        if self._membership.is_waiting:
            runs = self._join(self._state.commit_number if self._restore_handover() else -1)
        else:
            runs = super()._prepare()
        if runs and self._membership.has_joined_others:
            self._membership.has_joined_others, self._is_rebuilt = False, True
        self._membership.raise_failures(self._restart_when_stuck)
        return runs

    def _log_memory(self) -> None:
        own, others = self._state.memory_of_shards()
        if others and not self._has_logged_memory and not self._membership.handed_over(self._index):
            self._has_logged_memory = True
            log_on_rank_0("holds shards of the optimizer's state in memory with each commit:"
                          f" {own / MIB:,.3g} MiB of this rank, and {others / MIB:,.3g} MiB as backup of other ranks")

    def _restore_last_commit(self) -> bool:
        if not self._restore_handover():
            return not self._membership.has_joined_at_start and super()._restore_last_commit()
        return self._is_done

    def _restore_handover(self) -> bool:
        """Restore the commit that the program handed over when it restarted; return False if there is none."""
        handover = self._membership.handed_over(self._index)
        if handover is None:
            return False
        state = self._state
        state.take(handover["saved"])
        state.restore()
        state.data_positions, state.commit_number = handover["positions"], handover["number"]
        self._is_done = handover["is_over"]
        self._reason, self._change_began = handover["why"], handover["since"]
        self._repeated_steps = handover["repeated"]
        return True

    def _synchronize(self) -> None:
        super()._synchronize()
        state = self._state
        state.commit_number, self._is_done = broadcast_object((state.commit_number, self._is_done),
                                                              name="the last commit")
        state.steps_at_commit = state.steps_made()
        state.newest_commit = state.saved(), state.data_positions, state.commit_number
        self._log_memory()

    def _finish(self, result: Any) -> None:
        session = current_session()
        self._state.record_commit()
        self._is_done = result is None
        if self._membership.restarts:
            self._hand_over()
        full_state = self._state.gather_full_state(self._commits is not None)
        if self._commits is not None:
            self._commits.write(full_state, self._is_done, self._state.data_positions)
        if session.control is not None:  # until all have arrived, the loss of a rank affects the others
            session.control.gather(f"the end of elastic function {self._index}", None, session.settings.stall_shutdown
                               or float("inf"))

    def _may_recover(self, error: Exception) -> bool:
        session, began = current_session(), time.monotonic()
        cause = None if session.hooks is None else session.hooks.is_consequence(error)
        if cause is None and (_has_lost_rank() or not isinstance(error, HorovodInternalError)):
            return False
        self._reason = cause.sentence() if cause is not None else f"{type(error).__name__}: {error}"
        self._change_began = self._change_began or began
        now, then = self._state.steps_made(), self._state.steps_at_commit
        self._repeated_steps = None if now is None or then is None else now - then
        return True

    def _rebuild(self) -> None:
        self._change_began = self._change_began or time.monotonic()
        if self._membership.restarts:
            self._restart()
        if not self._join(self._state.commit_number):
            self._is_done = True
            return
        if self._reset is not _restart_session:
            self._reset()

    def _call_reset_callbacks(self) -> None:
        super()._call_reset_callbacks()
        if self._change_began:
            self._log_resumption()

    def _hand_over(self) -> None:
        state = self._state
        self._membership.store_commit(self._index, {
            "saved": state.saved(), "positions": state.data_positions, "number": state.commit_number,
            "is_over": self._is_done, "why": self._reason, "since": self._change_began,
            "repeated": self._repeated_steps})

    def _restart_when_stuck(self, cause: Cause) -> None:
        """Restart the program from another thread, while the main thread is stuck in a collective."""
        if self._state.newest_commit is None or self._state.newest_commit[0] is None:
            return  # there is no commit to resume from: the launcher will replace this process
        saved, positions, number = self._state.newest_commit
        self._membership.store_commit(self._index, {
            "saved": saved, "positions": positions, "number": number, "is_over": False, "why": cause.sentence(),
            "since": time.monotonic() - STUCK_AFTER, "repeated": None})
        self._membership.restart(number, is_stuck=True)

    def _restart(self) -> None:
        """Restart the program, once no other rank needs this rank's backend."""
        session = current_session()
        self._hand_over()
        if not self._reason and session.control is not None:
            session.control.gather("all ranks restart", None, session.settings.start_timeout)
        self._membership.restart(self._state.commit_number, is_stuck=bool(self._reason))

    def _log_resumption(self) -> None:
        size, seconds = current_session().topology.size, time.monotonic() - self._change_began
        repeated_steps = self._repeated_steps if self._reason else 0
        change = Change(size, self._membership.commit, repeated_steps, seconds, self._reason)
        changes().append(change)
        if current_session().topology.rank == 0:
            self._membership.notify_change(change)
            log_on_rank_0(change.sentence())
        self._reason, self._change_began, self._repeated_steps = "", 0.0, None

    def _join(self, commit: int) -> bool:
        """Join the next generation; return False if its ranks have completed this function."""
        joined = self._membership.join_next(commit, self._index)
        if joined:
            self._open_commit_file()
            self._watch_for_preemption()
        self._is_synchronized = False
        return joined

    def _hosts_have_changed(self) -> bool:
        # Combined over all ranks, since notices of the launcher arrive at different times.
        with graphs.eagerly():
            changed = allreduce(tf.constant([int(self._membership.hosts_changed)]), op=Max,
                                name="whether hosts have changed")
            return bool(changed[0] > 0)


def _restore_commit(state: State, commits: CommitFile) -> bool:
    """Restore a state from the last commit on disk; return whether the training function had completed by then."""
    commit = commits.read()
    if commit is None:
        return False
    if commit.note:
        log_on_rank_0(f"resumes from the commit before the last one: {commit.note}")
    if commit.saved is None:  # the state does not implement saved()
        return False
    state.take(commit.saved)
    state.restore()
    state.data_positions = commit.positions
    size = current_session().topology.size
    if commit.ranks not in (0, size) and not commit.positions:
        log_on_rank_0(f"resumes on {size} rank{'s' * (size > 1)} from a commit of {commit.ranks}: the shards of"
                      " hvd.shard, the global batch size and the steps per epoch differ")
    if commit.over:
        log_on_rank_0("does not call the function again, which had completed before the job was restarted")
    return commit.over


def _values_of_rank_0(own: list[bool], key: str) -> list[bool]:
    """Return rank 0's values, because only rank 0 reads commits."""
    session = current_session()
    if session.control is None:
        return own
    decision: list[bool] = session.control.gather(key, own, session.settings.start_timeout)[0]
    return decision


def _has_lost_rank() -> bool:
    control = current_session().control
    return control is not None and control.cause is not None


def _restart_session() -> None:
    restart_with_services(current_session())

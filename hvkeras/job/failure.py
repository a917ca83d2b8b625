"""Failure handling: when a rank fails, every rank learns of it, and ends with an exit report, or goes on.

A rank goes on if its `FailurePolicy` says so, as in an elastic function (`FailureHooks.outlives`). Otherwise:

The failing rank prints its traceback and notifies the control server. On the surviving ranks, pending collectives are
aborted so that the main thread unwinds. Each survivor then prints its exit report, one line that names the failed
rank, its host and its exception. No rank exits before all have printed theirs (launchers end the other ranks as soon
as one exits), and none outlives the grace period.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from hvkeras.backends.interface import Backend
from hvkeras.control.cause import Cause, CauseKind
from hvkeras.control.client import ControlClient
from hvkeras.control.server import ANSWER_GRACE, SECONDARY_GRACE
from hvkeras.errors import PeerError
from hvkeras.host.console import say_last, summary
from hvkeras.host.forks import detach_in_children
from hvkeras.job.signals import SignalWatch

INTERRUPT_GRACE = 1.0  # seconds that Python has to notice Ctrl-C before the collective in flight is aborted
ROOT_FIRST = 0.3  # seconds by which survivors let the failed rank exit first: launchers report the first exit code
LOG_GRACE = 0.2  # seconds for the engine's own messages about an aborted collective to appear
STUCK_AFTER = 3.0  # seconds after an abort in which a collective ends, if it ever does
RECORD_GRACE = 4.0  # seconds to write a rank's last record, and rank 0's report
PREEMPTION_GRACE = 10.0  # seconds that preempted ranks have to confirm after checkpointing
CAUSE_GRACE = 0.5  # seconds to learn why a launcher ends this rank, before its signal is reported as the cause


@dataclass(frozen=True)
class FailurePolicy:
    """What a rank does when another one fails, or when it is to end.

    Attributes:
        survives: Whether it outlives the failure of another rank, as inside an elastic function.
        on_terminate: What SIGTERM does instead of ending the rank; None to end it.
        restart: Starts the rank's program again once another rank has failed; None to let the main thread go on.
        when_stuck: Called if the main thread does not notice the failure; None for nothing.
    """

    survives: bool = False
    on_terminate: Callable[[], None] | None = None
    restart: Callable[[], None] | None = None
    when_stuck: Callable[[Cause], None] | None = None


END_ALWAYS = FailurePolicy()  # what a rank does outside of elastic functions


class FailureHooks:
    """The hooks of one initialised job for exceptions, exits, signals, and failures of other ranks.

    Args:
        client: This rank's end of the control channel.
        host: This rank's host name.
        exit_grace: Seconds that the main thread has to unwind after a failure elsewhere.
        show_secondary: Whether a survivor also prints the traceback of its aborted collective.
        cause_file: The file that the cause of the job's end is written to, for a launcher; "" for none.
        policy: What this rank does when another one fails.

    Attributes:
        policy: The policy in force.
        backends: The engines that are aborted when another rank fails.
        before_last_line: Called with how this rank ends, before it prints its last line.
        grace: Seconds that the main thread has to unwind.
        aborted: Set once the engines are aborted, after another rank's failure.
    """

    def __init__(self, client: ControlClient, host: str, exit_grace: float, show_secondary: bool,
                 cause_file: str = "", policy: FailurePolicy = END_ALWAYS) -> None:
        self.policy: FailurePolicy = policy
        self.backends: list[Backend] = []
        self.before_last_line: list[Callable[[str], None]] = []
        self._client = client
        self._host = host
        self._rank = client.introduction.rank
        self.grace: float = exit_grace
        self._show_secondary = show_secondary
        self._cause_file = cause_file
        self.aborted: threading.Event = threading.Event()
        self._unwinding = threading.Event()
        self._preempted = threading.Event()  # set once an elastic function knows of the failure
        self._last_line_lock = threading.Lock()
        self._told: Cause | None = None  # why the launcher has told this rank to end
        self._exit_code: Any = None
        self._previous_hook = sys.excepthook
        self._previous_thread_hook = threading.excepthook
        self._previous_exit = sys.exit
        self._signals: SignalWatch | None = None
        self._is_copy = False  # in a forked process
        detach_in_children(self)

    def install(self) -> None:
        """Installs the hooks; those for signals only when called from the main thread."""
        self._previous_hook, sys.excepthook = sys.excepthook, self._on_exception
        self._previous_thread_hook, threading.excepthook = threading.excepthook, self._on_thread_exception
        self._previous_exit, sys.exit = sys.exit, self._on_exit  # type: ignore[assignment]
        if threading.current_thread() is threading.main_thread():
            self._signals = SignalWatch(self._on_signal)
            self._signals.install()
        self._client.on_terminate = self._termination_requested

    def in_child(self) -> None:
        """Removes all hooks in a forked process, such as one that loads data: it is not a rank."""
        self._is_copy = True
        self._signals = None  # which has removed itself
        self.uninstall()

    def uninstall(self) -> None:
        """Restores the previous hooks wherever ours are still in place."""
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._previous_hook
        if threading.excepthook == self._on_thread_exception:
            threading.excepthook = self._previous_thread_hook
        if sys.exit == self._on_exit:
            sys.exit = self._previous_exit
        self._client.on_terminate = self._client.fail
        if self._signals is not None:
            self._signals.uninstall()
            self._signals = None

    def release(self) -> None:
        """Restores the previous hooks, and lets the engines go, which have stopped."""
        self.uninstall()
        self.backends = []

    def reinstall_signals(self) -> None:
        """Reinstalls the signal handling after an engine has started, as that may have replaced it."""
        if self._signals is not None:
            self._signals.uninstall()
            self._signals.install()

    def report(self, error: BaseException) -> None:
        """Reports to all ranks an exception that `init()` is about to raise on this rank."""
        if self._client.cause is None:
            self._client.fail(self._cause_of(error), secondary=self._is_secondary_failure(error))

    def job_ended(self, cause: Cause) -> None:
        """Ends this rank when the job ends early; called in the control channel's thread."""
        threading.Thread(target=self._reap, args=(cause,), name="hvkeras-reaper", daemon=True).start()

    def outlives(self, cause: Cause) -> bool:
        """Whether this rank goes on without the rank that has failed; its launcher ends it if it does not."""
        return (self.policy.survives and cause.kind.leaves_others_intact
                and cause.rank is not None and cause.rank != self._rank)

    def is_consequence(self, error: BaseException) -> Cause | None:
        """Returns the failure of another rank that an exception in an elastic function follows from; None if none.

        Args:
            error: The exception.
        """
        self._preempted.set()
        cause = self._client.cause
        if cause is None and self._is_secondary_failure(error):
            cause = self._client.wait_for_cause(SECONDARY_GRACE + ANSWER_GRACE + 2.0)
        return cause if cause is not None and self.outlives(cause) else None

    @property
    def exits_with_failure(self) -> bool:
        """Whether the script has requested an exit code other than 0."""
        return self._exit_code not in (None, 0)

    def exiting(self) -> None:
        """Called at interpreter exit: reports an exit code other than 0 as a failure, otherwise leaves the job.

        A rank whose job has failed prints its exit report even if its main thread ends normally: its other threads may
        have been in the aborted collectives.
        """
        code = self._exit_code
        if self._client.cause is not None and not self._client.detached:
            self._end_process(self._client.cause)
        if code not in (None, 0) and self._client.cause is None and not self._client.detached:
            number = int(code) if isinstance(code, int) else 1  # of sys.exit(True)
            text = f"exited with {code!r}" if isinstance(code, str) else f"exited with code {number}"
            self._client.fail(Cause(CauseKind.EXIT, self._rank, self._host, os.getpid(), text, "", number))
            cause = self._client.wait_for_cause(SECONDARY_GRACE)
            if cause is not None:
                self._end_process(cause)
        else:
            self._client.leave()

    # The end of this rank, in the main thread.

    def _on_exit(self, code: Any = None, /) -> None:
        self._exit_code = code
        self._previous_exit(code)

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self._is_copy:  # the program's own hook has called this one
            self._previous_hook(kind, error, trace)
            return
        self._unwinding.set()
        cause = self._client.cause
        if cause is None and self._is_secondary_failure(error):
            self._client.fail(self._cause_of(error), secondary=True)
            cause = self._client.wait_for_cause(SECONDARY_GRACE + ANSWER_GRACE + 2.0)
        # Once the cause of failure is known, an aborted collective or an interrupt is only its consequence.
        is_reported = cause is not None and (cause.rank != self._rank or cause.kind is CauseKind.SIGNAL or
                                             (self._is_secondary_failure(error)
                                              and cause.kind is not CauseKind.TIMEOUT))
        if not is_reported or self._show_secondary:
            self._previous_hook(kind, error, trace)
        if cause is None:
            cause = self._cause_of(error)
            self._client.fail(cause)
        self._restart_after(cause)
        self._end_process(cause)

    def _restart_after(self, cause: Cause) -> None:
        if self.policy.restart is not None and self.outlives(cause):
            self.policy.restart()

    def _on_thread_exception(self, arguments: threading.ExceptHookArgs) -> None:
        """Suppresses tracebacks of threads whose collectives the job's end aborted; the exit report says why."""
        error = arguments.exc_value
        shows = self._is_copy or self._show_secondary
        if error is None or shows or not self._is_secondary_failure(error) or self._client.cause is None:
            self._previous_thread_hook(arguments)

    def end_after_preemption(self, is_told: bool, saved: str) -> None:
        """Ends this rank after SIGTERM, or after the same notice to another rank, with the exit code of SIGTERM.

        Args:
            is_told: Whether this rank has received it; otherwise it leaves the cause to those that have.
            saved: What was saved, as a clause; "" if the time was over before.
        """
        self._unwinding.set()
        if is_told and self._client.cause is None:
            text = f"; {saved or 'nothing was saved in time'}"
            told = self._told or self._signal_cause(signal.SIGTERM)
            self._client.fail(replace(told, error=told.error + text))
        cause = self._client.wait_for_cause(PREEMPTION_GRACE) or self._signal_cause(signal.SIGTERM)
        self._end_process(cause, 128 + signal.SIGTERM if is_told else None)

    def _end_process(self, cause: Cause, code: int | None = None) -> None:
        with self._last_line_lock:
            with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody reads standard output any more
                sys.stdout.flush()
            self._close_record(cause)
            self._last_line(cause)
            self._client.wait_to_exit(self.grace + 2.0)
            if cause.rank != self._rank:
                time.sleep(ROOT_FIRST)
            os._exit(code if code is not None else cause.exit_code if cause.rank == self._rank else 1)

    def _last_line(self, cause: Cause | None) -> None:
        if cause is None:
            return
        if self._cause_file:
            with contextlib.suppress(OSError), open(self._cause_file, "w", encoding="utf-8") as file:
                json.dump(cause.to_message(), file)
        if cause.rank == self._rank:
            say_last(f"{cause.sentence()}; the job ends on all ranks")
        else:
            say_last(f"rank {self._rank} on {self._host} ends because {cause.sentence()}")

    def _close_record(self, cause: Cause) -> None:
        """Writes to this rank's record, if any, how the rank ended; with a time limit, as TensorFlow may be stuck."""
        text = cause.error if cause.rank == self._rank else cause.sentence()
        for finish in self.before_last_line:
            closing = threading.Thread(target=finish, args=(text,), name="hvkeras-last-record", daemon=True)
            closing.start()
            closing.join(RECORD_GRACE)

    def _cause_of(self, error: BaseException) -> Cause:
        if isinstance(error, KeyboardInterrupt):
            return Cause(CauseKind.SIGNAL, self._rank, self._host, os.getpid(), "was interrupted (Ctrl-C)", "", 130)
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        kind = (CauseKind.TIMEOUT if _timed_out(error) else
                CauseKind.EXCEPTION if getattr(error, "may_pass", True) else CauseKind.SETUP)
        return Cause(kind, self._rank, self._host, os.getpid(), f"failed with {summary(error)}", text)

    def _is_secondary_failure(self, error: BaseException) -> bool:
        return isinstance(error, PeerError) or _timed_out(error) or any(
            backend.is_peer_failure(error) for backend in self.backends)

    # The end of the job, in other threads.

    def _reap(self, cause: Cause) -> None:
        if cause.rank == self._rank and self._unwinding.is_set():
            return
        self._restart_after(cause)
        for backend in self.backends:
            backend.abort(cause.sentence())
        self.aborted.set()
        if self.outlives(cause):
            if self.policy.when_stuck is not None and not self._preempted.wait(STUCK_AFTER):
                self.policy.when_stuck(cause)
            return
        deadline = time.monotonic() + self.grace
        while time.monotonic() < deadline:
            if self._unwinding.wait(0.05):
                deadline += self.grace
                self._unwinding.clear()
        # The main thread is busy in Python or stuck in a call that cannot be aborted.
        self._end_process(cause)

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGINT:
            if self._unwinding.wait(INTERRUPT_GRACE) or self._client.cause is not None:
                return
            self._client.fail(self._cause_of(KeyboardInterrupt()))
            return
        if self.policy.on_terminate is not None and self._client.cause is None:
            self.policy.on_terminate()
            return
        cause = self._client.wait_for_cause(CAUSE_GRACE)
        if cause is None:
            cause = self._signal_cause(number)
            self._client.fail(cause)
        with self._last_line_lock:
            time.sleep(LOG_GRACE)
            self._close_record(cause)
            self._last_line(cause)
            self._client.wait_to_exit(CAUSE_GRACE)
            os._exit(128 + number)


    def _signal_cause(self, number: int) -> Cause:
        name = signal.Signals(number).name
        return Cause(CauseKind.SIGNAL, self._rank, self._host, os.getpid(), f"received {name}", "", 128 + number)

    def _termination_requested(self, cause: Cause) -> None:
        """The launcher was told to end the job: what trains saves first; called in the control channel's thread."""
        self._told = cause
        if self.policy.on_terminate is not None:
            self.policy.on_terminate()
        else:
            self._client.fail(cause)


def _timed_out(error: BaseException) -> bool:
    """Whether a TensorFlow collective gave up waiting for another rank."""
    return type(error).__name__ == "DeadlineExceededError" and "ollective" in str(error)

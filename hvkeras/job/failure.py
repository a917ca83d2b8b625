"""Failure handling: when a rank fails, every rank is notified, and terminates with an exit report or continues.

A rank continues if its `FailurePolicy` allows it, as in an elastic function (`FailureHooks.outlives`). Otherwise:

The failing rank notifies the control server, and prints its exit report: one line, and its traceback. On the surviving
ranks, outstanding collectives are aborted so that the main thread unwinds. Each survivor then prints its own exit
report, one line that names the failed rank, its host and its exception. A rank that fails with the same exception as
the one that was first does not repeat the traceback. No rank exits before all ranks have printed their reports, because
launchers terminate the other ranks as soon as one exits. All ranks exit within the grace period.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

from hvkeras.backends.interface import Backend
from hvkeras.control.cause import Cause, CauseKind
from hvkeras.control.client import ControlClient
from hvkeras.control.server import ANSWER_GRACE, SECONDARY_GRACE
from hvkeras.errors import PeerError, format_error, print_error, summary, with_callers, with_hint_last
from hvkeras.host.console import say_last
from hvkeras.host.forks import detach_in_children
from hvkeras.job.signals import SignalWatch

INTERRUPT_GRACE = 1.0  # seconds for Python to handle Ctrl-C before the outstanding collective is aborted
ROOT_FIRST = 0.3  # seconds that survivors wait for the failed rank to exit: launchers report the first exit code
LOG_GRACE = 0.2  # seconds for the engine's own messages about an aborted collective to appear
STUCK_AFTER = 3.0  # seconds after an abort until a collective that has not ended counts as stuck
RECORD_GRACE = 4.0  # seconds to write a rank's last record, and rank 0's report
PREEMPTION_GRACE = 10.0  # seconds for preempted ranks to confirm after checkpointing
AGREEMENT_GRACE = 3.0  # seconds for the server to tell a failing rank whether it is the first
CAUSE_GRACE = 0.5  # seconds to receive the launcher's reason for SIGTERM, before the signal itself is reported


@dataclass(frozen=True)
class FailurePolicy:
    """Reaction of a rank to the failure of another rank, and to SIGTERM.

    Attributes:
        survives: Whether this rank continues after the failure of another rank, as inside an elastic function.
        on_terminate: Handler for SIGTERM; None to terminate the rank.
        restart: Restarts the rank's program after another rank has failed; None to let the main thread continue.
        when_stuck: Called if the main thread does not return from a collective after the failure; None for nothing.
    """

    survives: bool = False
    on_terminate: Callable[[], None] | None = None
    restart: Callable[[], None] | None = None
    when_stuck: Callable[[Cause], None] | None = None


END_ALWAYS = FailurePolicy()  # outside of elastic functions


class FailureHooks:
    """Hooks of one initialised job for exceptions, exits, signals, and failures of other ranks.

    Args:
        exit_grace: Seconds for the main thread to unwind after another rank failed.
        show_secondary: Whether a survivor also prints the traceback of its aborted collective.
        cause_file: File to write the cause of the job's end to, for a launcher; "" for none.
        policy: Reaction to the failure of another rank.

    Attributes:
        backends: Engines to abort when another rank fails.
        before_last_line: Called with the cause of this rank's end, before the exit report is printed.
        grace: Seconds for the main thread to unwind.
        aborted: Set after the engines were aborted because of another rank's failure.
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
        self._handled = threading.Event()  # set when an elastic function handles the failure
        self._last_line_lock = threading.Lock()
        self._termination: Cause | None = None  # why the launcher requested that this rank terminates
        self._exit_code: Any = None
        self._previous_hook = sys.excepthook
        self._previous_thread_hook = threading.excepthook
        self._previous_exit = sys.exit
        self._signals: SignalWatch | None = None
        self._in_forked_process = False
        detach_in_children(self)

    def install(self) -> None:
        """Install the hooks; signal handlers only when called from the main thread."""
        self._previous_hook, sys.excepthook = sys.excepthook, self._on_exception
        self._previous_thread_hook, threading.excepthook = threading.excepthook, self._on_thread_exception
        self._previous_exit, sys.exit = sys.exit, self._on_exit  # type: ignore[assignment]
        if threading.current_thread() is threading.main_thread():
            self._signals = SignalWatch(self._on_signal)
            self._signals.install()
        self._client.on_terminate = self._termination_requested

    def in_child(self) -> None:
        """Remove all hooks in a forked process, such as a data loader: it is not a rank."""
        self._in_forked_process = True
        self._signals = None  # has removed itself
        self.uninstall()

    def uninstall(self) -> None:
        """Restore the previous hooks where they were not replaced by others since."""
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
        """Restore the previous hooks and drop the references to stopped engines."""
        self.uninstall()
        self.backends = []

    def reinstall_signals(self) -> None:
        """Reinstall the signal handlers, which the start of an engine may have replaced."""
        if self._signals is not None:
            self._signals.uninstall()
            self._signals.install()

    def report(self, error: BaseException) -> None:
        """Report an exception that `init()` is about to raise on this rank to all ranks."""
        if self._client.cause is None:
            self._client.fail(self._cause_of(error, with_callers(error)), secondary=self._is_secondary_failure(error))

    def job_ended(self, cause: Cause) -> None:
        """Terminate this rank because the job has failed; called in the control channel's thread."""
        threading.Thread(target=self._reap, args=(cause,), name="hvkeras-reaper", daemon=True).start()

    def outlives(self, cause: Cause) -> bool:
        """Return whether this rank continues without the failed rank."""
        return (self.policy.survives and cause.kind.leaves_others_intact
                and cause.rank is not None and cause.rank != self._rank)

    def is_consequence(self, error: BaseException) -> Cause | None:
        """Return the failure of another rank that caused an exception in an elastic function; None if there is none."""
        self._handled.set()
        cause = self._client.cause
        if cause is None and self._is_secondary_failure(error):
            cause = self._client.wait_for_cause(SECONDARY_GRACE + ANSWER_GRACE + 2.0)
        return cause if cause is not None and self.outlives(cause) else None

    @property
    def exits_with_failure(self) -> bool:
        """Return whether the script requested a nonzero exit code."""
        return self._exit_code not in (None, 0)

    def exiting(self) -> None:
        """Report a nonzero exit code as a failure, otherwise leave the job; called at interpreter exit.

        If the job has failed, print the exit report even if the main thread ends normally: other threads may have been
        in the aborted collectives.
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

    # Termination from the main thread.

    def _on_exit(self, code: Any = None, /) -> None:
        self._exit_code = code
        self._previous_exit(code)

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self._in_forked_process:  # the program's own hook called this one
            self._previous_hook(kind, error, trace)
            return
        self._unwinding.set()
        own, secondary = self._cause_of(error), self._is_secondary_failure(error)
        known = self._client.cause
        cause = known
        if known is None:
            self._client.fail(own, secondary)
            cause = self._client.wait_for_cause(
                SECONDARY_GRACE + ANSWER_GRACE + 2.0 if secondary else AGREEMENT_GRACE)
        cause = cause or own
        repeats = not secondary and own.kind is not CauseKind.SIGNAL and _are_alike(own, cause)
        is_first = cause.rank == self._rank and bool(cause.traceback)
        # If the cause of failure is known, an aborted collective or an interrupt is only its consequence.
        if self._show_secondary or (self._program_has_hook and is_first) or (
                known is None and not (secondary or is_first or repeats)):
            self._previous_hook(kind, error, trace)
        self._restart_after(cause)
        self._end_process(cause, repeats=repeats)

    @property
    def _program_has_hook(self) -> bool:
        """True if the program prints uncaught exceptions itself."""
        return self._previous_hook not in (sys.__excepthook__, print_error)

    def _restart_after(self, cause: Cause) -> None:
        if self.policy.restart is not None and self.outlives(cause):
            self.policy.restart()

    def _on_thread_exception(self, arguments: threading.ExceptHookArgs) -> None:
        """Suppress tracebacks of threads whose collectives were aborted; the exit report names the cause."""
        error = arguments.exc_value
        shows = self._in_forked_process or self._show_secondary
        if error is None or shows or not self._is_secondary_failure(error) or self._client.cause is None:
            self._previous_thread_hook(arguments)

    def end_after_preemption(self, received_signal: bool, saved: str) -> None:
        """Terminate this rank after SIGTERM on this or another rank.

        Args:
            received_signal: Whether this rank received SIGTERM. If so, it reports the cause, and its exit code is that
                of SIGTERM.
            saved: Description of what was saved, as a clause; "" if the deadline passed before.
        """
        self._unwinding.set()
        if received_signal and self._client.cause is None:
            text = f"; {saved or 'nothing was saved in time'}"
            termination = self._termination or self._signal_cause(signal.SIGTERM)
            self._client.fail(replace(termination, error=termination.error + text))
        cause = self._client.wait_for_cause(PREEMPTION_GRACE) or self._signal_cause(signal.SIGTERM)
        self._end_process(cause, 128 + signal.SIGTERM if received_signal else None)

    def _end_process(self, cause: Cause, code: int | None = None, repeats: bool = False) -> None:
        with self._last_line_lock:
            with contextlib.suppress(OSError, ValueError, AttributeError):  # standard output is closed
                sys.stdout.flush()
            self._close_record(cause)
            self._print_exit_report(cause, repeats)
            self._client.wait_to_exit(self.grace + 2.0)
            if cause.rank != self._rank:
                time.sleep(ROOT_FIRST)
            os._exit(code if code is not None else cause.exit_code if cause.rank == self._rank else 1)

    def _print_exit_report(self, cause: Cause, repeats: bool = False) -> None:
        """Print why this rank ends, as the last text of this process.

        Args:
            repeats: Whether this rank has failed with the same exception as the first one.
        """
        if self._cause_file:
            with contextlib.suppress(OSError), open(self._cause_file, "w", encoding="utf-8") as file:
                json.dump(cause.to_message(), file)
        if cause.rank != self._rank:
            how = "failed in the same way as" if repeats else "ends because"
            speaks = self._rank == (1 if cause.rank == 0 else 0) and not cause.traceback  # else the failed rank does
            who = f"rank {cause.rank} on {cause.host}" if repeats else cause.sentence(brief=not speaks)
            say_last(with_hint_last(f"rank {self._rank} on {self._host} {how} {who}"))
        elif cause.traceback and not (self._show_secondary or self._program_has_hook):
            say_last(f"{cause.who} failed; the job ends on all ranks\n{cause.traceback.rstrip()}")
        else:
            sentence, hint, cure = cause.sentence().partition(" HINT: ")
            say_last(f"{sentence.removesuffix('.')}; the job ends on all ranks" + f"\nHINT: {cure}" * bool(hint))

    def _close_record(self, cause: Cause) -> None:
        """Write the cause to this rank's record, if there is one. The timeout guards against a stuck TensorFlow."""
        text = cause.error if cause.rank == self._rank else cause.sentence()
        for finish in self.before_last_line:
            closing = threading.Thread(target=finish, args=(text,), name="hvkeras-last-record", daemon=True)
            closing.start()
            closing.join(RECORD_GRACE)

    def _cause_of(self, error: BaseException, trace: TracebackType | None = None) -> Cause:
        if isinstance(error, KeyboardInterrupt):
            return Cause(CauseKind.SIGNAL, self._rank, self._host, os.getpid(), "was interrupted (Ctrl-C)", "", 130)
        kind = (CauseKind.TIMEOUT if _timed_out(error) else
                CauseKind.EXCEPTION if getattr(error, "may_pass", True) else CauseKind.SETUP)
        return Cause(kind, self._rank, self._host, os.getpid(), f"failed with {summary(error)}",
                     format_error(error, trace))

    def _is_secondary_failure(self, error: BaseException) -> bool:
        return isinstance(error, PeerError) or _timed_out(error) or any(
            backend.is_peer_failure(error) for backend in self.backends)

    # Termination from other threads.

    def _reap(self, cause: Cause) -> None:
        if cause.rank == self._rank and self._unwinding.is_set():
            return
        self._restart_after(cause)
        for backend in self.backends:
            backend.abort(cause.sentence())
        self.aborted.set()
        if self.outlives(cause):
            if self.policy.when_stuck is not None and not self._handled.wait(STUCK_AFTER):
                self.policy.when_stuck(cause)
            return
        deadline = time.monotonic() + self.grace
        while time.monotonic() < deadline:
            if self._unwinding.wait(0.05):
                deadline += self.grace
                self._unwinding.clear()
        # The main thread is busy in Python or blocked in a call that cannot be aborted.
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
            self._print_exit_report(cause)
            self._client.wait_to_exit(CAUSE_GRACE)
            os._exit(128 + number)

    def _signal_cause(self, number: int) -> Cause:
        name = signal.Signals(number).name
        return Cause(CauseKind.SIGNAL, self._rank, self._host, os.getpid(), f"received {name}", "", 128 + number)

    def _termination_requested(self, cause: Cause) -> None:
        """Handle a launcher's request to terminate: training saves first. Called in the control channel's thread."""
        self._termination = cause
        if self.policy.on_terminate is not None:
            self.policy.on_terminate()
        else:
            self._client.fail(cause)


def _are_alike(one: Cause, other: Cause) -> bool:
    """Return whether two ranks failed with the same exception, apart from numbers in its text."""
    return one.kind is other.kind and re.sub(r"\d", "", one.error) == re.sub(r"\d", "", other.error)


def _timed_out(error: BaseException) -> bool:
    return type(error).__name__ == "DeadlineExceededError" and "ollective" in str(error)

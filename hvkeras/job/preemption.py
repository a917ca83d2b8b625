"""Preemption by SIGTERM: all ranks save a checkpoint after the same step, and then the job ends.

Schedulers, spot machines and launchers send SIGTERM some time before SIGKILL. Code that can checkpoint listens for it
with a `PreemptionSignal`. Without a listener, a rank that receives SIGTERM terminates immediately.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from hvkeras.host.console import say
from hvkeras.host.forks import detach_in_children
from hvkeras.job.session import current_session, is_initialized
from hvkeras.settings import Settings


class PreemptionSignal:
    """Agreement of all training ranks on the step after which they save and terminate.

    Args:
        name: Name of the training; equal on all ranks, and unique within the job.
        ranks: The ranks that train together; empty for a single process.
        is_pending: Returns whether this rank should terminate, where the request is not SIGTERM.
    """

    def __init__(self, name: str, ranks: Sequence[int] = (), is_pending: Callable[[], bool] | None = None) -> None:
        self._name, self._ranks = f"the end of {name}", ranks
        self._received: bool = False
        self._due = False
        self._requests_save = is_pending or (lambda: self._received)
        self._listens = False
        self._previous: Any = None

    def listen(self) -> None:
        """Handle SIGTERM as a preemption request, unless another handler exists."""
        hooks = current_session().hooks if is_initialized() else None
        if hooks is not None:
            if hooks.policy.on_terminate is None:
                hooks.policy, self._listens = replace(hooks.policy, on_terminate=self._receive), True
        elif (threading.current_thread() is threading.main_thread()
              and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL):
            self._previous, self._listens = signal.signal(signal.SIGTERM, lambda *_: self._receive()), True
            detach_in_children(self)

    def in_child(self) -> None:
        """Let SIGTERM terminate a forked process, such as a data loader."""
        if self._listens and self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
        self._listens = False

    def forget(self) -> None:
        """Stop listening. A request that arrived too late to save terminates this process now, or at its deadline."""
        if not self._listens:
            return
        self._listens = False
        hooks = current_session().hooks if is_initialized() else None
        if hooks is not None:
            hooks.policy = replace(hooks.policy, on_terminate=None)
        elif self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            if self._received:
                os.kill(os.getpid(), signal.SIGTERM)

    @property
    def is_pending(self) -> bool:
        """Return whether a request to save and terminate is pending on this rank."""
        return self._due or self._requests_save()

    def is_due(self) -> bool:
        """Return whether all ranks save and terminate now; all ranks must call this after the same steps.

        Raises:
            PeerError: The job has failed, or a rank does not respond.
        """
        requested = self._requests_save()
        control = current_session().control if is_initialized() else None
        if control is None or len(self._ranks) < 2:
            self._due = requested
            return requested
        stop, limit = control.stop_of(self._name), current_session().settings.stall_shutdown
        stop.begin()
        self._due = stop.now(requested, lambda: control.ask_to_stop(self._name, self._ranks), control.raise_if_ended,
                             limit or float("inf"))
        return self._due

    def end(self, saved: str) -> NoReturn:
        """Terminate this process after all ranks have saved.

        Args:
            saved: Description of what was saved, as a clause, for the exit report.
        """
        hooks = current_session().hooks if is_initialized() else None
        if hooks is not None:
            hooks.end_after_preemption(self._received, saved)
        say(f"received SIGTERM; {saved}")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("SIGTERM ends the process")

    def _receive(self) -> None:
        if self._received:
            return
        self._received = True
        grace = (current_session().settings if is_initialized() else Settings()).leave_grace
        hooks = current_session().hooks if is_initialized() else None
        if hooks is None:
            return
        late = threading.Timer(grace, hooks.end_after_preemption, (True, ""))
        late.name = "hvkeras-leave-grace"
        late.daemon = True
        late.start()

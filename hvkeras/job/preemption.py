"""Preemption by SIGTERM: training saves its state after the same step on all ranks, and then the job ends.

Schedulers, spot machines and launchers send SIGTERM some time before they kill. Code that can save listens for it with
a `PreemptionSignal`. Without a listener, a rank that receives SIGTERM ends at once.
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
    """The agreement of all ranks that train together to save and end, once one of them is told to.

    Args:
        name: Identifies the training; the same on all ranks, and another one for each training of a job.
        ranks: The ranks that train together; none if this process trains by itself.
        is_pending: Whether this rank is told to, where something else than SIGTERM tells it.
    """

    def __init__(self, name: str, ranks: Sequence[int] = (), is_pending: Callable[[], bool] | None = None) -> None:
        self._name, self._ranks = f"the end of {name}", ranks
        self._received: bool = False
        self._due = False
        self._requests_save = is_pending or (lambda: self._received)
        self._listens = False
        self._previous: Any = None

    def listen(self) -> None:
        """Makes SIGTERM a notice from now on, unless something else handles it already."""
        hooks = current_session().hooks if is_initialized() else None
        if hooks is not None:
            if hooks.policy.on_terminate is None:
                hooks.policy, self._listens = replace(hooks.policy, on_terminate=self._receive), True
        elif (threading.current_thread() is threading.main_thread()
              and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL):
            self._previous, self._listens = signal.signal(signal.SIGTERM, lambda *_: self._receive()), True
            detach_in_children(self)

    def in_child(self) -> None:
        """Lets SIGTERM end a forked process, such as one that loads data."""
        if self._listens and self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
        self._listens = False

    def forget(self) -> None:
        """Ends listening; a notice that came too late to save ends this process when its time is over."""
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
        """Whether this rank knows that all save soon, or now."""
        return self._due or self._requests_save()

    def is_due(self) -> bool:
        """Whether all ranks save now, and end; called by all of them after the same steps.

        Raises:
            PeerError: The job has ended, or a rank does not answer.
        """
        wish = self._requests_save()
        control = current_session().control if is_initialized() else None
        if control is None or len(self._ranks) < 2:
            self._due = wish
            return wish
        stop, limit = control.stop_of(self._name), current_session().settings.stall_shutdown
        stop.begin()
        self._due = stop.now(wish, lambda: control.ask_to_stop(self._name, self._ranks), control.raise_if_ended,
                             limit or float("inf"))
        return self._due

    def end(self, saved: str) -> NoReturn:
        """Ends this process, once all ranks have saved.

        Args:
            saved: What was saved, as a clause, for the last line.
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

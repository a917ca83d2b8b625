"""Signals that a rank must handle while it is blocked in an engine. `job.failure.FailureHooks` has the handlers."""

from __future__ import annotations

import signal
import socket
import threading
from typing import Any

from hvkeras.host.forks import detach_in_children


class SignalWatch:
    """Watcher thread for SIGINT and SIGTERM, even while the main thread is blocked in an engine.

    Python runs signal handlers in the main thread, between two bytecodes, so they do not run while that thread waits in
    a collective. However, Python's C-level handler immediately writes the signal's number to a socket, which the thread
    of this class reads. SIGTERM is watched only if the program has no handler; KeyboardInterrupt is unchanged.
    """

    def __init__(self, on_signal: Any) -> None:
        self._on_signal = on_signal
        self._ends: tuple[socket.socket, socket.socket] | None = None
        self._thread: threading.Thread | None = None
        self._terminate: Any = None
        self._own_terminate = False
        detach_in_children(self)

    def install(self) -> None:
        """Start watching, unless the program has set a wake-up file descriptor."""
        receiving, sending = socket.socketpair()
        sending.setblocking(False)
        previous = signal.set_wakeup_fd(sending.fileno(), warn_on_full_buffer=False)
        if previous != -1:
            signal.set_wakeup_fd(previous, warn_on_full_buffer=False)
            receiving.close()
            sending.close()
            return
        self._ends = (receiving, sending)
        handler = signal.getsignal(signal.SIGTERM)
        self._own_terminate = handler in (signal.SIG_DFL, None)
        if self._own_terminate:
            signal.signal(signal.SIGTERM, _do_nothing)
        else:
            signal.signal(signal.SIGTERM, handler)  # an engine may have replaced it at the C level
        self._thread = threading.Thread(target=self._watch, args=(receiving,), name="hvkeras-signals", daemon=True)
        self._thread.start()

    def uninstall(self) -> None:
        """Stop watching and restore the default handlers."""
        if self._ends is None:
            return
        receiving, sending = self._restore()
        sending.send(b"\0")
        if self._thread is not None:
            self._thread.join(timeout=2.0)
        receiving.close()
        sending.close()

    def in_child(self) -> None:
        """Stop watching in a forked process, whose signals would otherwise be handled as its parent's."""
        if self._ends is not None:
            for end in self._restore():
                end.close()

    def _restore(self) -> tuple[socket.socket, socket.socket]:
        assert self._ends is not None
        signal.set_wakeup_fd(-1)
        if self._own_terminate and signal.getsignal(signal.SIGTERM) is _do_nothing:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ends, self._ends = self._ends, None
        return ends

    def _watch(self, receiving: socket.socket) -> None:
        while True:
            received = receiving.recv(1)
            if received in (b"", b"\0"):
                return
            if received[0] == signal.SIGINT or (received[0] == signal.SIGTERM and self._own_terminate):
                self._on_signal(received[0])


def _do_nothing(number: int, frame: Any) -> None:
    """Python's handler for SIGTERM: the watcher thread terminates the process."""

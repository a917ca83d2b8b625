"""Ranks whose process outlives their script, because of a non-daemon thread, an exit function or an engine.

Once the scripts of all others have ended as well, such a rank keeps its job alive forever; before, it delays nobody.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import signal
import sys
import time

from hvkeras.control import location, stalls
from hvkeras.host.console import say

LAST_RESORT = 5.0  # seconds after the server's limit until the kernel kills the process
BACKOFF = 2.0  # the next report is due after this multiple of the waiting time


class ExitWatch:
    """Monitor of how long this rank's process outlives its script.

    Args:
        who: The rank, its host and its process, for messages.
        warn_after: Seconds until its threads' stacks are printed; the interval then doubles. 0 for never.
        end_after: Seconds until the job ends; 0 for never.
        liveness: Additional seconds for the process once Python's threads no longer run.
    """

    def __init__(self, who: str, warn_after: float, end_after: float, liveness: float) -> None:
        self._who, self._liveness = who, liveness
        self._warn_after, self._end_after = warn_after, end_after
        self._script_done: float | None = None
        self._others_done: float | None = None

    def begin(self) -> None:
        """Record that this rank's script has ended."""
        self._script_done = time.monotonic()

    def others_have_ended(self) -> None:
        """Record that the scripts of all ranks have ended, or that their state is no longer available."""
        self._others_done = self._others_done or time.monotonic()

    def excuse(self) -> None:
        """Record that this rank waits for others to exit, and so is not the one that keeps the job alive."""
        self._script_done = None

    def check(self, now: float, moved: float) -> str:
        """Report a process that does not exit.

        Args:
            now: The time, in seconds.
            moved: The time at which the rank last entered a collective or made progress in a Keras loop.

        Returns:
            The reason why the job must end; "" if it continues.
        """
        if self._script_done is None or self._others_done is None:
            return ""
        waited = now - max(self._script_done, self._others_done, moved)
        if self._end_after and waited >= self._end_after:
            return (f"has not ended, {waited:.0f} s after its script did: {location.blocking_exit()[0]}"
                    " (HVKERAS_STALL_SHUTDOWN sets the limit)")
        if self._warn_after and waited >= self._warn_after:
            self._warn_after = BACKOFF * waited
            where, stacks = location.blocking_exit()
            text = f"{self._who} has not ended, {waited:.0f} s after its script did: {where}"
            say(f"{text}; the innermost call last:\n" + "\n".join(stacks))
            stalls.notify(text)
        return ""

    def arm_last_resort(self) -> None:
        """Limit the time of finalizers and of the cleanup of libraries, after Python's threads have ended."""
        if self._warn_after:
            # If standard error is closed, the stacks cannot be printed.
            with contextlib.suppress(AttributeError, OSError, RuntimeError, ValueError):
                faulthandler.dump_traceback_later(self._warn_after, repeat=True, file=sys.__stderr__ or sys.stderr)
        if self._end_after and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL:
            _end_after(self._end_after + self._liveness + LAST_RESORT)


def _end_after(seconds: float) -> None:
    """Set a kernel timer that kills this process, but not a program that it executes; libc may lack the calls."""
    libc, timer = ctypes.CDLL(None), ctypes.c_void_p()
    interval_and_value = (ctypes.c_long * 4)(0, 0, int(seconds), int(seconds % 1 * 1e9))
    with contextlib.suppress(AttributeError):
        if libc.timer_create(time.CLOCK_MONOTONIC, None, ctypes.byref(timer)) == 0:  # the timer sends SIGALRM
            libc.timer_settime(timer, 0, interval_and_value, None)

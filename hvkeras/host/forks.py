"""Forked processes, such as data loaders: they inherit objects of this process, but not its threads.

In a forked process, a lock that another thread held stays locked, and a join of a thread never returns. Writes to an
inherited socket or file are mixed with those of this process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol


class Inherited(Protocol):
    """Object that a forked process must detach from its parent."""

    def in_child(self) -> None:
        """Detach the copy in a forked process; called in the child, which has only the calling thread."""


class _Forks:
    """Number of forks since this module was imported, and the objects to detach in children."""

    generation = 0
    inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()  # noqa: RUF012 - one per process
    mask: Any = ()

    @classmethod
    def before(cls) -> None:
        """Block signals until the child has removed its handlers."""
        cls.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})

    @classmethod
    def after_in_parent(cls) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, cls.mask)

    @classmethod
    def after_in_child(cls) -> None:
        cls.generation += 1
        try:
            for each in list(cls.inherited):
                with contextlib.suppress(OSError):  # out of descriptors; continue with the others
                    each.in_child()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, cls.mask)


class ForkSafeLock:
    """Reentrant lock that is replaced in forked processes, and in copies of the object that holds it.

    If another thread holds a lock during a fork, it stays locked in the child. The lock is reentrant because signal
    handlers may run while it is held.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        detach_in_children(self)

    def in_child(self) -> None:
        """Replace the lock, which may be locked."""
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> Any:
        return ForkSafeLock, ()


def detach_in_children(inherited: Inherited) -> None:
    """Register an object whose `in_child` is called in forked processes. The reference is weak."""
    _Forks.inherited.add(inherited)


def at_exit(function: Callable[..., None], *arguments: Any) -> Callable[[], None]:
    """Register a function with `atexit`, for this process but not for processes forked from it.

    Returns:
        A function that cancels the registration.
    """
    call = _only_here(function, arguments)
    atexit.register(call)
    return lambda: atexit.unregister(call)


def at_script_end(function: Callable[[], None]) -> None:
    """Register a function to call when the script has ended, before Python waits for non-daemon threads.

    Functions of `atexit` run only after these threads have ended.
    """
    threading._register_atexit(_only_here(function, ()))  # type: ignore[attr-defined]


def end_without_libraries() -> None:
    """Skip the cleanup of C++ libraries at the exit of this process, which was forked from a rank.

    The cleanup would wait for threads that do not exist here, and release sockets and memory that the rank still uses.
    It runs after Python's, in reverse order of registration. Not all C libraries have `on_exit`.
    """
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):
        libc.on_exit(libc._exit, None)  # called with the exit code


def _only_here(function: Callable[..., None], arguments: tuple[Any, ...]) -> Callable[[], None]:
    generation = _Forks.generation

    def call() -> None:
        if generation == _Forks.generation:
            function(*arguments)

    return call


os.register_at_fork(before=_Forks.before, after_in_parent=_Forks.after_in_parent,
                    after_in_child=_Forks.after_in_child)

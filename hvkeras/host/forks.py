"""Forked processes, such as those that load data: they have a copy of what belongs to this one, but not its threads.

A lock that another thread held at the moment of the fork stays locked there, a thread that is waited for never ends,
and what is written to a socket or a file gets into the middle of what this process writes.
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
    """An object that a forked process must not use as it is."""

    def in_child(self) -> None:
        """Makes the copy in a forked process harmless; called in the child, whose only thread is the caller's."""


class _Forks:
    """This process, counted from the first one that has imported this module, and what a child must not use."""

    generation = 0
    inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()  # noqa: RUF012 - one per process
    mask: Any = ()

    @classmethod
    def before(cls) -> None:
        """Blocks signals until the child has removed the hooks."""
        cls.mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})

    @classmethod
    def after_in_parent(cls) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, cls.mask)

    @classmethod
    def after_in_child(cls) -> None:
        cls.generation += 1
        try:
            for each in list(cls.inherited):
                with contextlib.suppress(OSError):  # no descriptor is left for one of them; the others do without
                    each.in_child()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, cls.mask)


class ForkSafeLock:
    """A reentrant lock that is a new one in forked processes, and in copies of what holds it.

    Another thread may hold a lock at the moment of a fork; it would stay locked in the child. Signal handlers may run
    amid a body, so that the lock is reentrant.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        detach_in_children(self)

    def in_child(self) -> None:
        """Replaces the lock."""
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> Any:
        return ForkSafeLock, ()


def detach_in_children(inherited: Inherited) -> None:
    """Makes forked processes call an object's `in_child`, as long as the object lives.

    Args:
        inherited: The object.
    """
    _Forks.inherited.add(inherited)


def at_exit(function: Callable[..., None], *arguments: Any) -> Callable[[], None]:
    """Calls a function when this process exits, as `atexit` does, and not when one exits that was forked from it.

    Args:
        function: The function.
        *arguments: Its arguments.

    Returns:
        A function after which it is no longer called.
    """
    call = _only_here(function, arguments)
    atexit.register(call)
    return lambda: atexit.unregister(call)


def at_script_end(function: Callable[[], None]) -> None:
    """Calls a function after Python has run the script of this process, and before it waits for non-daemon threads.

    Functions of `atexit` run only after that.

    Args:
        function: The function.
    """
    threading._register_atexit(_only_here(function, ()))  # type: ignore[attr-defined]


def end_without_libraries() -> None:
    """Makes this process, which a rank has forked, end without the cleanup of C++ libraries.

    They would wait for threads that are not in it, and give up sockets and memory that the rank still uses. The cleanup
    begins when Python is done, with what was registered last. Not all C libraries have the call.
    """
    libc = ctypes.CDLL(None)
    with contextlib.suppress(AttributeError):
        libc.on_exit(libc._exit, None)  # which is called with the exit code


def _only_here(function: Callable[..., None], arguments: tuple[Any, ...]) -> Callable[[], None]:
    generation = _Forks.generation

    def call() -> None:
        if generation == _Forks.generation:
            function(*arguments)

    return call


os.register_at_fork(before=_Forks.before, after_in_parent=_Forks.after_in_parent,
                    after_in_child=_Forks.after_in_child)

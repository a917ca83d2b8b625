"""Listeners for stall reports, in addition to the console: the record of this rank, if there is one."""

from __future__ import annotations

from collections.abc import Callable

listeners: list[Callable[[str], None]] = []


def note(stall: str) -> None:
    """Notifies all listeners of a stall.

    Args:
        stall: Which rank makes no progress, and where.
    """
    for listener in listeners:
        listener(stall)

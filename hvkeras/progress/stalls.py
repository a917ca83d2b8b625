"""Who hears of ranks that stand still, besides those who read the console: the record of this rank, if there is one."""

from __future__ import annotations

from collections.abc import Callable

listeners: list[Callable[[str], None]] = []


def note(stall: str) -> None:
    """Tells all listeners.

    Args:
        stall: Who stands still, and where.
    """
    for listener in listeners:
        listener(stall)

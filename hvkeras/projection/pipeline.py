"""How much of the communication of a step does not fit beside its backward pass."""

from __future__ import annotations

from collections.abc import Sequence


def exposed(leads: Sequence[float], durations: Sequence[float]) -> float:
    """Seconds that communication goes on after the backward pass, where buckets travel one after the other.

    Args:
        leads: For each bucket, in the order in which they are sent: how long before the end of the backward pass it
            is ready.
        durations: Seconds that each takes.
    """
    end = float("-inf")  # of the last bucket, counted from the end of the backward pass
    for lead, duration in zip(leads, durations, strict=True):
        end = max(end, -lead) + duration
    return max(end, 0.0)

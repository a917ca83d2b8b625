"""The part of a step's communication that does not overlap with its backward pass."""

from __future__ import annotations

from collections.abc import Sequence


def exposed(leads: Sequence[float], durations: Sequence[float]) -> float:
    """Seconds that communication continues after the backward pass, if buckets are sent one after the other.

    Args:
        leads: For each bucket, in the order of sending: how many seconds before the end of the backward pass it is
            ready.
        durations: Seconds that each bucket takes.
    """
    end = float("-inf")  # when the last bucket ends, relative to the end of the backward pass
    for lead, duration in zip(leads, durations, strict=True):
        end = max(end, -lead) + duration
    return max(end, 0.0)

"""What limits a job, and what to try, in words."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hvkeras.time_split import TimeSplit

WORTH_IT = 0.1  # of a step: what takes less is not worth a change
UNEVEN = 0.1  # of a step: beyond this difference in computing, a rank is slower than the others


def advice(splits: Mapping[int, TimeSplit]) -> str:
    """Names what takes the most time of a step beside computing, and what to do about it.

    Args:
        splits: Where the time of a typical step goes, by rank; one rank at least.

    Returns:
        A sentence or two.
    """
    step = float(np.mean([split.step for split in splits.values()])) or 1.0
    shares = {"input": _mean(splits, "input") / step, "wait": _mean(splits, "wait") / step,
              "communication": _mean(splits, "communication") / step}
    worst = max(shares, key=lambda part: shares[part])
    share = shares[worst]
    if share < WORTH_IT:
        return (f"Computing takes {_mean(splits, 'compute') / step:.0%} of a step, so nothing else limits it: try"
                " jit_compile=True, mixed precision, or more processes on more cores.")
    if worst == "input":
        return (f"Reading data limits it: {share:.0%} of a step is spent waiting for the next batch. Try"
                " dataset.prefetch, cache, and map with num_parallel_calls=tf.data.AUTOTUNE.")
    if worst == "communication":
        also = "" if all(split.wait is not None for split in splits.values()) else ", waiting for other ranks included"
        return (f"Communication limits it: it takes {share:.0%} of a step{also}. Try larger batches, so that there are"
                " fewer steps, compression=hvd.Compression.fp16, or backward_passes_per_step.")
    return _of_waiting(splits, share, step)


def _of_waiting(splits: Mapping[int, TimeSplit], share: float, step: float) -> str:
    """Who waits for whom."""
    busy = {rank: split.compute + split.input for rank, split in splits.items()}
    slowest = max(busy, key=lambda rank: busy[rank])
    others = [seconds for rank, seconds in busy.items() if rank != slowest]
    more = busy[slowest] - float(np.median(others)) if others else 0.0
    if more > UNEVEN * step:
        return (f"Rank {slowest} limits it: the ranks wait for each other {share:.0%} of a step, as rank {slowest} is"
                f" busy for {1000 * more:.3g} ms longer than the others. See what else runs there, and give all ranks"
                " as much work.")
    return (f"Waiting for each other limits it: it takes {share:.0%} of a step, now for the one rank and now for the"
            " other. See what else runs on these cores, and whether batches take unlike times.")


def _mean(splits: Mapping[int, TimeSplit], part: str) -> float:
    return float(np.mean([getattr(split, part) or 0.0 for split in splits.values()]))

"""How tensors are fused into buckets, by their sizes; `HVKERAS_BUCKET_SIZE` is the limit, see `hvkeras.settings`."""

from __future__ import annotations

from collections.abc import Sequence

# The first bucket is small, so that its collective starts while the backward pass is still running.
FIRST_BUCKET = 1024**2


def by_dtype(indices: Sequence[int], dtypes: dict[int, str]) -> list[list[int]]:
    """Splits indices by dtype (and anything else that the tensors of a collective share), keeping their order."""
    kinds = dict.fromkeys(dtypes[index] for index in indices)
    return [[index for index in indices if dtypes[index] == kind] for kind in kinds]


def pack(order: Sequence[int], dtypes: dict[int, str], sizes: dict[int, int | None], limit: int) -> list[list[int]]:
    """Fills buckets in order: each has one dtype and at most `limit` bytes, unless a single tensor is larger.

    Args:
        order: The tensors' indices.
        dtypes: Each tensor's dtype, with whatever else the tensors of a bucket must share.
        sizes: Each tensor's size in bytes; a tensor of unknown size gets a separate bucket.
        limit: The size limit of a bucket in bytes; the first bucket is smaller, see `FIRST_BUCKET`.

    Returns:
        The buckets, in the order in which they are completed.
    """
    done: list[list[int]] = []
    filling: dict[str, tuple[list[int], int]] = {}
    room = min(FIRST_BUCKET, limit)
    for index in order:
        size = sizes[index]
        if size is None:
            done.append([index])
            continue
        bucket, used = filling.pop(dtypes[index], ([], 0))
        if bucket and used + size > room:
            done.append(bucket)
            bucket, used, room = [], 0, limit
        filling[dtypes[index]] = ([*bucket, index], used + size)
    return done + [bucket for bucket, _ in filling.values()]

"""Buckets: tensors fused into few collectives, by dtype and size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvkeras.settings import Settings

BUCKET = 25 * 1024**2
# Gradients begin with a small bucket, so that its collective starts while the backward pass is still running.
FIRST_BUCKET = 1024**2


def bucket_size(settings: Settings) -> int:
    """Return the size limit of a bucket in bytes."""
    return BUCKET if settings.bucket_size is None else int(settings.bucket_size)


def by_dtype(indices: Sequence[int], dtypes: Mapping[int, str]) -> list[list[int]]:
    """Split indices by dtype (and anything else that the tensors of a collective have in common), in order."""
    kinds = dict.fromkeys(dtypes[index] for index in indices)
    return [[index for index in indices if dtypes[index] == kind] for kind in kinds]


def pack(order: Sequence[int], dtypes: Mapping[int, str], sizes: Mapping[int, int | None], limit: int,
         first: int | None = None) -> list[list[int]]:
    """Fill buckets in order: each has one dtype and at most `limit` bytes, unless a single tensor is larger.

    Args:
        dtypes: Each tensor's dtype, and anything else that the tensors of a bucket must have in common.
        sizes: Each tensor's size in bytes; a tensor of unknown size gets a separate bucket.
        limit: The size limit of a bucket in bytes.
        first: The size limit of the first bucket, where that is smaller.

    Returns:
        The buckets, in the order in which they are completed.
    """
    done: list[list[int]] = []
    filling: dict[str, tuple[list[int], int]] = {}
    capacity = min(first or limit, limit)
    for index in order:
        size = sizes[index]
        if size is None:
            done.append([index])
            continue
        bucket, used = filling.pop(dtypes[index], ([], 0))
        if bucket and used + size > capacity:
            done.append(bucket)
            bucket, used, capacity = [], 0, limit
        filling[dtypes[index]] = ([*bucket, index], used + size)
    return done + [bucket for bucket, _ in filling.values()]

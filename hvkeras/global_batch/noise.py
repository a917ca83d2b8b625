"""Random numbers in steps: ranks draw different ones for their rows, but their generators stay equal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from hvkeras.collectives.row_share import global_batch
from hvkeras.job.session import current_session

_STRIDE = 0x9E3779B1  # odd, near 2**32 divided by the golden ratio: ranks' seeds are far apart


class _Drawing:
    """How operations of TensorFlow draw while pipelines are built."""

    seeds: tuple[int, int] | None = None  # of all operations
    for_rank = False  # whether ranks draw different numbers


@contextlib.contextmanager
def drawing_as(seeds: tuple[int, int]) -> Iterator[None]:
    """Enter a scope in which a stage that shuffles gets the seeds of another one."""
    before, _Drawing.seeds = _Drawing.seeds, seeds
    try:
        yield
    finally:
        _Drawing.seeds = before


@contextlib.contextmanager
def drawing_for_rank() -> Iterator[None]:
    """Enter a scope in which functions that draw random numbers draw different ones on each rank."""
    before, _Drawing.for_rank = _Drawing.for_rank, True
    try:
        yield
    finally:
        _Drawing.for_rank = before


def next_seed(original: Callable[..., Any], generator: Any, *args: Any, **kwargs: Any) -> Any:
    """Draw the seed of a random operation of Keras."""
    seed = original(generator, *args, **kwargs)
    if global_batch().rows is None:
        return seed
    return tf.bitwise.bitwise_xor(seed, tf.constant([_offset(31), 0], seed.dtype))


def operation_seed(original: Callable[..., Any], seed: Any) -> Any:
    """Return the seeds of a random operation of TensorFlow, which are constants of its graph."""
    if _Drawing.seeds is not None:
        return _Drawing.seeds
    first, second = original(seed)
    draws_for_rank = _Drawing.for_rank and not tf.executing_eagerly()
    if (global_batch().rows is None and not draws_for_rank) or not isinstance(first, int):
        return first, second
    return first ^ _offset(31), second


def _offset(bits: int) -> int:
    offset: int = current_session().topology.rank * _STRIDE % 2**bits
    return offset

"""Random numbers in steps: ranks draw different ones for their rows, but their generators stay equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvkeras.collectives.row_share import global_batch
from hvkeras.job.session import current_session

_STRIDE = 0x9E3779B1  # odd, near 2**32 divided by the golden ratio: ranks' seeds are far apart


def next_seed(original: Callable[..., Any], generator: Any, *args: Any, **kwargs: Any) -> Any:
    """Draw the seed of a random operation of Keras."""
    seed = original(generator, *args, **kwargs)
    if global_batch().rows is None:
        return seed
    return tf.bitwise.bitwise_xor(seed, tf.constant([_offset(31), 0], seed.dtype))


def operation_seed(original: Callable[..., Any], seed: Any) -> Any:
    """Return the seeds of a random operation of TensorFlow, which are constants of its graph."""
    first, second = original(seed)
    if global_batch().rows is None or not isinstance(first, int):
        return first, second
    return first ^ _offset(31), second


def _offset(bits: int) -> int:
    return current_session().topology.rank * _STRIDE % 2**bits

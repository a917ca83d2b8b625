"""Keras 3's random seeds under strategies: each replica draws different numbers.

In Keras 3.15, all replicas draw the same numbers, so that dropout applies the same mask to the rows of each replica.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvkeras.compat import graphs, repairs

_APART = 2_654_435_761  # distance between the seeds of two replicas: a prime, so that users' seeds do not match it


def patch(module: Any) -> None:
    """Installs the repair of Keras's own method.

    Args:
        module: Keras's module `keras.src.random.seed_generator`.
    """

    def draw(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        seed, replica = original(self, *args, **kwargs), tf.distribute.get_replica_context()
        if replica is None or graphs.reducing_strategy() is None or repairs.mentions(original, "replica"):
            return seed
        number = tf.cast(replica.replica_id_in_sync_group, tf.int64)
        return seed + tf.cast(tf.stack([number * _APART % 2**31, tf.constant(0, tf.int64)]), seed.dtype)

    repairs.put(module.SeedGenerator, "next", draw)

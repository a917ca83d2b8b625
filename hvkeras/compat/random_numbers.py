"""Global seed of TensorFlow's random numbers, which has no public getter."""

from __future__ import annotations

from tensorflow.python.eager import context


def global_seed() -> int | None:
    """Return the seed that `tf.random.set_seed` has set; None if there is none."""
    seed: int | None = context.global_seed()
    return seed

"""Seeds of global random numbers, which must be equal on all ranks where a script makes or shuffles its data."""

from __future__ import annotations

import hashlib
import os
import random

import numpy as np
import tensorflow as tf

from hvkeras.collectives.broadcasts import gather_objects
from hvkeras.compat.random_numbers import global_seed
from hvkeras.job.process_sets import global_process_set


def agree() -> None:
    """Seed the random numbers of Python, NumPy and TensorFlow in the same way on all ranks, except those equal already.

    Those that the script has seeded alike on all ranks keep its seed.
    """
    states = [_digest(random.getstate()), _digest(np.random.get_state(legacy=False)), global_seed()]
    everyone = gather_objects((int.from_bytes(os.urandom(4), "little"), states), global_process_set, "random seeds")
    seed = everyone[0][0]
    for index, set_seed in enumerate((random.seed, np.random.seed, tf.random.set_seed)):
        found = {states[index] for _, states in everyone}
        if len(found) > 1 or None in found:
            set_seed(seed)


def _digest(state: object) -> str:
    return hashlib.sha256(repr(_plain(state)).encode()).hexdigest()


def _plain(state: object) -> object:
    """Return a state with its arrays as bytes, which `repr` would abbreviate."""
    if isinstance(state, dict):
        return {name: _plain(value) for name, value in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state

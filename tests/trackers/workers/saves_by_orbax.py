"""Trains with Keras's `OrbaxCheckpoint` on every rank, and notes what each saved and what is on disk.

Arguments: the folder.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import orbax.checkpoint as ocp  # type: ignore[import-not-found, unused-ignore]

import hvkeras as hvd
from harness.checks import check, run_checks

ROOT = Path(sys.argv[1])


def saved(name: str, **options: Any) -> dict[str, Any]:
    """The steps in a folder after three epochs, and how far its weights are from the model's."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization()])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01), **options), "mse")
    x = np.random.default_rng(hvd.rank()).normal(size=(32, 4)).astype("float32")
    model.fit(x, x[:, :3], batch_size=8, epochs=3, verbose=0,
              callbacks=[keras.callbacks.OrbaxCheckpoint(str(ROOT / name), monitor="loss", max_to_keep=2)])
    hvd.barrier()
    steps = sorted(path.name for path in (ROOT / name).iterdir())
    tree = ocp.PyTreeCheckpointer().restore(str(ROOT / name / steps[-1] / "pytree"))
    found = sorted(float(np.sum(leaf)) for leaf in keras.tree.flatten(
        [tree["trainable_variables"], tree["non_trainable_variables"]]))
    weights = sorted(float(np.sum(one)) for one in model.get_weights())
    return {"steps": steps, "apart": float(np.max(np.abs(np.subtract(found, weights))))}


@check
def saves() -> dict[str, Any]:
    return {"plain": saved("plain"), "shared update": saved("shared", shard_update=True)}


if __name__ == "__main__":
    run_checks(before=hvd.init, after=hvd.shutdown)

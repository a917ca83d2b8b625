"""Interrupt and resume training in one job: `checkpoints.py ranks` with hvkeras, `workers` under a strategy."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvkeras as hvd
from harness.checks import check, run_checks
from harness.cut_off import CutOff, CutOffError
from hvkeras.callbacks import BackupAndRestore, BroadcastGlobalVariablesCallback, ModelCheckpoint

RANKS = sys.argv[1] == "ranks"
if RANKS:
    hvd.init()
    RANK, SIZE, STRATEGY = hvd.rank(), hvd.size(), None
else:
    STRATEGY = tf.distribute.MultiWorkerMirroredStrategy()
    RANK, SIZE = STRATEGY.cluster_resolver.task_id, 2
X = np.random.default_rng(0).normal(size=(96, 4)).astype("float32")
Y = (X @ [[1.0], [2], [-1], [0.5]]).astype("float32")
FOLDER = Path(f"of rank {RANK}")  # ranks share no folder


class Worse(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that logs a value whose second one is the best."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["made"] = [2.0, 1.0, 3.0][epoch]


def scope() -> Any:
    return contextlib.nullcontext() if STRATEGY is None else STRATEGY.scope()


def compiled() -> Any:
    keras.utils.set_random_seed(7 + RANK if RANKS else 7)  # ranks have different dropout masks
    with scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.BatchNormalization(),
                                  keras.layers.Dropout(0.3), keras.layers.Dense(1)])
        adam = keras.optimizers.Adam(0.02)
        model.compile(hvd.DistributedOptimizer(adam) if RANKS else adam, "mse")
    return model


def dataset() -> Any:
    whole = tf.data.Dataset.from_tensor_slices((X, Y))
    return hvd.shard(whole, shuffle=96).batch(24 // SIZE) if RANKS else whole.shuffle(96, seed=5).batch(24)


def trained(*callbacks: Any, cut: int | None = None) -> Any:
    """Return a model after three epochs of four steps, or after `cut` steps."""
    model, data = compiled(), dataset()
    with warnings.catch_warnings(), contextlib.suppress(CutOffError):
        warnings.simplefilter("ignore")
        model.fit(data, epochs=3, verbose=0, shuffle=None, callbacks=[
            *callbacks, *([BroadcastGlobalVariablesCallback(0)] if RANKS else []),
            keras.callbacks.ReduceLROnPlateau("loss", 0.5, patience=1, min_delta=10, cooldown=1),
            *([] if cut is None else [CutOff(cut)])])
    return model


def values(model: Any, save_freq: Any) -> list[Any]:
    """Return everything that training depends on: weights, the optimizer's variables, and the layers' seeds.

    The moving statistics of BatchNormalization differ between workers, and all resume with the chief's; ranks average
    them at the end of an epoch.
    """
    with_statistics = save_freq == "epoch" if RANKS else RANK == 0
    return [np.asarray(variable) for variable in model.variables + model.optimizer.variables
            if with_statistics or "moving" not in variable.path]


@check
def goes_on_exactly() -> Any:
    """Whether each variable is equal after interruptions in and between epochs; and the remaining files."""
    undisturbed = trained()
    found = []
    cases: Any = ((1, 6), ("epoch", 9)) if RANKS else ((1, 6),)
    for save_freq, cut in cases:
        FOLDER.mkdir()
        backup = FOLDER / "backup"
        whole = values(undisturbed, save_freq)
        cut_off = values(trained(BackupAndRestore(backup, save_freq, delete_checkpoint=False), cut=cut), save_freq)
        files = [path.name for path in backup.iterdir()] if backup.exists() else []
        resumed = values(trained(BackupAndRestore(backup, save_freq)), save_freq)
        found.append({
            "same": all(np.array_equal(one, other) for one, other in zip(whole, resumed, strict=True)),
            "cut": any(not np.array_equal(one, other) for one, other in zip(whole, cut_off, strict=True)),
            "files": files, "left": [path.name for path in FOLDER.iterdir()]})
        os.removedirs(FOLDER)
    return found


def weights(model: Any) -> list[Any]:
    """Return the weights except statistics, which are averaged at an epoch's end, after the last batch's file."""
    return [np.asarray(variable) for variable in model.weights if not RANKS or "moving" not in variable.path]


@check
def the_best_is_kept() -> Any:
    """ModelCheckpoint's files, and their differences from the model after loading without a strategy."""
    model = trained(Worse(), ModelCheckpoint(FOLDER / "{epoch}-{made:.0f}.keras", "made", mode="min",
                                             save_best_only=True),
                    ModelCheckpoint(FOLDER / "last.weights.h5", save_weights_only=True, save_freq=2))
    if not FOLDER.exists():
        return {"files": []}
    again = keras.models.load_model(FOLDER / "2-1.keras")
    names = sorted(path.name for path in FOLDER.iterdir())
    again.load_weights(FOLDER / "last.weights.h5")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = hvd.alone() if RANKS else contextlib.nullcontext()
        with alone:
            again.fit(X, Y, verbose=0)  # with the plain optimizer's state
    again.load_weights(FOLDER / "last.weights.h5")
    return {"files": names, "optimizer": type(again.optimizer).__mro__[0].__module__,
            "apart": max(float(np.abs(one - other).max()) for one, other in
                         zip(weights(model), weights(again), strict=True))}


@check
def what_others_wrote_opens_here() -> Any:
    """Load a model under this strategy that one process saved without one."""
    path = FOLDER / "plain.keras"
    FOLDER.mkdir(exist_ok=True)
    plain = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    plain.compile("adam", "mse")
    plain.save(path)
    with scope():
        opened = keras.models.load_model(path)
    return [float(np.abs(one - other).max()) for one, other in zip(plain.get_weights(), opened.get_weights(),
                                                                    strict=True)]


if __name__ == "__main__":
    run_checks(after=hvd.shutdown if RANKS else None)

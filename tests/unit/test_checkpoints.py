"""`BackupAndRestore` and `ModelCheckpoint` in one process: what is kept, and what it is worth after a crash."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py  # type: ignore[import-untyped]
import keras
import numpy as np
import pytest
import tensorflow as tf

import hvkeras as hvd
from hvkeras.callbacks import BackupAndRestore, ModelCheckpoint
from hvkeras.callbacks.backup_file import Position
from hvkeras.callbacks.whole_files import replacing

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras with NumPy 2
X = np.random.default_rng(1).normal(size=(24, 3)).astype("float32")
Y = X @ np.float32([[1], [-2], [3]])


class CutOffError(Exception):
    pass


class CutOff(keras.callbacks.Callback):  # type: ignore[misc]
    """Ends training after so many steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.left = steps

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if self.left < 0:
            raise CutOffError


class Numbers(keras.callbacks.Callback):  # type: ignore[misc]
    """Draws from the global generators, as a user's callback might, and notes the steps and what it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[tuple[int, int, float, float, float]] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch
        random.random()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.drawn.append((self.epoch, batch, random.random(), float(np.random.rand()),
                           float(tf.random.uniform(()) + keras.random.uniform(()))))


class Batches(keras.utils.PyDataset):  # type: ignore[misc]
    """Shuffles its batches itself after each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.order = list(range(6))
        self.generator = np.random.default_rng(3)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        rows = slice(self.order[index] * 4, self.order[index] * 4 + 4)
        return X[rows], Y[rows]

    def on_epoch_end(self) -> None:
        self.generator.shuffle(self.order)


def dataset(**options: Any) -> Any:
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(24, seed=5, **options).batch(4)


def generator() -> Iterator[Any]:
    numbers = np.random.default_rng(8)
    while True:
        rows = numbers.integers(0, 24, 4)
        yield X[rows], Y[rows]


DATA: dict[str, Any] = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": 4},
    "shuffled dataset": lambda: {"x": dataset(), "shuffle": None},
    "unknown length": lambda: {"x": dataset().filter(lambda x, y: True), "shuffle": None},
    "endless dataset": lambda: {"x": dataset().repeat(), "steps_per_epoch": 5, "shuffle": None},
    "generator": lambda: {"x": generator(), "steps_per_epoch": 6, "shuffle": None},
    "PyDataset": lambda: {"x": Batches(), "shuffle": True},
}


def compiled(optimizer: Any = None, **options: Any) -> Any:
    keras.utils.clear_session()  # as in a new process
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.BatchNormalization(),
                              keras.layers.Dropout(0.3), keras.layers.Dense(1)])
    model.compile(optimizer or keras.optimizers.Adam(0.02), "mse", **options)
    return model


def train(folder: Path | None, data: Any, cut: int | None = None, save_freq: Any = "epoch",
          more: Any = (), backup: Any = None, **options: Any) -> Any:
    """One run of the script: its model, and the numbers that it drew."""
    model, numbers = compiled(options.pop("optimizer", None), **options.pop("compiled", {})), Numbers()
    made = data()  # after the seeds are set
    callbacks = [BackupAndRestore(folder, save_freq, **(backup or {}))] if folder else []
    callbacks += [numbers, *more]
    callbacks += [] if cut is None else [CutOff(cut)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Your input ran out of data")
        if cut is None:
            model.fit(**made, epochs=3, verbose=0, callbacks=callbacks, **options)
        else:
            with pytest.raises(CutOffError):
                model.fit(**made, epochs=3, verbose=0, callbacks=callbacks, **options)
    return model, numbers.drawn


def assert_same_state(one: Any, other: Any) -> None:
    for mine, theirs in zip(one.variables + one.optimizer.variables, other.variables + other.optimizer.variables,
                            strict=True):
        assert np.array_equal(mine.numpy(), theirs.numpy()), mine.path


@pytest.mark.oldest
@pytest.mark.parametrize(("save_freq", "cut"), [(2, 9), ("epoch", 14)])
@pytest.mark.parametrize("kind", DATA)
def test_training_goes_on_as_if_it_had_not_been_cut_off(kind: str, save_freq: Any, cut: int, tmp_path: Path,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    whole, drawn = train(None, DATA[kind])
    train(tmp_path / "backup", DATA[kind], cut, save_freq)
    resumed, drawn_again = train(tmp_path / "backup", DATA[kind], save_freq=save_freq)
    assert_same_state(resumed, whole)
    assert 0 < len(drawn_again) < len(drawn)
    if kind != "PyDataset":  # Keras shuffles it in a thread of its own, by the same global generator
        assert drawn_again == drawn[-len(drawn_again):]
    assert capsys.readouterr().err.count("training goes on with epoch") == 1
    assert not (tmp_path / "backup").exists()

"""Training on one rank of `KerasEstimator`: reads its shard, trains, and saves the best model in the store."""

from __future__ import annotations

import importlib
import itertools
import math
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

import hvkeras as hvd
from hvkeras.spark.common.pickling import unpacked
from hvkeras.spark.common.reader import Arrays, ParquetShare, shaped
from hvkeras.spark.common.store import Store

PREFETCHED = 2  # batches


@dataclass(frozen=True)
class FitOrder:
    """Parameters of `KerasEstimator` that the ranks need.

    Attributes:
        family: The model's Keras package: `keras` or `tf_keras`.
        val_path: The folder of validation data; "" without validation.
        pool: The number of rows in the shuffle buffer.
        passes_per_step: The number of steps whose gradients are accumulated.
        objects: The pickled model, optimizer, losses, metrics and callbacks.
    """

    family: str
    store: Store
    run_id: str
    train_path: str
    val_path: str
    feature_cols: Sequence[str]
    label_cols: Sequence[str]
    sample_weight_col: str | None
    label_shapes: Sequence[Sequence[int]] | None
    batch_size: int
    val_batch_size: int
    epochs: int
    verbose: int
    seed: int | None
    shuffle: bool
    pool: int | None
    train_steps: int | None
    val_steps: int | None
    in_memory: bool
    custom_objects: Mapping[str, Any]
    passes_per_step: int
    objects: bytes

    @property
    def columns(self) -> list[str]:
        """The columns to read."""
        weights = [self.sample_weight_col] if self.sample_weight_col else []
        return list(dict.fromkeys([*self.feature_cols, *self.label_cols, *weights]))


def train(plan: FitOrder) -> tuple[dict[str, list[float]], bytes] | None:
    """Train on this rank.

    Returns:
        On rank 0, the history and the `.keras` file of the best model; None on other ranks.
    """
    hvd.init()
    with tempfile.TemporaryDirectory(prefix="hvkeras-run-") as folder:
        rank = _Rank(plan, Path(folder))
        history = rank.fit()
        return (history, rank.best_model()) if hvd.rank() == 0 else None


class _Rank:
    def __init__(self, plan: FitOrder, folder: Path) -> None:
        self._plan, self._folder = plan, folder
        self._file = folder / "checkpoint.keras"
        self._keras: Any = importlib.import_module(plan.family)
        self._objects: dict[str, Any] = unpacked(plan.objects, plan.custom_objects, plan.family)
        self.model: Any = self._model_from_checkpoint() or self._compiled()

    def fit(self) -> dict[str, list[float]]:
        plan = self._plan
        if plan.seed is not None:
            self._keras.utils.set_random_seed(plan.seed + hvd.rank())
        data = self._dataset(plan.train_path, plan.batch_size, plan.train_steps, training=True)
        validation_data = self._dataset(plan.val_path, plan.val_batch_size, plan.val_steps) if plan.val_path else None
        history = self.model.fit(
            data, epochs=plan.epochs, steps_per_epoch=plan.train_steps, validation_data=validation_data,
            validation_steps=plan.val_steps if validation_data is not None else None, callbacks=self._callbacks(),
            shuffle=False, verbose=(2 if plan.verbose else 0) if hvd.rank() == 0 else 0)
        self._save_logs()
        return {name: [float(value) for value in values] for name, values in history.history.items()}

    def best_model(self) -> bytes:
        """Return the file of the best model, or of the last one if the user's checkpoint callback saved none."""
        if not self._file.exists():
            self.model.save(self._file)
        data = self._file.read_bytes()
        if self._plan.store.saving_runs():
            self._plan.store.write(self._checkpoint, data)
        return data

    @property
    def _checkpoint(self) -> str:
        return self._plan.store.get_checkpoint_path(self._plan.run_id)

    # The model.

    def _model_from_checkpoint(self) -> Any:
        store = self._plan.store
        if not hvd.broadcast_object(store.exists(self._checkpoint)):
            return None
        self._file.write_bytes(store.read(self._checkpoint))
        model = hvd.load_model(self._file, custom_objects=self._plan.custom_objects)
        self._file.unlink()
        return model if model.optimizer is not None else self._compiled(model)

    def _compiled(self, model: Any = None) -> Any:
        objects = self._objects
        model = objects["model"] if model is None else model
        optimizer = objects["optimizer"]
        optimizer = self._keras.optimizers.get(optimizer) if isinstance(optimizer, str) else optimizer
        model.compile(
            optimizer=hvd.DistributedOptimizer(
                optimizer, compression=objects["compression"] or hvd.Compression.none,
                backward_passes_per_step=self._plan.passes_per_step),
            loss=objects["loss"], loss_weights=objects["loss_weights"], metrics=objects["metrics"])
        return model

    def _callbacks(self) -> list[Any]:
        checkpoint = self._objects["checkpoint"]
        if checkpoint is None:
            monitor = "val_loss" if self._plan.val_path else "loss"
            checkpoint = hvd.callbacks.BestModelCheckpoint(monitor=monitor, filepath=self._file)
        checkpoint.filepath = str(self._file)
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), *self._objects["callbacks"], checkpoint]
        if hvd.rank() == 0 and self._plan.store.saving_runs():
            callbacks.append(self._keras.callbacks.LambdaCallback(on_epoch_end=self._save_checkpoint))
            if find_spec("tensorboard") is not None:
                callbacks.append(self._keras.callbacks.TensorBoard(str(self._folder / "logs")))
        return callbacks

    def _save_checkpoint(self, _epoch: int, _logs: Any) -> None:
        if self._file.exists():
            self._plan.store.write(self._checkpoint, self._file.read_bytes())

    def _save_logs(self) -> None:
        logs = self._folder / "logs"
        for path in logs.rglob("*") if logs.exists() else ():
            if path.is_file():
                name = path.relative_to(logs).as_posix()
                self._plan.store.write(f"{self._plan.store.get_logs_path(self._plan.run_id)}/{name}", path.read_bytes())

    # The data.

    def _dataset(self, path: str, batch_size: int, steps: int | None, training: bool = False) -> Any:
        import tensorflow as tf

        filesystem, located = self._plan.store.located(path)
        share = ParquetShare(filesystem, located, self._plan.columns, hvd.rank(), hvd.size(), training,
                             self._objects["transform"])
        if self._plan.in_memory:
            share.keep_in_memory()
        example = self._example(next(share.batches(1)))
        signature = tf.nest.map_structure(lambda array: tf.TensorSpec([None, *array.shape[1:]], array.dtype), example)
        dataset = tf.data.Dataset.from_generator(self._epochs(share, batch_size, training), output_signature=signature)
        if steps is not None:
            return dataset.repeat().prefetch(PREFETCHED)
        count = max(1, math.ceil(share.rows / batch_size))
        return dataset.apply(tf.data.experimental.assert_cardinality(count)).prefetch(PREFETCHED)

    def _epochs(self, share: ParquetShare, batch_size: int, training: bool) -> Callable[[], Iterator[Any]]:
        """Return a function that iterates over the shard once per call."""
        seed = secrets.randbits(32) if self._plan.seed is None else self._plan.seed
        passes = itertools.count()

        def read() -> Iterator[Any]:
            shuffle = training and self._plan.shuffle
            for arrays in share.batches(batch_size, shuffle, self._plan.pool, (seed, hvd.rank(), next(passes))):
                yield self._example(arrays)

        return read

    def _example(self, arrays: Arrays) -> tuple[Any, ...]:
        """Convert columns to Keras's inputs, labels and sample weights."""
        plan = self._plan
        shapes = [tuple(each.shape)[1:] for each in getattr(self.model, "inputs", None) or ()]
        features = [arrays[name] for name in plan.feature_cols]
        if len(shapes) == 1 and len(features) > 1:
            features = [np.concatenate([feature.reshape(len(feature), -1) for feature in features], axis=1)]
        if len(shapes) == len(features):
            features = [shaped(name, feature, shape)
                        for name, feature, shape in zip(plan.feature_cols, features, shapes, strict=False)]
        labels = [arrays[name] for name in plan.label_cols]
        if plan.label_shapes:
            labels = [shaped(name, label, shape)
                      for name, label, shape in zip(plan.label_cols, labels, plan.label_shapes, strict=True)]
        weights = [arrays[plan.sample_weight_col]] if plan.sample_weight_col else []
        return (_one_or_all(features), _one_or_all(labels), *weights)


def _one_or_all(parts: Sequence[Any]) -> Any:
    return parts[0] if len(parts) == 1 else tuple(parts)

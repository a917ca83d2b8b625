"""Train on shards with all ranks, and on whole batches on one process; report the differences of the weights.

Arguments: the names of the cases, `--eager` to run every step eagerly, and `--compiled` to compile updates with XLA.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np
import tensorflow as tf

import hvkeras as hvd
from harness.checks import check, run_checks
from harness.pages import ROOT, lines
from hvkeras.job.session import current_session

STEPS, BATCH = 5, 16
keras: Any = tf.keras
KERAS_3 = not keras.Model.__module__.startswith("tf_keras.")

CASES: dict[str, Any] = {
    "sgd_momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adam_clip_decay": lambda: keras.optimizers.Adam(0.01, clipnorm=0.01, weight_decay=0.02),
    "adam_global_clip": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.02),
    "sgd_clipvalue": lambda: keras.optimizers.SGD(0.1, clipvalue=0.01),
    "adam_ema": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "adam_schedule": lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.5)),
}
if KERAS_3:
    CASES["adam_accumulating"] = lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2)
SPARSE = "sparse_adam_clip"  # its gradients are tf.IndexedSlices
CASES[SPARSE] = lambda: keras.optimizers.Adam(0.01, clipnorm=0.05)
LOSSES = "losses_sgd"  # masked and weighted means, a weighted sum, and a regularizer
CASES[LOSSES] = lambda: keras.optimizers.SGD(0.02)
HAS_MEAN_BY_WEIGHT = KERAS_3 and tuple(map(int, keras.__version__.split(".")[:2])) >= (3, 9)
BY_WEIGHT = "mean_with_sample_weight" if HAS_MEAN_BY_WEIGHT else "sum_over_batch_size"
PLAIN = ("Adadelta", "Adafactor", "Adagrad", "AdamW", "Adamax", "Ftrl", "Lion", "Muon", "Nadam", "RMSprop",
         "ScheduleFreeAdamW")
LEGACY = ("Adadelta", "Adagrad", "Adam", "Adamax", "Ftrl", "Nadam", "RMSprop", "SGD")
for _name in PLAIN:
    if hasattr(keras.optimizers, _name):
        CASES[_name] = functools.partial(getattr(keras.optimizers, _name), learning_rate=0.02)
if not KERAS_3:
    for _name in LEGACY:
        CASES[f"legacy_{_name}"] = functools.partial(getattr(keras.optimizers.legacy, _name), learning_rate=0.02)


def data(case: str) -> tuple[Any, ...]:
    """Return the whole batches, the same on every rank; words and columns repeat within and between ranks' parts."""
    random = np.random.default_rng(1)
    rows = STEPS * BATCH
    x, y = random.normal(size=(rows, 6)).astype("float32"), random.normal(size=(rows, 3)).astype("float32")
    if case == SPARSE:
        x = (x * (random.random(x.shape) < 0.1), random.integers(0, 9, (rows, 4)))
    if case == LOSSES:
        weights = [random.random(shape).astype("float32") for shape in ((rows, 4), rows, rows)]
        return random.integers(0, 3, (rows, 4)), [y[:, :1].repeat(4, 1)[..., None], y[:, 1:2], y[:, 2:]], weights
    return x, y


def model(case: str) -> Any:
    keras.utils.set_random_seed(7)
    if case == LOSSES:
        words = keras.Input((4,), dtype="int32")
        looked_up = keras.layers.Embedding(3, 4, mask_zero=True)(words)
        whole = keras.layers.Flatten()(keras.layers.Embedding(3, 4)(words))
        summed = keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.1))(whole)
        return keras.Model(words, [keras.layers.Dense(1)(looked_up), summed, keras.layers.Dense(1)(whole)])
    hidden, last = keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)
    if case != SPARSE:
        return keras.Sequential([keras.Input((6,)), hidden, last])
    columns, words = keras.Input((6,), sparse=True), keras.Input((4,), dtype="int32")
    looked_up = keras.layers.Flatten()(keras.layers.Embedding(12, 2)(words))
    return keras.Model([columns, words], last(keras.layers.Concatenate()([hidden(columns), looked_up])))


def trained(case: str, wrap: Any, rank: int, size: int, eager: bool) -> list[Any]:
    """Return the weights after training on rows `rank`, `rank + size`, ... of each batch."""
    net = model(case)
    mean = keras.losses.MeanSquaredError
    loss = ["mse", mean(reduction="sum"), mean(reduction=BY_WEIGHT)] if case == LOSSES else "mse"
    net.compile(wrap(CASES[case]()), loss, run_eagerly=eager)
    x, *y = tf.nest.map_structure(lambda array: array[rank::size], data(case))
    if case == LOSSES:
        logs = net.fit(x, *y[:1], sample_weight=y[1], batch_size=BATCH // size, shuffle=False, verbose=0).history
        return [*net.get_weights(), *(np.array(logs[name]) for name in sorted(logs))]
    [y] = y
    if case == SPARSE:
        columns, words = x
        batches = tf.data.Dataset.from_tensor_slices(((tf.sparse.from_dense(columns), words), y)).batch(BATCH // size)
        net.fit(batches, verbose=0)
    else:
        net.fit(x, y, batch_size=BATCH // size, shuffle=False, verbose=0)
    return list(net.get_weights())


def apart(weights: list[Any], others: list[Any]) -> float:
    """Return the largest difference, relative to the largest weight."""
    largest = max(float(np.max(np.abs(other))) for other in others)
    return max(float(np.max(np.abs(one - other))) for one, other in zip(weights, others, strict=True)) / largest


@check
def differences() -> dict[str, Any]:
    """For each case: differences from one process and from the initial weights, and a checksum of the weights."""
    eager = "--eager" in sys.argv
    wrap = functools.partial(hvd.DistributedOptimizer, compile_update="--compiled" in sys.argv)
    names = [name for name in sys.argv[1:] if not name.startswith("--")] or list(CASES)
    found = {}
    for name in names:
        if name not in CASES:
            continue
        start = model(name).get_weights()
        with hvd.alone():
            alone = trained(name, lambda plain: plain, 0, 1, True) if hvd.rank() == 0 else None
        truth = hvd.broadcast_object(alone, 0)
        weights = trained(name, wrap, hvd.rank(), hvd.size(), eager)
        moved = apart(truth[: len(start)], start)
        found[name] = [apart(weights, truth), moved, float(np.sum([np.sum(one) for one in weights]))]
    return found


LINES = lines(ROOT / "docs" / "losses.md")


def run_lines(name: str, **names: Any) -> dict[str, Any]:
    """Run lines of docs/losses.md; return the names after them."""
    exec(LINES[name], {"hvd": hvd, "keras": keras, "tf": tf}, names)
    return names


class Clipping(keras.Model):  # type: ignore[misc]
    """A model that clips gradients in its step (before the optimizer, or by the lines of the page), or does not."""

    way = "in the optimizer"

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = 100.0 * tf.reduce_mean((self(data[0], training=True) - data[1]) ** 2)
        weights = self.trainable_variables
        if self.way == "lines":
            run_lines("clip-behind-a-tape", tape=tape, loss=loss, weights=weights, optimizer=self.optimizer)
            return {"loss": loss}
        gradients = tape.gradient(loss, weights)
        if self.way == "before the optimizer":
            gradients, _ = tf.clip_by_global_norm(gradients, 1.0)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss}


class Retrieval(keras.Model):  # type: ignore[misc]
    """A model of two towers, whose loss compares each query with all candidates that it sees."""

    gathers, reduction, factor = False, "sum", 1.0

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            queries, candidates = tf.split(self(data[0], training=True), 2, axis=1)
            if self.gathers:
                made = run_lines("in-batch-negatives", queries=queries, candidates=candidates)
                queries, candidates = made["queries"], made["candidates"]
            scores = tf.matmul(queries, candidates, transpose_b=True)
            compare = keras.losses.CategoricalCrossentropy(from_logits=True, reduction=self.reduction)
            loss = self.factor * compare(tf.eye(len(scores)), scores)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


def by_own_step(cls: Any, optimizer: Any, rank: int, size: int, attributes: dict[str, Any]) -> list[Any]:
    """Return the weights after training on rows `rank`, `rank + size`, ... of each of three batches."""
    x, y = (array[: 3 * BATCH] for array in data("sgd_momentum"))
    keras.utils.set_random_seed(7)
    rows = keras.Input((6,))
    net = cls(rows, keras.layers.Dense(8)(keras.layers.Dense(8, activation="tanh")(rows)))
    vars(net).update(attributes)
    net.compile(optimizer, run_eagerly=True)
    net.fit(x[rank::size], y[rank::size, :1], batch_size=BATCH // size, shuffle=False, verbose=0)
    return list(net.get_weights())


@check
def own_steps() -> dict[str, float]:
    """For ways to clip, and to compare the rows of a batch: the difference from one process."""
    def sgd(**options: Any) -> Any:
        return keras.optimizers.SGD(0.05, **options)

    truths: dict[Any, list[Any]] = {}

    def off(cls: Any, plain: Any, mine: Any, alone: dict[str, Any], **attributes: Any) -> float:
        key = cls, type(plain), *alone.items()
        if key not in truths:
            with hvd.alone():
                truths[key] = by_own_step(cls, plain, 0, 1, alone)
        return apart(by_own_step(cls, mine, hvd.rank(), hvd.size(), {**alone, **attributes}), truths[key])

    wrap, clips = hvd.DistributedOptimizer, {"way": "before the optimizer"}
    found = {
        "clipped before the optimizer": off(Clipping, sgd(), wrap(sgd()), clips),
        "clipped by the optimizer": off(Clipping, keras.optimizers.Adam(global_clipnorm=1.0),
                                        run_lines("clip-in-the-optimizer")["optimizer"], {}),
        "clipped behind a tape": off(Clipping, sgd(), sgd(), clips, way="lines"),
        "negatives of a rank": off(Retrieval, sgd(), wrap(sgd()), {"reduction": "sum"}, factor=hvd.size()),
    }
    for reduction in ("sum", "sum_over_batch_size"):
        found[f"all negatives, {reduction}"] = off(Retrieval, sgd(), wrap(sgd()), {"reduction": reduction},
                                                   gathers=True)
    settings = vars(current_session().settings)
    before, settings["gradients"] = settings["gradients"], "horovod"  # as HVKERAS_GRADIENTS=horovod
    found["all negatives, as horovod"] = off(Retrieval, sgd(), wrap(sgd()), {"reduction": "sum"}, gathers=True,
                                             factor=hvd.size())
    settings["gradients"] = before
    return found


if __name__ == "__main__":
    run_checks(before=hvd.init, after=hvd.shutdown)

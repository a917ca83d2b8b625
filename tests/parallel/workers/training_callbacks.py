"""Callbacks on two ranks, compared with a loop of one process without callbacks.

Arguments: `--few` for fewer optimizers.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import hvkeras as hvd
from harness.checks import check, run_checks

keras: Any = tf.keras
KERAS_3 = not keras.Model.__module__.startswith("tf_keras.")
STEPS, EPOCHS, BATCH = 2, 5, 8
MOMENTUM, RHO, EPSILON = 0.9, 0.9, 1e-7


def sgd(nesterov: bool) -> Callable[..., Any]:
    """SGD whose velocity sums gradients without the learning rate, as in equation (9) of Goyal et al. 2017."""

    def update(weight: Any, gradient: Any, state: dict[str, Any], rate: float) -> Any:
        state["sum"] = MOMENTUM * state.get("sum", 0.0) + gradient
        return weight - rate * (gradient + MOMENTUM * state["sum"] if nesterov else state["sum"])

    return update


def rmsprop(weight: Any, gradient: Any, state: dict[str, Any], rate: float) -> Any:
    """RMSprop whose velocity sums scaled gradients without the learning rate."""
    state["square"] = RHO * state.get("square", 0.0) + (1 - RHO) * gradient**2
    state["sum"] = MOMENTUM * state.get("sum", 0.0) + gradient / np.sqrt(state["square"] + EPSILON)
    return weight - rate * state["sum"]


def cases() -> dict[str, tuple[float, Callable[[float], Any], Callable[..., Any] | None]]:
    """Return by name: learning rate, Keras's optimizer, and the expected update (None: Keras's own)."""
    optimizers = keras.optimizers
    found = {
        "SGD momentum": (0.1, lambda rate: optimizers.SGD(rate, MOMENTUM), sgd(False)),
        "SGD nesterov": (0.1, lambda rate: optimizers.SGD(rate, MOMENTUM, nesterov=True), sgd(True)),
        "Adam": (0.02, optimizers.Adam, None),
    }
    if "--few" in sys.argv:
        return found
    found |= {
        "SGD": (0.1, optimizers.SGD, None),
        "RMSprop momentum": (0.01, lambda rate: optimizers.RMSprop(rate, RHO, MOMENTUM, EPSILON), rmsprop),
        "AdamW": (0.02, optimizers.AdamW, None),
    }
    if not KERAS_3:
        legacy = optimizers.legacy
        found |= {
            "legacy SGD nesterov": (0.1, lambda rate: legacy.SGD(rate, MOMENTUM, nesterov=True), sgd(True)),
            "legacy RMSprop momentum": (0.01, lambda rate: legacy.RMSprop(rate, RHO, MOMENTUM, EPSILON), rmsprop),
            "legacy Adam": (0.02, legacy.Adam, None),
        }
    return found


def halving(epoch: float) -> float:
    return 0.5**epoch


def plan(rate: float, **options: Any) -> list[Any]:
    """Return two epochs of warm-up, one at a tenth, and then a function of the step; `rates` has the rates."""
    return [
        hvd.callbacks.LearningRateWarmupCallback(rate, 2, **options),
        hvd.callbacks.LearningRateScheduleCallback(rate, 0.1, 2, 3, **options),
        hvd.callbacks.LearningRateScheduleCallback(rate, halving, 3, 4, staircase=False, **options),
        hvd.callbacks.LearningRateScheduleCallback(rate, halving, 4, **options),
    ]


def rates(rate: float, size: int = 2) -> list[float]:
    steps = 2 * STEPS
    warming = [rate / size + (rate - rate / size) * (step + 1) / steps for step in range(steps)]
    smooth = [rate * 0.5 ** (3 + step / STEPS) for step in range(STEPS)]
    return [*warming, *[0.1 * rate] * STEPS, *smooth, *[rate * 0.5**4] * STEPS]


def data() -> tuple[Any, Any]:
    """Return the whole batches of an epoch, the same on every rank."""
    random = np.random.default_rng(1)
    rows = STEPS * BATCH
    return random.normal(size=(rows, 4)).astype("float32"), random.normal(size=(rows, 2)).astype("float32")


def network() -> Any:
    keras.utils.set_random_seed(7)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(2)])


def compiled(optimizer: Any, **options: Any) -> Any:
    model = network()
    model.compile(hvd.DistributedOptimizer(optimizer), "mse", **options)
    return model


class Watch(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that records the learning rate of each execution."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.rates.append(float(np.asarray(self.model.optimizer.learning_rate)))


def fit(model: Any, callbacks: list[Any], epochs: int = EPOCHS, **options: Any) -> list[float]:
    """Train on this rank's part of each batch, and return the rates."""
    watch, (x, y), size = Watch(), data(), hvd.size()
    model.fit(x[hvd.rank()::size], y[hvd.rank()::size], batch_size=BATCH // size, shuffle=False, verbose=0,
              epochs=epochs, callbacks=[*callbacks, watch], **options)
    return watch.rates


@functools.cache
def weights_of_one_process(case: str) -> list[Any]:
    """Return the weights after a loop over whole batches that sets the rate of each step."""
    rate, make, update = cases()[case]
    model, optimizer, (x, y) = network(), make(rate), data()
    states: list[dict[str, Any]] = [{} for _ in model.trainable_variables]
    for step, now in enumerate(rates(rate)):
        start = step % STEPS * BATCH
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x[start:start + BATCH], training=True) - y[start:start + BATCH]) ** 2)
        variables = model.trainable_variables
        gradients = tape.gradient(loss, [getattr(each, "value", each) if KERAS_3 else each for each in variables])
        if update is None:
            optimizer.learning_rate = now
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
        else:
            for variable, gradient, state in zip(variables, gradients, states, strict=True):
                variable.assign(update(np.asarray(variable), gradient.numpy(), state, now))
    return list(model.get_weights())


def apart(weights: list[Any], others: list[Any]) -> float:
    """Return the largest difference, relative to the largest weight."""
    largest = max(float(np.max(np.abs(other))) for other in others)
    return max(float(np.max(np.abs(one - other))) for one, other in zip(weights, others, strict=True)) / largest


@check
def truth() -> dict[str, Any]:
    """For each optimizer: differences from one process, and of that from the initial weights; the first in a graph."""
    start, found = network().get_weights(), {}
    for name, (rate, make, _) in cases().items():
        model = compiled(make(rate), run_eagerly=bool(found))
        fit(model, plan(rate))
        expected = weights_of_one_process(name)
        found[name] = [apart(model.get_weights(), expected), apart(expected, start)]
    return found


@check
def uncorrected() -> dict[str, Any]:
    """Without momentum correction, and with different steps per epoch on the ranks: rates and differences."""
    rate, make, _ = cases()["SGD momentum"]
    model = compiled(make(rate), run_eagerly=True)
    seen = fit(model, plan(rate, momentum_correction=False, steps_per_epoch=STEPS + hvd.rank()))
    return {"rates": seen, "expected": rates(rate),
            "apart": apart(model.get_weights(), weights_of_one_process("SGD momentum"))}


@check
def resumed() -> float:
    """The difference from one process of a run that was stopped in the warm-up, saved and resumed."""
    rate, make, _ = cases()["SGD momentum"]
    model, path = compiled(make(rate), run_eagerly=True), f"{hvd.rank()}.keras"
    fit(model, plan(rate), epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tf_keras warns about NumPy
        model.save(path)
    again = hvd.load_model(path)
    again.run_eagerly = True
    fit(again, plan(rate), EPOCHS - 1)
    return apart(again.get_weights(), weights_of_one_process("SGD momentum"))


class Measure(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that adds a value that differs between ranks to the logs."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs |= {"mine": np.float32(hvd.rank()), "same": 0.1, "count": 7, "text": f"rank {hvd.rank()}", "none": None,
                 "array": np.array([hvd.rank()]), "tensor": tf.constant(hvd.rank() * 2.0),
                 "score": [2.0, 3.0, 1.0][epoch] + hvd.rank()}
        if hvd.rank() == 1:
            logs["only on 1"] = 5.0


@check
def averaged_and_best() -> dict[str, Any]:
    """The averaged logs, and the files of each rank in its own folder."""
    model, folder, seen = compiled(keras.optimizers.SGD(0.1), run_eagerly=True), Path(f"best-of-{hvd.rank()}"), {}
    keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.update(logs))
    whole = hvd.callbacks.BestModelCheckpoint("score", mode="min", filepath=folder / "{epoch}.keras")
    weights = hvd.callbacks.BestModelCheckpoint("score", save_weights_only=True, mode="min")
    weights.filepath = str(folder / "best.weights.h5")
    logs = [keras.callbacks.CSVLogger("all.csv"), keras.callbacks.CSVLogger(f"{hvd.rank()}.csv")]
    fit(model, [Measure(), hvd.callbacks.MetricAverageCallback(), keep, whole, weights, *logs], epochs=3)
    found = {**seen, "keys": list(seen), "history": model.history.history["mine"],
             "files": sorted(path.name for path in folder.glob("*")), "patched": "save" in vars(model)}
    if hvd.rank() == 0:
        again = network()
        again.load_weights(str(folder / "best.weights.h5"))
        whole_again = keras.models.load_model(folder / "3.keras")
        found["apart"] = [apart(each.get_weights(), model.get_weights()) for each in (again, whole_again)]
    return found


if __name__ == "__main__":
    run_checks(before=hvd.init, after=hvd.shutdown)

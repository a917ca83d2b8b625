"""Training with parameter servers: the chief trains on the cluster and alone, and returns the differences.

With one worker nothing is asynchronous, so all numbers must equal those of Keras's own `fit` on the same batches.
"""

from __future__ import annotations

import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from harness.checks import check, run_checks
from hvkeras import parameter_server
from hvkeras.compat import asynchronous
from hvkeras.control.launch_environments import parameter_server_launch
from hvkeras.parameter_server.checkpoints import Checkpoints
from hvkeras.parameter_server.chief import server_of
from hvkeras.parameter_server.training import TrainingPlan, fit
from hvkeras.settings import Settings

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(90, 4)).astype("float32")
Y = (X @ [[1.0], [2], [-1], [0.5]] > 0).astype("float32")
WEIGHTS = RANDOM.uniform(0.5, 2, size=(90, 1)).astype("float32")
CHIEF: Any = None


class Noted(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
    """Record the devices of the variables, and the number of batch callbacks."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.batches = 0
        self.places = [server_of(variable.value) for variable in self.model.weights]
        self.slots = [server_of(variable.value) for variable in self.model.optimizer.variables[2:]]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches += 1
        self.last = batch


def dense(*more: Any) -> Any:
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2"),
                             *more, keras.layers.Dense(1)])


def with_everything() -> Any:
    return dense(keras.layers.BatchNormalization(momentum=0.9), keras.layers.Dropout(0.3),
                 keras.layers.Dense(5, activity_regularizer="l1"))


def two_inputs() -> Any:
    first, second = keras.Input((4,)), keras.Input((4,))
    together = keras.layers.Concatenate()([keras.layers.Dense(3)(first), keras.layers.Dense(3)(second)])
    return keras.Model([first, second], keras.layers.Dense(1)(together))


def compiled(build: Any, optimizer: Any, **options: Any) -> Any:
    def make() -> Any:
        keras.utils.set_random_seed(1)
        model = build()
        model.compile(optimizer(), keras.losses.BinaryCrossentropy(from_logits=True), metrics=["accuracy"],
                      weighted_metrics=[keras.metrics.AUC(from_logits=True)], **options)
        return model

    return make


def batches(inputs: int = 1) -> Any:
    x = X if inputs == 1 else (X,) * inputs
    return lambda context: tf.data.Dataset.from_tensor_slices((x, Y, WEIGHTS)).shard(
        context.num_input_pipelines, context.input_pipeline_id).batch(24)


def plan(make: Any, data: Any = None, **options: Any) -> TrainingPlan:
    given = {"epochs": 3, "steps_per_epoch": None, "initial_epoch": 0, "verbose": 0, "callbacks": (),
             "validation_data": None, "validation_freq": 1, "checkpoints": None} | options
    return TrainingPlan(make, data or batches(), **given)


def values(model: Any, history: Any) -> list[Any]:
    return [*model.get_weights(), *(np.asarray(one) for one in model.optimizer.variables),
            *(np.asarray(one) for one in asynchronous.seed_states(model)),
            *(history.history[name] for name in sorted(history.history))]


def apart(build: Any, optimizer: Any, inputs: int = 1, steps: Any = None, **options: Any) -> float:
    """Return the largest difference from Keras's own `fit`."""
    make, data = compiled(build, optimizer, **options), batches(inputs)
    history = fit(CHIEF, plan(make, data, validation_data=data, steps_per_epoch=steps))
    model, whole = compiled(build, optimizer)(), data(tf.distribute.InputContext())
    alone = model.fit(whole if steps is None else whole.repeat(), epochs=3, steps_per_epoch=steps, verbose=0,
                      validation_data=whole)
    pairs = zip(values(history.model, history), values(model, alone), strict=True)
    return max(float(abs(np.asarray(one) - np.asarray(other)).max()) for one, other in pairs)


@check
def adam_and_all_kinds_of_layers() -> float:
    return apart(with_everything, lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(0.05, 2, 0.9), clipnorm=1.0))


@check
def several_steps_an_execution_with_moving_averages_and_decay() -> float:
    return apart(with_everything, lambda: keras.optimizers.AdamW(
        0.05, weight_decay=0.1, use_ema=True, ema_momentum=0.8), steps=5, steps_per_execution=3)


@check
def several_inputs_and_momentum() -> float:
    return apart(two_inputs, lambda: keras.optimizers.SGD(0.1, momentum=0.9), inputs=2)


@check
def variables_are_spread_by_size() -> Any:
    noted = Noted()
    wide = lambda: keras.Sequential([keras.Input((4,)), keras.layers.Dense(64), keras.layers.Dense(4)])  # noqa: E731
    fit(CHIEF, plan(compiled(lambda: keras.Sequential([wide(), keras.layers.Dense(1)]), keras.optimizers.Adam),
                    epochs=1, callbacks=[noted]))
    return {"places": noted.places, "slots": noted.slots, "batches": noted.batches, "last": noted.last}


@check
def keras_callbacks() -> Any:
    history = fit(CHIEF, plan(compiled(dense, keras.optimizers.SGD), epochs=9, validation_data=batches(), callbacks=[
        keras.callbacks.EarlyStopping("loss", min_delta=10.0, patience=1, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=10.0, verbose=0),
        keras.callbacks.ModelCheckpoint("saved.keras"), keras.callbacks.CSVLogger("log.csv")]))
    loaded = keras.saving.load_model("saved.keras")
    return [sorted(history.history), len(history.epoch), float(np.asarray(history.model.optimizer.learning_rate)),
            loaded.optimizer.iterations.numpy()]


@check
def going_on_from_a_checkpoint() -> Any:
    """Two epochs and two resumed ones, compared with four; the optimizer and dropout have state."""
    make = compiled(lambda: dense(keras.layers.Dropout(0.3)), lambda: keras.optimizers.Adam(0.05))
    checkpoints = Checkpoints("checkpoints", keep=2)
    for epochs in (2, 4):
        halves = fit(CHIEF, plan(make, epochs=epochs, checkpoints=checkpoints))
    whole = fit(CHIEF, plan(make, epochs=4))
    rest = {name: values[2:] for name, values in whole.history.items()}
    once_more = fit(CHIEF, plan(make, epochs=4, checkpoints=checkpoints))
    distance = max(float(abs(one - other).max()) for one, other in
                   zip(halves.model.get_weights(), whole.model.get_weights(), strict=True))
    return [distance, halves.history == rest, checkpoints.epochs(), halves.epoch, once_more.epoch]


@check
def what_cannot_be() -> Any:
    """The errors of invalid plans, by name."""
    no_number = lambda x, y, w: (tf.debugging.check_numerics(x * float("nan"), "no number"), y, w)  # noqa: E731
    sgd = compiled(dense, keras.optimizers.SGD)
    plans = {
        "another model": plan(compiled(two_inputs, keras.optimizers.SGD), batches(2),
                              checkpoints=Checkpoints("checkpoints")),
        "an error in a step": plan(sgd, lambda context: batches()(context).map(no_number)),
        "no batches": plan(sgd, lambda context: batches()(context).take(0)),
        "no length": plan(sgd, lambda context: batches()(context).repeat()),
        "no dataset": plan(sgd, lambda _: [1, 2]),
        "no model": plan(lambda: None),
        "accumulation": plan(compiled(dense, lambda: keras.optimizers.SGD(gradient_accumulation_steps=2))),
    }
    errors = {}
    for name, one in plans.items():
        try:
            fit(CHIEF, one)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            errors[name] = f"{type(error).__name__}: {error}"
    return errors


@check
def training_after_all_these_errors() -> float:
    return apart(dense, lambda: keras.optimizers.SGD(0.1))


if __name__ == "__main__":
    launch = parameter_server_launch()
    if launch.rank != 0:
        parameter_server.train(lambda: None, lambda _: None)
    from hvkeras.parameter_server.chief import running_chief

    with running_chief(launch, Settings()) as CHIEF:
        run_checks()
    sys.stdout.write("the chief is done\n")

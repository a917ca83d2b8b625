"""`fit` and `evaluate` on several ranks: metrics, steps, stopping, and the divergence check.

Arguments: `--few` for fewer metrics, and the names of checks; default: all.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import hvkeras as hvd
from harness.checks import check, run_checks
from hvkeras import compat
from hvkeras.horovod import as_horovod

keras: Any = tf.keras
PyDataset = getattr(keras.utils, "PyDataset", None) or keras.utils.Sequence
KERAS_3 = not keras.Model.__module__.startswith("tf_keras.")
FEATURES = 6
# Keras 3.3 has no logs if the batches do not fill an execution, also on one process.
EXECUTION = 1 if KERAS_3 and keras.__version__.startswith("3.3.") else 3


def rows(count: int, seed: int) -> tuple[Any, Any]:
    """Return random rows, and labels that mostly depend on them."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(count, FEATURES)).astype("float32")
    return x, (x.sum(1, keepdims=True) + random.normal(size=(count, 1)) > 0).astype("float32")


def share(counts: tuple[int, ...], rank: int, seed: int = 0) -> tuple[Any, Any]:
    """Return a rank's rows; `counts` repeats for further ranks."""
    return rows(counts[rank % len(counts)], 100 * seed + rank)


def union(counts: tuple[int, ...], batch: int, steps: int | None = None, seed: int = 0) -> tuple[Any, Any]:
    """Return all ranks' rows in global batches of `steps` steps, or of all steps."""
    shares = [share(counts, rank, seed) for rank in range(hvd.size())]
    if steps is None:
        return tuple(np.concatenate([one[part] for one in shares]) for part in (0, 1))  # type: ignore[return-value]
    indices = [(one, slice(step * batch, (step + 1) * batch)) for step in range(steps) for one in shares]
    return tuple(np.concatenate([one[part][index] for one, index in indices]) for part in (0, 1))  # type: ignore[return-value]


def model(seed: int = 1, width: int = 8, dropout: float = 0.0, normalization: Any = None) -> Any:
    keras.utils.set_random_seed(seed)
    more = [] if normalization is None else [normalization]
    return keras.Sequential([
        keras.Input((FEATURES,)), keras.layers.Dense(width, activation="tanh"), keras.layers.Dropout(dropout), *more,
        keras.layers.Dense(1, activation="sigmoid"),
    ])


def metrics() -> list[Any]:
    return [
        "accuracy", keras.metrics.AUC(), keras.metrics.Precision(), keras.metrics.Recall(),
        keras.metrics.F1Score(threshold=0.5, average="micro"), keras.metrics.RootMeanSquaredError(),
        keras.metrics.MeanIoU(num_classes=2), keras.metrics.TruePositives(), keras.metrics.LogCoshError(),
    ]


def compiled(optimizer: Any = None, seed: int = 1, metrics: Any = None, **options: Any) -> Any:
    made = model(seed, **{name: options.pop(name) for name in ("width", "dropout", "normalization") if name in options})
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)) if optimizer is None else optimizer
    made.compile(optimizer, "binary_crossentropy", metrics=metrics, **options)
    return made


def values(logs: Any) -> list[Any]:
    """Return the values of logs in order, without the names, which Keras numbers."""
    by_name = sorted(logs.items(), key=lambda item: item[0].rstrip("0123456789_"))
    return [np.asarray(value).tolist() for _, value in by_name]


def by_one_process(train: Callable[[], Any]) -> Any:
    """Return the result of one process on all ranks' data, which rank 0 computes for all."""
    with hvd.alone():
        found = train() if hvd.rank() == 0 else None
    return hvd.broadcast_object(found, 0)


def compared(counts: tuple[int, ...], batch: int, steps: int, extra: Any = None, few: bool = False,
             **options: Any) -> dict[str, Any]:
    """Return the logs of two epochs with validation and of an evaluation, on all ranks and on one process."""
    validation, some = (30, 17, 8), slice(2 if few or "--few" in sys.argv else None)
    mine = compiled(metrics=metrics()[some], **options)
    history = mine.fit(*share(counts, hvd.rank()), batch_size=batch, epochs=2, shuffle=False, verbose=0,
                       validation_data=share(validation, hvd.rank(), 1), callbacks=extra() if extra else None).history
    evaluated = mine.evaluate(*share(validation, hvd.rank(), 2), batch_size=7, verbose=0, return_dict=True)

    def one_process() -> list[Any]:
        one = compiled(keras.optimizers.SGD(0.1), metrics=metrics()[some], run_eagerly=True)
        trained = one.fit(*union(counts, batch, steps), batch_size=batch * hvd.size(), epochs=2, shuffle=False,
                          verbose=0, validation_data=union(validation, batch, seed=1)).history
        return [values(trained), values(one.evaluate(*union(validation, batch, seed=2), batch_size=7, verbose=0,
                                                     return_dict=True))]

    return {"found": [values(history), values(evaluated)], "truth": by_one_process(one_process)}


@check
def exact_metrics() -> dict[str, Any]:
    """All of Keras's logs, on uneven shards."""
    average = hvd.callbacks.MetricAverageCallback
    return {
        "60/40": compared((60, 40), 20, 2),
        "120/80, three steps an execution, with the callback": compared(
            (120, 80), 20, 4, lambda: [average()], few=True, steps_per_execution=EXECUTION),
    }


class Largest(keras.metrics.Metric):  # type: ignore[misc]
    """The largest prediction: a state that is not a sum."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        add = self.add_variable if KERAS_3 else self.add_weight
        self.value = add(shape=(), initializer="zeros", name="value")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(tf.maximum(tf.convert_to_tensor(self.value), tf.reduce_max(y_pred)))

    def result(self) -> Any:
        return self.value + 0.0


class Declared(Largest):
    hvkeras_merge = "max"


class Merging(Largest):
    def hvkeras_merge(self, states: list[list[Any]]) -> list[Any]:
        return [np.max([state[0] for state in states])]


@check
def own_metrics() -> dict[str, Any]:
    """A metric with a merge rule, one with a merge method, and one with neither."""
    x, y = share((10,), hvd.rank())
    found = {}
    for kind in (Declared, Merging, Largest):
        mine = compiled(metrics=[kind()], run_eagerly=True)
        try:
            found[kind.__name__] = mine.evaluate(x, y, verbose=0, return_dict=True)["largest"]
        except hvd.UsageError as error:
            found[kind.__name__] = str(error)
    try:
        compiled(metrics=[Largest()], run_eagerly=True).fit(x, y, batch_size=2, verbose=0, callbacks=[StepCount()])
        found["in fit"] = "no error"
    except hvd.UsageError:
        found["in fit"] = StepCount.last
    found["truth"] = by_one_process(lambda: float(np.max(compiled().predict(union((10,), 1)[0], verbose=0))))
    return found


class StepCount(keras.callbacks.Callback):  # type: ignore[misc]
    last = -1

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        StepCount.last = batch


class Accumulating(keras.metrics.Mean):  # type: ignore[misc]
    """A metric that accumulates over all epochs."""

    def __init__(self) -> None:
        super().__init__(name="accumulating")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        super().update_state(tf.cast(y_true, tf.float32))

    def result(self) -> Any:
        return self.count + 0.0

    def reset_state(self) -> None:
        pass


@check
def metrics_that_are_not_reset() -> list[float]:
    """The number of labels in a metric after each of three epochs, on ranks with 8 rows each."""
    mine = compiled(metrics=[Accumulating()])
    return list(mine.fit(*share((8,), hvd.rank()), batch_size=4, epochs=3, verbose=0).history["accumulating"])


class Evaluating(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that evaluates within an epoch, at the ends of certain batches, and records the results."""

    def __init__(self, batches: tuple[int, ...], data: Any, batch_size: int) -> None:
        super().__init__()
        self.batches, self.data, self.batch_size, self.found = batches, data, batch_size, []  # type: ignore[var-annotated]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        # Keras 3 passes the batch that has ended; tf_keras, with several steps per execution, the next one.
        if batch in self.batches:
            self.found.append(values(self.model.evaluate(*self.data, batch_size=self.batch_size, verbose=0,
                                                         return_dict=True)))


class EvaluatingAlone(Evaluating):
    """The same on rank 0 alone."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if hvd.rank() == 0:
            with hvd.alone():
                super().on_train_batch_end(batch, logs)


@check
def evaluation_amid_an_epoch() -> dict[str, Any]:
    """The logs of two epochs in which callbacks evaluate: on all ranks, on one process, and only on rank 0."""
    def trained(data: Any, batch_size: int, *callbacks: Any, optimizer: Any = None) -> Any:
        mine = compiled(optimizer, metrics=["accuracy", Accumulating()], run_eagerly=True)
        return values(mine.fit(*data, batch_size=batch_size, epochs=2, shuffle=False, verbose=0,
                               callbacks=list(callbacks)).history)

    def one_process() -> Any:
        both = [Evaluating(at, union((6,), 3, 2, 1), 3 * hvd.size()) for at in ((1,), (3,))]
        return [[trained(union((16,), 4, 4), 4 * hvd.size(), each, optimizer=keras.optimizers.SGD(0.1)), each.found]
                for each in both]

    mine = share((16,), hvd.rank())
    found = []
    for at in ((1,), (3,)):
        each = Evaluating(at, share((6,), hvd.rank(), 1), 3)
        found.append([trained(mine, 4, each), each.found])
    return {"found": found, "truth": by_one_process(one_process),
            "without": trained(mine, 4), "alone": trained(mine, 4, EvaluatingAlone((1, 3), share((6,), 0, 1), 3))}


class OwnLogs(keras.Model):  # type: ignore[misc]
    """A model whose logs do not come from metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def call(self, x: Any) -> Any:
        return self.net(x)

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(data[0], training=True) - data[1]) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"mine": tf.constant(float(hvd.rank()))}


@check
def logs_of_an_own_step() -> list[float]:
    own = OwnLogs()
    own.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    return list(own.fit(*share((8,), hvd.rank()), batch_size=4, epochs=1, verbose=0).history["mine"])


@check
def evaluation_without_data_on_one_rank() -> dict[str, Any]:
    """The last rank's dataset is empty, which Keras 3 allows."""
    if not KERAS_3:
        return {"found": {}, "truth": {}}
    x, y = share((12,), 0)
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(5)
    last = hvd.rank() == hvd.size() - 1
    mine = compiled(metrics=["accuracy"])
    found = mine.evaluate(data.take(0) if last else data, verbose=0, return_dict=True)
    truth = by_one_process(lambda: compiled(metrics=["accuracy"]).evaluate(data, verbose=0, return_dict=True))
    return {"found": found, "truth": truth}


@check
def stopping() -> dict[str, Any]:
    """Epochs until EarlyStopping stops, learning rates of ReduceLROnPlateau, and a stop on one rank."""
    x, y = share((16,), hvd.rank())
    patient = compiled(seed=3)
    early = keras.callbacks.EarlyStopping(monitor="val_loss", patience=1, min_delta=0.02)
    first = patient.fit(x, y, batch_size=4, epochs=40, verbose=0, callbacks=[early],
                        validation_data=share((9, 5), hvd.rank(), 1)).history
    plateau = keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0, min_delta=0.05, factor=0.5)
    second = compiled(seed=3)
    second.fit(x, y, batch_size=4, epochs=6, verbose=0, callbacks=[plateau])

    class Stop(keras.callbacks.Callback):  # type: ignore[misc]
        """Stop on rank 1 in its second execution of the second epoch."""

        executions = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            Stop.executions += 1
            if Stop.executions == batches // steps + 2 and hvd.rank() == 1:
                self.model.stop_training = True

    stops = []
    batches = 12
    for steps in (1, EXECUTION):
        Stop.executions = 0
        third = compiled(seed=3, steps_per_execution=steps)
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4).repeat().take(batches)
        stopped = third.fit(data.apply(tf.data.experimental.assert_cardinality(batches)), epochs=5, verbose=0,
                            shuffle=False, callbacks=[Stop()]).history
        stops.append([len(stopped["loss"]), Stop.executions - batches // steps])
    again = third.fit(x, y, batch_size=4, epochs=2, verbose=0).history
    return {"epochs": len(first["loss"]), "val_loss": first["val_loss"],
            "rate": float(np.asarray(second.optimizer.learning_rate)), "stops": stops,
            "again": len(again["loss"]), "weights": [np.asarray(one).tolist() for one in patient.get_weights()]}


def iterations_after(data: Callable[[], Any], **arguments: Any) -> list[Any]:
    """Return the ranks' batches of each epoch, and a checksum of the weights."""
    mine = compiled(run_eagerly=True)
    given = data()
    count = Batches(getattr(given, "data", given))
    mine.fit(given, verbose=0, callbacks=[count], **arguments)
    return [count.seen, float(sum(np.sum(np.abs(one)) for one in mine.get_weights()))]


class Batches(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that counts the batches of each epoch."""

    def __init__(self, data: Any = None) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.data = data

    def on_train_begin(self, logs: Any = None) -> None:
        if isinstance(self.data, Changing):
            self.data.has_begun = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.seen.append(0)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen[-1] += 1


class Changing(PyDataset):  # type: ignore[misc, valid-type]
    """A rank's batches of 4 rows, of a different number in each epoch."""

    def __init__(self, lengths: tuple[int, ...], rank: int = 0) -> None:
        super().__init__()
        self.lengths, self.epoch, self.has_begun = lengths, 0, False
        self.x, self.y = rows(4 * max(lengths), rank)

    def __len__(self) -> int:
        return self.lengths[min(self.epoch, len(self.lengths) - 1)]

    def __getitem__(self, index: int) -> Any:
        return self.x[4 * index : 4 * index + 4], self.y[4 * index : 4 * index + 4]

    def on_epoch_end(self) -> None:
        self.epoch += self.has_begun  # newer Keras 3 also calls this before the first epoch


def batches(count: int, form: str) -> Any:
    """Return a rank's data of `count` batches of 4 rows, in one of several forms."""
    x, y = rows(4 * count, hvd.rank())
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    if form == "unknown":
        return data.filter(lambda *_: True)
    if form == "generator":
        return (pair for _ in range(3) for pair in data.as_numpy_iterator())
    return data


@check
def uneven_data() -> dict[str, Any]:
    """Rank 0 has one more batch than the others."""
    count = 4 if hvd.rank() == 0 else 3
    found = {
        "known": iterations_after(lambda: batches(count, "known"), epochs=2),
        "unknown": iterations_after(lambda: batches(count, "unknown"), epochs=2),
        "unknown on one rank": iterations_after(lambda: batches(count, "unknown" if hvd.rank() else "known"), epochs=2),
        "too few for the steps": iterations_after(lambda: batches(count, "known"), epochs=1, steps_per_epoch=6),
        "repeated, other steps": iterations_after(lambda: batches(count, "known").repeat(), epochs=2,
                                                  steps_per_epoch=count),
        "generator": iterations_after(lambda: batches(count, "generator"), epochs=2, steps_per_epoch=2),
    }
    return {**found, "same": len(set(map(str, hvd.allgather_object(found)))) == 1}


@check
def changing_lengths() -> dict[str, Any]:
    """Numbers of batches change between epochs: on one rank, with fixed steps, of sharded data, and in other ways."""
    few, rank, size = (4, 2, 3, 4) if hvd.rank() else (4, 4, 5, 4), hvd.rank(), hvd.size()
    shared = (6 * size, 5 * size + 1, 4 * size)
    found = {
        "one rank": iterations_after(lambda: Changing(few, rank), epochs=4),
        "steps": iterations_after(lambda: Changing((4, 4, 2) if rank else (4,), rank), epochs=5, steps_per_epoch=2),
        "to share": iterations_after(lambda: hvd.shard(Changing(shared)), epochs=3, shuffle=False),
    }

    def one_process() -> Any:
        one = compiled(keras.optimizers.SGD(0.1), run_eagerly=True)
        data = Changing(shared)
        for count in shared:
            for step in range(count // size):
                parts = [data[step * size + part] for part in range(size)]
                one.train_on_batch(*(np.concatenate([part[index] for part in parts]) for index in (0, 1)))
            if count % size:  # the last batch is split into equal parts
                one.train_on_batch(*(part[: 4 // size * size] for part in data[count - 1]))
        return float(sum(np.sum(np.abs(weight)) for weight in one.get_weights()))

    return {**found, "same": len(set(map(str, hvd.allgather_object(found)))) == 1,
            "truth": by_one_process(one_process),
            "unlike": mistake(lambda: iterations_after(lambda: hvd.shard(Changing((8, 8 - 2 * rank))), epochs=2)),
            "none left": mistake(lambda: iterations_after(lambda: Changing((4, 4 * (rank < 1)), rank), epochs=2))}


class Plus(keras.layers.Layer):  # type: ignore[misc]
    """Layer that adds an optional second input."""

    def call(self, x: Any, more: Any = None) -> Any:
        return x if more is None else x + more


@check
def optional_inputs() -> dict[str, Any]:
    """Weights after training on generators that yield None for an input; nothing if Keras has no optional inputs."""
    if not hasattr(keras, "ops") or "optional" not in inspect.signature(keras.Input).parameters:
        return {"found": {}, "truth": []}

    def trained(optimizer: Any, data: Any, **options: Any) -> list[Any]:
        keras.utils.set_random_seed(1)
        inputs = {"x": keras.Input((FEATURES,), name="x"), "more": keras.Input((FEATURES,), name="more", optional=True)}
        made = keras.Model(inputs, keras.layers.Dense(1)(Plus()(inputs["x"], inputs["more"])))
        made.compile(optimizer, "mse")
        made.fit(data, verbose=0, **options)
        return [np.asarray(weight).tolist() for weight in made.get_weights()]

    shares = [rows(16 if rank else 12, rank) for rank in range(hvd.size())]

    def generate(parts: Any) -> Any:
        for step in range(3 if len(parts) > 1 else len(parts[0][0]) // 4):
            x, y = (np.concatenate([part[index][4 * step : 4 * step + 4] for part in parts]) for index in (0, 1))
            yield {"x": x, "more": None}, y

    def own(**options: Any) -> Any:
        return trained(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), generate([shares[hvd.rank()]]), **options)

    return {"found": {"all": own(), "by steps": own(steps_per_epoch=5)},
            "truth": by_one_process(lambda: trained(keras.optimizers.SGD(0.1), generate(shares)))}


class ByValue(keras.Model):  # type: ignore[misc]
    """A model that requires values, so that shapes do not build it."""

    def __init__(self, apart: bool) -> None:
        super().__init__()
        self.net = without_shape(apart)

    def call(self, x: Any) -> Any:
        return self.net(x) if np.all(np.isfinite(x.numpy())) else None


class Around(keras.Model):  # type: ignore[misc]
    """A model that is never called: its step calls another one with initial weights."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        net.build((None, FEATURES))
        self.net = net

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.net(data[0], training=True) - data[1]) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


def without_shape(apart: bool) -> Any:
    """Return a model whose weights are created in the first step, different on each rank or equal to rank 0's."""
    keras.utils.set_random_seed(hvd.rank() if apart else 0)
    return keras.Sequential([keras.layers.Dense(4, activation="tanh"), keras.layers.BatchNormalization(momentum=0.5),
                             keras.layers.Dense(1)])


@check
def weights_without_a_shape() -> dict[str, Any]:
    """The trainable weights after an epoch of models without input shape, and those of one process."""
    def trained(made: Any, data: Any, batch_size: int, *callbacks: Any, plain: bool = False, **options: Any) -> Any:
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        made.compile(optimizer if plain else hvd.DistributedOptimizer(optimizer), "mse", **options)
        made.fit(*data, batch_size=batch_size, shuffle=False, verbose=0, callbacks=list(callbacks))
        return [np.asarray(weight).tolist() for weight in made.trainable_weights]

    def of_rank_0() -> Any:
        return hvd.callbacks.BroadcastGlobalVariablesCallback(0)

    # The same rows on all ranks, so that batch normalization matches one process.
    data = rows(12, 5)
    found = trained(without_shape(True), data, 4, of_rank_0(), steps_per_execution=EXECUTION)
    not_built = trained(ByValue(True), data, 12, of_rank_0(), run_eagerly=True)
    around = trained(Around(without_shape(True)), data, 4, of_rank_0(), run_eagerly=True)
    return {"found": [found, around], "not built": not_built, "truth": by_one_process(lambda: 2 * [trained(
        without_shape(False), data, 4, plain=True, run_eagerly=True)])}


def mistake(train: Callable[[], Any]) -> str:
    """Return the error of a mistake. All ranks raise at the same point, so the job can continue."""
    try:
        train()
    except hvd.HvkerasError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class AssignOnOneRank(keras.callbacks.Callback):  # type: ignore[misc]
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1 and hvd.rank() == 1:
            self.model.layers[-1].bias.assign([5.0])


@check
def mistakes() -> dict[str, str]:
    """The error of each classic mistake; in eager mode except the first, as most take a step or two."""
    x, y = share((12,), hvd.rank())
    options: dict[str, Any] = {"batch_size": 4, "epochs": 3, "verbose": 0}
    eagerly = functools.partial(compiled, run_eagerly=True)
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback

    def own_step() -> Any:
        own = OwnLogs()
        own.compile("sgd", run_eagerly=True)
        return own.fit(x, y, **options)

    def registered() -> Any:
        mine = eagerly(seed=hvd.rank())
        for variable in mine.trainable_variables:
            mine.optimizer.register_local_var(variable)
        return mine.fit(x, y, **options)

    def numbered() -> Any:
        """Return metrics that Keras names auc_1, auc_2 and so on, differently on each rank."""
        made = [keras.metrics.AUC() for _ in range(hvd.rank() + 1)]
        return eagerly(metrics=made[-1:]).fit(x, y, **options)

    return {
        "no broadcast": mistake(lambda: compiled(seed=hvd.rank()).fit(x, y, **options)),
        "no wrapper": mistake(lambda: eagerly("sgd").fit(x, y, **options)),
        "no wrapper, but another start": mistake(lambda: eagerly("sgd", seed=hvd.rank()).fit(x, y, **options)),
        "no wrapper in a step of one's own": mistake(own_step),
        "an assignment": mistake(lambda: eagerly().fit(x, y, callbacks=[AssignOnOneRank()], **options)),
        "another width": mistake(lambda: eagerly(width=8 + hvd.rank()).fit(x, y, **options)),
        "another dropout": mistake(lambda: eagerly(dropout=0.1 + 0.1 * hvd.rank()).fit(x, y, **options)),
        "validation on one rank": mistake(lambda: eagerly().fit(
            x, y, validation_data=(x, y) if hvd.rank() == 0 else None, **options)),
        "other epochs": mistake(lambda: eagerly().fit(x, y, batch_size=4, epochs=2 + hvd.rank(), verbose=0)),
        **{case: mistake(lambda given=given: unlike(given).fit(x, y, **options)) for case, given in {
            "another loss": ({"loss": "mse"}, {"loss": "mae"}),
            "another reduction": tuple({"loss": keras.losses.MeanSquaredError(reduction=how)} for how in
                                       ("sum", REDUCTION)),
            "other weights": ({"loss": "mse", "loss_weights": [0.5]}, {"loss": "mse", "loss_weights": [0.25]}),
            "another closure": tuple({"loss": scaled(factor)} for factor in (1.0, 2.0)),
            "other metrics": tuple({"loss": "mse", "metrics": ["mse", keras.metrics.BinaryAccuracy(threshold=at)]}
                                   for at in (0.5, 0.6)),
            "fewer metrics": ({"loss": "mse", "metrics": ["mae"]}, {"loss": "mse"}),
        }.items()},
        "no data": mistake(lambda: eagerly().fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(4).take(
            hvd.rank()), epochs=1, verbose=0)),
        "no reduction": mistake(lambda: unreduced().fit(x, y, **options)),
        "none": mistake(lambda: eagerly(seed=hvd.rank()).fit(x, y, callbacks=[broadcast(0)], **options)),
        "none, names that Keras numbers": mistake(numbered),
        "none, each rank its own dropout": mistake(lambda: eagerly(dropout=0.5).fit(x, y, **options)),
        "none, local variables": mistake(registered),
        "none, by themselves": mistake(lambda: by_itself(x, y, options)),
    }


def unreduced() -> Any:
    """Return a model with an unreduced loss (one number per sample)."""
    one = model()
    one.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), keras.losses.MeanSquaredError(reduction="none"),
                run_eagerly=True)
    return one


REDUCTION = "sum_over_batch_size"  # Keras's own


def scaled(factor: float) -> Callable[[Any, Any], Any]:
    return lambda truth, guess: factor * tf.reduce_mean((truth - guess) ** 2, -1)


def unlike(given: tuple[dict[str, Any], dict[str, Any]]) -> Any:
    """Return a model that the last rank compiles with the second of two sets of arguments."""
    made = model()
    made.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), run_eagerly=True,
                 **given[hvd.rank() == hvd.size() - 1])
    return made


def by_itself(x: Any, y: Any, options: dict[str, Any]) -> Any:
    """Each rank trains and evaluates its own model; the first one more often."""
    with hvd.alone():
        for _ in range(2 if hvd.rank() == 0 else 1):
            mine = compiled("sgd", seed=hvd.rank(), run_eagerly=True)
            mine.fit(x, y, **options)
            mine.evaluate(x, y, verbose=0)
    return hvd.rank()


class Statistics(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that records the moving statistics at the start of validation, and at the end of the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def note(self) -> None:
        layer = self.model.layers[0]
        self.seen.append([np.asarray(one).tolist() for one in (layer.moving_mean, layer.moving_variance)])

    def on_test_begin(self, logs: Any = None) -> None:
        self.note()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.note()
        if hvd.rank() == 0:
            with hvd.alone():
                self.model.evaluate(*share((6,), 0, 1), batch_size=3, verbose=0)


def normalized(layer: Any, **local: Any) -> list[Any]:
    """Return the statistics during two epochs of two batches, and after them."""
    made = keras.Sequential([keras.Input((FEATURES,)), layer, keras.layers.Dense(1, kernel_initializer="zeros")])
    made.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", run_eagerly=True)
    seen = Statistics()
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(
        0, local_variables=[layer.moving_mean] if local.get("mean") else None)
    made.fit(*share((8,), hvd.rank()), batch_size=4, epochs=2, shuffle=False, verbose=0, callbacks=[broadcast, seen],
             validation_data=share((4,), hvd.rank(), 1))
    seen.note()
    return seen.seen


def statistics_truth() -> Any:
    """Return the expected moving statistics after each epoch on each rank, not averaged, by Keras's formula."""
    found = []
    for rank in range(hvd.size()):
        x, _ = share((8,), rank)
        mean, variance, epochs = np.zeros(FEATURES), np.ones(FEATURES), []
        for _ in range(2):
            for batch in (x[:4], x[4:]):
                mean, variance = 0.5 * mean + 0.5 * batch.mean(0), 0.5 * variance + 0.5 * batch.var(0)
            epochs.append([mean.tolist(), variance.tolist()])
        found.append(epochs)
    return found


@check
def moving_statistics() -> dict[str, Any]:
    """Moving means and variances in fit: averaged, with a local mean, and synchronized."""
    return {"averaged": normalized(keras.layers.BatchNormalization(momentum=0.5)),
            "local mean": normalized(keras.layers.BatchNormalization(momentum=0.5), mean=True),
            "synchronized": normalized(hvd.SyncBatchNormalization(momentum=0.5)),
            "flag": normalized(keras.layers.BatchNormalization(momentum=0.5, synchronized=True)),
            "truth": statistics_truth()}


class Center(keras.layers.Layer):  # type: ignore[misc]  # Keras ships no types
    """A custom layer that subtracts the moving mean of its inputs, and counts its calls."""

    def __init__(self, over_ranks: bool = False) -> None:
        super().__init__(name="center")
        self.over_ranks = over_ranks

    def build(self, shape: Any) -> None:
        self.mean = self.add_weight(name="mean", shape=shape[-1:], initializer="zeros", trainable=False)
        self.calls = self.add_weight(name="calls", shape=(), initializer="zeros", trainable=False, dtype="int32")
        self.built = True

    def call(self, inputs: Any, training: Any = None) -> Any:
        if training:
            mean = tf.reduce_mean(inputs, 0)
            self.mean.assign(0.5 * self.mean + 0.5 * (hvd.allreduce(mean) if self.over_ranks else mean))
            self.calls.assign_add(1 + hvd.rank())
        return inputs - self.mean


class Renewing(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that recomputes the moving statistics from this rank's data, like callbacks that average weights."""

    def __init__(self, alone: bool = False) -> None:
        super().__init__()
        self.alone = alone

    def on_train_end(self, logs: Any = None) -> None:
        if not self.alone or hvd.rank() == 0:
            self.model.layers[0].moving_mean.assign([float(hvd.rank() + 1)] * FEATURES)
            if self.alone:
                self.model.layers[-1].bias.assign([5.0])


def with_layer(layer: Any, prepare: Any = None) -> Any:
    made = keras.Sequential([keras.Input((FEATURES,)), layer, keras.layers.Dense(1, kernel_initializer="zeros")])
    made.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", run_eagerly=True)
    if prepare is not None:
        prepare(made)
    return made


def centers(layer: Any, prepare: Any = None) -> Any:
    """Return the layer's state after each of two epochs of two batches, or the error."""
    made, seen = with_layer(layer, prepare), []
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: seen.append(np.asarray(layer.mean).tolist()))
    told = mistake(lambda: made.fit(*share((8,), hvd.rank()), batch_size=4, epochs=2, shuffle=False, verbose=0,
                                    callbacks=[note]))
    return seen if told == "no error" else told


def mean_of(made: Any) -> float:
    return float(np.asarray(made.layers[0].moving_mean)[0])


def renewed() -> dict[str, Any]:
    """The moving mean after a fit that ends with different ones on the ranks, in the next evaluation, and in a fit."""
    found: dict[str, Any] = {}
    data = share((8,), hvd.rank())
    for name, alone in (("all", False), ("alone", True)):
        made = with_layer(keras.layers.BatchNormalization())
        made.fit(*data, batch_size=8, verbose=0, callbacks=[Renewing(alone)])
        found[name] = mean_of(made)
    made, means = with_layer(keras.layers.BatchNormalization()), []
    note = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: means.append(mean_of(made)))
    for _ in range(2):
        made.fit(*data, batch_size=8, verbose=0, callbacks=[note])
        made.layers[0].moving_mean.assign([float(hvd.rank() + 3)] * FEATURES)
    made.evaluate(*data, verbose=0)
    found["between"] = [means[1], mean_of(made)]
    return found


def renormalized() -> Any:
    """The moving variance after two epochs with `renorm`, and the value derived from its standard deviation."""
    if "renorm" not in inspect.signature(keras.layers.BatchNormalization.__init__).parameters and KERAS_3:
        return None
    layer = keras.layers.BatchNormalization(renorm=True, momentum=0.5)
    made = with_layer(layer)
    made.fit(*share((8,), hvd.rank()), batch_size=4, epochs=2, shuffle=False, verbose=0)
    derived = np.square(layer.moving_stddev) - layer.epsilon
    return [np.asarray(layer.moving_variance).tolist(), derived.tolist(), [one.tolist() for one in made.get_weights()]]


def as_in_horovod(train: Callable[[], Any]) -> Any:
    as_horovod.install()
    try:
        return train()
    finally:
        as_horovod.uninstall()


@check
def kept_state() -> dict[str, Any]:
    """State of a custom layer and of BatchNormalization."""
    own, registered, late = Center(), Center(), Center()
    frozen = keras.layers.Dense(FEATURES, trainable=False, kernel_initializer=keras.initializers.Constant(hvd.rank()))
    found = {
        "own": centers(own), "as horovod": as_in_horovod(lambda: centers(Center())),
        "frozen": mistake(lambda: with_layer(frozen).fit(*share((8,), hvd.rank()), verbose=0)),
        "over ranks": centers(Center(over_ranks=True)),
        "registered": centers(hvd.register_statistic(registered)),
        "registered variable": centers(late, lambda _: hvd.register_statistic(late.mean)),
        "local": centers(Center(), lambda made: made.optimizer.register_local_var(made.layers[0].mean)),
        "refused": mistake(lambda: hvd.register_statistic(late.calls)),
        "renewed": renewed(), "renorm": renormalized(), "truth": [],
    }
    for rank in range(hvd.size()):
        mean, (x, _), epochs = np.zeros(FEATURES), share((8,), rank), []
        for _ in range(2):
            for batch in (x[:4], x[4:]):
                mean = 0.5 * mean + 0.5 * batch.mean(0)
            epochs.append(mean.tolist())
        found["truth"].append(epochs)
    return found


def best_on_rank_0(made: Any, callbacks: Any = None) -> Any:
    """Train; rank 0 alone restores the weights after the first epoch, when training ends."""
    stopping = keras.callbacks.EarlyStopping("loss", mode="max", patience=0, restore_best_weights=True)
    made.fit(*share((8,), hvd.rank()), batch_size=4, epochs=4, shuffle=False, verbose=0,
             callbacks=callbacks or [stopping] * (hvd.rank() == 0))
    return made


class OwnScore(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that adds a number to the logs, and keeps the one that it finds there in the next epoch."""

    def __init__(self, name: str, score: Callable[[int], float]) -> None:
        super().__init__()
        self.log, self.score = name, score

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs[self.log] = self.score(epoch)


@check
def after_fit() -> dict[str, Any]:
    """What ranks do with a model whose weights differ after `fit`, or before there was one."""
    eagerly = functools.partial(compiled, run_eagerly=True)
    data = share((8,), hvd.rank())
    made = best_on_rank_0(eagerly())
    found: dict[str, Any] = {
        "evaluate": mistake(lambda: made.evaluate(*data, verbose=0)),
        "predict": mistake(lambda: hvd.predict(made, rows(8, 0)[0])),
        "another fit": mistake(lambda: made.fit(*data, verbose=0)),
    }
    hvd.broadcast_variables(made.variables, 0)
    with hvd.alone():
        truth = [made.evaluate(*share((8,), rank), verbose=0) for rank in range(hvd.size())]
    found["broadcast"] = [made.evaluate(*data, verbose=0), float(np.mean(truth))]
    old = as_in_horovod(lambda: best_on_rank_0(eagerly()))
    found["as horovod"] = as_in_horovod(lambda: [made.evaluate(*data, verbose=0) for made in (old, old)])

    between = eagerly()
    between.fit(*data, verbose=0)
    between.layers[-1].bias.assign([float(hvd.rank())])
    found["between"] = mistake(lambda: between.evaluate(*data, verbose=0))
    found["never trained"] = mistake(lambda: eagerly(seed=hvd.rank()).evaluate(*data, verbose=0))
    unbuilt = without_shape(True)
    unbuilt.compile(loss="mse", run_eagerly=True)
    found["never built"] = mistake(lambda: unbuilt.evaluate(*data, verbose=0))

    local = eagerly(keras.optimizers.SGD(0.1), seed=hvd.rank())
    tape = hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=local.layers)
    with tape:
        loss = tf.reduce_sum(local(data[0]))
    tape.gradient(loss, [compat.as_tf_variable(one) for one in local.trainable_variables])
    found["none, local layers of a tape"] = mistake(lambda: local.evaluate(*data, verbose=0))
    return found


@check
def partial_callbacks() -> dict[str, Any]:
    """The error after one rank alone changes the learning rate, and histories of logs that callbacks add."""
    eagerly = functools.partial(compiled, run_eagerly=True)
    options: dict[str, Any] = {"batch_size": 4, "shuffle": False, "verbose": 0}
    data = share((8,), hvd.rank())
    plateau = keras.callbacks.ReduceLROnPlateau("loss", mode="max", factor=0.5, patience=1, cooldown=9)
    scores = [OwnScore("own_score", lambda epoch: hvd.rank() + epoch), OwnScore("time", lambda _: 3.0)]
    if hvd.rank() == 0:
        scores.append(OwnScore("on_rank_0", float))
    averaging = [OwnScore("averaged_score", lambda epoch: hvd.rank() + epoch), hvd.callbacks.MetricAverageCallback()]

    def own_best() -> Any:
        """Ranks restore the weights of different epochs."""
        made = eagerly()
        made.fit(*data, epochs=3, **options, callbacks=[
            OwnScore("best_score", lambda epoch: epoch * (1.0 - 2.0 * hvd.rank())),
            keras.callbacks.EarlyStopping("best_score", mode="max", patience=0, restore_best_weights=True)])
        return made.evaluate(*data, verbose=0)

    def scored(*callbacks: Any) -> Any:
        return eagerly().fit(*data, epochs=3, callbacks=list(callbacks), **options).history

    return {"rate": mistake(lambda: eagerly().fit(*data, epochs=4, callbacks=[plateau] * (hvd.rank() == 0),
                                                  **options)),
            "own best": mistake(own_best), "own": scored(*scores)["own_score"],
            "averaged": scored(*averaging)["averaged_score"]}


@check
def hooks_are_undone() -> dict[str, Any]:
    """Whether Keras has its original methods after shutdown(), and the hooks after another init()."""
    def hooked() -> bool:
        return all(method.__code__.co_name == "patched" for method in (keras.Model.fit, keras.Model.evaluate))

    before = hooked()
    hvd.shutdown()
    after = hooked()
    stop = keras.Sequential([keras.layers.Dense(1)]).stop_training
    os.environ["HVKERAS_UNEVEN"] = "join"
    os.environ["HVKERAS_AVERAGE_STATISTICS"] = "off"
    parameters = list(inspect.signature(keras.Model.fit).parameters.values())[1:]
    known = list(compat.fit_arguments((), {}).items())
    wrap_fit_as_libraries_do()
    hvd.init()
    return {"before": before, "after": after, "stop_training": stop, "again": hooked(),
            "signature": [(one.name, one.default) for one in parameters][:len(known)] == known}


# arguments of the library's wrapper of `fit`: number of positional ones, and names of the others
TRACKED: list[Any] = []


def wrap_fit_as_libraries_do() -> None:
    """Wrap Keras's `fit` twice like experiment trackers: with its signature, and with another one."""
    original = keras.Model.fit

    @functools.wraps(original)
    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        TRACKED.append([len(args), sorted(kwargs)])
        if len(args) < 6:
            kwargs["callbacks"] = [*(kwargs.get("callbacks") or ()), keras.callbacks.Callback()]
        kwargs.setdefault("validation_freq", 1)
        return original(self, *args, **kwargs)

    def noting(self: Any, *args: Any, note: str = "none", **kwargs: Any) -> Any:
        TRACKED.append(note)
        return counting(self, *args, **kwargs)

    keras.Model.fit = noting


@check
def fit_that_a_library_has_wrapped() -> dict[str, Any]:
    """The arguments of the library's wrapper, and whether the ranks still train together."""
    x, y = share((12,), hvd.rank())
    mine, batches = compiled(seed=hvd.rank(), run_eagerly=True), Batches()
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    TRACKED.clear()
    mine.fit(x, y, batch_size=4, note="by name", verbose=0, callbacks=[broadcast, batches])
    mine.fit(x, y, 4, 2, 0, [batches])
    mine.fit(x, batch_size=4, y=y, verbose=0)
    found = {"tracked": list(TRACKED), "batches": batches.seen}
    found["other epochs"] = mistake(lambda: mine.fit(x, y, 4, 2 + hvd.rank(), 0))
    try:
        model().fit(x, y, verbose=0)
    except (RuntimeError, ValueError) as error:  # Keras's own
        found["not compiled"] = str(error)
    weights = hvd.allgather_object(str([weight.tolist() for weight in mine.get_weights()]))
    found["same"] = len(set(weights)) == 1
    return found


@check
def statistics_of_ones_own() -> dict[str, Any]:
    """The same with the setting that keeps statistics local."""
    return {"own": normalized(keras.layers.BatchNormalization(momentum=0.5)), "truth": statistics_truth()}


CHANGING = ((3, 5), (3, 2))  # numbers of batches of even and of odd ranks, by epoch


@check
def joined() -> dict[str, Any]:
    """Training on all batches of uneven shards, and the result of one process."""
    counts = (12, 20)
    x, y = share(counts, hvd.rank())
    normalization = keras.layers.BatchNormalization
    mine = compiled(metrics=["accuracy", keras.metrics.AUC()], normalization=normalization(synchronized=True))
    history = mine.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history
    shares = [share(counts, rank) for rank in range(hvd.size())]

    def generate() -> Any:
        for step in range(5):
            parts = [(a[4 * step : 4 * step + 4], b[4 * step : 4 * step + 4]) for a, b in shares]
            yield tuple(np.concatenate([part[one] for part in parts]) for one in (0, 1))

    def one_process() -> list[Any]:
        one = compiled(keras.optimizers.SGD(0.1), metrics=["accuracy", keras.metrics.AUC()], run_eagerly=True,
                       normalization=normalization())
        signature = (tf.TensorSpec((None, FEATURES)), tf.TensorSpec((None, 1)))
        data = tf.data.Dataset.from_generator(generate, output_signature=signature).apply(
            tf.data.experimental.assert_cardinality(5))
        return [values(one.fit(data, epochs=2, verbose=0).history),
                [np.asarray(weight).tolist() for weight in one.get_weights()]]

    changing = compiled()
    count = Batches(Changing(CHANGING[hvd.rank() % 2], hvd.rank()))
    changing.fit(count.data, epochs=2, shuffle=False, verbose=0, callbacks=[count])

    def changing_by_one_process() -> list[Any]:
        one = compiled(keras.optimizers.SGD(0.1))
        data = [Changing(CHANGING[rank % 2], rank) for rank in range(hvd.size())]
        for epoch in range(2):
            for step in range(max(lengths[epoch] for lengths in CHANGING)):
                parts = [each[step] for each in data if step < each.lengths[epoch]]
                one.train_on_batch(*(np.concatenate([part[index] for part in parts]) for index in (0, 1)))
        return [np.asarray(weight).tolist() for weight in one.get_weights()]

    return {"found": [values(history), [np.asarray(weight).tolist() for weight in mine.get_weights()]],
            "truth": by_one_process(one_process),
            "changing": [np.asarray(weight).tolist() for weight in changing.get_weights()], "steps": count.seen,
            "changing truth": by_one_process(changing_by_one_process)}


if __name__ == "__main__":
    run_checks(before=hvd.init, after=hvd.shutdown, chosen=[each for each in sys.argv[1:] if each != "--few"])

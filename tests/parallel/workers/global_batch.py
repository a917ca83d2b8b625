"""Training on the batches of all ranks, in float64; each check returns numbers or sentences that the tests compare.

With one rank, nothing changes: that is the result of one process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import hvkeras as hvd
from harness.checks import check, run_checks
from hvkeras.global_batch.pipelines import packed, rebuilt
from hvkeras.job.session import current_session
from hvkeras.training.fit_run import shares_update

keras.config.set_floatx("float64")  # before the first layer
ROWS = 61  # by batches of 12: the last one has one row, fewer than ranks
RANDOM = np.random.RandomState(0)
X, Y = RANDOM.normal(size=(ROWS, 6)), RANDOM.randint(0, 4, ROWS)
WORDS = RANDOM.randint(0, 5, (ROWS, 7))
WEIGHTS = RANDOM.uniform(size=ROWS)


def crossentropy() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def dense(*added: Any) -> Any:
    return keras.Sequential([keras.Input((6,)), layers.Dense(5, activation="tanh"), *added, layers.Dense(4)])


def numbers(model: Any, history: Any, *more: Any) -> list[float]:
    """Return weights, the history and other results in one list."""
    arrays = [variable.numpy() for variable in model.variables]
    arrays += [history.history[name] for name in sorted(history.history)]
    return np.concatenate([np.ravel(np.asarray(array, float)) for array in [*arrays, *more]]).tolist()


def trained(model: Any, *data: Any, **options: Any) -> list[float]:
    history = model.fit(*data, **{"epochs": 2, "verbose": 0, **options})
    return numbers(model, history)


@check
def arrays() -> list[float]:
    """Shuffled arrays with weights and validation, and everything else that a compiled model does."""
    model = dense(layers.BatchNormalization())
    model.compile("adam", crossentropy(), metrics=["accuracy"], weighted_metrics=["accuracy"])
    history = model.fit(X, Y, batch_size=12, epochs=2, verbose=0, validation_split=0.2, sample_weight=WEIGHTS[:, None])
    results = model.evaluate(X, Y, batch_size=10, verbose=0), model.predict(X[:13], batch_size=5, verbose=0)
    on_batch = model.train_on_batch(X[:1], Y[:1]), model.test_on_batch(X[:5], Y[:5]), model.predict_on_batch(X[:3])
    return numbers(model, history, *results, *on_batch)


@check
def masks() -> list[float]:
    model = keras.Sequential([layers.Embedding(5, 4, mask_zero=True), layers.GRU(3, return_sequences=True),
                              layers.Dense(5)])
    model.compile(keras.optimizers.Adam(clipnorm=0.1), crossentropy(), metrics=["accuracy"], steps_per_execution=3)
    dataset = tf.data.Dataset.from_tensor_slices((WORDS, WORDS)).shuffle(50, seed=3).batch(12)
    return trained(model, dataset) + np.ravel(model.predict(WORDS[:4], verbose=0)).tolist()


@check
def reductions() -> list[float]:
    found = []
    for reduction in ("sum", "mean_with_sample_weight", "mean"):
        model = dense()
        model.compile(keras.optimizers.SGD(0.001), keras.losses.MeanSquaredError(reduction=reduction),
                      metrics=["mae", keras.metrics.AUC()], weighted_metrics=["mse"])
        found += trained(model, X, np.tile(Y[:, None] > 1, 4).astype(float), sample_weight=WEIGHTS, batch_size=12)
    return found


class Worst(keras.metrics.Metric):
    """Metric that cannot be merged: a maximum and a moving average."""

    def __init__(self) -> None:
        super().__init__(name="worst")
        self.worst = self.add_weight(name="worst", initializer="zeros")
        self.moving = self.add_weight(name="moving", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        errors = ops.abs(ops.cast(y_true, y_pred.dtype) - y_pred)[:, 0]
        self.worst.assign(ops.maximum(self.worst, ops.max(errors)))
        self.moving.assign(0.9 * self.moving + 0.1 * ops.sum(errors))

    def result(self) -> Any:
        return self.worst + self.moving


@check
def losses_and_metrics_of_users() -> list[float]:
    def dice(y_true: Any, y_pred: Any) -> Any:
        y_true = ops.cast(y_true, y_pred.dtype)
        return 1 - 2 * ops.sum(y_true * y_pred) / (ops.sum(y_true * y_true) + ops.sum(y_pred * y_pred) + 1)

    class Pairs(keras.losses.Loss):
        def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            return ops.mean(ops.logsumexp(ops.matmul(y_pred, ops.transpose(y_pred)), axis=1))

    model = dense(layers.Dense(4, activation="sigmoid", activity_regularizer="l2"))
    model.compile("adam", dice, metrics=[dice, "accuracy", Worst()])
    target = np.tile(Y[:, None] > 1, 4).astype(float)
    found = trained(model, X, target, batch_size=12)
    model.compile("adam", Pairs())
    return found + trained(model, X, target, batch_size=12)


@check
def structures() -> list[float]:
    a, b = keras.Input((6,), name="a"), keras.Input((7,), name="b", dtype="int64")
    joined = layers.Concatenate()([a, layers.Flatten()(layers.Embedding(5, 2)(b))])
    joined = layers.BatchNormalization()(joined)
    model = keras.Model({"a": a, "b": b}, {"c": layers.Dense(4, name="c")(joined),
                                           "d": layers.Dense(1, name="d", kernel_regularizer="l2")(joined)})
    model.compile("rmsprop", {"c": crossentropy(), "d": "mse"}, loss_weights={"c": 1.0, "d": 0.3},
                  metrics={"c": ["accuracy"], "d": ["mae"]})

    def batches() -> Iterator[Any]:
        while True:
            for start in range(0, ROWS, 12):
                rows = slice(start, start + 12)
                yield {"a": X[rows], "b": WORDS[rows]}, {"c": Y[rows], "d": X[rows, :1]}

    found = trained(model, batches(), steps_per_epoch=4, epochs=3)
    predicted = model.predict({"a": X[:9], "b": WORDS[:9]}, verbose=0)
    return found + [float(one) for name in sorted(predicted) for one in predicted[name].ravel()]


@check
def py_datasets_and_eager_steps() -> list[float]:
    class Batches(keras.utils.PyDataset):
        def __len__(self) -> int:
            return (ROWS + 11) // 12

        def __getitem__(self, index: int) -> Any:
            return X[index * 12 : index * 12 + 12], Y[index * 12 : index * 12 + 12]

    found = []
    for eagerly in (False, True):
        model = dense(layers.BatchNormalization())
        model.compile("adam", crossentropy(), metrics=["accuracy"], run_eagerly=eagerly)
        found += trained(model, Batches(workers=2), shuffle=True)
        found += np.ravel(model.predict(Batches(), verbose=0)).tolist()
    return found


def scaled(index: Any) -> Any:
    return tf.gather(X, index) * 2.0, tf.gather(Y, index)


def moved(x: Any, y: Any) -> Any:
    if tf.reduce_sum(x) > 0:  # converted by AutoGraph
        x += 1.0
    return x, y


@functools.cache  # TensorFlow's collectives must start before the first tensor
def table() -> Any:
    return layers.StringLookup(vocabulary=[str(index) for index in range(ROWS)])


def indices() -> Any:
    return tf.data.Dataset.range(ROWS)


AUTOTUNE = tf.data.AUTOTUNE
# Pipelines, and whether each rank maps its own elements only.
PIPELINES: dict[str, tuple[Callable[[], Any], bool]] = {
    "map": (lambda: indices().shuffle(100).map(scaled, AUTOTUNE).map(moved).batch(12).prefetch(2), True),
    "map before shuffle": (lambda: indices().map(scaled).shuffle(30, seed=3).map(moved).batch(12).repeat(2), True),
    "endless": (lambda: indices().map(scaled).repeat().shuffle(30).batch(12, drop_remainder=True), True),
    "zipped elements": (lambda: tf.data.Dataset.zip((indices().map(lambda index: scaled(index)[0]),
                                                     indices().map(lambda index: scaled(index)[1]))).batch(30), True),
    "table": (lambda: tf.data.Dataset.from_tensor_slices([str(index) for index in range(ROWS)]).shuffle(100).map(
        lambda text: scaled(tf.cast(table()(text), tf.int64) - 1)).batch(31).shuffle(3), True),
    "cache": (lambda: indices().map(scaled).cache().shuffle(100).map(moved).batch(12), True),
    "unknown length": (lambda: indices().filter(lambda index: index % 3 > 0).shuffle(9).map(scaled).batch(12), True),
    "unequal shapes": (lambda: tf.data.Dataset.from_tensor_slices(tf.ragged.range(np.arange(ROWS))).map(
        lambda row: scaled(tf.size(row))).batch(12), False),
    "map of batches": (lambda: indices().map(scaled).batch(12).map(lambda x, y: (x - tf.reduce_mean(x), y)), False),
    "python": (lambda: indices().map(lambda index: (tf.ensure_shape(tf.numpy_function(
        lambda one: X[one], [index], tf.float64), [6]), 1)).batch(12), False),
}


@check
def pipelines() -> dict[str, list[float]]:
    found = {}
    for name, (make, _) in PIPELINES.items():
        keras.utils.set_random_seed(1)
        model = dense(layers.BatchNormalization())
        model.compile("adam", crossentropy(), metrics=["accuracy"])
        dataset = make()
        options = {"steps_per_epoch": 4} if name == "endless" else {"class_weight": {0: 1.0, 1: 2.0, 2: 0.5, 3: 1.0}}
        result = trained(model, dataset, epochs=3, validation_data=indices().map(scaled).batch(20), **options)
        found[name] = [*result, *np.ravel(model.evaluate(dataset, verbose=0, steps=2))]
    return found


@check
def rows_that_this_rank_maps() -> dict[str, int | None]:
    """Count the rows that each pipeline computes on this rank; None if it computes all."""
    found: dict[str, int | None] = {}
    for name, (make, _) in PIPELINES.items():
        if name != "endless":
            dataset = rebuilt(make(), of_arrays=False)
            found[name] = dataset and sum(len(packed(batch).rows[0]) for batch in dataset)
    return found


@check
def zipped_batches() -> list[float]:
    """16 labelled and 48 unlabelled rows in a batch, in a training step of the user."""

    class Both(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            (x, y), unlabelled = data
            with tf.GradientTape() as tape:
                loss = ops.mean(ops.square(self(x) - y)) + 0.5 * ops.mean(ops.abs(self(unlabelled)))
            self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_weights), self.trainable_weights,
                                               strict=True))
            return {"loss": loss}

    model = Both([keras.Input((6,)), layers.Dense(4, activation="tanh"), layers.Dense(1)])
    model.compile("adam")
    labelled = tf.data.Dataset.from_tensor_slices((X, X[:, :1])).shuffle(ROWS).batch(16)
    unlabelled = tf.data.Dataset.from_tensor_slices(np.concatenate([X, -X, X + 1])).batch(48)
    return trained(model, tf.data.Dataset.zip((labelled, unlabelled)).prefetch(2))


class Adversaries(keras.Model):
    """Two models and optimizers, a gradient penalty, trackers, and a function of TensorFlow in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = keras.Sequential([keras.Input((6,)), layers.Dense(5), layers.LeakyReLU(), layers.Dense(1)])
        self.maker = keras.Sequential([keras.Input((2,)), layers.Dense(5), layers.LeakyReLU(), layers.Dense(6)])
        self.first, self.second = keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.01)
        self.trackers = [keras.metrics.Mean(name="critic"), keras.metrics.Mean(name="maker")]

    @property
    def metrics(self) -> list[Any]:
        return self.trackers

    @tf.function
    def train_step(self, data: Any) -> Any:
        rows = ops.shape(data)[0]
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        with tf.GradientTape() as tape:
            both = ops.concatenate([self.maker(data[:, :2]), data], axis=0)
            labels = ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))], axis=0)
            of_critic = loss(labels, self.critic(both))
        weights = self.critic.trainable_weights
        self.first.apply_gradients(zip(tape.gradient(of_critic, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            made = self.maker(data[:, :2])
            with tf.GradientTape() as inner:
                inner.watch(made)
                judged = self.critic(made)
            slopes = ops.sqrt(ops.sum(ops.square(inner.gradient(judged, made)), axis=1))
            of_maker = loss(ops.zeros((rows, 1)), judged) + 0.1 * ops.mean((slopes - 1.0) ** 2)
        weights = self.maker.trainable_weights
        self.second.apply_gradients(zip(tape.gradient(of_maker, weights), weights, strict=True))
        for tracker, value in zip(self.trackers, (of_critic, of_maker), strict=True):
            tracker.update_state(value)
        return {"loss of the critic": self.trackers[0].result(), "maker": self.trackers[1].result(), "last": of_maker}


@check
def steps_of_users() -> list[float]:
    model = Adversaries()
    model.compile()
    found = trained(model, tf.data.Dataset.from_tensor_slices(X).batch(12))
    return found + [float(one) for weight in model.weights for one in np.ravel(weight)]


class OfSixteen(keras.Sequential):
    """Steps for batches of 16 rows, with a metric of the user that compares rows."""

    class Products(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="products")
            self.mean = keras.metrics.Mean()

        def update_state(self, one: Any, other: Any) -> None:
            self.mean.update_state(ops.mean(ops.square(ops.matmul(one, ops.transpose(other)))))

        def result(self) -> Any:
            return self.mean.result()

    def __init__(self) -> None:
        super().__init__([keras.Input((6,)), layers.Dense(6)])
        self.products, self.tracker = self.Products(), keras.metrics.Mean(name="tracker")

    @property
    def metrics(self) -> list[Any]:
        return [self.tracker, self.products]

    def train_step(self, data: Any) -> Any:
        noise = 0.0 * keras.random.normal((16, 6))
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.abs(self(data + noise) * ops.ones((16, 1)) - 1.0))
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.tracker.update_state(loss)
        return {"tracker": self.tracker.result()}

    def test_step(self, data: Any) -> Any:
        self.products.update_state(data, self(data + 0.0 * keras.random.normal((16, 6))))
        return {"products": self.products.result()}


@check
def constant_batch_sizes() -> list[float]:
    found = []
    for map_elements in (False, True):
        dataset = tf.data.Dataset.from_tensor_slices(X)
        dataset = (dataset.map(lambda row: row * 1.0) if map_elements else dataset).batch(16, drop_remainder=True)
        model = OfSixteen()
        model.compile("adam")
        found += trained(model, dataset, validation_data=dataset)
    return found


@check
def sharded_updates() -> list[float]:
    """Optimizers that assign to variables of their own, with the setting HVKERAS_SHARD_UPDATE."""
    session, found = current_session(), []
    settings = session.settings
    session.settings = settings.with_shared({**settings.shared(), "shard_update": True})
    try:
        for options in ({"use_ema": True}, {"use_ema": True, "ema_overwrite_frequency": 2},
                        {"gradient_accumulation_steps": 2}, {"use_ema": True, "gradient_accumulation_steps": 3}):
            model = dense()
            model.compile(keras.optimizers.Adam(0.01, **options), crossentropy())
            swap = [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)] if [*options] == ["use_ema"] else []
            found += trained(model, X, Y, batch_size=12, callbacks=swap)
            assert session.topology.size == 1 or shares_update(model)
    finally:
        session.settings = settings
    return found


@check
def equal_rows_of_embeddings() -> list[float]:
    """An embedding of positions: its gradient has the same rows on all ranks."""

    class Positions(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.positions = layers.Embedding(5, 3), layers.Embedding(7, 3)

        def call(self, inputs: Any) -> Any:
            return self.words(inputs) + self.positions(ops.arange(ops.shape(inputs)[-1]))

    model = keras.Sequential([keras.Input((7,), dtype="int64"), Positions(), layers.Flatten(), layers.Dense(4)])
    model.compile(keras.optimizers.Adam(0.05), crossentropy())
    return trained(model, WORDS, Y, batch_size=12)


class Own(keras.Model):
    """Model whose training step computes a loss that is given by name."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer, self.dropout = kind, layers.Dense(5), layers.Dropout(0.5)
        self.kept = self.add_weight(shape=(5,), trainable=False, name="kept", initializer="zeros")

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.layer(inputs)

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            made = self(data[0], training=True)
            if self.kind == "pairs":
                made = ops.normalize(made, axis=1)
                loss = ops.mean(ops.logsumexp(ops.matmul(made, ops.transpose(made)), axis=1))
            elif self.kind == "gathered pairs":
                everyone = hvd.allgather(made)
                loss = ops.mean(ops.logsumexp(ops.matmul(everyone, ops.transpose(everyone)), axis=1))
            else:
                loss = ops.sum(ops.square(made)) if self.kind == "sum" else ops.mean(ops.square(made))
        weights = self.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        if self.kind == "queue":
            self.kept.assign(made[0])
        if self.kind == "moving average":
            self.kept.assign(0.9 * self.kept + 0.1 * ops.mean(made, axis=0))
        return {"loss": loss}


@check
def steps_that_are_checked() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in ("mean", "moving average", "gathered pairs", "pairs", "sum", "queue"):
        keras.utils.set_random_seed(1)
        model = Own(kind)
        model.compile("adam")
        found[kind] = outcome_of(lambda model=model: trained(model, X[:48], Y[:48], batch_size=16))
    return found


def outcome_of(function: Callable[[], Any]) -> Any:
    """Return the result, or what an error says."""
    try:
        return function()
    except hvd.HvkerasError as error:
        return str(error)


@check
def refusals() -> dict[str, Any]:
    def fitted(model: Any, *data: Any, **options: Any) -> Any:
        model.compile("sgd", "mse")
        model.fit(*data, verbose=0, **options)
        return "trained"

    def unseeded() -> Any:
        generator = np.random.default_rng()
        while True:
            yield generator.normal(size=(12, 6)), X[:12, :4]

    def of_graphs() -> Any:
        for count in range(4):
            yield (np.ones((10 + count, 6)), np.ones((5, 1))), np.ones((10 + count, 4))

    node, graph = keras.Input((6,)), keras.Input((1,))
    of_nodes = keras.Model((node, graph), layers.Dense(4)(node))
    spec = (tf.TensorSpec((None, 6)), tf.TensorSpec((None, 1))), tf.TensorSpec((None, 4))
    sequences = X[:48].reshape(48, 2, 3)
    made = {
        "fixed batch": lambda: fitted(keras.Sequential([keras.Input((6,), batch_size=12), layers.Dense(1)]), X, Y),
        "stateful": lambda: fitted(keras.Sequential([layers.LSTM(2, stateful=True)]), sequences, Y[:48], batch_size=12),
        "unseeded arrays": lambda: fitted(dense(), np.random.default_rng().normal(size=(ROWS, 6)), X[:, :4]),
        "unseeded batches": lambda: fitted(dense(), unseeded(), steps_per_epoch=3),
        "graphs": lambda: fitted(of_nodes, tf.data.Dataset.from_generator(of_graphs, output_signature=spec)),
        "already distributed": lambda: hvd.DistributedOptimizer(keras.optimizers.Adam()) and "made",
        "already sharded": lambda: hvd.shard(X) is not None and "made",
        "strategy": under_strategy,
    }
    return {name: outcome_of(function) for name, function in made.items()}


def under_strategy() -> str:
    with tf.distribute.OneDeviceStrategy("/CPU:0").scope():
        model = dense()
    model.compile("sgd", crossentropy())
    model.fit(X, Y, verbose=0)
    return "trained"


@check
def noise() -> list[Any]:
    """Dropout draws different numbers on each rank, and the generators of all ranks stay equal."""
    generator = keras.random.SeedGenerator(3)

    class Noisy(layers.Layer):
        def call(self, inputs: Any) -> Any:
            rows = ops.shape(inputs)[0]
            of_tensorflow = tf.random.uniform((rows, 1), dtype=inputs.dtype)
            return inputs * 0 + keras.random.uniform((rows, 1), seed=generator) + 10 * of_tensorflow

    model = keras.Sequential([keras.Input((6,)), Noisy()])
    drawn = model.predict(np.zeros((12, 6)), verbose=0)[:, 0]
    return [len(set(drawn.tolist())), generator.state.numpy().tolist()]


if __name__ == "__main__":
    keras.utils.set_random_seed(1)
    hvd.data_parallel()
    run_checks()

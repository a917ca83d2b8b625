"""Training of which each rank computes its part, with noise, in float64; tests compare what the checks return.

With one rank, nothing is divided: that is the result of one process.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import hvkeras as hvd
from harness import checks
from hvkeras.collectives.global_batch import global_batch
from hvkeras.global_batch import mode
from hvkeras.global_batch.pipelines import rebuilt
from hvkeras.job.session import current_session

keras.config.set_floatx("float64")  # before the first layer
ROWS = 61  # by batches of 12: the last one has one row, fewer than ranks
RANDOM = np.random.RandomState(0)
X, Y = RANDOM.normal(size=(ROWS, 6)), RANDOM.randint(0, 4, ROWS)
WORDS = RANDOM.randint(0, 5, (ROWS, 7))
WEIGHTS = RANDOM.uniform(size=ROWS)
BATCHES = [slice(start, start + 12) for start in range(0, ROWS, 12)]


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    """Register a check, which begins with the same random numbers whatever other checks have run."""
    @functools.wraps(function)
    def seeded() -> Any:
        keras.utils.set_random_seed(1)
        return function()

    return checks.check(seeded)


def crossentropy() -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def dense(*added: Any) -> Any:
    return keras.Sequential([keras.Input((6,)), layers.Dense(5, activation="tanh"), *added,
                             layers.Dropout(0.2), layers.Dense(4)])


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
    """Metric that cannot be merged: a maximum and a moving average, whatever it declares."""

    hvkeras_merge = "max"

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
            for rows in BATCHES:
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
        lambda text: scaled(tf.cast(table()(text), tf.int64) - 1)).batch(31), True),
    "shuffled twice": (lambda: indices().shuffle(100).map(scaled).batch(31).shuffle(3), False),
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
        result = trained(model, dataset, epochs=2, validation_data=indices().map(scaled).batch(20), **options)
        found[name] = [*result, *np.ravel(model.evaluate(dataset, verbose=0, steps=2))]
    return found


@check
def rows_that_this_rank_maps() -> dict[str, int | None]:
    """Count the rows that each pipeline computes on this rank; None if it computes all."""
    found: dict[str, int | None] = {}
    for name, (make, _) in PIPELINES.items():
        if name != "endless":
            dataset = rebuilt(make(), of_arrays=False)
            found[name] = dataset and sum(len(tf.nest.flatten(rows)[0]) for rows, _, _ in dataset)
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


Loss: TypeAlias = "Callable[[Any, Any, Any], Any]"


class Own(keras.Model):
    """Model whose training step computes a loss of the user.

    Args:
        inner: Layers.
        loss: Returns the loss, of this model, and the inputs and targets.
        after: Called with the same behind the step.
    """

    def __init__(self, inner: Any, loss: Loss, after: Loss | None = None) -> None:
        super().__init__()
        self.inner, self.loss_of, self.after = inner, loss, after

    def call(self, inputs: Any, training: bool = False) -> Any:
        return self.inner(inputs, training=training)

    def kept(self, name: str, *shape: int, initializer: str = "random_normal") -> Any:
        """Make a variable that is not trained."""
        variable = self.add_weight(shape=shape, trainable=False, name=name, initializer=initializer)
        setattr(self, name, variable)
        return variable

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(self, x, y)
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_weights), self.trainable_weights,
                                           strict=True))
        if self.after is not None:
            self.after(self, x, y)
        return {"loss": loss}


def encoder(size: int = 4) -> Any:
    return keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="relu"), layers.Dropout(0.2),
                             layers.Dense(size)])


def stepped(model: Any, *, batch: int = 12, epochs: int = 1, **options: Any) -> list[float]:
    model.compile(keras.optimizers.Adam(0.01, **options))
    return trained(model, X, Y, batch_size=batch, epochs=epochs)


def pairs_of(one: Any, other: Any) -> Any:
    """Return the loss that tells which rows belong together."""
    logits = ops.matmul(ops.normalize(one, axis=1), ops.transpose(ops.normalize(other, axis=1))) / 0.2
    labels = ops.arange(ops.shape(logits)[0])
    return ops.mean(ops.sparse_categorical_crossentropy(labels, logits, from_logits=True))


@check
def contrastive_losses() -> list[float]:
    def supervised(y_true: Any, y_pred: Any) -> Any:
        made, y_true = ops.normalize(y_pred, axis=1), ops.reshape(y_true, (-1,))
        logits = ops.matmul(made, ops.transpose(made)) - 1e9 * ops.eye(ops.shape(made)[0])
        same = ops.cast(ops.equal(y_true[:, None], y_true[None]), logits.dtype) - ops.eye(ops.shape(made)[0])
        probabilities = logits - ops.logsumexp(logits, axis=1, keepdims=True)
        return -ops.sum(same * probabilities, axis=1) / ops.maximum(ops.sum(same, axis=1), 1.0)

    def queued(model: Own, x: Any, y: Any) -> Any:
        keys = ops.stop_gradient(ops.normalize(model(x + 0.1 * keras.random.normal(ops.shape(x))), axis=1))
        queries = ops.normalize(model(x, training=True), axis=1)
        logits = ops.concatenate([ops.sum(queries * keys, axis=1, keepdims=True),
                                  ops.matmul(queries, ops.transpose(model.queue))], axis=1)
        model.queue.assign(ops.concatenate([keys, model.queue], axis=0)[:20])
        return ops.mean(ops.sparse_categorical_crossentropy(ops.zeros_like(y), logits / 0.2, from_logits=True))

    model = encoder()
    model.compile("adam", supervised, metrics=[supervised])
    found = trained(model, X, Y, batch_size=12, epochs=1)
    found += stepped(Own(encoder(), lambda model, x, _: pairs_of(model(x, training=True), model(x, training=True))))
    model = Own(encoder(), queued)
    model.kept("queue", 20, 4)
    return found + stepped(model)


@check
def statistics_over_the_batch() -> list[float]:
    def whitened(rows: Any) -> Any:
        rows -= ops.mean(rows, axis=0, keepdims=True)
        return rows / (1 + ops.std(rows, axis=0) + ops.max(rows, axis=0) + ops.var(rows, axis=0))

    inputs = keras.Input((6,))
    hidden = layers.Dropout(0.2)(layers.Dense(6, activation="tanh")(inputs))
    moved = layers.Lambda(lambda rows: ops.flip(rows, axis=0) + ops.roll(rows, 1, axis=0))(hidden)
    by_operations = ops.concatenate([ops.softmax(hidden, axis=0), ops.cumsum(hidden, axis=0), ops.sort(moved, axis=0),
                                     hidden - ops.min(hidden, axis=0), ops.norm(hidden, axis=0) * hidden], axis=1)
    ordered = ops.take(hidden, ops.argsort(hidden[:, 0]), axis=0)
    ranked = ops.cast(ops.argmax(hidden, axis=0), "float64") * hidden
    mixed = ops.matmul(hidden, ops.matmul(ops.transpose(hidden), hidden))
    joined = layers.Concatenate()([layers.Lambda(whitened)(hidden), moved, by_operations, ordered, ranked, mixed])
    model = keras.Model(inputs, layers.Dense(4)(joined))
    model.compile(keras.optimizers.SGD(0.01), crossentropy(), metrics=["accuracy"])
    found = trained(model, X, Y, batch_size=12, epochs=1, validation_data=(X[:30], Y[:30]))
    return found + np.ravel(model.predict(X[:20], batch_size=15, verbose=0)).tolist()


class Running(layers.Layer):
    """Normalization with moving statistics of its own."""

    def build(self, shape: Any) -> None:
        self.moving = [self.add_weight(shape=shape[-1:], trainable=False, name=name, initializer=name)
                       for name in ("zeros", "ones")]

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            mean, variance = ops.moments(inputs, axes=[0])
            for variable, value in zip(self.moving, (mean, variance), strict=True):
                variable.assign(0.9 * variable + 0.1 * value)
        else:
            mean, variance = self.moving
        return (inputs - mean) / ops.sqrt(variance + 0.001)


class Codes(layers.Layer):
    """Vectors of a codebook, which moves towards what it stands for."""

    def build(self, shape: Any) -> None:
        self.book = self.add_weight(shape=(7, shape[-1]), trainable=False, name="book", initializer="random_normal")
        self.counts = self.add_weight(shape=(7,), trainable=False, name="counts", initializer="ones")

    def call(self, inputs: Any, training: bool = False) -> Any:
        distances = ops.sum(ops.square(inputs[:, None] - self.book[None]), axis=2)
        codes = ops.argmin(distances, axis=1)
        chosen = ops.one_hot(codes, 7)
        found = ops.take(self.book, codes, axis=0)
        if training:
            self.counts.assign(0.9 * self.counts + 0.1 * ops.sum(chosen, axis=0))
            moved = 0.9 * self.book + 0.1 * ops.matmul(ops.transpose(chosen), inputs)
            self.book.assign(moved / ops.maximum(self.counts, 0.1)[:, None])
            self.add_loss(ops.mean(ops.square(ops.stop_gradient(found) - inputs)))
        return inputs + ops.stop_gradient(found - inputs)


@check
def running_statistics() -> list[float]:
    def centered(model: Own, x: Any, _: Any) -> Any:
        teacher = ops.stop_gradient(model(x + 0.1 * keras.random.normal(ops.shape(x)))) - model.center
        student = ops.log_softmax(model(x, training=True) / 0.1)
        model.center.assign(0.9 * model.center + 0.1 * ops.mean(teacher + model.center, axis=0))
        return -ops.mean(ops.sum(ops.softmax(teacher / 0.04) * student, axis=1))

    found = []
    for layer in (Running(), Codes()):
        model = dense(layer)
        model.compile("adam", crossentropy(), metrics=["accuracy"])
        found += trained(model, X, Y, batch_size=12, epochs=1, validation_data=(X[:30], Y[:30]))
    model = Own(encoder(), centered)
    model.kept("center", 4, initializer="zeros")
    return found + stepped(model)


@check
def losses_of_whole_batches() -> list[float]:
    def unlike(_: Any, made: Any) -> Any:
        """Penalties between rows: their distances, and the correlation of their features."""
        distances = ops.sqrt(ops.sum(ops.square(made[:, None] - made[None]), axis=2) + 1e-3)
        centered = (made - ops.mean(made, axis=0)) / (ops.std(made, axis=0) + 0.1)
        rows = ops.cast(ops.shape(made)[0], made.dtype)
        correlation = ops.matmul(ops.transpose(centered), centered) / rows
        return ops.mean(ops.exp(-distances)) + ops.sum(ops.square(correlation - ops.eye(4)))

    target, found = np.tile(Y[:, None] > 1, 4).astype(float), []
    for loss, y in ((keras.losses.Dice(), target), (keras.losses.Tversky(alpha=0.3), target),
                    (keras.losses.Dice(axis=1), target), (keras.losses.Circle(), Y), (unlike, target)):
        model = keras.Sequential([encoder(), layers.UnitNormalization() if y is Y else layers.Activation("sigmoid")])
        model.compile("adam", loss, metrics=[loss])
        found += trained(model, X, y, batch_size=12, epochs=1, sample_weight=None if loss is unlike else WEIGHTS)
    return found


class Wasserstein(keras.Model):
    """Critic and generator, with a penalty on gradients between real and generated rows, and noise of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = keras.Sequential([keras.Input((6,)), layers.Dense(6), layers.LeakyReLU(), layers.Dropout(0.2),
                                        layers.Dense(1)])
        self.maker = keras.Sequential([keras.Input((3,)), layers.Dense(6, activation="tanh"),
                                       layers.BatchNormalization(), layers.Dense(6)])
        self.first, self.second = keras.optimizers.Adam(0.01), keras.optimizers.RMSprop(0.01)

    def train_step(self, data: Any) -> Any:
        rows = tf.shape(data)[0]
        for _ in range(2):
            made = self.maker(tf.random.normal((rows, 3), dtype=data.dtype), training=True)
            shares = keras.random.uniform((rows, 1))
            with tf.GradientTape() as tape:
                mixed = shares * data + (1 - shares) * made
                with tf.GradientTape() as inner:
                    inner.watch(mixed)
                    judged = self.critic(mixed, training=True)
                slopes = tf.sqrt(tf.reduce_sum(inner.gradient(judged, mixed) ** 2, axis=1) + 1e-6)
                distance = self.critic(made, training=True) - self.critic(data, training=True)
                of_critic = tf.reduce_mean(distance) + 10 * tf.reduce_mean((slopes - 1) ** 2)
            weights = self.critic.trainable_weights
            self.first.apply_gradients(zip(tape.gradient(of_critic, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            made = self.maker(tf.random.normal((rows, 3), dtype=data.dtype), training=True)
            of_maker = -tf.reduce_mean(self.critic(made, training=True))
        weights = self.maker.trainable_weights
        self.second.apply_gradients(zip(tape.gradient(of_maker, weights), weights, strict=True))
        return {"critic": of_critic, "maker": of_maker}


@check
def adversaries_with_noise() -> list[float]:
    model = Wasserstein()
    model.compile()
    found = trained(model, tf.data.Dataset.from_tensor_slices(X).shuffle(ROWS).batch(12), epochs=1)
    return found + [float(one) for weight in model.weights for one in np.ravel(weight)]


@check
def networks_that_follow_another() -> list[float]:
    """BYOL: a network predicts what the average of its past gives for another view."""
    target = encoder()
    predictor = keras.Sequential([keras.Input((4,)), layers.BatchNormalization(), layers.Dense(4)])

    def loss(model: Own, x: Any, _: Any) -> Any:
        one, other = (x + 0.1 * keras.random.normal(ops.shape(x)) for _ in range(2))
        made = ops.normalize(predictor(model(one, training=True), training=True), axis=1)
        wanted = ops.stop_gradient(ops.normalize(target(other, training=False), axis=1))
        return ops.mean(2 - 2 * ops.sum(made * wanted, axis=1))

    def follow(model: Own, *_: Any) -> None:
        for own, other in zip(target.weights, model.inner.weights, strict=True):
            own.assign(0.9 * own + 0.1 * other)

    model = Own(encoder(), loss, follow)
    model.target, model.predictor = target, predictor
    target.trainable = False
    return stepped(model)


class Accumulating(Own):
    """Model that adds up the gradients of three batches in its own variables."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.loss_of(self, x, y)
        for kept, gradient in zip(self.sums, tape.gradient(loss, self.trainable_weights), strict=True):
            kept.assign_add(gradient)
        self.batches.assign_add(1)
        tf.cond(self.batches % 3 == 0, self.apply_sums, lambda: None)
        return {"loss": loss}

    def apply_sums(self) -> None:
        self.optimizer.apply_gradients([(kept / 3, weight) for kept, weight in
                                        zip(self.sums, self.trainable_weights, strict=True)])
        for kept in self.sums:
            kept.assign(tf.zeros_like(kept))


@check
def accumulated_gradients() -> list[float]:
    def loss(model: Own, x: Any, y: Any) -> Any:
        return ops.mean(keras.losses.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True))

    model = Accumulating(encoder(), loss)
    model.sums = [tf.Variable(tf.zeros_like(weight), trainable=False) for weight in model.trainable_weights]
    model.batches = tf.Variable(0, trainable=False)
    found = stepped(model)
    for options in ({"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 3, "use_ema": True}):
        found += stepped(Own(encoder(), loss), **options)
        model = dense()
        model.compile(keras.optimizers.Adam(0.01, **options), crossentropy())
        found += trained(model, X, Y, batch_size=12, epochs=1)
    return found


@check
def policies() -> list[float]:
    """PPO, in a function of the user with a loop that may end early; MAML, with gradient steps in the loss."""
    policy, optimizer = encoder(), keras.optimizers.Adam(0.05)
    optimizer.build(policy.trainable_weights)

    @tf.function
    def improve(states: Any, actions: Any, old: Any, advantages: Any) -> Any:
        advantages = (advantages - tf.reduce_mean(advantages)) / (tf.math.reduce_std(advantages) + 1e-8)
        divergence, passes = tf.zeros((), tf.float64), 0
        for _ in tf.range(5):
            with tf.GradientTape() as tape:
                found = tf.reduce_sum(tf.one_hot(actions, 4, dtype=tf.float64)
                                      * tf.nn.log_softmax(policy(states, training=True)), axis=1)
                ratio = tf.exp(found - old)
                loss = -tf.reduce_mean(tf.minimum(ratio * advantages, tf.clip_by_value(ratio, 0.8, 1.2) * advantages))
            gradients = tape.gradient(loss, policy.trainable_weights)
            optimizer.apply_gradients(zip(gradients, policy.trainable_weights, strict=True))
            divergence, passes = tf.reduce_mean(old - found), passes + 1
            if divergence > 0.05:
                break
        return divergence, passes, tf.reduce_mean(tf.cast(tf.abs(ratio - 1) > 0.2, tf.float64))

    found = []
    for rows in BATCHES:
        old = tf.nn.log_softmax(policy(X[rows]))
        chosen = tf.gather(old, Y[rows], batch_dims=1)
        found += [float(one) for one in improve(tf.constant(X[rows]), tf.constant(Y[rows]), chosen,
                                                tf.constant(WEIGHTS[rows] - X[rows, 0]))]

    def adapted(model: Own, x: Any, y: Any) -> Any:
        first, second = model.inner.trainable_weights
        with tf.GradientTape() as inner:
            loss = ops.mean(ops.square(ops.matmul(x, first) + second - x[:, :4]))
        slopes = inner.gradient(loss, [first, second])
        moved = [weight - 0.1 * slope for weight, slope in zip((first, second), slopes, strict=True)]
        return ops.mean(ops.square(ops.matmul(x, moved[0]) + moved[1] - ops.cast(y, x.dtype)[:, None]))

    found += stepped(Own(keras.Sequential([keras.Input((6,)), layers.Dense(4)]), adapted))
    return found + [float(one) for weight in policy.weights for one in np.ravel(weight)]


class Experts(layers.Layer):
    """Mixture of experts: each row goes to two of them, and the loss grows with the imbalance of a batch."""

    def build(self, shape: Any) -> None:
        self.gate = self.add_weight(shape=(shape[-1], 4), name="gate")
        self.kernels = self.add_weight(shape=(4, shape[-1], 5), name="kernels")

    def call(self, inputs: Any, training: bool = False) -> Any:
        scores = ops.matmul(inputs, self.gate)
        if training:
            scores += 0.1 * keras.random.normal(ops.shape(scores))
        probabilities = ops.softmax(scores)
        shares, chosen = ops.top_k(probabilities, 2)
        places = ops.one_hot(chosen, 4)
        load = ops.mean(places[:, 0], axis=0)
        self.add_loss(0.1 * 4 * ops.sum(load * ops.mean(probabilities, axis=0)))
        ranks = ops.cumsum(places[:, 0], axis=0) * places[:, 0]
        fits = ops.cast(ops.max(ranks, axis=1) <= ops.cast(ops.shape(inputs)[0], ranks.dtype) / 2, inputs.dtype)
        weights = ops.einsum("bk,bke->be", shares, places) * fits[:, None]
        return ops.einsum("bi,eio,be->bo", inputs, self.kernels, weights)


class Dispatching(Experts):
    """The same, but rows are gathered for each expert."""

    def call(self, inputs: Any, training: bool = False) -> Any:
        probabilities = tf.nn.softmax(tf.matmul(inputs, tf.convert_to_tensor(self.gate)))
        chosen = tf.argmax(probabilities, axis=1, output_type=tf.int32)
        parts, places = (tf.dynamic_partition(what, chosen, 4) for what in (inputs, tf.range(tf.shape(inputs)[0])))
        made = [tf.matmul(part, self.kernels[number]) for number, part in enumerate(parts)]
        shares = tf.reduce_max(probabilities, axis=1, keepdims=True)
        return tf.ensure_shape(tf.dynamic_stitch(places, made) * shares, (None, 5))


@check
def mixtures_of_experts() -> list[float]:
    found = []
    for layer in (Experts(), Dispatching()):
        model = dense(layer)
        model.compile("adam", crossentropy(), metrics=["accuracy"])
        found += trained(model, X, Y, batch_size=12, epochs=1, validation_data=(X[:30], Y[:30]))
    return found


@check
def sequences_of_unequal_lengths() -> list[float]:
    """CTC; ragged and sparse inputs."""
    model = keras.Sequential([keras.Input((8, 6)), layers.Conv1D(6, 3, padding="same", activation="tanh"),
                              layers.Dropout(0.2), layers.Dense(5)])
    model.compile("adam", keras.losses.CTC())
    signals = np.stack([X + step for step in np.linspace(-1, 1, 8)], axis=1)
    labels = 1 + WORDS[:, :3] % 4
    found = trained(model, signals, np.where(np.arange(3) < 1 + Y[:, None] % 3, labels, 0), batch_size=12, epochs=1)

    words = tf.RaggedTensor.from_row_lengths(np.tile(WORDS.ravel(), 2)[: int(np.sum(1 + Y))], 1 + Y)
    ragged = tf.data.Dataset.from_tensor_slices((words, Y)).batch(12)

    class Averages(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.dropout, self.last = layers.Embedding(5, 4), layers.Dropout(0.2), layers.Dense(4)

        def call(self, inputs: Any, training: bool = False) -> Any:
            if isinstance(inputs, tf.RaggedTensor):
                inputs = tf.reduce_mean(inputs.with_flat_values(self.table(inputs.flat_values)), axis=1)
            else:
                inputs = tf.sparse.sparse_dense_matmul(inputs, tf.convert_to_tensor(self.table.embeddings))
            return self.last(self.dropout(inputs, training=training))

    spec = tf.sparse.from_dense(np.where(np.arange(5) == WORDS[:, :1], X[:, :5], 0.0))
    sparse = tf.data.Dataset.from_tensor_slices((spec, Y)).batch(12)
    for dataset in (ragged, sparse):
        model = Averages()
        model.table.build((None,))
        model.compile("adam", crossentropy(), metrics=["accuracy"])
        found += trained(model, dataset, epochs=2)
        found += np.ravel(model.predict(dataset, verbose=0)).tolist()
    model = keras.Sequential([keras.Input((5,), sparse=True), layers.Dense(4)])
    model.compile("adam", crossentropy())
    return found + trained(model, sparse)


@check
def batches_of_a_fixed_size() -> list[float]:
    """Also layers that keep states of rows from batch to batch."""
    model = keras.Sequential([keras.Input((6,), batch_size=12), layers.Dense(5, activation="tanh"),
                              layers.BatchNormalization(), layers.Dropout(0.2), layers.Dense(4)])
    model.compile("adam", crossentropy(), metrics=["accuracy"])
    found = trained(model, X[:48], Y[:48], batch_size=12, class_weight={0: 1.0, 1: 2.0, 2: 0.5, 3: 1.0})
    sequences = np.stack([X[:48], X[:48] - 1], axis=1)
    for layer in (layers.LSTM(3, stateful=True), layers.GRU(3, stateful=True, dropout=0.2, recurrent_dropout=0.1)):
        model = keras.Sequential([keras.Input((2, 6), batch_size=16), layer, layers.Dense(4)])
        model.compile("adam", crossentropy())
        found += trained(model, sequences, Y[:48], batch_size=16, shuffle=False)
        found += np.ravel(model.predict(sequences, batch_size=16, verbose=0)).tolist()
        layer.reset_states()
        found += np.ravel(model.predict(sequences[:16], batch_size=16, verbose=0)).tolist()
    return found


@check
def batches_of_graphs() -> list[float]:
    """Arrays of different numbers of rows in one batch: nodes, edges, and targets of graphs."""

    class OfGraphs(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = layers.Dense(6, activation="tanh"), layers.Dense(4)
            self.dropout = layers.Dropout(0.2)

        def call(self, inputs: Any, training: bool = False) -> Any:
            nodes, edges, graphs = inputs
            nodes = self.dropout(self.first(nodes), training=training)
            heard = tf.math.unsorted_segment_sum(tf.gather(nodes, edges[:, 0]), edges[:, 1], tf.shape(nodes)[0])
            number = tf.reduce_max(graphs) + 1
            return self.second(tf.math.unsorted_segment_mean(nodes + heard, graphs, number))

    def batches() -> Iterator[Any]:
        for count in range(4):
            of_node = np.sort(np.arange(10 + count) % 5)
            edges = np.stack([np.arange(17 - count) % (10 + count), 3 * np.arange(17 - count) % (10 + count)], axis=1)
            yield (X[: 10 + count], edges, of_node), Y[:5]

    spec = (tf.TensorSpec((None, 6), tf.float64), tf.TensorSpec((None, 2), tf.int64),
            tf.TensorSpec((None,), tf.int64)), tf.TensorSpec((None,), tf.int64)
    model = OfGraphs()
    model.compile("adam", crossentropy(), metrics=["accuracy"])
    dataset = tf.data.Dataset.from_generator(batches, output_signature=spec)
    found = trained(model, dataset)
    return found + np.ravel(model.predict(dataset, verbose=0)).tolist()


@check
def values_that_are_not_finite() -> list[float]:
    """NaN in a row of the last rank: in the loss of everybody; a scaled loss skips the step, and halves the scale."""
    broken = X.copy()
    broken[[11, 35]] = np.nan
    found = []
    for scaled_options in (None, {"initial_scale": 64.0, "dynamic_growth_steps": 2}):
        model = dense()
        optimizer: Any = keras.optimizers.Adam(0.01)
        if scaled_options is not None:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, **scaled_options)
        model.compile(optimizer, crossentropy())
        found += [float(model.train_on_batch(broken[rows], Y[rows])) for rows in BATCHES]
        found += [float(one) for variable in (*model.variables, *optimizer.variables) for one in np.ravel(variable)]
    return found


@check
def several_steps_per_execution() -> list[float]:
    model = dense(layers.GaussianNoise(0.1))
    model.compile("adam", crossentropy(), metrics=["accuracy"], steps_per_execution=3)
    found = trained(model, X, Y, batch_size=12, validation_data=(X, Y))
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(ROWS).batch(12)
    found += trained(model, dataset, class_weight={0: 1.0, 1: 2.0, 2: 0.5, 3: 1.0}, validation_data=dataset)
    found += np.ravel(model.predict(X, batch_size=12, verbose=0)).tolist()
    found += np.ravel(model.predict(tf.data.Dataset.from_tensor_slices(X).batch(12), verbose=0)).tolist()
    for rows in BATCHES[:2]:
        found += model.train_on_batch(X[rows], Y[rows], sample_weight=WEIGHTS[rows], return_dict=False)
        found += model.train_on_batch(X[rows], Y[rows], class_weight={0: 1.0, 1: 2.0, 2: 0.5, 3: 1.0})
    return found


def images() -> Any:
    return np.random.RandomState(1).uniform(size=(ROWS, 8, 8, 3))


@check
def augmentation() -> list[float]:
    """Layers that change images at random, in float32 (some of Keras fail in float64), in a model and in a pipeline."""
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    try:
        dataset = tf.data.Dataset.from_tensor_slices((images(), Y)).shuffle(ROWS).map(
            lambda image, y: (tf.image.stateless_random_flip_left_right(image, (1, y)), y)).batch(12).prefetch(2)
        model = keras.Sequential([
            keras.Input((8, 8, 3)), layers.RandomFlip(), layers.RandomRotation(0.2), layers.RandomZoom(0.1),
            layers.RandomTranslation(0.1, 0.1), layers.RandomContrast(0.2),
            layers.RandomBrightness(0.2, value_range=(0, 1)), layers.Conv2D(4, 3, strides=2),
            layers.BatchNormalization(), layers.ReLU(), layers.SpatialDropout2D(0.2), layers.GlobalAveragePooling2D(),
            layers.Dense(4)])
        model.compile(keras.optimizers.SGD(0.05), crossentropy(), metrics=["accuracy"])
        found = trained(model, dataset, epochs=1, validation_data=dataset)
        return found + trained(model, images(), Y, batch_size=12, epochs=1)
    finally:
        keras.config.set_floatx("float64")
        keras.config.set_dtype_policy("float64")


@check
def compiled_by_xla() -> list[float]:
    found = []
    for layer in (layers.BatchNormalization(), layers.Lambda(lambda rows: rows - ops.mean(rows, axis=0))):
        model = keras.Sequential([keras.Input((6,)), layers.Dense(5), layer, layers.Dropout(0.2), layers.Dense(4)])
        model.compile("adam", crossentropy(), metrics=["accuracy"], jit_compile=True)
        found += trained(model, X, Y, batch_size=20, epochs=1)
    return found + np.ravel(model.predict(X, batch_size=31, verbose=0)).tolist()


@check
def mixed_precision() -> list[float]:
    found = []
    for name in ("mixed_float16", "mixed_bfloat16"):
        keras.config.set_dtype_policy(name)
        try:
            model = dense(layers.BatchNormalization())
            model.compile("adam", crossentropy(), metrics=["accuracy"])
            found += trained(model, X, Y, batch_size=12, epochs=1)
            found += np.ravel(model.predict(X[:13], batch_size=5, verbose=0)).astype(float).tolist()
            overflowing = np.where(np.arange(12) == 11, 1e6, 1.0)[:, None] * X[:12]
            found += [float(model.train_on_batch(overflowing, Y[:12])[0] > 0), *numbers(model, model.history)]
        finally:
            keras.config.set_dtype_policy("float64")
    return found


def own_step(model: Any, optimizer: Any) -> Callable[[Any, Any], Any]:
    """Return the training step of a user's loop."""
    optimizer.build(model.trainable_weights)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            made = model(x + tf.random.normal(tf.shape(x), stddev=0.1, dtype=x.dtype), training=True)
            loss = crossentropy()(y, made)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_weights), model.trainable_weights,
                                      strict=True))
        return loss

    return step


@check
def loops_of_users() -> list[float]:
    """Steps in a loop, a loop over a dataset in a function, and one over an iterator that is its argument."""
    model, mean = dense(layers.BatchNormalization()), keras.metrics.Mean()
    step = own_step(model, keras.optimizers.Adam(0.01))
    one_step = tf.function(step)

    @tf.function
    def whole_epoch(batches: Any) -> Any:
        total, seen = tf.constant(0.0, tf.float64), 0
        for x, y in batches:
            loss = step(x, y)
            mean.update_state(loss)
            total += loss
            seen += tf.shape(x)[0]
        return total, seen

    @tf.function
    def some_steps(iterator: Any) -> Any:
        losses = tf.TensorArray(tf.float64, 3)
        for number in tf.range(3):
            x, y = next(iterator)
            losses = losses.write(number, step(x, y))
        return losses.stack()

    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(ROWS).batch(12)
    found = [float(one_step(x, y)) for x, y in dataset]
    found += [float(one) for one in whole_epoch(dataset)]
    for _ in range(2):
        iterator = iter(dataset)
        found += some_steps(iterator).numpy().tolist()
        found.append(float(one_step(*next(iterator))))
    found.append(float(mean.result()))
    return found + [float(one) for weight in model.weights for one in np.ravel(weight)]


@check
def eager_steps() -> list[float]:
    """Steps without a function: every rank computes all of them."""
    model = dense(layers.BatchNormalization())
    model.compile("adam", crossentropy(), metrics=["accuracy"], run_eagerly=True)
    found = trained(model, X[:25], Y[:25], batch_size=12, epochs=1, validation_data=(X[:13], Y[:13]))
    step = own_step(model, keras.optimizers.SGD(0.01))
    found += [float(step(tf.constant(X[:12]), Y[:12])) for _ in range(2)]
    found += np.ravel(model.predict(X[:13], batch_size=12, verbose=0)).tolist()
    return found + np.ravel(model(X[:13], training=True)).tolist()


@check
def plain_tensorflow() -> list[float]:
    """A module with steps of its own, saved and loaded; a model of Keras that is exported."""

    class Line(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.random = tf.random.Generator.from_seed(3)
            self.kernel = tf.Variable(self.random.normal((6, 4), dtype=tf.float64))
            self.bias, self.steps = tf.Variable(tf.zeros(4, tf.float64)), tf.Variable(0, trainable=False)

        @tf.function(input_signature=[tf.TensorSpec((None, 6), tf.float64)])
        def __call__(self, x: Any) -> Any:
            return tf.matmul(x - tf.reduce_mean(x, axis=0), self.kernel) + self.bias

        @tf.function
        def step(self, x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                noise = self.random.normal(tf.shape(x), stddev=tf.constant(0.1, tf.float64), dtype=tf.float64)
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, tf.nn.dropout(self(x + noise), 0.2))
                loss = tf.reduce_mean(losses) + 0.01 * tf.reduce_sum(self.kernel**2)
            for weight, slope in zip(self.trainable_variables, tape.gradient(loss, self.trainable_variables),
                                     strict=True):
                weight.assign_sub(0.1 * tf.clip_by_norm(slope, 1.0))
            self.steps.assign_add(1)
            return loss, tf.reduce_max(losses), losses

    module, found = Line(), []
    for rows in BATCHES:
        results = module.step(tf.constant(X[rows]), tf.constant(Y[rows]))
        found += [float(one) for result in results for one in np.ravel(result)]
    found += [float(one) for variable in module.variables for one in np.ravel(variable)]
    model = dense(layers.BatchNormalization())
    with tempfile.TemporaryDirectory() as folder:
        tf.saved_model.save(module, f"{folder}/module")
        model.export(f"{folder}/model", verbose=False)
        loaded = tf.saved_model.load(f"{folder}/module")
        found += np.ravel(loaded(tf.constant(X[:13]))).tolist()
        exported = tf.saved_model.load(f"{folder}/model")
        found += np.ravel(exported.serve(tf.constant(X[:13]))).tolist()
    return found


@check
def models_of_tf_keras() -> list[float]:
    import tf_keras

    tf_keras.backend.set_floatx("float64")
    tf_keras.utils.set_random_seed(1)
    model = tf_keras.Sequential([
        tf_keras.layers.Dense(5, activation="tanh", input_shape=(6,)), tf_keras.layers.BatchNormalization(),
        tf_keras.layers.Dropout(0.2), tf_keras.layers.Lambda(lambda rows: rows - tf.reduce_mean(rows, axis=0)),
        tf_keras.layers.Dense(4)])
    model.compile(tf_keras.optimizers.Adam(0.01),
                  tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    found = trained(model, X, Y, batch_size=12, sample_weight=WEIGHTS, validation_data=(X[:30], Y[:30]))
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(ROWS).batch(12)
    found += trained(model, dataset, epochs=1)
    return found + np.ravel(model.predict(X[:13], batch_size=5, verbose=0)).tolist()


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

    made = {
        "unseeded arrays": lambda: fitted(dense(), np.random.default_rng().normal(size=(ROWS, 6)), X[:, :4]),
        "unseeded batches": lambda: fitted(dense(), unseeded(), steps_per_epoch=3),
        "already distributed": lambda: hvd.DistributedOptimizer(keras.optimizers.Adam()) and "made",
        "already sharded": lambda: hvd.shard(X) is not None and "made",
        "strategy": under_strategy,
        "sharded update": with_sharded_update,
    }
    return {name: outcome_of(function) for name, function in made.items()}


def under_strategy() -> str:
    with tf.distribute.OneDeviceStrategy("/CPU:0").scope():
        model = dense()
    model.compile("sgd", crossentropy())
    model.fit(X, Y, verbose=0)
    return "trained"


def with_sharded_update() -> str:
    """Start anew, with the setting HVKERAS_SHARD_UPDATE."""
    session = current_session()
    settings, session.settings = session.settings, session.settings.with_shared({"shard_update": True})
    global_batch().started, started = False, global_batch().started
    try:
        mode.start()
    finally:
        session.settings, global_batch().started = settings, started
    return "started"


if __name__ == "__main__":
    hvd.data_parallel()
    checks.run_checks()

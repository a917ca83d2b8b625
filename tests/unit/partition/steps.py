"""Training steps as users write them: models of Keras, a loop of one's own, losses in which rows of a batch meet.

Each is made anew, from the same seeds, in float64 (`use_float64`), with dropout, noise and augmentation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from unit.partition.ranks import Ranks

ROWS = (33, 32, 1, 17)  # of the batches, which all go through one trace
TOLERANCE = 1e-12  # of an element, in parts of the largest one of its tensor

Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Step:
    """A training step, and what it must cost.

    Args:
        make: Creates the model and its step; returns the step, and the variables whose gradients, or parts, are summed.
        batch: Returns a batch, of a generator of random numbers and the number of rows.
        rounds: The most rounds that it may take.
        nbytes: The most bytes that it may exchange, in parts of those of the variables; 0 if rows meet in it.
        zeros: Pattern of names of weights, with their slots, whose gradient is zero by mathematics: of those, rounding
            decides, and they are the same if they are as small.
    """

    make: Callable[[Arrays], tuple[Callable[..., Any], Sequence[Any]]]
    batch: Callable[[np.random.Generator, int], Arrays]
    rounds: int = 2
    nbytes: float = 1.1
    zeros: str = "(?!)"

    def batches(self) -> list[Arrays]:
        """Return a batch for each number of `ROWS`."""
        generator = np.random.default_rng(1)
        return [self.batch(generator, rows) for rows in ROWS]

    def on(self, size: int, **options: Any) -> tuple[Ranks, Sequence[Any]]:
        """Return the step on ranks, and the variables whose gradients, or parts, are summed.

        Args:
            size: Number of ranks.
            **options: Of `Ranks`.
        """
        keras.utils.set_random_seed(0)
        batch = self.batches()[0]
        step, summed = self.make(batch)
        specs = [tf.TensorSpec([None, *array.shape[1:]], array.dtype) for array in batch]
        return Ranks(tf.autograph.experimental.do_not_convert(step), specs, range(len(specs)), size, **options), summed

    def differences(self, ranks: Ranks) -> list[str]:
        """Train with all batches; return what differs from one process: results, weights, slots, metrics, states."""
        found = []
        for batch in self.batches():
            wanted = tf.nest.flatten(ranks.whole(*map(tf.constant, batch)))
            for results in ranks.run(*batch):
                found += [f"result {place}, {len(batch[0])} rows: {apart}" for place, (result, want) in enumerate(
                    zip(results, wanted, strict=True)) if (apart := _apart(result, want))]
            for variable, *own in ranks.variables:
                floor = 1e-9 if re.search(self.zeros, variable.name) else 0.0
                found += [f"{variable.name}, {len(batch[0])} rows: {apart}" for copy in own
                          if (apart := _apart(copy, variable, floor))]
        return found


def _apart(result: Any, wanted: Any, floor: float = 0.0) -> float:
    """Return by how much two tensors differ, in parts of the largest element of one; 0 for rounding.

    Args:
        result: One tensor.
        wanted: The other.
        floor: The size below which elements are as good as zero.
    """
    one, other = np.asarray(result), np.asarray(wanted)
    if one.shape != other.shape or one.dtype != other.dtype:
        return np.inf
    if one.dtype.kind != "f":
        return float((one != other).any())
    apart, largest = np.max(np.abs(one - other), initial=0), np.max(np.abs(other), initial=0)
    return 0.0 if apart <= max(floor, TOLERANCE * largest) else float(apart / largest)


def _fit(model: Any, loss: Any, optimizer: Any = lambda: "adam", **options: Any) -> Callable[[Arrays], Any]:
    """Return what makes and compiles a model, and makes the step of its `fit`."""

    def make(batch: Arrays) -> tuple[Callable[..., Any], Sequence[Any]]:
        made = model()
        made.compile(optimizer(), loss if isinstance(loss, str) else loss(), jit_compile=False, **options)
        made._symbolic_build(data_batch=batch)
        made.optimizer.build(made.trainable_variables)
        return lambda *data: made.train_step(data), [*made.trainable_variables, *made.metrics_variables]

    return make


def _vectors(size: int, targets: int = 1, classes: int = 0, weighs: bool = False) -> Callable[..., Arrays]:
    def batch(random: np.random.Generator, rows: int) -> Arrays:
        y = random.integers(0, classes, (rows, targets)) if classes else random.standard_normal((rows, targets))
        weights = (random.random(rows),) if weighs else ()
        return random.standard_normal((rows, size)), y.astype("float64"), *weights

    return batch


def _images(random: np.random.Generator, rows: int) -> Arrays:
    return random.random((rows, 12, 12, 3)), random.integers(0, 5, rows)


def _masks(random: np.random.Generator, rows: int) -> Arrays:
    return random.random((rows, 8, 8, 1)), random.integers(0, 2, (rows, 8, 8, 1)).astype("float64"), random.random(rows)


def _texts(random: np.random.Generator, rows: int) -> Arrays:
    words, lengths = random.integers(1, 50, (rows, 8)).astype("int32"), random.integers(3, 9, rows)
    return np.where(np.arange(8) < lengths[:, None], words, 0), random.integers(0, 2, (rows, 1)).astype("float64")


def _series(random: np.random.Generator, rows: int) -> Arrays:
    return random.standard_normal((rows, 8, 4)), random.standard_normal((rows, 1))


def mlp() -> Any:
    return keras.Sequential([
        keras.Input((20,)), layers.Dense(64, activation="relu", kernel_regularizer="l2"), layers.Dropout(0.3),
        layers.Dense(32, activation="gelu"), layers.GaussianNoise(0.1), layers.Dense(1, activation="sigmoid")])


def cnn() -> Any:
    return keras.Sequential([
        keras.Input((12, 12, 3)), layers.RandomFlip(), layers.RandomContrast(0.3),
        layers.Conv2D(8, 3, padding="same", use_bias=False), layers.BatchNormalization(), layers.ReLU(),
        layers.MaxPooling2D(), layers.Conv2D(8, 3, strides=2, use_bias=False), layers.BatchNormalization(),
        layers.ReLU(), layers.SpatialDropout2D(0.1), layers.Flatten(), layers.Dense(5)])


def transformer() -> Any:
    words = keras.Input((8,), dtype="int32")
    hidden = layers.Embedding(50, 16)(words) + layers.Embedding(8, 16)(ops.arange(8))
    attended = layers.MultiHeadAttention(2, 8, dropout=0.1)(hidden, hidden, use_causal_mask=True)
    hidden = layers.LayerNormalization()(hidden + attended)
    wide = layers.Dropout(0.1)(layers.Dense(32, activation="gelu")(hidden))
    hidden = layers.LayerNormalization()(hidden + layers.Dense(16)(wide))
    return keras.Model(words, layers.Dense(1, activation="sigmoid")(layers.GlobalAveragePooling1D()(hidden)))


def lstm() -> Any:
    return keras.Sequential([
        keras.Input((8,), dtype="int32"), layers.Embedding(50, 8, mask_zero=True),
        layers.Bidirectional(layers.LSTM(6, return_sequences=True)), layers.LSTM(5, dropout=0.2),
        layers.Dense(1, activation="sigmoid")])


def gru() -> Any:
    return keras.Sequential([keras.Input((8, 4)), layers.GRU(6, return_sequences=True, recurrent_dropout=0.1),
                             layers.SimpleRNN(5), layers.Dense(1)])


def across_rows() -> Any:
    inputs = keras.Input((10,))
    hidden = layers.Dense(16, activation="tanh")(inputs)
    centered = layers.Lambda(lambda rows: rows - ops.mean(rows, axis=0, keepdims=True))(hidden)
    scaled = layers.Lambda(lambda rows: rows / (1 + ops.std(rows, axis=0) + ops.max(rows, axis=0)))(centered)
    mixed = layers.Lambda(lambda rows: ops.flip(rows, axis=0) + ops.roll(rows, 1, axis=0))(scaled)
    return keras.Model(inputs, layers.Dense(1)(layers.Concatenate()([scaled, mixed])))


def embedding() -> Any:
    return keras.Sequential([keras.Input((10,)), layers.Dense(16, activation="relu"), layers.Dropout(0.2),
                             layers.Dense(6), layers.UnitNormalization()])


def segmentation() -> Any:
    return keras.Sequential([keras.Input((8, 8, 1)), layers.Conv2D(8, 3, padding="same", activation="relu"),
                             layers.Conv2D(1, 1, activation="sigmoid")])


def use_float64() -> None:
    """Let Keras make all weights and compute in float64, whatever it has been told before."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")


class Contrastive(keras.Model):
    """Two encoders that learn which of a batch's rows belong together."""

    def __init__(self) -> None:
        super().__init__()
        self.encoders = [keras.Sequential([layers.Dense(32, activation="relu"), layers.Dropout(0.2), layers.Dense(8)])
                         for _ in range(2)]
        self.mean = keras.metrics.Mean(name="loss")
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")

    def call(self, data: Any, training: bool = False) -> Any:
        return [encoder(rows, training=training) for encoder, rows in zip(self.encoders, data, strict=True)]

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            one, other = (tf.math.l2_normalize(rows, 1) for rows in self(data, training=True))
            logits = tf.matmul(one, other, transpose_b=True) / 0.1
            labels = tf.range(tf.shape(logits)[0])
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
                + tf.nn.sparse_softmax_cross_entropy_with_logits(labels, tf.transpose(logits)))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        self.mean.update_state(loss)
        self.accuracy.update_state(labels, logits)
        return {"loss": self.mean.result(), "accuracy": self.accuracy.result()}


def contrastive(batch: Arrays) -> tuple[Callable[..., Any], Sequence[Any]]:
    model = Contrastive()
    model.compile("adam", jit_compile=False)
    model(batch)
    model.optimizer.build(model.trainable_variables)
    return lambda *data: model.train_step(data), model.trainable_variables


def gan(batch: Arrays) -> tuple[Callable[..., Any], Sequence[Any]]:
    """Train a discriminator on real and generated images side by side, then the generator through it."""
    seeds = keras.random.SeedGenerator(3)
    generator = keras.Sequential([keras.Input((6,)), layers.Dense(36), layers.LeakyReLU(), layers.Reshape((6, 6, 1)),
                                  layers.Conv2DTranspose(1, 4, strides=2, padding="same", activation="sigmoid")])
    discriminator = keras.Sequential([keras.Input((12, 12, 1)), layers.Conv2D(4, 3, strides=2), layers.LeakyReLU(),
                                      layers.Flatten(), layers.Dropout(0.2), layers.Dense(1, activation="sigmoid")])
    optimizers, loss = [keras.optimizers.Adam(1e-3) for _ in range(2)], keras.losses.BinaryCrossentropy()
    for optimizer, model in zip(optimizers, (discriminator, generator), strict=True):
        optimizer.build(model.trainable_variables)

    def step(images: Any) -> Any:
        def latent() -> Any:
            return keras.random.normal((ops.shape(images)[0], 6), seed=seeds)

        ones = ops.ones((ops.shape(images)[0], 1))
        both = ops.concatenate([generator(latent()), images], axis=0)
        labels = ops.concatenate([ones, 0 * ones], axis=0)
        labels += 0.05 * keras.random.uniform(ops.shape(labels), seed=seeds)
        losses = []
        for model, wanted, shown in ((discriminator, labels, lambda: both), (generator, 0 * ones,
                                                                             lambda: generator(latent()))):
            with tf.GradientTape() as tape:
                losses.append(loss(wanted, discriminator(shown(), training=True)))
            optimizers[len(losses) - 1].apply(tape.gradient(losses[-1], model.trainable_variables))
        return losses

    return step, [*discriminator.trainable_variables, *generator.trainable_variables]


def own_loop(batch: Arrays) -> tuple[Callable[..., Any], Sequence[Any]]:
    """Train with branches, loops, clipping, and a generator of random numbers."""
    random = np.random.default_rng(0)
    weights = [tf.Variable(random.standard_normal(shape)) for shape in ((10, 16), (16, 4))]
    seen, generator = tf.Variable(0, dtype=tf.int64), tf.random.Generator.from_seed(3)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    optimizer.build(weights)

    @tf.function
    def hidden_of(rows: tf.Tensor, training: bool) -> tf.Tensor:
        hidden = tf.nn.relu(rows @ weights[0])
        if training:
            hidden = tf.nn.dropout(hidden, 0.3)
        if tf.reduce_mean(hidden) > 0.5:
            hidden = hidden / tf.reduce_max(hidden)
        noise = generator.normal(tf.shape(hidden), stddev=tf.constant(0.01, tf.float64), dtype=tf.float64)
        return hidden + noise

    @tf.function
    def step(rows: tf.Tensor, labels: tf.Tensor) -> Any:
        labels = tf.cast(labels[:, 0], tf.int64)
        with tf.GradientTape() as tape:
            logits = hidden_of(rows, True) @ weights[1]
            loss = tf.nn.compute_average_loss(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
            for power in tf.range(3):
                loss += tf.cast(power, tf.float64) * 0.01 * tf.nn.l2_loss(weights[0])
                loss += 0.001 * tf.reduce_sum(tf.square(logits))
        gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, weights), 1.0)
        optimizer.apply(gradients, weights)
        seen.assign_add(tf.shape(rows, out_type=tf.int64)[0])
        right = tf.equal(tf.argmax(logits, 1), labels)
        return loss, norm, seen.read_value(), tf.reduce_mean(tf.cast(right, tf.float64))

    return step, weights


STEPS = {
    "mlp": Step(_fit(mlp, "binary_crossentropy", metrics=["accuracy", "auc"], weighted_metrics=["accuracy"]),
                _vectors(20, 1, 2, weighs=True)),
    "cnn": Step(_fit(cnn, lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]),
                _images, rounds=6, nbytes=1.2),  # one for each BatchNormalization, each way: few filters, in proportion
    "transformer": Step(_fit(transformer, "binary_crossentropy", lambda: keras.optimizers.Adam(global_clipnorm=1.0)),
                        _texts, zeros=r"attention(_\d+)?[/_]key[/_]bias"),
    # Adam of Keras sums the squares of what each word adds to the embedding, too
    "lstm": Step(_fit(lstm, "binary_crossentropy", metrics=["accuracy"]), _texts, rounds=1, nbytes=1.3),
    "gru": Step(_fit(gru, "mse", metrics=["mae"]), _series, rounds=1),
    "contrastive": Step(contrastive, _vectors(10, 12), rounds=4, nbytes=0),
    "lambda": Step(_fit(across_rows, "mse", lambda: "sgd"), _vectors(10), rounds=9, nbytes=0),
    "own loop": Step(own_loop, _vectors(10, 1, 4), rounds=9),  # two branches and a loop
    "circle": Step(_fit(embedding, lambda: keras.losses.Circle(gamma=80.0)), lambda random, rows: (
        random.standard_normal((rows, 10)), random.integers(0, 6, rows), random.random(rows)), rounds=4, nbytes=0),
    "dice": Step(_fit(segmentation, lambda: keras.losses.Dice(axis=None)), _masks),
    "dice of rows": Step(_fit(segmentation, lambda: keras.losses.Dice(axis=(1, 2, 3))), _masks),
    "tversky": Step(_fit(segmentation, lambda: keras.losses.Tversky(alpha=0.5)), _masks),
    "gan": Step(gan, lambda random, rows: (random.random((rows, 12, 12, 1)),), rounds=3),
}

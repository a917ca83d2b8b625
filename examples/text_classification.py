"""Classify texts with `TextVectorization` and a small transformer.

Start it with any launcher, for example:

    hvkeras run -np 2 python examples/text_classification.py
"""

from __future__ import annotations

import argparse
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvkeras as hvd

options = argparse.ArgumentParser(description="Tell good reviews from bad ones.")
options.add_argument("--epochs", type=int, default=3)
options.add_argument("--batch-size", type=int, default=16, help="texts per process and step (default: 16)")
args = options.parse_args()
LENGTH, WIDTH = 16, 32
NEUTRAL = ["the", "a", "film", "movie", "plot", "was", "is", "actor", "scene", "and", "of", "very", "this", "story"]
PRAISE, BLAME = ["great", "lovely", "superb", "moving", "funny"], ["dull", "awful", "boring", "weak", "noisy"]


def write_reviews(count: int) -> tuple[Any, Any]:
    """Return texts, and whether they are good. A quarter of them negate their opinion: "not clever" is bad."""
    random = np.random.default_rng(seed=0)  # the same texts on every rank
    good, negated = random.integers(2, size=count), random.random(count) < 0.25
    texts = []
    for is_good, is_negated in zip(good, negated, strict=True):
        words = list(random.choice(NEUTRAL, random.integers(4, 12)))
        opinion = random.choice(PRAISE if is_good != is_negated else BLAME)
        words.insert(random.integers(len(words)), f"not {opinion}" if is_negated else opinion)
        texts.append(" ".join(words))
    return tf.constant(texts), good


hvd.init()
x, y = write_reviews(4_000)
x_train, y_train = hvd.shard((x[:3_000], y[:3_000]))
x_test, y_test = hvd.shard((x[3_000:], y[3_000:]), training=False)

# 1. Each rank has other texts. `hvd.adapt` counts the words of all ranks, and gives them the same vocabulary.
vectorize = keras.layers.TextVectorization(max_tokens=1_000, output_sequence_length=LENGTH)
hvd.adapt(vectorize, x_train)

# 2. The model trains on the numbers of words.
keras.utils.set_random_seed(1 + hvd.rank())
inputs = keras.Input((LENGTH,), dtype="int64")
positions = keras.ops.cumsum(keras.ops.ones_like(inputs), axis=1) - 1
x = (keras.layers.Embedding(vectorize.vocabulary_size(), WIDTH)(inputs)
     + keras.layers.Embedding(LENGTH, WIDTH)(positions))
x = keras.layers.LayerNormalization()(
    x + keras.layers.MultiHeadAttention(num_heads=2, key_dim=WIDTH // 2, dropout=0.1)(x, x))
x = keras.layers.LayerNormalization()(
    x + keras.layers.Dense(WIDTH)(keras.layers.Dense(2 * WIDTH, activation="relu")(x)))
outputs = keras.layers.Dense(1, activation="sigmoid")(keras.layers.GlobalAveragePooling1D()(x))
model = keras.Model(inputs, outputs)
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size())), loss="binary_crossentropy",
              metrics=["accuracy"])
model.fit(vectorize(x_train), y_train, batch_size=args.batch_size, epochs=args.epochs,
          validation_data=(vectorize(x_test), y_test), verbose=hvd.verbose(),
          callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
_, accuracy = model.evaluate(vectorize(x_test), y_test, verbose=0)

# 3. A model that takes texts includes the vocabulary. All ranks predict together.
classifier = keras.Sequential([keras.Input((), dtype="string"), vectorize, model])
texts = ["a superb film", "the plot was not clever", "this story was not dull"]
scores = hvd.predict(classifier, tf.constant(texts), verbose=0)
if hvd.rank() == 0:
    print(*(f"{text}: {score:.2f}" for text, score in zip(texts, scores[:, 0], strict=True)), sep="\n")
    print(f"test accuracy: {accuracy:.4f}", flush=True)

hvd.shutdown()

"""Recommend items from a large embedding table, of which ranks exchange only the rows that a step uses.

Start it with any launcher, for example:

    hvkeras run -np 2 python examples/recommendation.py
    hvkeras run -np 2 python examples/recommendation.py --dense    # exchanges the gradient of the whole table

Add `--report` after `hvkeras run` to see where the time of a step goes.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import keras
import numpy as np

import hvkeras as hvd

options = argparse.ArgumentParser(description="Predict clicks on items from the items that a user clicked on before.")
options.add_argument("--items", type=int, default=100_000, help="rows of the table (default: 100,000)")
options.add_argument("--epochs", type=int, default=3)
options.add_argument("--batch-size", type=int, default=256, help="samples per process and step (default: 256)")
options.add_argument("--dense", action="store_true", help="exchange gradients as large as the table")
args = options.parse_args()
GENRES, DIMENSION = 8, 32


def draw_clicks(count: int) -> tuple[dict[str, Any], Any]:
    """Return ten past clicks of each user, another item, and whether the user, who prefers a genre, clicks on it."""
    random = np.random.default_rng(seed=0)  # the same clicks on every rank
    taste, any_genre = random.integers(GENRES, size=(count, 1)), random.integers(GENRES, size=(count, 11))
    genres = np.where(random.random((count, 11)) < 0.8, taste, any_genre)
    clicked = random.integers(2, size=count)
    genres[:, 10] = np.where(clicked, taste[:, 0], any_genre[:, 10])
    # In each genre, a few items are far more popular than the others.
    items = GENRES * (args.items // GENRES * random.random((count, 11)) ** 12).astype("int32") + genres
    return {"history": items[:, :10], "item": items[:, 10]}, clicked


# 1. Shard inputs and labels together.
hvd.init()
x, y = draw_clicks(50_000)
x_train, y_train = hvd.shard(({name: ids[10_000:] for name, ids in x.items()}, y[10_000:]))
x_test, y_test = hvd.shard(({name: ids[:10_000] for name, ids in x.items()}, y[:10_000]), training=False)

keras.utils.set_random_seed(1 + hvd.rank())
history, item = keras.Input((10,), name="history", dtype="int32"), keras.Input((), name="item", dtype="int32")
embedding = keras.layers.Embedding(args.items, DIMENSION)
user = keras.layers.Dense(DIMENSION)(keras.layers.GlobalAveragePooling1D()(embedding(history)))
model = keras.Model({"history": history, "item": item}, keras.layers.Dot(axes=1)([user, embedding(item)]))

# 2. The gradient of an `Embedding` is sparse: a row for each item in the batch. In a step, a rank sends 256 x 11 rows
#    of 32 numbers (0.36 MB), and not a gradient of the table's size (12.8 MB). `SGD` also updates only these rows,
#    whereas optimizers of Keras with a state, such as Adam, compute on the whole table. A step changes a row little,
#    because the loss is a mean over the batch, so the learning rate is high.
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(2.0 * hvd.size()), sparse_as_dense=args.dense)
model.compile(optimizer, keras.losses.BinaryCrossentropy(from_logits=True),
              metrics=[keras.metrics.AUC(from_logits=True)])

started = time.perf_counter()
model.fit(x_train, y_train, batch_size=args.batch_size, epochs=args.epochs, validation_data=(x_test, y_test),
          callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)], verbose=hvd.verbose())
seconds = time.perf_counter() - started

_, area = model.evaluate(x_test, y_test, verbose=0)
if hvd.rank() == 0:
    print(f"trained in {seconds:.0f} s, test AUC: {area:.4f}", flush=True)

hvd.shutdown()

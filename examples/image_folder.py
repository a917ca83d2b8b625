"""Classify images from a folder with a subfolder per class, with augmentation layers.

Start it with any launcher, for example:

    hvkeras run -np 2 python examples/image_folder.py                  # draws its own images into ./shapes
    hvkeras run -np 2 python examples/image_folder.py --folder photos  # photos/cats/1.jpg, photos/dogs/1.jpg, ...
"""

from __future__ import annotations

import argparse
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import hvkeras as hvd

options = argparse.ArgumentParser(description="Classify images from a folder with a subfolder per class.")
options.add_argument("--folder", type=Path, default=Path("shapes"), help="created if missing (default: shapes)")
options.add_argument("--epochs", type=int, default=4)
options.add_argument("--batch-size", type=int, default=16, help="images per process and step (default: 16)")
args = options.parse_args()


def draw_images(folder: Path, count: int = 200) -> None:
    """Write images of 32 x 32 pixels of three shapes on noise, `count` per class."""
    random = np.random.default_rng(seed=0)
    row, column = np.mgrid[:32, :32]
    for name in ("crosses", "discs", "rings"):
        (folder / name).mkdir(parents=True)
        for index in range(count):
            y, x = np.abs(row - random.integers(10, 22)), np.abs(column - random.integers(10, 22))
            distance = np.hypot(y, x)
            shape = {"crosses": np.minimum(y, x) < 2, "discs": distance < 7, "rings": abs(distance - 7) < 2}[name]
            image = random.uniform(0, 90, (32, 32, 3)) + shape[..., None] * random.uniform(60, 160, 3)
            keras.utils.save_img(folder / name / f"{index}.png", image, scale=False)


hvd.init()

# 1. One rank writes the images, and all others wait until they are complete.
if hvd.rank() == 0 and not args.folder.exists():
    draw_images(args.folder)
hvd.barrier()

# 2. All ranks list the same files: the seed makes the order and the split equal. With `batch_size=None`, the elements
#    are images, which `hvd.shard` assigns one by one; each rank keeps its own images in memory, and batches them.
train, test = keras.utils.image_dataset_from_directory(
    args.folder, image_size=(32, 32), batch_size=None, validation_split=0.2, subset="both", seed=1)
classes = len(train.class_names)
train = hvd.shard(train).cache().shuffle(1000).batch(args.batch_size).prefetch(tf.data.AUTOTUNE)
test = hvd.shard(test, training=False).cache().batch(args.batch_size)

# 3. Each rank augments its images differently.
keras.utils.set_random_seed(1 + hvd.rank())
model = keras.Sequential([
    keras.Input((32, 32, 3)),
    keras.layers.RandomFlip(),
    keras.layers.RandomRotation(0.1),
    keras.layers.RandomTranslation(0.1, 0.1),
    keras.layers.Rescaling(1 / 255),
    *(layer for filters in (16, 32, 64) for layer in (
        keras.layers.Conv2D(filters, 3, padding="same", activation="relu"), keras.layers.MaxPooling2D())),
    keras.layers.GlobalMaxPooling2D(),
    keras.layers.Dense(classes),
])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.002 * hvd.size())), loss, metrics=["accuracy"])
model.fit(train, validation_data=test, epochs=args.epochs, shuffle=False, verbose=hvd.verbose(),
          callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

_, accuracy = model.evaluate(test, verbose=0)
if hvd.rank() == 0:
    print(f"test accuracy: {accuracy:.4f}", flush=True)

hvd.shutdown()

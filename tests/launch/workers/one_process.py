"""Script for one process: it writes, saves, logs and downloads; each rank also writes what it has found."""

import json
import os
import random
import sys
import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

results, elsewhere, url = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
found = {"states": [repr(random.getstate()), repr(np.random.get_state()), float(tf.random.uniform([])),
                    float(keras.random.uniform([]))]}

elsewhere.mkdir(exist_ok=True)
os.makedirs("out")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.ones((8, 4), "float32")
callbacks = [keras.callbacks.ModelCheckpoint("out/{epoch}.keras"), keras.callbacks.CSVLogger(elsewhere / "log.csv"),
             keras.callbacks.ModelCheckpoint(elsewhere / "best.weights.h5", "loss", save_best_only=True,
                                             save_weights_only=True),
             keras.callbacks.BackupAndRestore("backup", delete_checkpoint=False)]
model.fit(x, x[:, :1], epochs=2, verbose=2, callbacks=callbacks)
found["log"] = (elsewhere / "log.csv").read_text().count("\n")
found["best"] = float(callbacks[2].best)

temporary = os.path.join(tempfile.mkdtemp(), "model.keras")
for path in ("model.keras", elsewhere / "model.keras", temporary):
    model.save(path)
    keras.saving.load_model(path)
model.save_weights("model.weights.h5")
model.load_weights("model.weights.h5")
model.export("exported")
found["seen"] = sorted(str(path) for path in Path(".").rglob("*"))

found["errors"] = []
for path in ("model.unknown", "/proc/none/model.keras"):
    try:
        model.save(path)
    except (OSError, ValueError) as error:
        found["errors"].append(f"{type(error).__name__}: {error}")

for folder in (elsewhere / "cache", "cache"):
    archive = keras.utils.get_file("archive.zip", f"{url}/archive.zip", extract=True, cache_dir=folder)
    found[str(folder)] = sorted(os.listdir(archive))
print("the end")
results.with_suffix(f".{os.environ.get('HVKERAS_RUN_RANK', 'alone')}").write_text(json.dumps(found))

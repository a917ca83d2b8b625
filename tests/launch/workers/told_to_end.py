"""Train for three epochs with one SIGTERM; after the restart, compare the weights with an uninterrupted run.

Arguments: the kind of saved state (`backup`, `commits`), and the receiver of SIGTERM after seven steps: a rank, or the
first ancestor process whose command line contains a word.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import psutil

import hvkeras as hvd

KIND, WHO = sys.argv[1:]


class Told(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
    steps = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        time.sleep(0.05)
        if self.steps == 7 and hvd.rank() == (int(WHO) if WHO.isdigit() else hvd.size() - 1):
            with open("told", "a"):
                os.kill(told(), signal.SIGTERM)


def told() -> int:
    if WHO.isdigit():
        return os.getpid()
    above = [process for process in psutil.Process().parents() if WHO in " ".join(process.cmdline())]
    return int((above[0] if WHO != "hvkeras" else above[-1]).pid)


def trained(*callbacks: Any) -> Any:
    keras.utils.set_random_seed(7)
    x = np.random.default_rng(0).normal(size=(160, 4)).astype("float32")
    x, y = hvd.shard((x, x.sum(1)))
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.02)), "mse", jit_compile=False)
    model.fit(x, y, epochs=3, batch_size=16 // hvd.size(), verbose=0, shuffle=False, callbacks=list(callbacks))
    return model


hvd.init()
keeps = (hvd.callbacks.BackupAndRestore("kept") if KIND == "backup"
         else hvd.elastic.ElasticCallback(batches_per_commit=None))
is_second = Path("told").exists()
model = trained(*([] if is_second else [Told()]), keeps)
if is_second:
    same = all(np.array_equal(one, other) for one, other in zip(
        model.get_weights(), trained().get_weights(), strict=True))
    print(f"same: {same}\n", end="", flush=True)  # in one write, so that lines of ranks do not mix
else:
    print("not ended", flush=True)

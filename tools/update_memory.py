"""Prints the memory of each rank in steps with Adam, of a model with 260 MiB of weights, and at the end of `fit`.

It is started as `hvkeras run -np 2 --backend native python tools/update_memory.py`, with `HVKERAS_SHARD_UPDATE=1` and
without.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import keras
import numpy as np

import hvkeras as hvd

BATCH, STEPS = 64, 8


def resident(name: str) -> float:
    """Returns a line of /proc/self/status, in MiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) / 1024


class Peak(keras.callbacks.Callback):
    """Notes the peak of the steps, before `fit` ends."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's arguments
        """Notes the peak until now."""
        self.steps = resident("VmHWM")


def main() -> None:
    """Trains on noise."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--compile-update", choices=("auto", "off"), default="auto")
    wanted = parser.parse_args().compile_update
    hvd.init()
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((256,)),
                              *(keras.layers.Dense(4096, activation="relu") for _ in range(5)), keras.layers.Dense(10)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(), compile_update=wanted == "auto" and wanted), "mse")
    model.optimizer.build(model.trainable_variables)
    built, peak = resident("VmRSS"), Peak()
    rows, draw = BATCH * STEPS, np.random.default_rng(hvd.rank())
    model.fit(draw.random((rows, 256), np.float32), draw.random((rows, 10), np.float32), BATCH, callbacks=[peak],
              verbose=0)
    at_end = resident("VmHWM")
    print(f"built {built:.0f} MiB; steps up to {peak.steps:.0f} MiB; end of fit {at_end:.0f} MiB", flush=True)


if __name__ == "__main__":
    main()

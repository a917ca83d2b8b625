"""Print the peak memory of each rank during steps with Adam and at the end of `fit`. The model has 260 MiB of weights.

Start it with `hvkeras run -np 2 --backend native python tools/update_memory.py`, with and without
`HVKERAS_SHARD_UPDATE=1`.
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
    """Return a field of /proc/self/status, in MiB."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) / 1024


class Peak(keras.callbacks.Callback):
    """Callback that records the peak memory during steps, before `fit` ends."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's arguments
        """Record the peak so far."""
        self.steps = resident("VmHWM")


def main() -> None:
    """Train on noise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile-update", choices=("auto", "off"), default="auto")
    update = parser.parse_args().compile_update
    hvd.init()
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((256,)),
                              *(keras.layers.Dense(4096, activation="relu") for _ in range(5)), keras.layers.Dense(10)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(), compile_update=update == "auto" and update), "mse")
    model.optimizer.build(model.trainable_variables)
    built, peak = resident("VmRSS"), Peak()
    rows, draw = BATCH * STEPS, np.random.default_rng(hvd.rank())
    model.fit(draw.random((rows, 256), np.float32), draw.random((rows, 10), np.float32), BATCH, callbacks=[peak],
              verbose=0)
    at_end = resident("VmHWM")
    print(f"built {built:.0f} MiB; steps up to {peak.steps:.0f} MiB; end of fit {at_end:.0f} MiB", flush=True)


if __name__ == "__main__":
    main()

"""Trains elastically with an optimizer whose update the ranks share; all have the same data, as one process would have.

Arguments: the optimizer, the number of ranks to end with (0 for any), and events: a worker's number, what it does, and
after which step: `1:kill:7`, `0:raise:9`, or `0:slots=1:12`, which writes a number of slots for a host discovery
script.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import hvkeras as hvd

keras: Any = tf.keras
STEPS, EVERY = 25, 3
WORKER = os.environ["HVKERAS_RUN_WORKER"]


def model_and_optimizer(name: str) -> tuple[Any, Any]:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.layers.Input((12,)), keras.layers.Dense(33, activation="tanh"),
                              keras.layers.Dense(5)])
    kind, *options = name.split("+")
    optimizer = getattr(keras.optimizers, kind)(0.01, **dict.fromkeys(options, 0.5))
    return model, optimizer


def data() -> tuple[Any, Any]:
    numbers = np.random.default_rng(1)
    return numbers.normal(size=(64, 12)).astype("float32"), numbers.normal(size=(64, 5)).astype("float32")


def happens(events: dict[int, str], step: int) -> None:
    what, _, slots = events.get(step, "").partition("=")
    mark = Path(f"done.{WORKER}.{step}")
    if not what or mark.exists():  # not again where the step is repeated
        return
    mark.touch()
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "raise":
        raise ArithmeticError("stumbles")
    Path("hosts").write_text(f"localhost:{slots}\n")


def main(name: str, wanted: int, events: dict[int, str]) -> None:
    hvd.init()
    x, y = data()
    model, optimizer = model_and_optimizer(name)
    model.compile(hvd.DistributedOptimizer(optimizer, shard_update=True), "mse", jit_compile=False)
    state: Any = hvd.elastic.TensorFlowKerasState(model, step=0)

    @hvd.elastic.run
    def train(state: Any) -> None:
        while state.step < STEPS:
            model.train_on_batch(x, y)
            state.step += 1
            time.sleep(0.01)
            if state.step % EVERY == 0:
                state.commit()
            happens(events, state.step)
        while wanted and hvd.size() != wanted:  # until others have joined or left
            time.sleep(0.1)
            state.commit()

    train(state)
    hvd.gather_optimizer(model, to=range(hvd.size()))
    alone, plain = model_and_optimizer(name)
    alone.compile(plain, "mse", jit_compile=False)
    for _ in range(STEPS):
        alone.train_on_batch(x, y)
    far = [apart(mine, its) for mine, its in zip(
        [*model.weights, *model.optimizer.variables], [*alone.weights, *plain.variables], strict=True)]
    print(f"as one process: {max(far) < 1e-6}" if max(far) < 1e-6 else f"differs: {far}", flush=True)


def apart(mine: Any, its: Any) -> float:
    return float(np.abs(np.asarray(mine, np.float64) - np.asarray(its, np.float64)).max())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), {int(step): what for worker, what, step in (
        event.split(":") for event in sys.argv[3].split()) if worker == WORKER})

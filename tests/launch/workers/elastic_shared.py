"""Train elastically with a sharded optimizer update. All ranks have the same data, as one process would have.

Arguments: the optimizer (after `fit:` to train with `fit`), the final number of ranks (0 for any), and events. An event
is a worker's number, an action, and a step: `1:kill:7`, `0:raise:9`, or `0:slots=1:12`, which sets the number of slots
that the host discovery script finds.
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
    if not what or mark.exists():  # not again when the step is repeated
        return
    mark.touch()
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "raise":
        raise ArithmeticError("stumbles")
    Path("hosts.new").write_text(f"localhost:{slots}\n")
    Path("hosts.new").rename("hosts")  # it may be read at any time


def by_fit(model: Any, events: dict[int, str]) -> None:
    """Train with `fit`, after which rank 0 has the complete state."""
    x, y = data()
    happening = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, _: (happens(events, epoch + 1),
                                                                              time.sleep(0.01)))
    model.fit(x, y, batch_size=len(x), epochs=STEPS, shuffle=False, verbose=0, callbacks=[
        happening, hvd.elastic.ElasticCallback(learning_rate=lambda rate, *_: rate)])
    if hvd.rank() == 0:
        model.save("end.keras")
        loaded = keras.models.load_model("end.keras")
        model.optimizer.set_weights([np.asarray(one) for one in loaded.optimizer.variables])


def by_loop(model: Any, wanted: int, events: dict[int, str]) -> None:
    x, y = data()
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
        while wanted and hvd.size() != wanted:
            time.sleep(0.1)
            state.commit()

    train(state)
    hvd.gather_optimizer(model)


def main(name: str, wanted: int, events: dict[int, str]) -> None:
    hvd.init()
    x, y = data()
    by, _, name = name.rpartition(":")
    model, optimizer = model_and_optimizer(name)
    model.compile(hvd.DistributedOptimizer(optimizer, shard_update=True), "mse", jit_compile=False)
    if by:
        by_fit(model, events)
    else:
        by_loop(model, wanted, events)
    alone, plain = model_and_optimizer(name)
    alone.compile(plain, "mse", jit_compile=False)
    for _ in range(STEPS):
        alone.train_on_batch(x, y)
    with_state = hvd.rank() == 0
    far = [apart(mine, its) for mine, its in zip(
        [*model.weights, *(model.optimizer.variables if with_state else ())],
        [*alone.weights, *(plain.variables if with_state else ())], strict=True)]
    print(f"as one process: {max(far) < 1e-6}" if max(far) < 1e-6 else f"differs: {far}", flush=True)


def apart(mine: Any, its: Any) -> float:
    return float(np.abs(np.asarray(mine, np.float64) - np.asarray(its, np.float64)).max())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), {int(step): what for worker, what, step in (
        event.split(":") for event in sys.argv[3].split()) if worker == WORKER})

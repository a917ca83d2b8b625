"""What recording costs: steps with and without it, in turns of short blocks, in one job.

    hvkeras run -np 2 --backend native --report python tools/recording_cost.py

Each rank trains two equal models by the train function of Keras's `fit`, one that was traced with recording and one
that was not. The difference between two blocks that follow each other is one sample; the median of many is printed,
with what the thread that writes the record took of the time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

import hvkeras as hvd
from hvkeras import recording
from hvkeras.bench.models import MODELS, Model


def train_step(model: Model) -> Callable[[], None]:
    """A step of Keras's train function on a model of `hvkeras bench`, traced as it is called for the first time."""
    keras.utils.set_random_seed(0)
    network = model.build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    network.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1e-4)), loss, jit_compile=False)
    batches = iter(tf.data.Dataset.from_tensors(model.data(hvd.rank())).repeat())
    network.make_train_function()
    return lambda: network.train_function(batches)


def block(step: Callable[[], None], steps: int) -> float:
    """Seconds a step of a block that all ranks begin together."""
    hvd.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - began) / steps


def main() -> None:
    """Measures, and has rank 0 print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--pairs", type=int, default=200, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=20, help="steps of a block")
    flags = parser.parse_args()
    hvd.init()
    model = MODELS[flags.model]
    recorded = train_step(model)
    with recording.paused():
        plain = train_step(model)
        block(plain, flags.steps)
    block(recorded, flags.steps)
    pairs = []
    for number in range(flags.pairs):
        order = (recorded, plain) if number % 2 else (plain, recorded)
        times = {step: block(step, flags.steps) for step in order}
        pairs.append((times[plain], times[recorded]))
    without = statistics.median(pair[0] for pair in pairs)
    more = [pair[1] - pair[0] for pair in pairs]
    lower, middle, upper = np.percentile(more, (25, 50, 75))
    error = 1.25 * np.std(np.clip(more, lower - 3 * (upper - lower), upper + 3 * (upper - lower))) / len(more) ** 0.5
    if hvd.rank() == 0:
        print(f"{flags.model}, {hvd.size()} ranks: {1000 * without:.2f} ms a step without recording; with it"
              f" {1e6 * middle:+.0f} us ({middle / without:+.2%}, standard error {error / without:.2%}, quartiles"
              f" {1e6 * lower:+.0f} to {1e6 * upper:+.0f} us); writing the record takes"
              f" {recording.writing_share():.2%} of a core")
    hvd.shutdown()


if __name__ == "__main__":
    main()

"""Overhead of recording: steps with and without it, in alternating short blocks, in one job.

    hvkeras run -np 2 --backend native --report python tools/recording_cost.py    # wall-clock time per step
    HVKERAS_REPORT=report HVKERAS_BACKEND=local python tools/recording_cost.py    # CPU time per step

Each rank trains identical models with the train function of Keras's `fit`; half of them are traced with recording.
There are several of each kind, because the addresses of the weights also influence the speed. The tool prints
percentiles of the step times (the low ones are more reliable on a busy machine), and the CPU share of the thread that
writes the record.

One process has no collectives. It copies the gradients instead, in two buckets, with the timestamps of collectives. Its
CPU time can be measured even on a busy machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvkeras as hvd
from hvkeras.bench.models import MODELS, ModelSpec
from hvkeras.diagnostics import recorder, spans
from hvkeras.gradients.reducer import GradientReducer
from hvkeras.job.plans import Plan


def train_step(model: ModelSpec) -> Callable[[], None]:
    """Return a function that runs a step of Keras's train function on a model of `hvkeras bench`.

    The first call traces it.
    """
    keras.utils.set_random_seed(0)
    network = model.build()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    network.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1e-4)), loss, jit_compile=False)
    batches = iter(tf.data.Dataset.from_tensors(model.data(hvd.rank())).repeat())
    network.make_train_function()
    return lambda: network.train_function(batches)


def copy_gradients(_: GradientReducer, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    """Replacement of `GradientReducer.reduce` for one process: copies, with the timestamps of collectives."""
    recorder.recording().step(gradients, variables)
    plan = Plan.of("gradients", gradients, (0,), "copies of the gradients")
    with spans.store().in_step():
        engine = spans.store().timed(Copies(), plan) if recorder.recording().is_on() else Copies()
    half = len(gradients) // 2
    return [*engine.allreduce(gradients[:half], f"{plan.key}.1"), *engine.allreduce(gradients[half:], f"{plan.key}.0")]


class Copies:
    """Backend whose allreduce copies its inputs."""

    def allreduce(self, tensors: Sequence[Any], _: str) -> list[Any]:
        """Copy tensors."""
        return [tf.identity(tensor) for tensor in tensors]


def block(step: Callable[[], None], steps: int) -> list[float]:
    """Run a block that all ranks start together, and return the seconds of each step (with one rank, of CPU time)."""
    hvd.barrier()
    clock = time.perf_counter if hvd.size() > 1 else time.process_time
    times = [clock()]
    for _ in range(steps):
        step()
        times.append(clock())
    return list(np.diff(times))


def main() -> None:
    """Measure on all ranks, and print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="mlp")
    parser.add_argument("--pairs", type=int, default=200, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=20, help="steps per block")
    parser.add_argument("--copies", type=int, default=4, help="models of each kind")
    flags = parser.parse_args()
    hvd.init()
    if hvd.size() == 1:
        GradientReducer.reduce = copy_gradients
        tf.config.threading.set_inter_op_parallelism_threads(1)
        tf.config.threading.set_intra_op_parallelism_threads(1)
    model = MODELS[flags.model]
    steps: dict[bool, list[Callable[[], None]]] = {True: [], False: []}  # key: with recording
    for _ in range(flags.copies):
        steps[True].append(train_step(model))
        block(steps[True][-1], flags.steps)
        with recorder.recording().paused():
            steps[False].append(train_step(model))
            block(steps[False][-1], flags.steps)
    times: dict[bool, list[list[float]]] = {True: [], False: []}
    for number in range(flags.pairs):
        for kind in (True, False) if number % 2 else (False, True):
            times[kind].append(block(steps[kind][number // 2 % flags.copies], flags.steps))
    if hvd.rank() == 0:
        cpu = ", CPU time" if hvd.size() == 1 else ""
        print(f"{flags.model}, {hvd.size()} ranks{cpu}, {flags.pairs} pairs of blocks of {flags.steps} steps:")
        for percentile in (5, 10, 25, 50):
            print(f"  {compared(np.array(times[False]), np.array(times[True]), percentile)}")
        print(f"  writing the record takes {recorder.recording().writing_share():.2%} of a core")
    hvd.shutdown()


def compared(without: Any, with_it: Any, percentile: int) -> str:
    """Return a text: a percentile of the step times, its change by recording, and the bootstrap standard error."""
    def increase(chosen: Any) -> float:
        return float(np.percentile(with_it[chosen], percentile) / np.percentile(without[chosen], percentile) - 1)

    random = np.random.default_rng(0)
    error = np.std([increase(random.integers(0, len(without), len(without))) for _ in range(200)])
    return (f"{percentile}th percentile: {1000 * np.percentile(without, percentile):.2f} ms per step without recording,"
            f" {increase(np.arange(len(without))):+.2%} with it (standard error {error:.2%})")


if __name__ == "__main__":
    main()

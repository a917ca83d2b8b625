"""Overhead of a training step apart from computation and communication, on the MLP of `hvkeras bench`.

    hvkeras run -np 2 --backend native python tools/step_costs.py

Each part is measured separately, with many repetitions, because the sum is smaller than the variation of step times on
most machines. Rank 0 prints its microseconds per step, and the duration of a step of `fit`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvkeras as hvd
from hvkeras.bench.models import MODELS
from hvkeras.compat import graphs
from hvkeras.job.session import current_session
from hvkeras.training import fit_callbacks, fit_hooks, metrics
from hvkeras.training.divergence_check import DivergenceCheck
from hvkeras.training.fit_run import FitRun

STEPS, REPEAT = 300, 2000
TICK = os.sysconf("SC_CLK_TCK")


def microseconds(function: Callable[[], Any], repeat: int = REPEAT) -> float:
    """Return the median duration of a call over ten series of calls."""
    series = []
    for _ in range(10):
        begun = time.perf_counter()
        for _ in range(repeat // 10):
            function()
        series.append((time.perf_counter() - begun) / (repeat // 10))
    return 1e6 * float(np.median(series))


def in_a_graph(operation: Callable[[], Any], count: int = 1000) -> float:
    """Return the microseconds of a stateful operation, measured as one of many in a function."""
    @tf.function(autograph=False)  # type: ignore[untyped-decorator]  # TensorFlow ships no types
    def many() -> Any:
        for _ in range(count):
            operation()
        return tf.constant(0)

    many()
    return microseconds(many, 100) / count


def thread_seconds() -> dict[str, float]:
    """Return the CPU seconds of hvkeras's threads, by name."""
    found = {}
    for thread in threading.enumerate():
        if thread.name.startswith("hvkeras"):
            fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rsplit(")", 1)[1].split()
            found[thread.name] = (int(fields[11]) + int(fields[12])) / TICK
    return found


class Probe(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that measures the parts at the end of the second epoch, while `fit` runs."""

    def __init__(self) -> None:
        super().__init__()
        self._supports_tf_logs = True
        self.costs: dict[str, float] = {}
        self.step = self._begun = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Start to time an epoch."""
        self._begun, self._threads = time.perf_counter(), thread_seconds()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
        """Store the time per step, and measure all other parts."""
        seconds, spent = time.perf_counter() - self._begun, thread_seconds()
        if epoch == 0:
            return
        self.step = 1e6 * seconds / STEPS
        run = fit_hooks.running_calls().run_of(self.model)
        assert isinstance(run, FitRun)
        (follower,) = fit_callbacks.with_hook_callbacks(self.model, None)
        self.costs["progress, by a callback"] = microseconds(lambda: follower.on_train_batch_begin(0, logs={}))
        self.costs["agreement on stop_training"] = (
            microseconds(lambda: run.before_step(0)) + microseconds(lambda: self.model.stop_training))
        self.costs |= {f"thread {name}": 1e6 * (seconds - self._threads.get(name, 0.0)) / STEPS
                       for name, seconds in spent.items()}
        check = DivergenceCheck(self.model, hvd.global_process_set, set, False, True)
        check.check(1, False, False)
        every = current_session().settings.guard_steps
        self.costs[f"divergence check, every {every} steps"] = microseconds(
            lambda: check.check(1, False, False), 50) / every
        own = metrics.own_states(self.model)
        self.costs[f"metrics of all ranks, once in {STEPS} steps"] = microseconds(
            lambda: metrics.merge(self.model, hvd.global_process_set, "fit", own), 50) / STEPS
        counter = graphs.FunctionCounter()
        self.costs["count of entries into plans, in the graph"] = in_a_graph(counter.count_one)
        variable = graphs.persistent_variable(0, tf.int64, "batches")
        self.costs["count of batches, in the graph"] = in_a_graph(lambda: variable.assign_add(1))


def main() -> None:
    """Measure on all ranks, and print on rank 0."""
    hvd.init()
    keras.utils.set_random_seed(1)
    made = MODELS["mlp"]
    x, y = made.data(hvd.rank())
    model, probe = made.build(), Probe()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(1e-4)),
                  keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    model.fit(np.tile(x, (STEPS, 1)), np.tile(y, STEPS), batch_size=made.batch, epochs=2, verbose=0, callbacks=[probe])
    if hvd.rank() == 0:
        print(f"a step of fit takes {probe.step:,.0f} us, of which")
        for name, cost in probe.costs.items():
            print(f"  {cost:8.2f} us ({cost / probe.step:.2%})  {name}")
        total = sum(probe.costs.values())
        print(f"  {total:8.2f} us ({total / probe.step:.2%})  total")
    hvd.shutdown()


if __name__ == "__main__":
    main()

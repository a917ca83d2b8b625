"""Overhead of elastic training without membership changes: a commit every 100 steps, compared with a plain job.

Two local ranks train an MLP with Adam. Plain and elastic jobs (`--min-np 1`) alternate. In elastic jobs, `fit` records
the processed samples, and commits the model and the optimizer, also to disk. Within each elastic job, epochs with and
without commits alternate.

Example:
    python tools/elastic_cost.py
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STEPS, WARM_UP = 200, 2
BIN = Path(sys.executable).parent


def train(epochs: int) -> None:
    """Train on one rank; rank 0 prints the milliseconds per step, with commits (elastic jobs only) and without."""
    import keras
    import numpy as np

    import hvkeras as hvd  # noqa: PLC0415 - imports TensorFlow, which only ranks need

    hvd.init()
    keras.utils.set_random_seed(1)
    random = np.random.default_rng(0)
    x, y = hvd.shard((random.standard_normal((STEPS * 32 * hvd.size(), 784)).astype("float32"),
                      random.integers(0, 10, STEPS * 32 * hvd.size())))
    model = keras.Sequential([keras.Input((784,)), keras.layers.Dense(1024, "relu"), keras.layers.Dense(1024, "relu"),
                              keras.layers.Dense(10)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3)),
                  keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    state: Any = hvd.elastic.TensorFlowKerasState(model, batch=0)
    is_elastic = bool(os.environ.get("HVKERAS_RUN_MEMBERSHIP"))

    def epoch(*callbacks: Any) -> float:
        began = time.perf_counter()
        model.fit(x, y, batch_size=32, verbose=0, callbacks=list(callbacks))
        return 1e3 * (time.perf_counter() - began) / STEPS

    def measure(state: Any) -> None:
        times: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(epochs + WARM_UP):
            for commits in ((True, False) if turn % 2 else (False, True)) if is_elastic else (False,):
                taken = epoch(*([hvd.elastic.UpdateBatchStateCallback(state),
                                 hvd.elastic.CommitStateCallback(state, batches_per_commit=100)] if commits else []))
                if turn >= WARM_UP:
                    times[commits].append(taken)
        if hvd.rank() == 0:
            print("took", *(statistics.median(found) for found in times.values() if found), flush=True)

    if is_elastic:
        hvd.elastic.run(measure)(state)
    else:
        measure(state)


def took(flags: list[str], epochs: int) -> list[float]:
    """Run a job, and return the milliseconds per step on rank 0: with commits (elastic jobs only), and without."""
    command = [str(BIN / "hvkeras"), "run", "-np", "2", *flags, sys.executable, str(Path(__file__).resolve()), "--rank",
               "--epochs", str(epochs)]
    done = subprocess.run(command, env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}, check=False, capture_output=True,
                          text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return [float(number) for number in re.findall(r"took (.*)", done.stdout)[0].split()]


def main() -> None:
    """Run the jobs alternately, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=6, help="jobs of each kind")
    parser.add_argument("--epochs", type=int, default=8, help="epochs of each kind per job")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        train(given.epochs)
        return
    total, commits = [], []
    for _ in range(given.jobs):
        (plain,) = took([], given.epochs)
        with_commits, without = took(["--min-np", "1", "--reset-limit", "1"], given.epochs)
        total.append(with_commits / plain)
        commits.append(with_commits / without)
        print(f"ms per step: plain job {plain:.2f}, elastic job {without:.2f}, with commits {with_commits:.2f}")
    for title, ratios in (("elastic / plain", total), ("with commits / without", commits)):
        low, median, high = statistics.quantiles(ratios, n=4)
        print(f"{title}: {median:.4f} (quartiles {low:.4f} and {high:.4f})")


if __name__ == "__main__":
    main()

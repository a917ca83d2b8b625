"""Gain of `hvkeras run --preload`: duration and memory of jobs, and the time until a rank trains; runs in turns.

Each measure is taken with and without `--preload tensorflow,keras`, alternately:

- the duration of a job of `--ranks` ranks that trains one Dense layer for 20 steps, from its start to its end;
- the proportional memory (PSS) of such ranks while they train, in total;
- the time from the start of a job of two ranks until the first step of the last rank, beside the duration of
  `python -c "import tensorflow, keras"`;
- the time from the loss of a rank in an elastic job of two ranks until the rank that replaces it has trained a step.

Example:
    python tools/warm_starts.py --times 5
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
MODULES = "tensorflow,keras"
DEADLINE = 600.0  # seconds for a job
KINDS = {"with": ["--preload", MODULES], "without": ["--no-preload"]}


def train(kind: str, folder: Path) -> None:
    """Train on one rank. `short` ends after 20 steps, `long` when the file `end` exists, `elastic` loses a rank."""
    import keras
    import numpy as np

    import hvkeras as hvd  # noqa: PLC0415 - imports TensorFlow, which only ranks need

    hvd.init()
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
    x, y = np.ones((20 * 8, 16), "float32"), np.ones((20 * 8, 1), "float32")

    class Report(keras.callbacks.Callback):
        """Report the first step, and lose the rank in its first epoch."""

        has_begun = False

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
            """Print the time once."""
            if not self.has_begun:
                self.has_begun = True
                print(f"first step at {time.time()}", flush=True)
            time.sleep(0.01 * (kind == "elastic"))
            if kind == "elastic" and batch == 10 and hvd.rank() == 1 and not (folder / "lost").exists():
                (folder / "lost").write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)

    report = Report()
    if kind == "elastic":
        state: Any = hvd.elastic.TensorFlowKerasState(model, epoch=0)

        def run(state: Any) -> None:
            model.fit(x, y, batch_size=8, epochs=20, initial_epoch=state.epoch, verbose=0, callbacks=[
                report, hvd.elastic.UpdateEpochStateCallback(state), hvd.elastic.CommitStateCallback(state)])

        hvd.elastic.run(run)(state)
        return
    model.fit(x, y, batch_size=8, verbose=0, callbacks=[report])
    while kind == "long" and not hvd.broadcast_object((folder / "end").exists(), root_rank=0):
        model.fit(x, y, batch_size=8, verbose=0)
        time.sleep(0.1)


def command(kind: str, ranks: int, flags: list[str], folder: Path) -> list[str]:
    """Return the command line of a job."""
    return [str(BIN / "hvkeras"), "run", "-np", str(ranks), *flags, sys.executable, str(Path(__file__).resolve()),
            "--train", kind, str(folder)]


def run_job(kind: str, ranks: int, flags: list[str], folder: Path) -> tuple[float, str]:
    """Run a job to its end, and return its start time and its output."""
    began = time.time()
    done = subprocess.run(command(kind, ranks, flags, folder), cwd=folder, capture_output=True, text=True,
                          timeout=DEADLINE, check=False)
    if done.returncode:
        raise SystemExit(f"the job failed: {done.stdout}\n{done.stderr}")
    return began, done.stdout


def duration(flags: list[str], ranks: int, folder: Path) -> float:
    """Return the seconds of a job from its start to its end."""
    began, _ = run_job("short", ranks, flags, folder)
    return time.time() - began


def first_step(flags: list[str], folder: Path) -> float:
    """Return the seconds until the last of two ranks has trained a step."""
    began, output = run_job("short", 2, flags, folder)
    return max(times(output)) - began


def memory(flags: list[str], ranks: int, folder: Path) -> float:
    """Return the MiB of proportional memory of all ranks in training."""
    job = subprocess.Popen(command("long", ranks, flags, folder), cwd=folder, stdout=subprocess.PIPE, text=True,
                           stderr=subprocess.DEVNULL)
    assert job.stdout is not None
    for _ in range(ranks):
        job.stdout.readline()
    time.sleep(2.0)
    found = [pss(int(path.name)) for path in Path("/proc").iterdir() if path.name.isdigit() and is_rank(path, folder)]
    (folder / "end").touch()
    if job.wait(DEADLINE) or len(found) != ranks:
        raise SystemExit(f"the job failed, or had {len(found)} ranks")
    return sum(found)


def is_rank(process: Path, folder: Path) -> bool:
    """Return whether a process is a rank of the job."""
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
        return words[-2:] == [str(folder).encode(), b""] and b"run" not in words
    except OSError:
        return False


def pss(pid: int) -> float:
    """Return the proportional memory of a process in MiB."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(re.findall(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)[0]) / 1024


def replacement(flags: list[str], folder: Path) -> float:
    """Return the seconds from the loss of a rank until its replacement has trained a step."""
    _, output = run_job("elastic", 2, ["--min-np", "1", "--max-np", "2", *flags], folder)
    lost = float((folder / "lost").read_text())
    return max(times(output)) - lost


def times(output: str) -> list[float]:
    """Return the times of first steps in the output of a job."""
    return [float(found) for found in re.findall(r"first step at ([\d.]+)", output)]


def in_turns(measure: Callable[[list[str], Path], float], count: int) -> dict[str, list[float]]:
    """Take a measure with and without --preload, alternately."""
    found: dict[str, list[float]] = {name: [] for name in KINDS}
    for turn in range(count):
        for name in sorted(KINDS, reverse=bool(turn % 2)):
            with tempfile.TemporaryDirectory(prefix="hvkeras-warm-") as folder:
                found[name].append(measure(KINDS[name], Path(folder)))
    return found


def main(ranks: int, count: int) -> None:
    """Print the table."""
    imports = []
    for _ in range(count):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", f"import {MODULES}"], check=True, stderr=subprocess.DEVNULL)
        imports.append(time.perf_counter() - began)
    print(f"python -c 'import {MODULES}': {statistics.median(imports):.2f} s", flush=True)
    measures: dict[str, Callable[[list[str], Path], float]] = {
        f"{ranks} ranks, start to end (s)": lambda flags, folder: duration(flags, ranks, folder),
        f"{ranks} ranks, PSS in training (MiB)": lambda flags, folder: memory(flags, ranks, folder),
        "2 ranks, first step of the last one (s)": first_step,
        "elastic, from a loss to its replacement's first step (s)": replacement,
    }
    for name, measure in measures.items():
        found = {kind: statistics.median(values) for kind, values in in_turns(measure, count).items()}
        print(f"{name:<58} with --preload {found['with']:8.2f}, without {found['without']:8.2f}, ratio"
              f" {found['with'] / found['without']:.2f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train:
        train(given.train[0], Path(given.train[1]))
    else:
        main(given.ranks, given.times)

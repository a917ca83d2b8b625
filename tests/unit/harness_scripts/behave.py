"""A rank without TensorFlow that does what its first argument says; for the harness's own tests."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import numpy as np

from harness.checks import check, run_checks
from harness.launchers import announced_rank

RANK = announced_rank(os.environ)


@check
def rank_and_folder() -> tuple[int | None, str]:
    """What the rank knows of itself."""
    return RANK, os.getcwd()


@check
def a_set_of_variables() -> list[str]:
    """Which launchers' variables it sees."""
    return sorted({"HOROVOD_RANK", "HVKERAS_RUN_RANK", "OMPI_COMM_WORLD_RANK", "TF_CONFIG"} & set(os.environ))


@check
def random_numbers() -> list[float]:
    """What generators give that nobody has seeded."""
    return [random.random(), float(np.random.default_rng().random()), float(np.random.random())]


@check
def a_hash() -> int:
    """The hash of a text, which decides the order of sets."""
    return hash("a text")


@check
def keras() -> str:
    """The major version of Keras."""
    import tensorflow as tf

    return "2" if tf.keras.Model.__module__.startswith("tf_keras") else "3"


@check
def raises_on_rank_1() -> None:
    """Fails on one rank, when told so."""
    if sys.argv[1] == "raise" and RANK == 1:
        raise ValueError("rank 1 was told to raise")


if __name__ == "__main__":
    print(f"rank {RANK} speaks", flush=True)
    if sys.argv[1] == "orphan" and RANK == 0:
        subprocess.Popen(["sleep", "600"], start_new_session=True, stdin=subprocess.DEVNULL,
                         stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if sys.argv[1] == "fork" and RANK == 0 and os.fork() == 0:
        os.setsid()
        time.sleep(600)
    if sys.argv[1] == "end" and RANK == 0:
        sys.exit(7)
    if sys.argv[1] == "end" and RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while sys.argv[1] == "sleep":
        time.sleep(0.1)
    run_checks()

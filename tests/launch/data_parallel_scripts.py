"""The scripts in `workers/data_parallel`, written after published examples for one process, and how to run them.

They write their weights, history and predictions to `result.npz`, and read these environment variables:

    NOISE=off      no dropout, no augmentation, no random latent vectors
    FLOAT64=1      weights and data in float64, where rounding differs by less than 1e-8
    PERTURB=1e-7   the initial weights change by this share: how far apart rounding takes one process
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import hvkeras
from harness.launchers import BIN, TESTS

SCRIPTS = Path(__file__).parent / "workers" / "data_parallel"
SEEDED = TESTS / "harness" / "seeded.py"
SEED = 17
SEED_VARIABLE = "PYTHONHASHSEED"  # if it is a number, it is the common seed of the ranks
MPIRUN = (str(BIN / "mpirun"), "--allow-run-as-root", "--oversubscribe", "--bind-to", "none")
DEADLINE = 240.0  # seconds for a run, of which most take ten


def environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a run in which the hvkeras of this test, and matplotlib, can be imported."""
    paths = [str(TESTS)]
    if "site-packages" not in (root := Path(hvkeras.__file__).parents[1]).parts:
        paths.insert(0, str(root))
    return {"PYTHONPATH": os.pathsep.join(paths), "TF_CPP_MIN_LOG_LEVEL": "3", "MPLBACKEND": "Agg",
            SEED_VARIABLE: str(SEED), **settings}

"""MirroredStrategy on two devices of one process trains like one device, with Keras 3's `fit` and in a loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness import Outcome
from harness.checks import names_of_checks

WORKER = Path(__file__).parent / "workers" / "mirrored.py"
# The most different cases; `make test-soak` runs all.
FEW = ("fit", "batch_normalization", "a_loop_that_clips", "steps_per_epoch",
       "an_infinity_on_one_replica_skips_the_step_on_all", "a_first_batch_that_does_not_divide")


@pytest.mark.slow
@pytest.mark.parametrize("check", [pytest.param(name, marks=() if name in FEW else pytest.mark.nightly)
                                   for name in names_of_checks(WORKER)])
def test_two_devices_give_what_one_does(check: str, launch_once: Callable[..., Outcome]) -> None:
    outcome = launch_once("hvkeras_run", WORKER, FEW if check in FEW else (), np=1)
    for found in outcome.results(check):
        assert found < 1e-4

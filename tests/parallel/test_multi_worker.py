"""Keras 3's `fit` under MultiWorkerMirroredStrategy trains like one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness import Outcome
from harness.checks import names_of_checks

WORKER = Path(__file__).parent / "workers" / "multi_worker.py"
# The most different cases; `make test-soak` runs all.
FEW = ("a_last_batch_that_is_smaller", "an_infinity_on_one_worker_skips_the_step_on_all")


@pytest.mark.slow
@pytest.mark.parametrize("check", [pytest.param(name, marks=() if name in FEW else pytest.mark.nightly)
                                   for name in names_of_checks(WORKER)])
def test_fit_evaluate_and_predict_give_what_one_process_does(check: str, launch_once: Callable[..., Outcome]) -> None:
    outcome = launch_once("tf_config", WORKER, FEW if check in FEW else (), np=2)
    for found in outcome.results(check):
        assert found < 1e-4

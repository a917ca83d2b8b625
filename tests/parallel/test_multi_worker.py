"""Keras 3's `fit` under MultiWorkerMirroredStrategy trains as one process does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness import Outcome
from harness.checks import names_of_checks

WORKER = Path(__file__).parent / "workers" / "multi_worker.py"

@pytest.mark.parametrize("check", names_of_checks(WORKER))
def test_fit_evaluate_and_predict_give_what_one_process_does(check: str, launch_once: Callable[..., Outcome]) -> None:
    outcome = launch_once("tf_config", WORKER, np=2)
    for found in outcome.results(check):
        assert found < 1e-4

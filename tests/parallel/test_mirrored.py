"""MirroredStrategy over two devices of one process trains as one device does, by Keras 3's `fit` and by a loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness import Outcome
from harness.checks import names_of_checks

WORKER = Path(__file__).parent / "workers" / "mirrored.py"


@pytest.mark.parametrize("check", names_of_checks(WORKER))
def test_two_devices_give_what_one_does(check: str, launch_once: Callable[..., Outcome]) -> None:
    outcome = launch_once("hvkeras_run", WORKER, np=1)
    for found in outcome.results(check):
        assert found < 1e-4

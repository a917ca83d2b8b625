"""MirroredStrategy within each rank and hvkeras between them train like one device on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness import Outcome
from harness.checks import names_of_checks

WORKER = Path(__file__).parent / "workers" / "two_levels.py"


@pytest.mark.nightly  # test_mirrored.py tests replicas, and test_same_training.py ranks
@pytest.mark.parametrize("check", names_of_checks(WORKER))
def test_two_ranks_of_two_devices_give_what_one_device_does(
    check: str, launch_once: Callable[..., Outcome]
) -> None:
    outcome = launch_once("hvkeras_run", WORKER, np=2)
    for found in outcome.results(check):
        assert found < 1e-4

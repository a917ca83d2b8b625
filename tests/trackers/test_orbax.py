"""Keras's `OrbaxCheckpoint` on two ranks, with the real package, which `make test-trackers` installs."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness import Outcome

WORKER = Path(__file__).parent / "workers" / "saves_by_orbax.py"


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("orbax") is None, reason="not run: needs Orbax. HINT: make test-trackers")
def test_one_rank_saves_for_all(launch: Callable[..., Outcome], tmp_path: Path) -> None:
    outcome = launch("hvkeras_run", WORKER, (str(tmp_path),), np=2, backend="native", cold=True)
    for found in outcome.results("saves"):
        for case in found.values():
            assert case["steps"] == ["1", "2"]
            assert case["apart"] < 1e-5

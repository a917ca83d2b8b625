"""Ranks that do different things end in an error that names the difference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness import Outcome

WORKER = Path(__file__).parent / "workers" / "mismatch.py"


@pytest.mark.parametrize(
    ("case", "named"),
    [("shapes", ("the gradients of SGD", "[3, 4]", "[3, 5]")), ("none", ("the gradients of SGD", "no gradient")),
     ("names", ('allreduce "of 0"', 'allreduce "of 1"'))],
)
@pytest.mark.parametrize(("launcher", "backend"), [("tf_config", "tfdist"), ("mpirun", "horovod"),
                                                   ("hvkeras_run", "native")])
def test_every_rank_names_the_first_difference(
    case: str, named: tuple[str, ...], launcher: str, backend: str, launch: Callable[..., Outcome]
) -> None:
    outcome = launch(launcher, WORKER, (case,), np=2, backend=backend, expect_failure=True, deadline=100)
    for rank in range(2):
        last = outcome.stderr(rank).strip().splitlines()[-1]
        for text in named:
            assert text in last

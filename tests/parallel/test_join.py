"""`join()`: ranks without data participate until all have joined."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import Outcome
from launch.hvkeras_run import python, run, warm_ranks

WORKER = Path(__file__).parent / "workers" / "joined.py"
SIZE = 3
RUNS = {"native": "hvkeras_run", "tfdist": "tf_config", "horovod": "hvkeras_run", "tfdist-graphs": "tf_config"}


@pytest.fixture(params=["native", pytest.param("tfdist", marks=pytest.mark.nightly),
                        pytest.param("horovod", marks=pytest.mark.slow)])
def outcome(request: pytest.FixtureRequest, launch_once: Callable[..., Outcome]) -> Outcome:
    return of(request.param, launch_once)


def of(run: str, launch_once: Callable[..., Outcome]) -> Outcome:
    backend, *checks = run.split("-")
    return launch_once(RUNS[run], WORKER, tuple(checks), np=SIZE, backend=backend)


def of_all_kinds(first: int) -> list[Any]:
    """Return the expected results of a rank while only the ranks from `first` on have work."""
    there = range(first + 1, SIZE + 1)
    low, high = there[0], there[-1]
    total = float(sum(there))
    return [[[total] * 2, [int(total)], total], pytest.approx(total / SIZE, rel=1e-6), [low, high, -high, -low],
            float(math.prod(there)), [one for one in there for _ in range(one)], float(SIZE), [float(len(there))],
            list(there), list(there)]


def test_every_kind_of_collective_continues(outcome: Outcome) -> None:
    for rank, (found, last) in enumerate(outcome.results("eager")):
        assert found == [of_all_kinds(step) for step in range(rank + 1)]
        assert last == SIZE - 1


def test_the_last_rank_is_returned(outcome: Outcome) -> None:
    assert outcome.results("at_once") == [[0, True]] * SIZE


@pytest.mark.parametrize("run", ["native", pytest.param("horovod", marks=pytest.mark.slow), "tfdist-graphs"])
def test_steps_continue_eagerly_in_functions_and_in_their_loops(run: str, launch_once: Callable[..., Outcome]) -> None:
    for rank, (found, last) in enumerate(of(run, launch_once).results("graphs")):
        for step, (dense, values, indices) in enumerate(found):
            there = [one for one in range(SIZE) if step < 2 + one]
            slope = 2.0 * sum(one + 1 for one in there)
            assert dense == [slope, 2 * slope]
            assert (values, indices) == ([[2.0, 2.0]] * len(there), there)
        assert (len(found), last) == (2 + rank, SIZE - 1)


def test_what_a_rank_never_did_itself_continues(outcome: Outcome) -> None:
    *others, (found, last) = outcome.results("never_seen")
    assert others == [[None, SIZE - 1]] * (SIZE - 1)
    assert (found, last) == ([[[1.0] * 3] * 2, 5.0], SIZE - 1)


def test_a_constant_of_one_rank_is_none_of_the_job(outcome: Outcome) -> None:
    assert outcome.results("constants_in_a_function") == [[5.0, 15.0, 25.0]] * SIZE


REFUSED_BEFORE = """
from contextlib import suppress
with suppress(hvd.MismatchError):
    hvd.broadcast(1.0, rank, name='b')
hvd.join() if rank == 0 else hvd.broadcast(1.0, 0, name='b')
"""


@pytest.mark.parametrize(("code", "words"), [
    ("hvd.join() if rank == 0 else hvd.broadcast(1.0, 0, name='b')",
     "The root of a broadcast must not have called join(). Received: collective='broadcast \"b\"'"),
    # Rank 0 may not run a collective for the waiting rank 1 only because it once participated in it: both can raise.
    (REFUSED_BEFORE,
     "The root of a broadcast must not have called join(). Received: collective='broadcast \"b\"'"),
    ("hvd.join() if rank == 0 else time.sleep(2)", "left the job normally while rank 0 waits for it in join()"),
    ("time.sleep(2) or hvd.join() if rank == 0 else None",
     "left the job normally before rank 0 called join(), which all ranks must call"),
    ("hvd.join() if rank == 0 else 1 / 0", "ZeroDivisionError"),
], ids=["broadcast", "refused before", "leave", "early", "raise"])
def test_what_cannot_continue_ends_the_job(code: str, words: str, tmp_path: Path) -> None:
    command = python(f"import hvkeras as hvd; hvd.init('native')\n{code}")
    done = run(["-np", "2", *warm_ranks(command)], tmp_path, {"HVKERAS_EXIT_GRACE": "1"})
    assert done.returncode == 1
    assert words in done.stderr

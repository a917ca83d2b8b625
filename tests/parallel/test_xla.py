"""The native engine's collectives in functions compiled by XLA, on two ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from harness import OLDEST_IN_SOAK, Outcome

WORKER = Path(__file__).parent / "workers" / "xla.py"
FAILURES = Path(__file__).parent / "workers" / "xla_failures.py"
# With float16, XLA's fused operations round differently.
TOLERANCES = {"compressed": 1e-4, "mixed precision": 1e-3}


@pytest.fixture(params=[pytest.param("keras3", marks=pytest.mark.nightly),
                        pytest.param("keras3-few", marks=OLDEST_IN_SOAK),
                        pytest.param("tf_keras", marks=pytest.mark.nightly)])
def outcome(request: pytest.FixtureRequest, launch_once: Callable[..., Outcome]) -> Outcome:
    legacy = "1" if request.param == "tf_keras" else "0"
    return launch_once("hvkeras_run", WORKER, ("--few",) if request.param.endswith("few") else (), np=2,
                       backend="native", env={"TF_USE_LEGACY_KERAS": legacy}, deadline=400)


def test_reductions_give_what_numpy_does(outcome: Outcome) -> None:
    assert outcome.results("reductions") == [[], []]


def test_many_collectives_that_are_independent_end(outcome: Outcome) -> None:
    assert outcome.results("many_at_once") == [[1.0 + 2 * each for each in range(20)]] * 2


def test_the_other_collectives(outcome: Outcome) -> None:
    mine, other = [[1, 2, 3], [4, 5, 1]], [[2, 3, 4], [5, 6, 2]]
    for rank, found in enumerate(outcome.results("others")):
        exchanged = [1 + rank, 11 + rank]
        assert found == {
            "broadcast": [other, other, other, [[True] * 3] * 2], "gathered": mine + other, "scalars": [0, 1],
            "scaled": 4.5, "compressed": [1.5, 2.5, 3.5], "any": [True, True, False],
            "slices": [[3.0, 3.0], [1.0, 1.0]], "transposed": (np.array(mine) + other).T.tolist(),
            "exchanged": exchanged, "split": [exchanged, [1, 1]], "scattered": [[1, 3], [5]][rank],
        }


def test_gradients_are_those_of_eager_mode(outcome: Outcome) -> None:
    for rank, found in enumerate(outcome.results("gradients")):
        assert found["sum"][0] == (4 * np.array([[1, 2], [3, 4]]) + 4 * rank).tolist()
        for compiled, eager in found.values():
            assert compiled == pytest.approx(eager) if np.ndim(eager) < 2 else np.allclose(compiled, eager)


def test_loops_branches_and_nested_functions_keep_the_order(outcome: Outcome) -> None:
    assert outcome.results("control_flow") == [[2.0, 8.0, 4.0, 6.0, 8.0]] * 2


def test_a_shape_that_is_not_known_is_refused(outcome: Outcome) -> None:
    for text in outcome.results("unknown_shape"):
        assert "reduces only tensors with static shapes. Received: shape='(None,)'." in text
        assert "or pass jit_compile=False" in text


def test_entries_are_counted_as_they_happen(outcome: Outcome) -> None:
    assert outcome.results("entries") == [[1, 2]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("case", ["plain", "compressed", "two passes", "mixed precision", "sparse gradients",
                                  "sparse as dense", "synchronized normalization"])
def test_training_gives_the_weights_that_it_gives_without_xla(case: str, outcome: Outcome) -> None:
    if case not in outcome.results("training")[0]:
        pytest.skip("trained in `make test-soak`")
    results = [found[case] for found in outcome.results("training")]
    for plain, *compiled in results:
        for found in compiled:
            for mine, expected in zip(found, plain, strict=True):  # weights, then a metric
                assert mine == pytest.approx(expected, abs=TOLERANCES.get(case, 2e-6))
    for mine, other in zip(*results, strict=True):
        assert mine[0] == other[0], "the ranks' weights differ"


@pytest.mark.slow
def test_training_gives_the_weights_of_one_process(outcome: Outcome) -> None:
    for training, expected in zip(outcome.results("training"), outcome.results("one_process"), strict=True):
        for found, _ in training["plain"]:
            assert found == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize(("case", "named"), [
    ("names", 'rank 0 is in allreduce "of 0" (allreduce average, ranks [0, 1]), rank 1 in allreduce "of 1"'),
    pytest.param("order", 'rank 0 is in allreduce "second" (allreduce average, ranks [0, 1]), rank 1 in allreduce'
                 ' "first"', marks=pytest.mark.slow),
    pytest.param("rows", "gathers the same number of rows from each rank", marks=pytest.mark.slow),
    ("killed", "rank 1"),
])
def test_failures_are_named(case: str, named: str, launch: Callable[..., Outcome]) -> None:
    outcome = launch("hvkeras_run", FAILURES, (case,), np=2, backend="native", expect_failure=True, deadline=100,
                     env={"HVKERAS_MISMATCH_AFTER": "0.4", "HVKERAS_EXIT_GRACE": "1"})
    for rank in range(1 if case == "killed" else 2):
        last = [line for line in outcome.stderr(rank).splitlines() if line and not line.startswith("HINT: ")][-1]
        assert named in last or "failed in the same way as rank" in last

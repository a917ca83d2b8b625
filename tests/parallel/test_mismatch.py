"""Ranks with different collectives end with an error that names the difference."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import Outcome

WORKER = Path(__file__).parent / "workers" / "mismatch.py"
SOON = {"HVKERAS_MISMATCH_AFTER": "0.4", "HVKERAS_EXIT_GRACE": "1"}


def causes(outcome: Outcome) -> list[str]:
    """Return the cause that each rank names, where one that failed in the same way as another rank names that rank."""
    last = [[line for line in outcome.stderr(rank).splitlines() if line and not line.startswith("HINT: ")][-1]
            for rank in range(2)]
    return [last[int(found[1])] if (found := re.search(r"failed in the same way as rank (\d)", line)) else line
            for line in last]


@pytest.mark.parametrize(
    ("case", "named"),
    [("shapes", ("the gradients of SGD", "[3, 4]", "[3, 5]")),
     ("none", ("the gradients of SGD", "no gradient")),
     ("names", ('allreduce "of 0"', 'allreduce "of 1"'))],
)
@pytest.mark.parametrize(("launcher", "backend"), [
    *(pytest.param(*each, marks=pytest.mark.slow) for each in (("tf_config", "tfdist"), ("mpirun", "horovod"))),
    ("hvkeras_run", "native")])
def test_every_rank_names_the_first_difference(
    case: str, named: tuple[str, ...], launcher: str, backend: str, launch: Callable[..., Outcome]
) -> None:
    outcome = launch(launcher, WORKER, (case,), np=2, backend=backend, env=SOON, expect_failure=True,
                     deadline=100)
    for last in causes(outcome):
        for text in named:
            assert text in last
    said = "".join(outcome.stderr(rank) for rank in range(2))
    assert ("HINT: the models themselves differ: " in said) == (case == "shapes")


@pytest.mark.slow
def test_an_update_that_is_compiled_on_one_rank_is_a_difference(launch: Callable[..., Outcome]) -> None:
    outcome = launch("hvkeras_run", WORKER, ("update",), np=2, backend="native", env=SOON, expect_failure=True,
                     deadline=100)
    for last in causes(outcome):
        assert "rank 0 is in the gradients of SGD (gradients average, compiled update, ranks [0, 1])" in last
        assert "rank 1 in the gradients of SGD (gradients average, ranks [0, 1])" in last


@pytest.mark.slow
@pytest.mark.parametrize(("case", "named"), [
    ("set", r'rank 0 in the exchange "native .*" for rank 1, rank 1 in allreduce "of all" \(\S*mismatch.py:\d+ in a_'),
    ("callback", r'ranks 0(, | and )1 .*wait for each other: .*rank 1 (is )?in allreduce "of one"')])
def test_a_rank_that_waits_in_an_exchange_is_named(case: str, named: str, launch: Callable[..., Outcome]) -> None:
    outcome = launch("hvkeras_run", WORKER, (case,), np=2, backend="native", env=SOON, expect_failure=True,
                     deadline=60)
    for last in causes(outcome):
        assert re.search(named, last)


@pytest.mark.slow
def test_gradients_that_differ_in_fit_name_both_calls_of_fit(launch: Callable[..., Outcome]) -> None:
    outcome = launch("hvkeras_run", WORKER, ("fit",), np=2, backend="native", env=SOON, expect_failure=True,
                     deadline=100)
    for last in causes(outcome):
        assert "the gradients of left" in last
        assert "the gradients of right" in last
        assert re.search(r"rank 0 at \S*mismatch.py:\d+ in train_as_left, rank 1 at \S*mismatch.py:\d+ in train_as_"
                         r"right", last)


OUTLIVED = Path(__file__).parent / "workers" / "outlived.py"
WORDS = {  # the difference, for two ranks
    "shape": "an unnamed allreduce float32[17, 17] on rank 0 and an unnamed allreduce float32[18, 18] on rank 1",
    "dtype": 'allgather "x" float32[None] on rank 0 and allgather "x" int32[None] on rank 1',
    "operation": 'in allreduce "x" (allreduce average, ranks [0, 1]), rank 1 in allreduce "x" (allreduce sum, ',
    "root": 'in broadcast "x" (broadcast from 0, ranks [0, 1]), rank 1 in broadcast "x" (broadcast from 1, ',
    "kind": "in an unnamed allreduce (allreduce average, ranks [0, 1]), rank 1 in an unnamed allgather (allgather, ",
    "of_a_group": 'tensor 2 is grouped allreduce "x" float32[2] on rank 0 and grouped allreduce "x" float32[3] on ',
    "rows": 'alltoall "x" float32[None, 1] on rank 0 and alltoall "x" float32[None, 2] on rank 1',
    "order": 'in allreduce "p" (allreduce average, ranks [0, 1]), rank 1 in allreduce "q" (allreduce average, ',
    "operation_again": '(allreduce average, ranks [0, 1]), rank 1 in allreduce "x" (allreduce sum, ranks [0, 1])',
}


QUICK = ("shape", "kind", "rows", "order", "in_a_function", "half_in_functions", "in_a_session",
         "one_after_the_other_in_a_function")  # in `make test`
# Location of each rank in the user's code.
SITES = re.compile(r"; rank 0 at \S*outlived.py:\d+ in (\S+), rank 1 at \S*outlived.py:\d+ in ([\w<>]+)")


RUNS = [pytest.param("tf_config", "tfdist", 2, marks=pytest.mark.nightly), ("hvkeras_run", "horovod", 2),
        pytest.param("hvkeras_run", "native", 3, marks=pytest.mark.slow)]


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow)
                                  for case in WORDS])
@pytest.mark.parametrize(("launcher", "backend", "np"), RUNS)
def test_in_eager_mode_every_rank_raises_and_the_job_continues(
    case: str, launcher: str, backend: str, np: int, launch_once: Callable[..., Outcome]
) -> None:
    outcome = launch_once(launcher, OUTLIVED, np=np, backend=backend, env=SOON)
    for raised, total in outcome.results(case):
        assert raised.startswith("MismatchError: ranks ")
        assert "communicate different things and wait for each other" in raised
        if np == 2:
            assert WORDS[case] in raised
            one, other = SITES.search(raised).groups()
            assert one == other if case != "order" else (one, other) == ("first", "second")
        assert total == np


IN_GRAPHS = {
    "in_a_function": 'allreduce "y" float32[3] on rank 0 and allreduce "y" float32[4] on rank 1',
    "of_a_group_in_a_function": 'tensor 2 is grouped allreduce "y" float32[2] on rank 0 and grouped allreduce "y" ',
    "half_in_functions": 'allgather "z" float32[None, 2] on rank 0 and allgather "z" float32[None, 3] on rank 1',
    "in_a_session": 'reducescatter "s" float32[2] on rank 0 and reducescatter "s" float32[4] on rank 1',
    "one_after_the_other_in_a_function":
        'allreduce "first" float32[2] on rank 0 and allreduce "second" float32[1, 2] on rank 1',
    "the_same_function_afterwards": 'allreduce "again" float32[3] on rank 0 and allreduce "again" float32[4] on rank 1',
}


@pytest.mark.parametrize(("launcher", "backend", "np"), RUNS)
def test_shapes_that_only_the_run_of_a_graph_knows_are_compared(launcher: str, backend: str, np: int,
                                                                launch_once: Callable[..., Outcome]) -> None:
    outcome = launch_once(launcher, OUTLIVED, np=np, backend=backend, env=SOON)
    for (summed, gathered), total, shape in outcome.results("in_a_function_for_any_shape"):
        for raised, sizes in ((summed, ("[3, 2]", "[4, 2]")), (gathered, ("3]", "4]"))):
            assert raised.startswith("FailedPreconditionError: ")
            assert re.search(r"ranks (\d) and (\d) communicate different things: .*tensor 1 is .* on rank \1 and .* on"
                             r" rank \2", raised)
            assert np > 2 or all(size in raised for size in sizes)
        assert (total, shape) == (np, [np * (np + 1) // 2, 2])
    for raised, total, mean in outcome.results("gradients_for_any_shape"):
        assert raised.startswith("FailedPreconditionError: ")
        assert re.search(r"tensor 1 is (source 0 float32)?\[\d, 2\] on rank \d and ", raised)
        assert (total, mean) == (np, 2.0)


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow)
                                  for case in IN_GRAPHS])
@pytest.mark.parametrize(("launcher", "backend", "np"), RUNS[1:])
def test_in_graphs_every_rank_raises_and_the_job_continues(
    case: str, launcher: str, backend: str, np: int, launch_once: Callable[..., Outcome]
) -> None:
    outcome = launch_once(launcher, OUTLIVED, np=np, backend=backend, env=SOON)
    for rank, (raised, total) in enumerate(outcome.results(case)):
        eager = case == "half_in_functions" and rank == 0
        assert raised.startswith("MismatchError: ranks " if eager else "FailedPreconditionError: ")
        assert "communicate different things and wait for each other" in raised
        if np == 2:
            assert IN_GRAPHS[case] in raised
            assert SITES.search(raised)
        assert total == np


@pytest.mark.parametrize(("launcher", "backend", "np"), RUNS[1:])
def test_a_graph_may_run_at_once_what_another_rank_ran(launcher: str, backend: str, np: int,
                                                       launch_once: Callable[..., Outcome]) -> None:
    outcome = launch_once(launcher, OUTLIVED, np=np, backend=backend, env=SOON)
    for raised, *totals in outcome.results("what_another_rank_ran"):
        assert raised.startswith("FailedPreconditionError: ")
        assert totals == [np] * 4


@pytest.mark.parametrize(("launcher", "backend", "np"), RUNS[2:])
def test_three_ranks_that_wait_in_a_circle_raise(launcher: str, backend: str, np: int,
                                                 launch_once: Callable[..., Outcome]) -> None:
    outcome = launch_once(launcher, OUTLIVED, np=np, backend=backend, env=SOON)
    for raised, total in outcome.results("in_a_circle"):
        assert re.search(r'MismatchError: ranks 0, 1, 2 wait for each other: rank 0 in allreduce "x" \(\S*outlived.py:'
                         r'\d+ in \S+\) for rank 1, rank 1 in allreduce "x" .* for rank 2, rank 2 in .* for rank 0'
                         r'\. HINT: ',
                         raised)
        assert total == 3

"""The collectives compared with NumPy, on one to four ranks: the contract of every backend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness import Outcome

WORKER = Path(__file__).parent / "workers" / "collectives.py"
RUNS = {
    "local-1-few": ("hvkeras_run", "local", 1),
    "tfdist-2-few": ("tf_config", "tfdist", 2),
    "tfdist-2-few-gpu": ("tf_config", "tfdist", 2),  # as over NCCL, except for the devices
    "horovod-2-few": ("hvkeras_run", "horovod", 2),
    "native-2-few": ("tf_config", "native", 2),
    "native-3-quick": ("mpirun", "native", 3),
    "native-3": ("mpirun", "native", 3),
    "native-4": ("hvkeras_run", "native", 4),
    "tfdist-3": ("tf_config", "tfdist", 3),
    "horovod-4": ("mpirun", "horovod", 4),
}
MARKS = {"native-2-few": (pytest.mark.oldest, pytest.mark.sample),
         **dict.fromkeys(("native-3-quick", "tfdist-2-few", "tfdist-2-few-gpu", "horovod-2-few"), pytest.mark.slow),
         **dict.fromkeys(("native-3", "native-4", "tfdist-3", "horovod-4"), pytest.mark.nightly)}


PARAMETERS = [pytest.param(run, marks=MARKS.get(run, ())) for run in RUNS]
WITH_GRADIENTS = [pytest.param(run, marks=MARKS.get(run, ())) for run in RUNS if "few" not in run]


@pytest.fixture(params=PARAMETERS)
def outcome(request: pytest.FixtureRequest, launch_once: Callable[..., Outcome]) -> Outcome:
    return of(request.param, launch_once)


def of(run: str, launch_once: Callable[..., Outcome]) -> Outcome:
    launcher, backend, size = RUNS[run]
    return launch_once(launcher, WORKER, tuple(run.split("-")[2:]), np=size, backend=backend, deadline=600)


@pytest.mark.parametrize("check", ["reductions", "gathers", "scatters"])
@pytest.mark.parametrize("run", ["tfdist-2-few", "horovod-2-few"])
def test_the_other_engines_give_what_numpy_does(run: str, check: str, launch_once: Callable[..., Outcome]) -> None:
    """A part of the checks that the tests below make on all engines in `make test-all`."""
    assert of(run, launch_once).results(check) == [[], []]


@pytest.mark.parametrize("check", ["reductions", "gathers", "broadcasts", "scatters", "exchanges", "races"])
def test_every_dtype_and_size_gives_what_numpy_does(
    check: str, outcome: Outcome, request: pytest.FixtureRequest
) -> None:
    if check == "races" and "gpu" in request.node.callspec.id:
        pytest.skip("over NCCL collectives have one order")
    assert outcome.results(check) == [[]] * outcome.np


def test_shapes_may_be_known_to_the_run_of_a_graph_alone(outcome: Outcome) -> None:
    size = outcome.np
    for rank, found in enumerate(outcome.results("shapes_of_any_rank")):
        assert found["gathered scalar"] == [*range(size)]
        assert found["gathered rows"] == [[one] for one in range(size) for _ in range(one + 1)]
        assert found["gradient"] == 2 * size * rank
        assert found["exchanged"] == [2 * rank, 2 * rank + 1] * size
        assert found["scattered"] == [size * 2 * rank, size * (2 * rank + 1)]
        assert "alltoall sends rows, so its tensor needs a first dimension" in found["exchanged scalar"]
        assert "reducescatter distributes rows, so its tensor needs a first dimension" in found["scattered scalar"]
        assert "the same number of rows" in found["uneven"]


def test_invalid_splits_are_refused_before_any_rank_communicates(outcome: Outcome) -> None:
    for found in outcome.results("invalid_splits"):
        assert len(found) == 5
        assert all("splits must not be negative, and must add up to the first dimension" in each for each in found)


def test_sums_have_the_same_bits_again_and_with_native_in_any_bucket(outcome: Outcome) -> None:
    for found in outcome.results("bits"):
        assert found["again"] and found["sent"]
        assert found["together"] or found["backend"] != "native"


def test_ranks_may_be_in_eager_mode_in_functions_or_in_loops(outcome: Outcome) -> None:
    everyone = range(1, outcome.np + 1)
    for rank, found in enumerate(outcome.results("where_each_likes")):
        assert found == [[[sum(everyone)] * outcome.np, [one for one in everyone for _ in everyone], [1] * outcome.np,
                          [sum(everyone)], list(everyone)]] * 3, rank


@pytest.mark.slow
@pytest.mark.parametrize("run", PARAMETERS)
def test_tensors_of_every_device_meet(run: str, launch_once: Callable[..., Outcome]) -> None:
    outcome = of(run, launch_once)
    size = outcome.np

    def from_device(index: int) -> list[float]:
        total = sum(rank + index for rank in range(size))
        return [total, size - 1 + index, index, size - 1 + index, total]

    both, one = [*from_device(0), *from_device(1)], from_device(0)
    assert outcome.results("of_any_device") == [[both, one, both] * 2] * size


def test_any_and_all(outcome: Outcome) -> None:
    alone = outcome.np == 1
    assert outcome.results("booleans") == [{"any": [True, True, False], "all": [alone, True, False]}] * outcome.np


def test_scaling(outcome: Outcome) -> None:
    size = outcome.np
    for found in outcome.results("scaling"):
        assert found == {"prescale": 5.0 * size, "postscale": 30.0 * size, "integers": 2 * size, "average=True": 10.0,
                         "average=False": 10.0 * size, "number": 4.0, "compressed": 10.0}


def test_functions_may_be_traced_again(outcome: Outcome) -> None:
    size = float(outcome.np)
    assert outcome.results("functions_traced_again") == [[[size], [size] * 2, [size] * 3]] * outcome.np


def test_a_function_that_is_gone_leaves_no_graph_behind(outcome: Outcome) -> None:
    assert outcome.results("graph_of_a_function_that_is_gone") == [False] * outcome.np


@pytest.mark.parametrize("outcome", WITH_GRADIENTS, indirect=True)
def test_autograph_leaves_our_functions_as_they_are(outcome: Outcome) -> None:
    assert outcome.results("converted") == [["True"]] * outcome.np


def test_groups_keep_dtypes_and_shapes(outcome: Outcome) -> None:
    size = outcome.np
    ranks = sum(range(size))
    expected = [["float32", [2], 2.0 * ranks], ["int32", [1, 2], 2 * ranks], ["float64", [], 1.0 * size],
                ["float32", [], 2.0 * size]]
    assert outcome.results("groups") == [expected] * size


def test_slices_stay_sparse(outcome: Outcome) -> None:
    size = outcome.np
    assert outcome.results("sparse") == [[True, [size + 1.0] + [1.0] * (size - 1)]] * size


def test_half_precisions_have_one_answer_on_every_engine(outcome: Outcome) -> None:
    for found in outcome.results("halves"):
        assert len(found) == 18
        for case, result in found.items():
            dtype = case.split()[-1]
            assert result == [dtype, [60000.0 if dtype == "float16" else 59904.0, 1.0]], case


def test_averages_of_integers_are_truncated_unless_they_are_sparse(outcome: Outcome) -> None:
    size = outcome.np
    mean, parts = 3 + (size - 1) / 2, [(3 + rank) / size for rank in range(size)]
    expected = [[False, "int32", [int(mean)]], [True, "float64", pytest.approx(parts)], [False, "float32", [mean]],
                [True, "float32", pytest.approx(parts)], [True, "float16", pytest.approx(parts, rel=1e-3)]]
    assert outcome.results("mixed_group") == [expected] * size


@pytest.mark.parametrize("outcome", WITH_GRADIENTS, indirect=True)
@pytest.mark.parametrize("name", ["sum", "average", "group", "allgather", "broadcast", "alltoall", "reducescatter",
                                  "scattered sum"])
def test_gradients_are_the_numeric_ones(name: str, outcome: Outcome) -> None:
    assert [found[name] for found in outcome.results("gradients")] == [[True, True]] * outcome.np


@pytest.mark.parametrize("outcome", WITH_GRADIENTS, indirect=True)
def test_second_gradients_are_the_numeric_ones(outcome: Outcome) -> None:
    for found in outcome.results("second_gradients"):
        assert len(found) in (2, 8)
        assert all(both == [True, True] for both in found.values()), found


@pytest.mark.parametrize("outcome", WITH_GRADIENTS, indirect=True)
def test_gradients_of_every_type_are_those_of_float64(outcome: Outcome) -> None:
    assert outcome.results("gradients_of_types") == [[]] * outcome.np


@pytest.mark.parametrize("outcome", WITH_GRADIENTS, indirect=True)
def test_gradients_of_reduced_gradients_are_those_of_one_process(outcome: Outcome) -> None:
    for found in outcome.results("gradients_of_reduced_gradients"):
        assert found == dict.fromkeys(("eager", "graph", "outside", "slices", "traced before"),
                                      pytest.approx(0.0, abs=1e-9))


def test_max_has_no_gradient(outcome: Outcome) -> None:
    assert all("op=hvd.Max has no gradient" in text for text in outcome.results("no_gradient_of_max"))


@pytest.mark.parametrize("outcome", [each for each in PARAMETERS if "gpu" not in each.values[0]], indirect=True)
def test_names_match_in_any_order(outcome: Outcome) -> None:
    size = outcome.np
    assert outcome.results("names_in_any_order") == [[0.0, 1.0 * size, 2.0 * size]] * size


def test_objects(outcome: Outcome) -> None:
    size = outcome.np
    everyone = [{"rank": rank, "data": "x" * rank} for rank in range(size)]
    assert outcome.results("objects") == [{"from the last": everyone[-1], "of all": everyone}] * size


def test_variables(outcome: Outcome) -> None:
    size = outcome.np
    assert outcome.results("variables") == [[size, size, size, 1.0, size]] * size


def test_process_sets(outcome: Outcome) -> None:
    if outcome.np == 1:
        pytest.skip("one rank has no process sets")
    for rank, found in enumerate(outcome.results("process_sets")):
        members = [other for other in range(outcome.np) if other % 2 == rank % 2]
        assert found["sum"] == sum(members)
        assert found["gather"] == found["objects"] == members
        assert found["broadcast"] == members[-1]
        assert found["place"] == [members.index(rank), len(members), True, False, 1 + rank % 2]
        assert "Only members of a process set can participate in its allreduce" in found["foreign"]
        assert found["removed"] == [True, True, False]
        if "meanwhile" in found:
            said = found["meanwhile"]
            assert said == "nothing" if rank else "the process set of ranks [0, 1] was removed" in said


def test_xla_compiles_or_is_refused_in_one_sentence(outcome: Outcome, request: pytest.FixtureRequest) -> None:
    if RUNS[request.node.callspec.params["outcome"]][1] in ("native", "local"):
        assert outcome.results("xla") == ["no error"] * outcome.np
    else:
        assert all("cannot be compiled by XLA" in text and "\n" not in text for text in outcome.results("xla"))

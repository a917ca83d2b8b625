"""Optimizers, tapes and callbacks on two ranks, with both Keras versions and on every engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import Outcome

WORKER = Path(__file__).parent / "workers" / "keras_side.py"
RUNS = {
    "keras3-native": ("hvkeras_run", "native", "0"),
    "keras3-native-compiled": ("hvkeras_run", "native", "0"),  # with updates compiled by XLA
    "tf_keras-native": ("hvkeras_run", "native", "1"),
    "keras3-tfdist": ("tf_config", "tfdist", "0"),
    "tf_keras-tfdist": ("tf_config", "tfdist", "1"),
    "keras3-horovod": ("hvkeras_run", "horovod", "0"),
}


@pytest.fixture(params=[pytest.param(run, marks=() if run == "keras3-native" else pytest.mark.nightly) for run in RUNS])
def outcome(request: pytest.FixtureRequest, launch_once: Callable[..., Outcome]) -> Outcome:
    launcher, backend, legacy = RUNS[request.param]
    compiles = {"HVKERAS_COMPILE_UPDATE": "on"} if request.param.endswith("compiled") else {}
    return launch_once(launcher, WORKER, np=2, backend=backend, env={"TF_USE_LEGACY_KERAS": legacy, **compiles})


@pytest.mark.parametrize("option", ["average", "in a graph", "predivide", "two groups", "num_groups",
                                    "foreign groups"])
def test_options_that_average(option: str, outcome: Outcome) -> None:
    assert [found[option] for found in outcome.results("options")] == [[1.5, 1.5], [1.5, 1.5]]


@pytest.mark.parametrize(
    ("option", "by_rank"),
    [("sum", [[3.0, 3.0], [3.0, 3.0]]), ("local scaled", [[0.5, 1.5], [1.0, 1.5]]),
     ("local unscaled", [[1.0, 1.5], [2.0, 1.5]]), ("process set", [[1.0, 1.0], [2.0, 2.0]])],
)
def test_options_that_do_not(option: str, by_rank: list[Any], outcome: Outcome) -> None:
    assert [found[option] for found in outcome.results("options")] == by_rank


def test_compression_rounds_what_travels(outcome: Outcome) -> None:
    for found in outcome.results("compressed"):
        exact = np.array([(1 + 1 / 3) * 1.5, 150.15])
        assert found["none"] == pytest.approx(exact, rel=1e-6)
        assert found["fp16"] == pytest.approx(exact, rel=1e-3)
        assert found["bf16"] == pytest.approx(exact, rel=1e-2)
        assert len({found[name][1] for name in ("none", "fp16", "bf16")}) == 3


def test_8_bits_are_for_native_and_between_hosts(outcome: Outcome, request: pytest.FixtureRequest) -> None:
    found = outcome.results("eight_bits")
    if "-native" in request.node.name:
        assert found == [[4999 * 1.5] * 2] * 2
    else:
        assert all("Compression.int8 is a feature of the backend native" in text for (text,) in found)


def test_of_new_values_of_a_variable_the_largest_counts(outcome: Outcome) -> None:
    for rank, found in enumerate(outcome.results("new_values")):
        if found:
            assert {name: value for name, value in found["largest"].items() if value != [20.0, 5.0]} == {}
            assert found["passes"] == [[60.0, 15.0]] * 3
            assert found["local"] == [10.0 * (rank + 1), 5.0 - rank]


@pytest.mark.slow
def test_float8_trains_as_one_process_does(outcome: Outcome) -> None:
    for found in outcome.results("float8_training"):
        assert {name: others for name, others in found.items() if others} == {}


def test_gradients_that_are_none_stay_none(outcome: Outcome) -> None:
    assert outcome.results("gradients_that_are_none") == [[1.5, 0.0, 1.5]] * 2


def test_sparse_gradients_stay_sparse_unless_asked(outcome: Outcome) -> None:
    for found in outcome.results("sparse_gradients"):
        assert (found["sparse"], found["dense"]) == (True, False)
        assert found["values"] == found["values of the dense"] == [0.5, 1.0, 0.0, 1.5]
        assert found["table"] == [0.5, 0.0, 1.0, -0.5]
    warning = "rows of the same index, and in eager mode they are not combined"
    warned = [outcome.stderr(rank).count(warning) for rank in (0, 1)]
    assert warned == [1, 0]


def test_gradients_may_be_lists(outcome: Outcome) -> None:
    once = [[0.5, 1.0, 0.0, 0.0], [1.5] * 4]
    for found in outcome.results("gradients_of_lists"):
        assert found["at once"] == found["as dense"] == found["shared"] == once
        assert found["two passes"] == [[2.0 * each for each in values] for values in once]


def test_passes_are_summed_before_one_update(outcome: Outcome) -> None:
    # The gradients of the passes are 1, 2, 3, 4 times (rank + 1); the mean over the ranks is 1.5 times that.
    for found in outcome.results("accumulation"):
        assert found["summed"] == [0.0, 4.5, 4.5, 15.0, 4]
        assert found["averaged"] == found["in a graph"] == [0.0, 2.25, 2.25, 7.5, 4]
        # The average starts from the weights after the first update: 0.75 * 8 + 0.25 * 6.
        assert found["averages of weights"] in ([], [[8.0, 6.0, 7.5]] * 2)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["policy before wrapping", "policy after wrapping", "explicit loss scale",
                                 "local variables", "compiled"])
def test_all_ranks_skip_the_step_in_which_one_overflows(way: str, outcome: Outcome) -> None:
    first, second = (found[way] for found in outcome.results("overflow_on_one_rank"))
    assert [scale for scale, _ in first] == [32768.0, 16384.0, 16384.0, 16384.0]
    sums = [weights for _, weights in first]
    assert sums[0] == sums[1], "the step was not skipped"
    assert len(set(sums)) == 3, "another step was skipped"
    assert [scale for scale, _ in second] == [scale for scale, _ in first]
    assert [weights for _, weights in second] == sums or way == "local variables"


@pytest.mark.slow
def test_an_overflow_skips_the_update_of_all_its_passes(outcome: Outcome) -> None:
    first, second = (found["two passes"] for found in outcome.results("overflow_on_one_rank"))
    assert first == second
    assert [scale for scale, _ in first] == [32768.0, 16384.0, 16384.0, 16384.0]
    sums = [weights for _, weights in first]
    assert sums[0] == sums[1] == sums[2] != sums[3]


@pytest.mark.parametrize("check", [pytest.param("bfloat16_policy", marks=pytest.mark.slow),
                                   pytest.param("ways_to_train", marks=pytest.mark.slow), "partial_batch_on_one_rank"])
def test_ranks_with_different_data_keep_equal_weights(check: str, outcome: Outcome) -> None:
    first, second = outcome.results(check)
    assert first == second


def test_equal_gradients_in_one_graph_are_distinguished(outcome: Outcome) -> None:
    assert outcome.results("two_optimizers_in_one_step") == [[3.0, 30.0]] * 2


def test_tapes(outcome: Outcome) -> None:
    for rank, found in enumerate(outcome.results("tapes")):
        assert found["once"] == found["persistent"] == found["in a graph"] == [1.5, 15.0]
        assert found["sum"] == [3.0, 30.0]
        assert found["local source"] == [(rank + 1) / 2, 15.0]
        assert found["entered itself"] == [[1.5, 1.5], None]
        assert found["of unknown length"] == [1.5] * 5


def test_the_callback_starts_all_ranks_from_the_root(outcome: Outcome) -> None:
    first, second = outcome.results("broadcast_callback")
    assert first == second
    assert first["unbuilt"][1:] == [pytest.approx(0.1), 1]
    weights, rate, iterations = first["built"]
    assert (rate, iterations) == (pytest.approx(0.1), 1)
    for found, truth in zip(weights, first["truth"][0], strict=True):
        assert np.asarray(found) == pytest.approx(np.asarray(truth), abs=1e-6)


def test_the_callback_leaves_local_variables(outcome: Outcome) -> None:
    assert outcome.results("broadcast_keeps_local_variables") == [[2.0, 1.0], [2.0, 2.0]]


def test_the_callback_warns_of_a_plain_optimizer(outcome: Outcome) -> None:
    for checked, unchecked in outcome.results("plain_optimizer_warning"):
        assert checked == [], "an error follows if weights diverge"
        assert len(unchecked) == 1
        assert "compile with hvkeras.DistributedOptimizer(optimizer)" in unchecked[0]


def test_jit_compile_works_or_is_refused_in_one_sentence(outcome: Outcome, request: pytest.FixtureRequest) -> None:
    serves = "native" in request.node.callspec.params["outcome"]
    for kind, text in outcome.results("jit_compile_error"):
        assert kind == ("" if serves else "UnsupportedError")
        if serves:
            continue
        assert "cannot be compiled by XLA" in text
        assert "pass jit_compile=False" in text
        assert "\n" not in text

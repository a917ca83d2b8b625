"""Layers with `adapt()` learn the same on all ranks, or `fit` reports differences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import OLDEST_ALONE, Outcome

WORKER = Path(__file__).parent / "workers" / "adapted.py"
RUNS = {
    "keras3-native": ("hvkeras_run", "native", "0"),
    "tf_keras-tfdist": ("tf_config", "tfdist", "1"),
    "keras3-horovod": ("hvkeras_run", "horovod", "0"),
}
MARKS = {"keras3-native": OLDEST_ALONE, "keras3-horovod": pytest.mark.nightly, "tf_keras-tfdist": pytest.mark.nightly}


@pytest.fixture(params=[pytest.param(run, marks=MARKS.get(run, ())) for run in RUNS])
def outcome(request: pytest.FixtureRequest, launch_once: Callable[..., Outcome]) -> Outcome:
    launcher, backend, legacy = RUNS[request.param]
    return launch_once(launcher, WORKER, np=2, backend=backend, env={"TF_USE_LEGACY_KERAS": legacy})


def near(found: Any, truth: Any, by: float = 1e-5) -> bool:
    """Return whether nested lists are equal: strings exactly, numbers approximately."""
    if isinstance(found, list):
        return len(found) == len(truth) and all(near(*pair, by) for pair in zip(found, truth, strict=True))
    return found == (truth if isinstance(found, str) else pytest.approx(truth, rel=by, abs=1e-6))


def test_all_ranks_learn_what_one_process_learns_from_the_whole(outcome: Outcome) -> None:
    first, second = outcome.results("together")
    assert len(first) > 13
    for case, (found, truth) in first.items():
        assert near(found, truth), f"{case}: {found} instead of {truth}"
        assert found == second[case][0], f"{case} differs between ranks"


def test_quantiles_are_within_the_error_of_keras(outcome: Outcome) -> None:
    first, second = outcome.results("quantiles")
    assert first["together"] <= 0.01, "the layer's epsilon"
    assert first == second


def test_feature_spaces_learn_from_all_ranks(outcome: Outcome) -> None:
    for space, other, one, difference in outcome.results("spaces"):
        assert near(space, one)
        assert near(other, one)
        assert difference < 1e-4


@pytest.mark.parametrize(
    ("case", "text"),
    [("dense", "UnsupportedError: hvd.adapt supports these layers of Keras"),
     ("own", "UnsupportedError: hvd.adapt supports these layers of Keras"),
     ("given", "UsageError: A layer to adapt must not have a given state"),
     ("given mean", "HINT: create it without mean"),
     ("no data", "UsageError: A layer needs data on at least one rank"),
     ("space", "UsageError: A FeatureSpace must be adapted to a dataset or a dict of arrays. Received: data='ndarray'"),
     ("samples", "HINT: create it with axis=None"),
     ("shapes", "UsageError: All ranks must adapt a layer to data of one shape"),
     ("order", "UsageError: All ranks must adapt their layers in the same order")],
)
def test_what_cannot_be_adapted_is_refused(case: str, text: str, outcome: Outcome) -> None:
    for found in outcome.results("refused"):
        assert text in found[case]


def test_the_root_gives_what_its_layers_have_learned(outcome: Outcome) -> None:
    first, second = outcome.results("given_by_the_root")
    assert not near(first["before"], second["before"]), "the layers of the ranks were alike"
    for found in (first, second):
        assert near(found["after"], second["before"])
        assert near(found["predicted"][1], second["predicted"][0])
        assert near(found["again"][0], found["again"][1])
        assert near(found["root alone"][0], found["root alone"][1])
    assert first["losses"] == second["losses"]
    assert not np.allclose(*first["losses"])


def test_other_ways_to_one_state_carry_what_layers_have_learned(outcome: Outcome) -> None:
    first, second = outcome.results("given_by_other_ways")
    for found in (first, second):
        assert "truth" not in found or near(found["restored"], found["truth"])
        assert found["late"] == first["late"]
        assert "loop" not in found or found["loop"][0] == found["loop"][1]


def test_an_elastic_state_holds_what_layers_have_learned(outcome: Outcome) -> None:
    for found in outcome.results("kept_by_a_state"):
        assert not near(found["changed"], found["truth"])
        for way in ("synced", "restored", "taken"):
            assert near(found[way], found["truth"]), way


@pytest.mark.parametrize("layer", ["inner", "text", "word", "bins"])
def test_fit_names_a_layer_that_differs(layer: str, outcome: Outcome) -> None:
    for found in outcome.results("guarded"):
        assert found[layer].startswith("DivergenceError: All ranks must compute the same function, but the layer")
        assert f"the layer {layer} (" in found[layer]
        assert "hvd.adapt(layer, data)" in found[layer]


def test_as_horovod_a_layer_that_differs_is_a_warning(outcome: Outcome) -> None:
    assert [found["as Horovod"] for found in outcome.results("guarded")] == ["no error"] * 2
    told = "hvkeras: the layer text (TextVectorization) has learned different state on ranks 0 and 1, which compute"
    assert (outcome.stderr(0).count(told), outcome.stderr(1).count(told)) == (1, 0)


def test_what_rounding_makes_of_a_layer_passes(outcome: Outcome) -> None:
    assert [found["near"] for found in outcome.results("guarded")] == ["no error"] * 2


@pytest.mark.parametrize("case", ["width", "embedding"])
def test_vocabularies_that_make_shapes_differ_are_refused(case: str, outcome: Outcome) -> None:
    for found in outcome.results("guarded"):
        assert "Layer wide StringLookup must have a vocabulary of one size on all ranks" in found[case]
        assert "rank_0=3, rank_1=4" in found[case]

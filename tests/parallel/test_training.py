"""`fit` and `evaluate` on several ranks: exact metrics, agreed steps and stops, and the divergence check."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import OLDEST_ALONE, Outcome

WORKER = Path(__file__).parent / "workers" / "training.py"
TOLERANCE = 2e-6
RUNS = {
    "tfdist-keras3-2": ("tf_config", "tfdist", "0", 2),
    "tfdist-keras3-2-fewest": ("tf_config", "tfdist", "0", 2),
    "native-keras3-2-fewest": ("hvkeras_run", "native", "0", 2),
    "native-tf_keras-2-fewest": ("hvkeras_run", "native", "1", 2),
    "native-tf_keras-2": ("hvkeras_run", "native", "1", 2),
    "native-keras3-2-few": ("hvkeras_run", "native", "0", 2),
    "native-keras3-2": ("hvkeras_run", "native", "0", 2),
    "native-keras3-4": ("hvkeras_run", "native", "0", 4),
    "horovod-tf_keras-2": ("hvkeras_run", "horovod", "1", 2),
}
MARKS = {"tfdist-keras3-2-fewest": (*OLDEST_ALONE, pytest.mark.sample),
         **dict.fromkeys(("native-tf_keras-2-fewest", "native-keras3-2-few"), pytest.mark.slow),
         **dict.fromkeys(("tfdist-keras3-2", "native-tf_keras-2", "native-keras3-2", "native-keras3-4",
                          "horovod-tf_keras-2"), pytest.mark.nightly)}


# Checks that differ most between versions of Keras and TensorFlow, and the tests that read them.
FEWEST = {
    "exact_metrics": "test_all_that_keras_reports_is_that_of_one_process",
    "own_metrics": "test_a_metric_says_how_it_is_merged",
    "logs_of_an_own_step": "test_logs_that_are_no_metrics_are_averaged",
    "stopping": "test_callbacks_decide_in_the_same_way",
    "uneven_data": "test_uneven_data_ends_on_all_ranks",
    "kept_state": "test_state_that_layers_keep_is_that_of_all_ranks",
    "after_fit": "test_ranks_use_a_model_together_only_if_it_is_the_same",
    "partial_callbacks": "test_callbacks_that_differ_between_ranks_are_named",
    "changing_lengths": "test_numbers_of_batches_may_change_between_epochs",
    "hooks_are_undone": "test_hooks_are_reversible",
    "joined": "test_joined_ranks_train_on_all_batches_as_one_process_does",
}


# Trained by `native-keras3-2-few` in `make test-all`.
LONGER = tuple(FEWEST[name] for name in ("uneven_data", "changing_lengths", "joined", "kept_state", "after_fit",
                                         "partial_callbacks"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "outcome" in metafunc.fixturenames:
        assert all(name in globals() for name in FEWEST.values())
        name = metafunc.function.__name__
        runs = [run for run in RUNS if not run.endswith("fewest") or name in FEWEST.values()]
        if name in LONGER:
            runs.remove("native-keras3-2-fewest")
        metafunc.parametrize("outcome", [pytest.param(run, marks=MARKS.get(run, ())) for run in runs], indirect=True,
                             scope="function")


@pytest.fixture
def outcome(request: pytest.FixtureRequest, launch_once: Callable[..., Outcome]) -> Outcome:
    launcher, backend, legacy, size = RUNS[request.param]
    arguments = {"few": ("--few",), "fewest": ("--few", *FEWEST)}.get(request.param.rsplit("-", 1)[1], ())
    return launch_once(launcher, WORKER, arguments, np=size, backend=backend, env={"TF_USE_LEGACY_KERAS": legacy},
                       deadline=300 if request.param.endswith(("few", "fewest")) else 600)


def largest_difference(found: Any, truth: Any) -> float:
    if isinstance(found, list):
        assert len(found) == len(truth)
        return max((largest_difference(*pair) for pair in zip(found, truth, strict=True)), default=0.0)
    return float(abs(found - truth))


@pytest.mark.parametrize("case", ["60/40", "120/80, three steps an execution, with the callback"])
def test_all_that_keras_reports_is_that_of_one_process(
    case: str, outcome: Outcome, request: pytest.FixtureRequest
) -> None:
    results = [found[case] for found in outcome.results("exact_metrics")]
    for found in results:
        count = 10 if case == "60/40" and "few" not in request.node.name else 3
        assert len(found["found"][0]) == 2 * count, "of training and of validation"
        assert largest_difference(found["found"], found["truth"]) < TOLERANCE
    assert all(found["found"] == results[0]["found"] for found in results), "logs differ between ranks"


def test_a_metric_says_how_it_is_merged(outcome: Outcome) -> None:
    for found in outcome.results("own_metrics"):
        assert found["Declared"] == found["Merging"] == pytest.approx(found["truth"], abs=1e-6)
        assert "The metric Largest must declare how the states of several ranks are merged" in found["Largest"]
        assert 'HINT: set Largest.hvkeras_merge = "sum"' in found["Largest"]
        assert found["in fit"] == 1, "found out after the first step"


def test_a_metric_that_is_not_reset_counts_each_label_once(outcome: Outcome) -> None:
    results = outcome.results("metrics_that_are_not_reset")
    assert results == [[8.0 * len(results) * epoch for epoch in (1, 2, 3)]] * len(results)


def test_an_evaluation_amid_an_epoch_counts_once(outcome: Outcome) -> None:
    for found in outcome.results("evaluation_amid_an_epoch"):
        assert largest_difference(found["found"], found["truth"]) < TOLERANCE
        assert found["alone"] == found["without"], "what one rank evaluates alone is no part of what all train"


def test_logs_that_are_no_metrics_are_averaged(outcome: Outcome) -> None:
    results = outcome.results("logs_of_an_own_step")
    assert results == [[(len(results) - 1) / 2]] * len(results)


def test_a_rank_without_data_participates_in_evaluate(outcome: Outcome) -> None:
    for found in outcome.results("evaluation_without_data_on_one_rank"):
        assert found["found"] == pytest.approx(found["truth"], abs=TOLERANCE)


def test_callbacks_decide_in_the_same_way(outcome: Outcome) -> None:
    results = outcome.results("stopping")
    assert all(found == results[0] for found in results)
    first = results[0]
    assert 2 < first["epochs"] < 40
    assert first["rate"] < 0.1
    for epochs, executions in first["stops"]:
        assert epochs == 2
        assert executions in (2, 3), "all stop after the execution in which one rank wants to, or after the next"
    assert first["again"] == 2, "one rank's wish ends only that fit"


def test_uneven_data_ends_on_all_ranks(outcome: Outcome) -> None:
    for rank, found in enumerate(outcome.results("uneven_data")):
        assert found["same"], "the ranks' weights differ"
        assert found["known"][0] == [3, 3]
        assert found["unknown"][0] == found["unknown on one rank"][0] == [3, 3], f"rank {rank}"
        assert found["repeated, other steps"][0] == [3, 3]
        assert found["too few for the steps"][0] == [3]
        assert found["generator"][0] == [2, 2]


def test_numbers_of_batches_may_change_between_epochs(outcome: Outcome) -> None:
    for found in outcome.results("changing_lengths"):
        assert found["same"], "the ranks' weights differ"
        assert found["one rank"][0] == [4, 2, 3, 4]
        assert found["steps"][0][:2] == [2, 2]
        # Old Keras 3 runs an empty epoch between two passes, also on one process.
        assert set(found["steps"][0]) <= {0, 2}, "a pass that has begun goes on with the numbers with which it began"
        assert found["to share"][0][0] == 6
        assert found["to share"][1] == pytest.approx(found["truth"], abs=2e-5)
        assert "All ranks must pass the same data" in found["unlike"]
        assert "Each rank needs at least one batch to train on" in found["none left"]
    assert outcome.stderr(0).count("(4 on rank 0, 2 on rank 1") == 2, "once in each fit"


def test_a_generator_may_leave_out_an_optional_input(outcome: Outcome) -> None:
    for found in outcome.results("optional_inputs"):
        for form, weights in found["found"].items():
            assert largest_difference(weights, found["truth"]) < 1e-6, form


def test_a_model_without_a_shape_starts_from_the_root(outcome: Outcome) -> None:
    results = outcome.results("weights_without_a_shape")
    for found in results:
        assert largest_difference(found["found"], found["truth"]) < TOLERANCE
        assert found["found"] == results[0]["found"]
        assert found["not built"] == results[0]["not built"], "broadcast after the first step"
    assert "weights in the first step" in outcome.stderr(0)
    assert "could not be built from its data's shapes (on rank 0, " in outcome.stderr(0)


@pytest.mark.parametrize(
    ("case", "texts"),
    [
        ("no broadcast", ("after 1 step of fit", "did not start from the same weights",
                          "BroadcastGlobalVariablesCallback(0)")),
        ("no wrapper", ("after 1 step of fit", "an optimizer that is not distributed",
                        "DistributedOptimizer(optimizer)")),
        ("no wrapper, but another start", ("an optimizer that is not distributed", "BroadcastGlobalVariablesCallback")),
        ("no wrapper in a step of one's own", ("after 1 step of fit", "DistributedGradientTape")),
        ("an assignment", ("after 6 steps of fit", "bias", "a layer or an assignment that depends on the rank",
                           "register_local_var")),
        ("another width", ("the models themselves differ in units of the layer dense", "rank_0='8', rank_1='9'")),
        ("another dropout", ("the models themselves differ in rate of the layer dropout", "rank_0='0.1', rank_1='0.2'",
                             "a tuner must give all ranks the same trial")),
    ],
)
def test_the_divergence_check_names_a_classic_mistake(case: str, texts: tuple[str, ...], outcome: Outcome) -> None:
    for found in outcome.results("mistakes"):
        assert found[case].startswith("DivergenceError: ")
        for text in texts:
            assert text in found[case]


@pytest.mark.parametrize(
    ("case", "texts"),
    [
        ("validation on one rank", ("All ranks must run validation, or none", "rank_0='given', rank_1='none'")),
        ("other epochs", ("All ranks must run the same number of epochs", "rank_0=2, rank_1=3")),
        ("no reduction", ("must be reduced to one number. Received: reduction=None", 'write reduction="sum_over_')),
        ("another loss", ("All ranks must compile the model alike, but loss differs", "rank_0='mse'", "'mae'",
                          "HINT: pass")),
        ("another reduction", ("but loss['reduction'] differs", "rank_0='sum'", "'sum_over_batch_size'")),
        ("other weights", ("but loss_weights[0] differs", "rank_0='0.5'", "'0.25'")),
        ("another closure", ("but loss's factor differs", "rank_0='1.0'", "'2.0'")),
        ("other metrics", ("but metrics[1]['threshold'] differs", "rank_0='0.5'", "'0.6'")),
        ("fewer metrics", ("but metrics[0] differs", "rank_0='mae'", "'nothing'")),
        ("no data", ("Each rank needs at least one batch", "rank_0='0 batches'", "hvd.shard(data)")),
    ],
)
def test_mismatched_calls_are_errors(case: str, texts: tuple[str, ...], outcome: Outcome) -> None:
    for found in outcome.results("mistakes"):
        assert found[case].startswith("UsageError: ")
        for text in texts:
            assert text in found[case]


@pytest.mark.parametrize("case", ["none", "none, names that Keras numbers",
                                  "none, each rank its own dropout", "none, local variables",
                                  "none, by themselves"])
def test_what_is_right_passes(case: str, outcome: Outcome) -> None:
    assert {found[case] for found in outcome.results("mistakes")} == {"no error"}


def test_moving_statistics_are_averaged_where_all_ranks_are(outcome: Outcome) -> None:
    results = outcome.results("moving_statistics")
    for rank, found in enumerate(results):
        own = found["truth"][rank]
        first, last = np.mean(found["truth"], 0).tolist()
        assert largest_difference(found["averaged"], [first, first, last, last, last]) < TOLERANCE
        for case in ("averaged", "synchronized"):
            assert found[case] == results[0][case]
        assert found["flag"] == found["synchronized"]
        means = [mean for mean, _ in found["local mean"]]
        assert largest_difference(means, [own[epoch][0] for epoch in (0, 0, 1, 1, 1)]) < TOLERANCE
        assert [other for _, other in found["local mean"]] == [other for _, other in found["averaged"]]


def test_state_that_layers_keep_is_that_of_all_ranks(outcome: Outcome) -> None:
    results = outcome.results("kept_state")
    for rank, found in enumerate(results):
        for said in ("DivergenceError", "which the layer center (Center) updates outside the optimizer",
                     "differs between ranks 0", "hvd.register_statistic", "register_local_var", "hvd.allreduce"):
            assert said in found["own"]
        mean = np.mean(found["truth"], 0).tolist()
        for case in ("over ranks", "registered", "registered variable"):
            assert largest_difference(found[case], mean) < TOLERANCE, case
        for case in ("local", "as horovod"):
            assert largest_difference(found[case], found["truth"][rank]) < TOLERANCE, case
        assert "as it did before the first step" in found["frozen"] and "add hvd.callbacks.Broadcast" in found["frozen"]
        assert "UsageError: A moving statistic is a floating-point variable" in found["refused"]
        size = outcome.np
        assert found["renewed"]["all"] == (size + 1) / 2
        assert found["renewed"]["between"] == [(size + 5) / 2] * 2
        if rank == 0:  # only this rank has loaded the weights
            assert found["renewed"]["alone"] == 1.0
        if found["renorm"] is not None:
            variance, derived, weights = found["renorm"]
            assert largest_difference(variance, derived) < TOLERANCE
            assert weights == results[0]["renorm"][2]


def test_ranks_use_a_model_together_only_if_it_is_the_same(outcome: Outcome) -> None:
    restored = "the likely cause is EarlyStopping, a callback that only rank 0 has"
    started = "the likely cause is that the ranks did not start from the same weights"
    for found in outcome.results("after_fit"):
        for case, texts in {
            "evaluate": ("in evaluate, but", restored, "HINT: pass EarlyStopping to fit on every rank, or give all",
                         "ranks the weights of rank 0: hvd.broadcast_variables(model.variables, root_rank=0)"),
            "predict": ("in predict, but", restored),
            "another fit": ("after 1 step of fit", started + ", after a fit with EarlyStopping, a callback that only"),
            "between": ("in evaluate, but", "differs between ranks 0 and ", "since the last fit"),
            "never trained": ("in evaluate, but", started), "never built": ("in evaluate, but", started),
        }.items():
            assert found[case].startswith("DivergenceError: All ranks must hold the same weights")
            for text in texts:
                assert text in found[case]
        assert found["none, local layers of a tape"] == "no error"
        together, truth = found["broadcast"]
        assert largest_difference(together, truth) < TOLERANCE
        assert found["as horovod"][0] == found["as horovod"][1]
    told = outcome.stderr(0)
    assert told.count("of its norm): each rank has a model of its own; " + restored) == 2, "once in each fit"
    assert told.count("in evaluate, ") == 1
    assert "the result is a mixture of different models (an error without --as-horovod); " + restored in told
    assert restored not in outcome.stderr(1)


def test_callbacks_that_differ_between_ranks_are_named(outcome: Outcome) -> None:
    size = outcome.np
    for rank, found in enumerate(outcome.results("partial_callbacks")):
        assert "the likely cause is that the learning rate is 0.05 on rank 0 and 0.1 on rank " in found["rate"]
        assert ": ReduceLROnPlateau, a callback that only rank 0 has" in found["rate"]
        assert "HINT: pass ReduceLROnPlateau to fit on every rank" in found["rate"]
        assert "a callback that decides by 'best_score', a number of its own on each rank" in found["own best"]
        assert found["own"] == [rank, rank + 1, rank + 2]
        assert found["averaged"] == [(size - 1) / 2 + epoch for epoch in range(3)]
    told = outcome.stderr(0)
    assert told.count("a callback adds 'own_score' to the logs, with a number of its own on each rank: 0 on rank 0, 1"
                      " on rank 1") == 1
    assert "hvd.callbacks.MetricAverageCallback() behind that callback" in told
    for name in ("time", "on_rank_0", "averaged_score"):
        assert f"a callback adds '{name}'" not in told


def test_a_setting_leaves_moving_statistics_to_each_rank(outcome: Outcome) -> None:
    for rank, found in enumerate(outcome.results("statistics_of_ones_own")):
        own = found["truth"][rank]
        assert largest_difference(found["own"], [own[epoch] for epoch in (0, 0, 1, 1, 1)]) < TOLERANCE


def test_hooks_are_reversible(outcome: Outcome) -> None:
    for found in outcome.results("hooks_are_undone"):
        assert found == {"before": True, "after": False, "stop_training": False, "again": True,
                         "signature": True}


def test_fit_hands_on_what_it_was_given_as_it_was_given(outcome: Outcome) -> None:
    for found in outcome.results("fit_that_a_library_has_wrapped"):
        assert found["tracked"] == ["by name", [2, ["batch_size", "callbacks", "verbose"]], "none", [6, []],
                                    "none", [1, ["batch_size", "callbacks", "verbose", "y"]]]
        assert found["batches"] == [3, 3, 3]
        assert "All ranks must run the same number of epochs" in found["other epochs"]
        assert re.match("You must (call `compile|compile your model)", found["not compiled"])
        assert found["same"], "the ranks' weights differ"


def test_joined_ranks_train_on_all_batches_as_one_process_does(outcome: Outcome) -> None:
    results = outcome.results("joined")
    for found in results:
        assert largest_difference(found["found"][0], found["truth"][0]) < TOLERANCE
        assert largest_difference(found["found"][1], found["truth"][1]) < 1e-5
    assert all(found["found"] == results[0]["found"] for found in results)
    for found in results:
        assert found["steps"] == [3, 5]
        assert largest_difference(found["changing"], found["changing truth"]) < 2e-6


def test_the_user_is_warned_once(outcome: Outcome) -> None:
    told = outcome.stderr(0)
    assert "the ranks have different numbers of batches per epoch (3 on rank 0, 2 on rank 1" in told
    for steps in ("1[45]", "(14|15|18|21)"):  # with one step per execution, and with three
        assert re.search(f"stop_training was set on rank 1 alone: all ranks stop after {steps} steps", told)
    assert "ranks that have no more batches continue with zero weight until all are done" in told
    assert "no batch after the first 3, ranks [0] have" in told
    for rank in range(1, len(outcome.results("stopping"))):
        assert "the ranks have different numbers" not in outcome.stderr(rank)


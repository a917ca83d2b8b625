"""Horovod's features besides the plain collectives: Adasum, local layers, SyncBatchNormalization, and more."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import Outcome

WORKER = Path(__file__).parent / "workers" / "horovod_surface.py"
RUNS = {
    "2-horovod-tf_keras": ("hvkeras_run", "horovod", 2, "1"),
    "2-tfdist": ("tf_config", "tfdist", 2, "0"),
    "2-native": ("hvkeras_run", "native", 2, "0"),
    "4-native": ("hvkeras_run", "native", 4, "0"),
}


MARKS = {"2-native": (), "4-native": pytest.mark.slow}


@pytest.fixture(params=[pytest.param(run, marks=MARKS.get(run, pytest.mark.nightly)) for run in RUNS])
def outcome(request: pytest.FixtureRequest, launch_once: Callable[..., Outcome]) -> Outcome:
    launcher, backend, size, legacy = RUNS[request.param]
    return launch_once(launcher, WORKER, np=size, backend=backend, env={"TF_USE_LEGACY_KERAS": legacy})


def test_adasum_is_the_published_rule(outcome: Outcome) -> None:
    for found in outcome.results("adasum_of_tensors"):
        assert (found.pop("dtype"), found.pop("shape")) == ("float16", [4, 3])
        assert found.pop("half") < 0.02
        assert found.pop("double") < 1e-12
        assert all(difference < 1e-5 for difference in found.values()), found


def test_adasum_of_gradients(outcome: Outcome) -> None:
    for found in outcome.results("adasum_of_gradients"):
        assert max(found.values()) < 1e-5


def test_adasum_refuses_what_it_cannot_combine(outcome: Outcome) -> None:
    for rank, found in enumerate(outcome.results("adasum_refusals")):
        assert found["integers"][0] == "UnsupportedError"
        assert "dtype='int32'" in found["integers"][1]
        assert found["slices"][0] == "UnsupportedError"
        if outcome.np == 4 and rank < 3:
            assert found["three ranks"][0] == "UnsupportedError"
            assert "ranks=3" in found["three ranks"][1]


def test_local_gradients_are_told_from_others(outcome: Outcome) -> None:
    mean = (outcome.np + 1) / 2
    for rank, found in enumerate(outcome.results("gradients_of_local_sources_apart")):
        assert found == {"gradients": [[[True, rank + 1.0]], [[True, mean]]], "tape": True, "of the job": [True, True],
                         "scaled": [False, False], "listed": True, "stepped": [mean, -2 * mean]}


def test_numbers_are_asked_when_the_graph_runs(outcome: Outcome) -> None:
    size = outcome.np
    some = size // 2
    for rank, (in_graph, eager, included, *refusals) in enumerate(outcome.results("numbers_as_operations")):
        assert in_graph == [rank, size, rank, size, some, int(rank < some), 1]
        assert eager == [rank, size, some]
        assert included == (rank < some)
        assert "process_set_id=99" in refusals[0]
        assert "use hvd.global_process_set" in refusals[1]


def test_ranks_outside_of_a_process_set_train_on_by_themselves(outcome: Outcome) -> None:
    for rank, (included, ranks, steps, session) in enumerate(outcome.results("steps_of_a_process_set")):
        mean = sum(member + 1 for member in ranks) / len(ranks) if included else rank + 1
        assert steps == [-mean] * 3
        assert session == -mean  # on tfdist, each of the two ranks is a set of its own, and does not communicate


def test_a_second_init_registers_new_process_sets(outcome: Outcome) -> None:
    for same, size, also, refusal in outcome.results("second_init"):
        assert (same, size, also) == (True, 1, 1)
        assert "The same ranks can be registered only once" in refusal


def test_groups_are_gathered(outcome: Outcome) -> None:
    size = outcome.np
    rows = [rank for rank in range(size) for _ in range(rank + 1)]
    assert outcome.results("groups_of_gathers") == [[rows, [[1.0, 2.0]] * size]] * size


def test_variables_and_objects_come_from_the_root(outcome: Outcome) -> None:
    assert outcome.results("variables_from_the_root") == [[[[1.0], [[1]]], [1.0], 1.0, {"rank": 1}]] * outcome.np


def test_sessions_of_tensorflow_1(outcome: Outcome) -> None:
    size = outcome.np
    for rank, found in enumerate(outcome.results("session_of_tensorflow_1")):
        total = [2.0 * size, 4.0 * size]
        if isinstance(found, str):
            assert "'tfdist' has no collectives for sessions of TensorFlow 1" in found
        else:
            assert found == [[2.0, 4.0], total, total, rank, {"rank": 1}]
    assert all("broadcast_variables" in text for text in outcome.results("global_variables_in_eager_mode"))


def test_optimizers_of_tensorflow_1(outcome: Outcome) -> None:
    size = outcome.np
    mean = (size + 1) / 2  # mean gradient of the ranks
    stepped = [1.0 - mean, 2.0 - mean]  # two steps with a rate of 1/2
    table = [[1.0 - sum(rank % 3 == row for rank in range(size)) / size] * 2 for row in range(3)]
    assert outcome.results("training_of_tensorflow_1_in_eager_mode") == [stepped] * size
    for found in outcome.results("training_of_tensorflow_1_in_a_session"):
        assert found == [stepped, table] or "'tfdist' has no collectives for sessions" in found


def test_gradients_that_a_loop_has_reduced_are_reduced_once(outcome: Outcome) -> None:
    ranks = range(1, outcome.np + 1)
    for rank, found in zip(ranks, outcome.results("gradients_that_are_reduced_before_they_are_applied"), strict=True):
        total = float(sum(ranks))
        both = 2 * [[1, -total], [2, -2 * total]]  # of a legacy and of a new optimizer
        assert found.pop("minimized", both) == both
        for name, steps in found.items():
            if name.endswith("2"):
                assert steps == [[rank, 0.0], [2 * total, -2 * total], -2 * total], name
            else:
                assert steps == [[total, -total], [total, -2 * total], -total], name


@pytest.mark.slow
def test_local_layers_differ_and_others_do_not(outcome: Outcome) -> None:
    for rank, found in enumerate(outcome.results("local_layers")):
        for kind in ("optimizer", "late", "tape"):
            mine, shared = found[kind]
            assert shared == 0.0
            assert (mine > 1e-4) == (rank > 0), (kind, mine)
        assert found["none"] == [0.0, 0.0]


def test_batch_normalization_is_that_of_the_whole_batch(outcome: Outcome) -> None:
    for rank in outcome.results("batch_normalization_over_all_ranks"):
        for found in rank.values():
            assert max(found.values()) < 1e-9, found


def test_batch_normalization_leaves_out_what_is_masked(outcome: Outcome) -> None:
    for rank in outcome.results("batch_normalization_of_masked_samples"):
        for found in rank.values():
            assert max(found.values()) < 1e-6, found


def test_batch_normalization_is_a_layer_like_others(outcome: Outcome) -> None:
    for found in outcome.results("batch_normalization_elsewhere"):
        assert not any(found["inference changes"])
        assert all(found["training changes"])
        assert max(found["apart"]) == 0.0  # including the moving statistics, although ranks have different samples
        assert (found["class"], found["momentum"]) == ("SyncBatchNormalization", 0.5)
        assert "fused=True" in found["refused"]


@pytest.mark.slow
def test_timelines_are_chrome_traces_of_what_ran(outcome: Outcome) -> None:
    for rank, (amid, after, alone) in enumerate(outcome.results("timeline")):
        assert [(event["name"], event["args"]) for event in amid] == [(event["name"], event["args"]) for event in after]
        assert all(event["pid"] == rank for event in after)
        rows = {event["tid"]: event["args"]["name"] for event in after if event["name"] == "thread_name"}
        bars = [event for event in after if event["ph"] == "X"]
        assert all(event["dur"] >= 0 for event in bars)
        assert [event["name"] for event in bars if event["cat"] == "steps"] == ["step 0", "step 1", "step 2"]
        assert [rows[event["tid"]] for event in bars if event["cat"] == "update"] == ["update"] * 3
        ran = [event for event in bars if event["cat"] == "collective"]
        assert all(rows[event["tid"]] == event["args"]["collective"] and event["dur"] > 0 for event in ran)
        steps = [event for event in ran if event["args"]["collective"] == "the gradients of SGD, part 0"]
        assert [(event["name"], event["args"]["bytes"]) for event in steps] == [("allreduce", 4 * (15 + 4))] * 3
        assert all(one["ts"] + one["dur"] <= other["ts"] for one, other in itertools.pairwise(steps))
        mine = {event["name"]: event["args"]["bytes"] for event in ran if "mine" in event["args"]["collective"]}
        assert mine == {"allgather": 24, "alltoall": 4 * outcome.np}
        assert [event["name"] for event in alone if event["ph"] == "X"] == (["broadcast"] if rank == 0 else [])


def test_gpus_are_reported(outcome: Outcome) -> None:
    assert all(told == there for told, there in outcome.results("gpus"))

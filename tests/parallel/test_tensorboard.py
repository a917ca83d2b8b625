"""TensorBoard on two ranks: rank 0 writes, and reports the time of each rank by part.

Ranks are cold: TensorFlow's profiler accesses all threads that a process ever had, and has crashed in forked ones.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness import OLDEST_IN_SOAK, Outcome
from harness.events import scalars
from hvkeras.callbacks import tensorboard

WORKERS = Path(__file__).parent / "workers"
STEP, COMMUNICATION, WAIT = "ranks/step_time_ms", "ranks/communication_ms", "ranks/wait_ms"
NEEDS_TENSORBOARD = [*OLDEST_IN_SOAK, pytest.mark.skipif(not tensorboard.has_tensorboard, reason="tf_keras's callback"
                     " needs the package tensorboard, which TensorFlow 2.16 brings along")]
WHOLE = [pytest.param(("native", "0"), id="keras3")]
FEW = [pytest.param(("native", "1", "--few"), id="tf_keras", marks=NEEDS_TENSORBOARD),
       pytest.param(("horovod", "0", "--few"), id="horovod", marks=pytest.mark.nightly),
       pytest.param(("tfdist", "0", "--few"), id="tfdist", marks=pytest.mark.nightly)]


@pytest.fixture(params=[*WHOLE, *FEW])
def outcome(request: pytest.FixtureRequest, launch_once: Callable[..., Outcome]) -> Outcome:
    backend, legacy, *arguments = request.param
    return launch_once("hvkeras_run", WORKERS / "tensorboard_ranks.py", tuple(arguments), np=2, backend=backend,
                       env={"TF_USE_LEGACY_KERAS": legacy}, cold=True)


@pytest.fixture(params=WHOLE)
def whole(request: pytest.FixtureRequest, launch_once: Callable[..., Outcome]) -> Outcome:
    backend, legacy = request.param
    return launch_once("hvkeras_run", WORKERS / "tensorboard_ranks.py", (), np=2, backend=backend,
                       env={"TF_USE_LEGACY_KERAS": legacy}, cold=True)


@pytest.mark.slow
def test_each_rank_has_a_run_of_its_own(outcome: Outcome) -> None:
    found = scalars(outcome.cwd / "everyone")
    assert set(found) == {"train", "validation", "rank_0", "rank_1", "rank_1/train"}
    assert {"epoch_loss", "batch_loss"} <= set(found["train"])
    for rank in ("rank_0", "rank_1"):
        assert set(found[rank]) == {STEP, COMMUNICATION, WAIT}
        for tag, values in found[rank].items():
            assert [epoch for epoch, _ in values] == [0, 1], tag
        for (_, step), (_, communication), (_, wait) in zip(*(found[rank][tag] for tag in (STEP, COMMUNICATION, WAIT)),
                                                            strict=True):
            assert 0 <= wait <= communication <= step
            assert communication > 0
    # Rank 1 is late in each step. The machine may delay rank 0 as long, but hardly in each epoch.
    assert any(mine > late for (_, mine), (_, late) in zip(found["rank_0"][WAIT], found["rank_1"][WAIT], strict=True))
    assert outcome.results("everyone") == [0.0, 0.0]


@pytest.mark.slow
def test_the_chosen_rank_profiles(outcome: Outcome) -> None:
    folder = outcome.cwd / "everyone"
    profiles = [path.relative_to(folder).parts[0] for path in folder.rglob("*.xplane.pb")]
    assert profiles == ["rank_1"]


@pytest.mark.slow
def test_a_chief_that_is_the_only_one_with_the_callback_tells_of_itself(whole: Outcome) -> None:
    found = scalars(whole.cwd / "the_chief_alone")
    assert set(found) == {"train", "validation", "rank_0"}
    assert set(found["rank_0"]) == {STEP, COMMUNICATION}


@pytest.mark.slow
def test_another_fit_does_not_trace_again(whole: Outcome) -> None:
    assert whole.results("again") == [True, True]
    for name in ("first", "second"):
        assert set(scalars(whole.cwd / "again" / name)["rank_1"]) == {STEP, COMMUNICATION, WAIT}


@pytest.mark.slow
def test_eager_steps_are_measured(whole: Outcome) -> None:
    found = scalars(whole.cwd / "eagerly")
    assert all(set(found[rank]) == {STEP, COMMUNICATION, WAIT} for rank in ("rank_0", "rank_1"))


@pytest.mark.slow
def test_of_compiled_steps_the_time_alone_is_known(whole: Outcome) -> None:
    found = scalars(whole.cwd / "compiled")
    assert all(set(found[rank]) == {STEP} for rank in ("rank_0", "rank_1"))


@pytest.mark.slow
def test_recording_and_timelines_put_collectives_into_no_order(outcome: Outcome) -> None:
    for without, recorded, in_timeline in outcome.results("order"):
        assert without == recorded == in_timeline


@pytest.mark.slow
@pytest.mark.nightly
def test_under_a_strategy_the_chief_tells_of_itself(launch_once: Callable[..., Outcome]) -> None:
    outcome = launch_once("tf_config", WORKERS / "tensorboard_strategy.py", np=2, cold=True)
    assert outcome.results("metrics")[0] == outcome.results("metrics")[1]
    found = scalars(outcome.cwd / "logs")
    assert set(found) == {"train", "validation", "rank_0", "rank_1/train"}
    assert set(found["rank_0"]) == {STEP}
    folder = outcome.cwd / "logs"
    assert [path.relative_to(folder).parts[0] for path in folder.rglob("*.xplane.pb")] == ["rank_1"]

"""`TensorBoard` in one process: Keras's summaries, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import hvkeras as hvd
from harness.events import scalars
from hvkeras.callbacks import TensorBoard, tensorboard
from hvkeras.job.session import Change, changes

# Keras reads the learning rate in a way that NumPy 2 will not know any more.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "warning")  # init() would set it for the rest of the process
    hvd.init("local")
    yield
    hvd.shutdown()


def fitted(*callbacks: Any, epochs: int = 2, **compiled: Any) -> None:
    x = np.random.default_rng(1).normal(size=(28, 3)).astype("float32")
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", **compiled)
    model.fit(x, x[:, :1], batch_size=4, epochs=epochs, validation_split=0.3, verbose=0, callbacks=list(callbacks))


def tags(folder: Path) -> dict[str, set[str]]:
    return {run: set(found) for run, found in scalars(folder).items()}


def test_one_process_writes_what_keras_does_and_its_step_time(tmp_path: Path) -> None:
    fitted(TensorBoard(tmp_path, update_freq=1, write_steps_per_second=True))  # without init()
    found = tags(tmp_path)
    assert found["rank_0"] == {"ranks/step_time_ms"}
    assert {"epoch_loss", "epoch_learning_rate", "epoch_steps_per_second", "batch_loss"} <= found["train"]
    assert {"epoch_loss", "evaluation_loss_vs_iterations"} <= found["validation"]
    steps = scalars(tmp_path)["rank_0"]["ranks/step_time_ms"]
    assert [epoch for epoch, _ in steps] == [0, 1]
    assert all(value > 0 for _, value in steps)


@pytest.mark.slow
@pytest.mark.usefixtures("job")
def test_rank_scalars_can_be_left_out(tmp_path: Path) -> None:
    fitted(TensorBoard(tmp_path, rank_scalars=False))
    assert set(tags(tmp_path)) == {"train", "validation"}


@pytest.mark.slow
@pytest.mark.usefixtures("job")
def test_several_steps_in_an_execution_and_several_fits(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path, write_graph=False)
    for _ in range(2):
        fitted(board, epochs=3, steps_per_execution=2)
    assert [epoch for epoch, _ in scalars(tmp_path)["rank_0"]["ranks/step_time_ms"]] == [0, 1, 2] * 2


@pytest.mark.usefixtures("job")
def test_changes_of_an_elastic_jobs_ranks_are_written(tmp_path: Path) -> None:
    def change(epoch: int, _: Any) -> None:
        for size in (3, 4) if epoch == 1 else ():
            changes().append(Change(size, commit=7, repeated=5 if size == 3 else None, seconds=0.25, why="lost"))

    fitted(keras.callbacks.LambdaCallback(on_epoch_end=change), TensorBoard(tmp_path, write_graph=False), epochs=3)
    changes().clear()
    assert scalars(tmp_path)["elastic"] == {
        "elastic/ranks": [(1, 4.0)], "elastic/changes": [(1, 2.0)], "elastic/seconds_lost": [(1, 0.5)],
        "elastic/steps_repeated": [(1, 5.0)]}


@pytest.mark.parametrize("wrong", [-1, True, "0", None, 1.0])
def test_a_profile_rank_that_is_none(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(hvd.UsageError, match="profile_rank must be the number of a rank"):
        TensorBoard(tmp_path, profile_rank=wrong)


@pytest.mark.slow
@pytest.mark.usefixtures("job")
def test_a_profile_rank_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(hvd.UsageError, match=r"profile_rank must be one of the 1 ranks.*profile_rank=1.*pass one of 0"):
        fitted(TensorBoard(tmp_path, profile_batch=1, profile_rank=1))
    fitted(TensorBoard(tmp_path, profile_rank=1))  # nobody profiles
    with pytest.raises(ValueError, match="profile_batch"):
        TensorBoard(tmp_path, profile_batch=(2, 1))


@pytest.mark.slow
@pytest.mark.usefixtures("job")
def test_a_profile_of_the_chief_is_where_keras_leaves_it(tmp_path: Path) -> None:
    fitted(TensorBoard(tmp_path, profile_batch=(2, 3)))
    assert len(list(tmp_path.rglob("*.xplane.pb"))) == 1
    assert not list((tmp_path / "rank_0").rglob("*.xplane.pb"))


def test_what_needs_the_package_tensorboard_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard, "has_tensorboard", False)
    with pytest.raises(hvd.MachineError, match="histogram_freq and write_images need the package tensorboard"):
        fitted(TensorBoard(tmp_path, histogram_freq=1, write_images=True))
    fitted(TensorBoard(tmp_path))
    assert "epoch_loss" in tags(tmp_path)["train"]

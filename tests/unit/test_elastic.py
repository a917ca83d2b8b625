"""States of `hvd.elastic` in one process: what they save, restore, commit, and refuse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvkeras as hvd
from hvkeras import context
from hvkeras.elastic import callbacks, running
from hvkeras.elastic.commits import CommitFile

pytestmark = pytest.mark.oldest
keras: Any = tf.keras


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A job of one process whose commits go to a folder, as if this were the script's first elastic function."""
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "warning")  # init() would set it for the rest of the process
    monkeypatch.setenv("HVKERAS_ELASTIC_DIR", str(tmp_path / "commits"))
    _next_process(monkeypatch)
    hvd.init()
    yield tmp_path / "commits"
    hvd.shutdown()


def _next_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_numbers", iter(range(9)))


def objects(**attributes: Any) -> Any:
    return hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, **attributes)


def model_of(*widths: int) -> Any:
    model = keras.Sequential([keras.layers.Input((2,)), *(keras.layers.Dense(width) for width in widths)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss="mse")
    return model


def test_objects_are_copied_and_restored() -> None:
    state = objects(epoch=0, history=[1])
    state.epoch = 3
    state.history.append(2)
    state.restore()
    assert (state.epoch, state.history) == (0, [1])
    state.epoch = 3
    state.history.append(2)
    state.save()
    state.history.append(4)
    for _ in range(2):
        state.restore()
        assert (state.epoch, state.history) == (3, [1, 2])
        state.history.append(5)


def test_a_keras_state_holds_weights_and_slots() -> None:
    model = model_of(3, 1)
    state = hvd.elastic.KerasState(model, epoch=0)
    before = model.get_weights()
    model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=4, verbose=0)
    state.epoch = 1
    state.restore()
    assert all(np.array_equal(*pair) for pair in zip(before, model.get_weights(), strict=True))
    assert (int(model.optimizer.iterations.numpy()), state.epoch) == (0, 0)
    model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=4, verbose=0)
    state.save()
    trained = model.get_weights()
    model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=4, verbose=0)
    state.restore()
    assert all(np.array_equal(*pair) for pair in zip(trained, model.get_weights(), strict=True))
    assert int(model.optimizer.iterations.numpy()) == 2


def test_variables_of_both_modes() -> None:
    eager = tf.Variable([1.0])
    state = hvd.elastic.TensorFlowState([eager], step=1)
    eager.assign([2.0])
    state.step = 2
    state.sync()  # variables as they are, attributes as they were saved
    assert (float(eager[0]), state.step) == (2.0, 1)
    eager.assign([3.0])
    state.restore()
    assert float(eager[0]) == 2.0
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = tf.compat.v1.get_variable("variable", initializer=5.0)
        session.run(variable.initializer)
        state = hvd.elastic.TensorFlowState(session=session, step=1)
        session.run(variable.assign(6.0))
        state.restore()
        assert session.run(variable) == 5.0
        session.run(variable.assign(7.0))
        state.sync()
        session.run(variable.assign(8.0))
        state.restore()
        assert session.run(variable) == 7.0


def test_another_process_goes_on_from_the_last_commit(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @hvd.elastic.run
    def fails(state: Any) -> None:
        for state.epoch in range(1, 5):
            if state.epoch == 4:
                raise ArithmeticError("lost")
            state.model.weights[0].assign_add(tf.ones((2, 1)))
            if state.epoch < 3:
                state.commit()

    first = hvd.elastic.TensorFlowKerasState(model_of(1), epoch=0)
    with pytest.raises(ArithmeticError):
        fails(first)
    assert [path.name for path in job.iterdir()] == ["commit-0.pickle"]
    _next_process(monkeypatch)
    second = hvd.elastic.TensorFlowKerasState(model_of(1), epoch=0)
    seen = hvd.elastic.run(lambda state: (state.epoch, state.model.weights[0].numpy()))(second)
    assert seen[0] == 2
    np.testing.assert_allclose(seen[1], first.model.weights[0].numpy() - 1, rtol=1e-6)  # adding 1 rounds
    running._forget(CommitFile(job, 0), None)  # what happens when such a process comes to its end
    assert list(job.iterdir()) == []


def test_another_elastic_function_has_commits_of_its_own(job: Path) -> None:
    state = objects(phase=0)
    for phase in (1, 2):
        def train(state: Any, phase: int = phase) -> None:
            state.phase = phase
            state.commit()

        hvd.elastic.run(train)(state)
    assert [CommitFile(job, number).read() for number in (0, 1, 2)] == [{"phase": 1}, {"phase": 2}, None]


def test_the_function_is_called_again_until_no_rank_stumbles() -> None:
    calls: list[Any] = []
    state = objects(step=0)
    state.register_reset_callbacks([lambda: calls.append("reset")])

    @hvd.elastic.run
    def train(state: Any) -> str:
        calls.append(state.step)
        if len(calls) == 1:
            state.step = 1
            state.commit()
            state.step = 2
            raise hvd.elastic.HorovodInternalError("stumbled")
        if len(calls) == 3:
            state.step = 7
            raise hvd.elastic.HostsUpdatedInterrupt(skip_sync=True)
        return "done"

    assert train(state) == "done"
    assert calls == [0, "reset", 1, "reset", 7]
    assert context.is_initialized()


def test_callbacks_count_over_several_fits() -> None:
    model = model_of(1)
    state = hvd.elastic.KerasState(model, epoch=0, batch=0)
    seen: list[Any] = []

    class Seen(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
        def on_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append((state.epoch, state.batch, state.saved()[1]["batch"]))

    updates = [callbacks.UpdateBatchStateCallback(state), callbacks.UpdateEpochStateCallback(state),
               callbacks.CommitStateCallback(state, 2), Seen()]
    for options in ({"epochs": 2}, {"initial_epoch": 2, "epochs": 3}):
        model.fit(np.ones((12, 2)), np.ones((12, 1)), batch_size=4, verbose=0, callbacks=updates, **options)
    # A commit after every second batch of a fit, and one after each epoch.
    assert seen == [(0, 0, 0), (0, 1, 1), (0, 2, 1), (1, 0, 0), (1, 1, 0), (1, 2, 2), (2, 0, 0), (2, 1, 1), (2, 2, 1)]
    assert (state.epoch, state.batch) == (3, 0)
    assert state.saved()[1] == {"epoch": 3, "batch": 0}


def test_misuse(job: Path) -> None:
    with pytest.raises(hvd.UsageError, match="must be a state"):
        hvd.elastic.run(print)(3)
    with pytest.raises(hvd.UsageError, match=r"names of their own.*attribute='commit'"):
        objects(commit=1)
    with pytest.raises(hvd.UsageError, match="must be copyable"):
        objects(numbers=(number for number in range(3)))
    with pytest.raises(hvd.UsageError, match="model with its weights"):
        hvd.elastic.KerasState(keras.Sequential([keras.layers.Dense(1)]))
    with pytest.raises(hvd.UsageError, match="needs variables"):
        hvd.elastic.TensorFlowState([])
    job.mkdir()
    (job / "commit-0.pickle").write_bytes(b"no pickle")
    with pytest.raises(hvd.UsageError, match=r"commit must be readable.*commit-0\.pickle"):
        hvd.elastic.run(print)(objects(step=1))
    CommitFile(job, 1).write({"other": 1})
    with pytest.raises(hvd.UsageError, match=r"must have the state's attributes.*commit=\['other'\]"):
        hvd.elastic.run(print)(objects(step=1))
    CommitFile(job, 2).write(([np.zeros(3)], {}))
    with pytest.raises(hvd.UsageError, match=r"must have the state's variables.*commit=\[\[3\]\]"):
        hvd.elastic.run(print)(hvd.elastic.TensorFlowState([tf.Variable([1.0])]))
    state = objects(step=1)
    state.keep_commits_in(CommitFile(job / "commit-1.pickle", 0))
    with pytest.raises(hvd.MachineError, match="Commits must be writable"):
        state.commit()

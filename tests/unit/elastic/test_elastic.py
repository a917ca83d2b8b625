"""States of `hvd.elastic` in one process: what they save, restore, commit, and refuse."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvkeras as hvd
from hvkeras.elastic import callbacks, commits, running
from hvkeras.elastic.commits import Commit, CommitFile
from hvkeras.elastic.encoding import decode, encode
from hvkeras.errors import CommitError
from hvkeras.job.session import current_session, is_initialized

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
    monkeypatch.setattr(running, "_call_indices", iter(range(9)))


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


def test_states_have_the_attributes_of_horovods() -> None:
    model = model_of(1)
    state = hvd.elastic.KerasState(model, steps=3, positions=[1], last_commit=0, variables=2, session=None)
    assert (state.steps, state.positions, state.last_commit, state.variables, state.session) == (3, [1], 0, 2, None)
    state.steps = 4
    state.commit()
    state.steps, state.positions = 5, []
    state.restore()
    assert (state.steps, state.positions, state.last_commit) == (4, [1], 0)
    assert (state.model is model, state.optimizer is model.optimizer, state.backend) == (True, True, keras.backend)
    model.compile(keras.optimizers.SGD(0.2), loss="mse")
    assert state.optimizer is model.optimizer
    other = keras.optimizers.SGD(0.3)
    assert hvd.elastic.TensorFlowKerasState(model, other).optimizer is other
    weights = [tf.Variable(1.0)]
    plain = hvd.elastic.TensorFlowState(weights, step=0)
    assert (plain.variables, plain.session) == (weights, None)
    assert not isinstance(state, hvd.elastic.TensorFlowState)  # as in Horovod
    with pytest.raises(hvd.UsageError, match=r"the names of its methods\. Received: attribute='commit'"):
        objects(commit=1)
    with pytest.raises(hvd.UsageError, match="A state needs a model whose weights exist"):
        hvd.elastic.KerasState(keras.Sequential([keras.layers.Dense(1)]))


def test_callbacks_have_the_attributes_of_horovods() -> None:
    state = objects(batch=0, epoch=3)
    committing = callbacks.CommitStateCallback(state, batches_per_commit=2)
    committing.set_params({"steps": 9})
    remaining = []
    for batch in range(3):
        committing.on_batch_end(batch)
        remaining.append((committing.batches_remaining, state.commit_number))
    assert remaining == [(1, 0), (2, 1), (1, 1)]
    committing.on_train_begin()
    assert committing.batches_remaining == 2
    counting = callbacks.UpdateEpochStateCallback(state)
    assert counting.initial_epoch == 3
    assert {one.backend for one in (committing, counting, callbacks.UpdateBatchStateCallback(state))} == {keras.backend}


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_later_steps_do_not_change_a_commit(compiled: bool) -> None:
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Embedding(9, 4), keras.layers.Flatten(),
                              keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), loss="mse", jit_compile=compiled)
    data = {"x": np.arange(60).reshape(20, 3) % 9, "y": np.ones((20, 1), np.float32), "batch_size": 5, "verbose": 0}
    model.fit(**data)
    state = hvd.elastic.TensorFlowKerasState(model)
    variables = [*model.weights, *model.optimizer.variables]
    committed = [variable.numpy() for variable in variables]
    for _ in range(2):  # the values that were restored are committed ones, too
        model.fit(**data)
        assert not all(np.array_equal(before, variable.numpy())
                       for before, variable in zip(committed, variables, strict=True))
        state.restore()
        for before, variable in zip(committed, variables, strict=True):
            np.testing.assert_array_equal(before, variable.numpy())


def test_commits_are_written_in_a_thread_the_newest_first(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvkeras.elastic.commits.SHARE", 1e-6)  # what waits does so for minutes
    commits = CommitFile(job, 0)
    for number in range(50):
        commits.write_soon({"number": number}, {"data": (0, number)})
    commits.finish()
    found = commits.read()
    assert found is not None
    assert (found.saved, found.positions) == ({"number": 49}, {"data": (0, 49)})
    commits.write_soon({"number": 50}, {})  # waits, as writing takes a small part of the time
    commits.abandon()
    commits.finish()
    assert commits.read() == found
    job.chmod(0o777)
    commits.write_soon({}, {})
    with pytest.raises(CommitError, match="Only you"):
        commits.finish()
    job.chmod(0o700)
    commits.write({"number": 50})


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


def test_another_process_resumes_from_the_last_commit(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert sorted((path.name, path.stat().st_mode & 0o777) for path in job.iterdir()) == [
        ("commit-0", 0o600), ("commit-0.former", 0o600)]
    assert job.stat().st_mode & 0o777 == 0o700
    _next_process(monkeypatch)
    second = hvd.elastic.TensorFlowKerasState(model_of(1), epoch=0)
    seen = hvd.elastic.run(lambda state: (state.epoch, state.model.weights[0].numpy()))(second)
    assert seen[0] == 2
    np.testing.assert_allclose(seen[1], first.model.weights[0].numpy() - 1, rtol=1e-6)  # adding 1 rounds
    monkeypatch.setattr(sys, "last_type", ArithmeticError, raising=False)  # as a traceback leaves it
    commits._remove_commits(current_session(), job)  # what happens when such a process ends
    assert len(list(job.iterdir())) == 2
    monkeypatch.delattr(sys, "last_type")
    commits._remove_commits(current_session(), job)
    assert list(job.iterdir()) == []


def test_another_elastic_function_has_commits_of_its_own(job: Path) -> None:
    state = objects(phase=0)
    for phase in (1, 2):
        def train(state: Any, phase: int = phase) -> None:
            state.phase = phase
            state.commit()

        hvd.elastic.run(train)(state)
    assert [CommitFile(job, number).read() for number in (0, 1, 2)] == [
        Commit({"phase": 1}, True, ranks=1), Commit({"phase": 2}, True, ranks=1), None]


@pytest.mark.parametrize("returns", [None, "history"])
def test_the_end_is_a_commit(returns: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    @hvd.elastic.run
    def train(state: Any) -> Any:
        calls.append(state.step)
        for state.step in range(state.step, 3):  # noqa: B020 - as Horovod's examples count
            state.commit()
        state.step += 1
        return returns

    for _ in range(2):
        state = objects(step=0)
        assert train(state) == returns
        assert state.step == (3 if returns is None or len(calls) == 1 else 4)
        _next_process(monkeypatch)
    assert calls == ([0] if returns is None else [0, 3])  # what it returns is wanted again


def test_a_damaged_commit_falls_back_to_the_former(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = objects(step=0)
    commits = CommitFile(job, 0)
    state.write_commits_to(commits)
    for state.step in (1, 2, 3):
        state.commit()
    for spoilt in (b"", (job / "commit-0").read_bytes()[:-9], b"no commit"):
        (job / "commit-0").write_bytes(spoilt)
        (job / "commit-0").chmod(0o600)
        found = commits.read()
        assert found is not None and found.saved == {"step": 2}
        assert found.note.startswith("commit-0 is damaged (ValueError: ")
    (job / "commit-0").touch(0o600)
    assert hvd.elastic.run(lambda state: state.step)(objects(step=0)) == 2
    assert "resumes from the commit before the last one: commit-0 is damaged" in capsys.readouterr().err
    (job / "commit-0").unlink()  # as after a kill between two renames; the damaged one has not replaced the former
    assert commits.read() == Commit({"step": 2}, False)


def test_what_commits_hold_executes_nothing() -> None:
    import ml_dtypes  # which TensorFlow needs

    arrays = [np.arange(6).reshape(2, 3).astype(dtype) for dtype in ("float32", ">i2", "bool", "complex64")]
    arrays += [np.ones(3, ml_dtypes.bfloat16), np.zeros((0, 2)), np.array(3), np.array(["ä", "bc"]), np.array([], "U"),
               np.array([[b"x", b""]], object), np.ones((3, 2), order="F")[::2]]
    value = {"arrays": arrays, 1: (None, True, 2**80, float("inf"), 1 + 2j, b"\0x", {3}, frozenset([(4, "é")])),
             (2, 3): [np.float16(1.5), np.int64(7), {"array": 0, "pickle": 1}]}
    data = b"".join(encode(value))
    assert b'"pickle": ' not in data.replace(b'["pickle", 1]', b"")
    found = decode(data)
    for array, own in zip(found.pop("arrays"), value.pop("arrays"), strict=True):  # type: ignore[call-overload]
        np.testing.assert_array_equal(array, own)
        assert (type(array), array.dtype, array.shape, array.flags.writeable) == (
            np.ndarray, own.dtype, own.shape, True)
    assert found == value
    assert [type(each) for each in found[2, 3]] == [np.float16, np.int64, dict]
    objects_of_users = decode(b"".join(encode([range(3), np.random.default_rng(0)])))
    assert objects_of_users[0] == range(3)
    assert objects_of_users[1].random() == np.random.default_rng(0).random()


def test_others_may_not_write_commits(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CommitFile(job, 0).write({"step": 1})
    job.chmod(0o770)
    train, state = hvd.elastic.run(print), objects(step=1)
    with pytest.raises(hvd.UsageError, match=r"but its mode is 0770\..*HINT: chmod go-w "):
        train(state)
    job.chmod(0o700)
    (job / "commit-0").chmod(0o602)
    _next_process(monkeypatch)
    with pytest.raises(hvd.UsageError, match=r"writable for nobody else \(its mode is 0602\)"):
        train(state)
    (job / "commit-0").unlink()
    (job / "commit-0").symlink_to(job / "elsewhere")
    _next_process(monkeypatch)
    with pytest.raises(hvd.UsageError, match=r"commit-0 is damaged"):
        train(state)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(hvd.UsageError, match="it belongs to user"):
        CommitFile(job, 0).read()


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
    assert is_initialized()


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
    # A commit after every second batch of a fit, unless it is an epoch's last, and one after each epoch.
    assert seen == [(0, 1, 0), (0, 2, 2), (0, 3, 2), (1, 1, 1), (1, 2, 1), (1, 3, 1), (2, 1, 0), (2, 2, 2), (2, 3, 2)]
    assert (state.epoch, state.batch) == (3, 0)
    assert state.saved()[1] == {"epoch": 3, "batch": 0}


@pytest.mark.parametrize("execution", [1, 2])
def test_fit_resumes_within_an_epoch(execution: int) -> None:
    x, y = np.arange(32, dtype="float32").reshape(16, 2) / 32, np.ones((16, 1), "float32")
    weights: list[Any] = []
    for done in (0, 2):
        model = model_of(1)
        model.compile(keras.optimizers.SGD(0.1), loss="mse", steps_per_execution=execution)
        model.set_weights(weights or [np.ones((2, 1)), np.zeros(1)])
        state = hvd.elastic.KerasState(model, batch=done)
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
        if not done:
            model.fit(data.take(2), verbose=0, shuffle=False)
            weights = model.get_weights()
            model.fit(data.skip(2), verbose=0, shuffle=False)
            model.fit(data, verbose=0, shuffle=False)
            truth = model.get_weights()
        else:
            model.fit(data, epochs=2, verbose=0, shuffle=False, callbacks=[hvd.elastic.UpdateBatchStateCallback(state)])
            assert state.batch == 0
            assert int(model.optimizer.iterations.numpy()) == 6
            for one, other in zip(model.get_weights(), truth, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-6)


def test_misuse(job: Path) -> None:
    with pytest.raises(hvd.UsageError, match="must be a state"):
        hvd.elastic.run(print)(3)
    with pytest.raises(hvd.UsageError, match=r"must not have the names of its methods.*attribute='commit'"):
        objects(commit=1)
    with pytest.raises(hvd.UsageError, match="must be copyable"):
        objects(numbers=(number for number in range(3)))
    with pytest.raises(hvd.UsageError, match="model whose weights exist"):
        hvd.elastic.KerasState(keras.Sequential([keras.layers.Dense(1)]))
    with pytest.raises(hvd.UsageError, match="needs variables"):
        hvd.elastic.TensorFlowState([])
    job.mkdir(mode=0o700)
    (job / "commit-0").touch(mode=0o600)
    with pytest.raises(hvd.UsageError, match=r"commit must be readable, but commit-0 is damaged.*commit-0'"):
        hvd.elastic.run(print)(objects(step=1))
    CommitFile(job, 1).write({"other": 1})
    with pytest.raises(hvd.UsageError, match=r"must have the state's attributes.*commit=\['other'\]"):
        hvd.elastic.run(print)(objects(step=1))
    CommitFile(job, 2).write(([np.zeros(3)], {}))
    with pytest.raises(hvd.UsageError, match=r"must have the state's variables.*commit=\[\[3\]\]"):
        hvd.elastic.run(print)(hvd.elastic.TensorFlowState([tf.Variable([1.0])]))
    state = objects(step=1)
    state.write_commits_to(CommitFile(job / "commit-1", 0))
    with pytest.raises(hvd.MachineError, match="The folder of commits must exist, or be creatable"):
        state.commit()
    (job / "commit-9.unfinished").mkdir()
    state.write_commits_to(CommitFile(job, 9))
    with pytest.raises(hvd.MachineError, match=r"Commits must be writable.*room_left="):
        state.commit()

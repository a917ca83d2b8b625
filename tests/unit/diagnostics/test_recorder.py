"""Recording in one process: each step once with its samples, in graphs and out of them, and the final weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import hvkeras as hvd
from harness import OLDEST_IN_SOAK
from harness.processes import run_python
from hvkeras.diagnostics import recorder
from hvkeras.diagnostics.record import WEIGHTS, Record

KINDS = {"keras": keras, "tf_keras": tf_keras}
ROWS = [8.0, 8.0, 8.0, 8.0, 5.0]  # of the steps of an epoch on 37 samples
X = np.random.default_rng(0).normal(size=(37, 4)).astype("float32")


@pytest.fixture(params=[pytest.param("keras", marks=OLDEST_IN_SOAK),
                        pytest.param("tf_keras", marks=pytest.mark.slow)])
def kind(request: pytest.FixtureRequest) -> Any:
    return KINDS[request.param]


@pytest.fixture
def finished(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[], Record]]:
    """Records, until it is called: then it leaves the job and gives the record."""
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "warning")  # init() would set it for the rest of the process
    monkeypatch.setenv("HVKERAS_RECORD", str(tmp_path / "record"))
    hvd.init("local")

    def finish() -> Record:
        hvd.shutdown()
        record = Record.read(tmp_path / "record", 0)
        assert record is not None
        return record

    yield finish
    hvd.shutdown()


def rows_of(record: Record) -> list[float]:
    """The samples of each step; times must have gone up."""
    assert (np.diff(record.stamps[:, 0]) > 0).all()
    return list(np.diff(record.stamps[:, 1], prepend=0))


def network(kind: Any) -> Any:
    """A model inside a model, so that only the outer one may count."""
    inner = kind.Sequential([kind.Input((3,)), kind.layers.Dense(1)])
    return kind.Sequential([kind.Input((4,)), kind.layers.Dense(3), inner])


def compiled(kind: Any, passes: int = 1, **options: Any) -> Any:
    model = network(kind)
    optimizer = hvd.DistributedOptimizer(kind.optimizers.SGD(0.01), backward_passes_per_step=passes)
    model.compile(optimizer, "mse", **options)
    return model


@pytest.mark.parametrize(("kind", "options"), [
    pytest.param(kind, options, id=f"{kind}-{options}", marks=[
        *(OLDEST_IN_SOAK if kind == "keras" else [pytest.mark.nightly] if options else []),
        *([] if kind == "keras" and not options else [pytest.mark.slow])])
    for kind in KINDS for options in ({}, {"steps_per_execution": 5}, {"run_eagerly": True})], indirect=["kind"])
def test_fit_records_each_step(kind: Any, options: dict[str, Any], finished: Callable[[], Record]) -> None:
    model = compiled(kind, **options)
    data = (X, X[:, :1])
    model.fit(*data, batch_size=8, epochs=2, verbose=0, validation_data=data, validation_batch_size=8)
    model.evaluate(*data, batch_size=8, verbose=0)
    model.predict(X, batch_size=8, verbose=0)
    record = finished()
    assert rows_of(record) == 2 * ROWS
    assert (record.rank, record.size, record.backend, record.no_steps, record.no_samples) == (0, 1, "local", "", "")


def test_the_logs_are_keras_own(kind: Any, finished: Callable[[], Record]) -> None:
    model = compiled(kind)
    history = model.fit(X, X[:, :1], epochs=2, verbose=0, validation_data=(X, X[:, :1])).history
    loss = model.evaluate(X, X[:, :1], verbose=0)
    record = finished()
    assert record.logs["fit"] == pytest.approx({name: values[-1] for name, values in history.items()})
    assert record.last_logs == "evaluate"
    assert record.logs["evaluate"]["loss"] == pytest.approx(loss)


def test_logs_keep_numbers_alone(finished: Callable[[], Record]) -> None:
    recorder.recording().record_logs(
        "fit", {"loss": tf.constant(2.0), "accuracy": np.float32(0.5), "comment": "good", "none": None})
    record = finished()
    assert (record.logs, record.last_logs) == ({"fit": {"loss": 2.0, "accuracy": 0.5}}, "fit")


def test_accumulated_passes_are_one_step_with_all_their_samples(kind: Any, finished: Callable[[], Record]) -> None:
    compiled(kind, passes=2).fit(X, X[:, :1], batch_size=8, epochs=2, verbose=0)
    assert rows_of(finished()) == [16, 16, 13, 16, 13]


def test_a_step_of_mixed_precision_is_one_step(kind: Any, finished: Callable[[], Record]) -> None:
    model = network(kind)
    scaled = kind.mixed_precision.LossScaleOptimizer(hvd.DistributedOptimizer(kind.optimizers.SGD(0.01)))
    model.compile(scaled, "mse")
    model.fit(X, X[:, :1], batch_size=8, verbose=0)
    assert rows_of(finished()) == ROWS


def train_step(model: Any, calls: int = 1) -> Callable[[Any], Any]:
    """A step of one's own that calls the model so many times."""
    optimizer = tf.keras.optimizers.SGD(0.01)

    def step(rows: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_mean(model(rows) ** 2) for _ in range(calls)])
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


def batches() -> Any:
    return tf.data.Dataset.from_tensor_slices(X).batch(8)


@pytest.mark.parametrize("form", ["eager", "graph", pytest.param("loop in a graph", marks=pytest.mark.slow)])
def test_a_tape_records_each_step(form: str, finished: Callable[[], Record], tmp_path: Path) -> None:
    model = network(tf.keras)
    step = train_step(model)
    model(X)  # without a tape: no samples of training
    if form == "loop in a graph":
        epoch = tf.function(lambda data: data.reduce(0.0, lambda _, rows: step(rows)))
        losses = [epoch(batches()) for _ in range(2)]
    else:
        step = tf.function(step) if form == "graph" else step
        losses = [step(rows) for _ in range(2) for rows in batches()]
    assert np.isfinite(float(losses[-1]))
    assert rows_of(finished()) == 2 * ROWS
    with np.load(tmp_path / "record" / WEIGHTS) as file:
        values = [file[name] for name in file.files]
    for value, variable in zip(values, model.trainable_variables, strict=True):
        np.testing.assert_array_equal(value, np.asarray(variable))


def test_a_model_that_is_called_twice_in_a_step_makes_samples_unknown(finished: Callable[[], Record]) -> None:
    step = tf.function(train_step(network(tf.keras), calls=2))
    for rows in batches():
        step(rows)
    record = finished()
    assert len(record.stamps) == len(ROWS)
    assert record.no_samples == recorder.SEVERAL_CALLS


def test_steps_that_xla_compiles_train_all_the_same_and_say_why_they_have_no_time(
    kind: Any, finished: Callable[[], Record],
) -> None:
    model = compiled(kind, jit_compile=True)
    model.fit(X[:32], X[:32, :1], batch_size=8, verbose=0)
    record = finished()
    assert len(record.stamps) == 0
    assert record.no_steps == recorder.COMPILED


def test_the_latest_steps_are_held(finished: Callable[[], Record], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "CAPACITY", 7)
    hvd.shutdown()
    hvd.init("local")
    step = tf.function(train_step(network(tf.keras)))
    for _ in range(2):
        for rows in batches():
            step(rows)
    stamps = finished().stamps
    assert (np.diff(stamps[:, 0]) > 0).all()
    assert np.diff(stamps[:, 1]).tolist() == [5, 8, 8, 8, 8, 5]
    assert stamps[-1, 1] == 2 * sum(ROWS)


@pytest.mark.slow
def test_recording_leaves_devices_to_be_set_up_after_init(finished: Callable[[], Record], tmp_path: Path) -> None:
    del finished
    code = ("import hvkeras as hvd, tensorflow as tf; hvd.init('local');"
            " tf.config.threading.set_inter_op_parallelism_threads(1); hvd.shutdown()")
    done = run_python(code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_nothing_is_recorded_without_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "warning")
    hvd.init("local")
    step = tf.function(train_step(network(tf.keras)))
    graph = step.get_concrete_function(tf.TensorSpec((8, 4))).graph
    assert "Timestamp" not in {operation.type for operation in graph.get_operations()}
    recorder.recording().record_logs("fit", {"loss": 1.0})  # and this is harmless
    hvd.shutdown()

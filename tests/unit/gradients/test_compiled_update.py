"""The update that XLA compiles, in one process: equal to plain Keras's in all that an optimizer does."""

from __future__ import annotations

import copy
import functools
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import hvkeras as hvd
from hvkeras.compat import compiling
from hvkeras.diagnostics.recorder import recording
from hvkeras.gradients import compiled_update
from hvkeras.gradients.optimizer_classes import distributed_part

TOLERANCE = 1e-6  # of the largest weight
STEPS, BATCH = 40, 4
random = np.random.default_rng(0)
X, Y = (random.normal(size=(STEPS * BATCH, width)).astype("float32") for width in (6, 3))
WORDS = random.integers(0, 9, (STEPS * BATCH, 4))

Make = Callable[[], Any]
schedules = keras.optimizers.schedules


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HVKERAS_LOG_LEVEL", "DEBUG")
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "warning")  # init() would set it for the rest of the process
    hvd.init("local")
    yield
    hvd.shutdown()


def compiled(optimizer: Any, **options: Any) -> Any:
    return hvd.DistributedOptimizer(optimizer, compile_update=True, **options)


def dense(kind: Any = keras) -> Any:
    kind.utils.set_random_seed(3)
    return kind.Sequential([kind.Input((6,)), kind.layers.Dense(8, activation="tanh"), kind.layers.Dense(3)])


def with_embedding(kind: Any = keras) -> Any:
    kind.utils.set_random_seed(3)
    return kind.Sequential([kind.Input((4,), dtype="int32"), kind.layers.Embedding(12, 2), kind.layers.Flatten(),
                            kind.layers.Dense(3)])


def trained(optimizer: Any, model: Any = None, x: Any = X, epochs: int = 1, callbacks: Any = (), **options: Any) -> Any:
    """The weights after training."""
    model = model or dense()
    if isinstance(optimizer, keras.optimizers.Optimizer):
        # Keras builds it while it traces the step, and ScheduleFreeAdamW then starts anew in each step.
        optimizer.build(model.trainable_variables)
    model.compile(optimizer, "mse", **options)
    model.fit(x, Y[: len(x)], batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model.get_weights()


def assert_close(some: Any, others: Any, tolerance: float = TOLERANCE) -> None:
    largest = max(float(np.max(np.abs(other))) for other in others)
    for one, other in zip(some, others, strict=True):
        assert np.abs(one - other).max() <= tolerance * largest


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What hvkeras says about whether updates are compiled."""
    lines = [line.removeprefix("hvkeras: ") for line in capsys.readouterr().err.splitlines()]
    return [line for line in lines if line.startswith("the update of ")]


CASES: dict[str, Make] = {
    "Adam": lambda: keras.optimizers.Adam(0.01),
    "global clip, EMA, accumulation": lambda: keras.optimizers.Adam(
        0.01, global_clipnorm=0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=3,
        gradient_accumulation_steps=2),
}
MORE: dict[str, Make] = {
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.02),
    **{name: lambda name=name: getattr(keras.optimizers, name)(0.01) for name in (
        "SGD", "RMSprop", "Adagrad", "Adadelta", "Adamax", "Adafactor", "Nadam", "Ftrl", "Lion", "Lamb", "Muon",
        "ScheduleFreeAdamW") if hasattr(keras.optimizers, name)},
    "momentum": lambda: keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True),
    "amsgrad": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "clipnorm": lambda: keras.optimizers.Adam(0.01, clipnorm=0.05),
    "clipvalue": lambda: keras.optimizers.Adam(0.01, clipvalue=0.01),
    "exponential decay": lambda: keras.optimizers.Adam(schedules.ExponentialDecay(0.05, 4, 0.8)),
    "cosine decay": lambda: keras.optimizers.Adam(schedules.CosineDecay(0.05, 30, warmup_steps=5, warmup_target=0.1)),
    "piecewise": lambda: keras.optimizers.Adam(schedules.PiecewiseConstantDecay([5, 20], [0.1, 0.05, 0.01])),
    "a function for the rate": lambda: keras.optimizers.Adam(lambda: 0.02),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), dynamic_growth_steps=7),
}


# ScheduleFreeAdamW keeps sums of all steps, in which the last bits add up.
TOLERANCES = {"ScheduleFreeAdamW": 3e-6}


@functools.cache
def plain(case: str, epochs: int = 1) -> Any:
    """The weights after training with plain Keras."""
    return trained({**CASES, **MORE}[case](), epochs=epochs)


@pytest.mark.parametrize("case", [pytest.param("Adam", marks=pytest.mark.oldest),
                                  *(pytest.param(case, marks=[pytest.mark.oldest, pytest.mark.slow])
                                    for case in CASES if case != "Adam"),
                                  *(pytest.param(case, marks=pytest.mark.nightly) for case in MORE)])
def test_weights_are_those_of_plain_keras(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    epochs = 5 if case in ("Adam", *MORE) else 1  # 200 steps
    made = compiled({**CASES, **MORE}[case]())
    assert_close(trained(made, epochs=epochs), plain(case, epochs), TOLERANCES.get(case, TOLERANCE))
    assert [" is compiled: " in line for line in said(capsys)] == [True]


@pytest.mark.slow
@pytest.mark.parametrize("clip", [pytest.param({"global_clipnorm": 0.1}, marks=pytest.mark.oldest),
                                  pytest.param({}, marks=pytest.mark.nightly)])
def test_sparse_gradients_are_applied_as_keras_does(clip: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def make() -> Any:
        return keras.optimizers.AdamW(0.01, use_ema=True, ema_overwrite_frequency=4, **clip)

    results = [trained(wrap(make()), with_embedding(), WORDS) for wrap in (compiled, lambda plain: plain)]
    assert_close(*results)
    assert "; that of sparse gradients is not" in said(capsys)[0]


@pytest.mark.slow
def test_a_users_optimizer_is_compiled_unless_gradients_are_sparse(capsys: pytest.CaptureFixture[str]) -> None:
    class Own(keras.optimizers.Optimizer):  # type: ignore[misc]
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            self.assign_sub(variable, tf.sign(gradient) * tf.cast(learning_rate, gradient.dtype))

        def get_config(self) -> Any:
            return super().get_config()

    assert_close(trained(compiled(Own(0.01))), trained(Own(0.01)))
    assert " is compiled: " in said(capsys)[0]

    class Sparse(keras.optimizers.SGD):  # type: ignore[misc]
        pass

    assert_close(*(trained(wrap(Sparse(0.01)), with_embedding(), WORDS) for wrap in (compiled, lambda plain: plain)))
    assert "only optimizers of Keras 3 itself" in said(capsys)[0]


@pytest.mark.parametrize(("operation", "effect"), [
    ("StringFormat", lambda gradient: tf.print("a gradient", output_stream="file:///dev/null")),
    pytest.param("EagerPyFunc", lambda gradient: tf.py_function(lambda: None, [], []), marks=pytest.mark.nightly),
    ("CheckNumerics", lambda gradient: tf.debugging.check_numerics(gradient, "not finite")),
    pytest.param("RandomStandardNormal", lambda gradient: tf.random.normal(gradient.shape), marks=pytest.mark.nightly),
    pytest.param("Where", lambda gradient: tf.boolean_mask(gradient, gradient > 0), marks=pytest.mark.nightly),
])
def test_what_xla_cannot_compile_runs_as_usual(operation: str, effect: Any, capsys: pytest.CaptureFixture[str]) -> None:
    class Noisy(keras.optimizers.SGD):  # type: ignore[misc]
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            effect(gradient)
            super().update_step(gradient, variable, learning_rate)

    optimizer = compiled(Noisy(0.01))
    model = dense()
    assert_close(trained(optimizer, model), plain("SGD"))
    model.compile(optimizer, "mse")  # which traces it once more
    model.fit(X, Y, batch_size=BATCH, verbose=0)
    lines = said(capsys)
    assert len(lines) == 1
    assert lines[0].startswith("the update of Noisy is not compiled: ") and f" operation {operation} " in f"{lines[0]} "


def test_an_optimizer_that_fails_while_it_is_traced_runs_as_usual(capsys: pytest.CaptureFixture[str]) -> None:
    class Refusing(keras.optimizers.SGD):  # type: ignore[misc]
        refusals = 1

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            if Refusing.refusals:
                Refusing.refusals -= 1
                raise RuntimeError("not today")
            super().update_step(gradient, variable, learning_rate)

    assert_close(trained(compiled(Refusing(0.01))), plain("SGD"))
    assert [re.sub(r" \S+:\d+", "", line) for line in said(capsys)] == [
        "the update of Refusing is not compiled: RuntimeError: not today, at in update_step"]


def test_whatever_xla_refuses_runs_as_usual(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: Any) -> None:
        raise tf.errors.UnimplementedError(None, None, "no such thing\nmore")

    monkeypatch.setattr(compiling.CompiledFunction, "compile", refuse)
    assert_close(trained(compiled(keras.optimizers.SGD(0.01))), plain("SGD"))
    assert said(capsys) == ["the update of SGD is not compiled: UnimplementedError: no such thing"]


def test_long_compiling_is_shown_and_recorded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    noted: list[float] = []
    monkeypatch.setattr(compiled_update, "SLOW", 0.0)
    monkeypatch.setattr(recording(), "record_compilation", noted.append)
    trained(compiled(keras.optimizers.SGD(0.01)))
    printed = capsys.readouterr().err
    assert len(noted) == 1 and noted[0] > 0
    assert printed.count(" operations) before the first step (HVKERAS_COMPILE_UPDATE=off prevents that)") == 1
    assert "hvkeras: XLA compiles the update of SGD (" in printed


@pytest.mark.nightly
def test_where_memory_is_short_the_first_step_compiles(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    count = count_compilations(monkeypatch)
    monkeypatch.setattr(compiled_update, "available_memory", lambda: 1)
    assert_close(trained(compiled(keras.optimizers.Adam(0.01))), plain("Adam"))
    assert " is compiled: " in said(capsys)[0]
    assert count == [0]


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras reads the rate in a way that NumPy 2 deprecates
def test_the_learning_rate_changes_without_another_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    count = count_compilations(monkeypatch)

    def rate_of(epoch: int) -> float:
        return 0.01 / (1 + epoch)

    results = [trained(wrap(keras.optimizers.Adam(0.5)), epochs=3,
                       callbacks=[keras.callbacks.LearningRateScheduler(rate_of)])
               for wrap in (compiled, lambda plain: plain)]
    assert_close(*results)
    assert count == [4]  # for each shape of a weight


@pytest.mark.slow
def test_weights_of_one_kind_share_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    count = count_compilations(monkeypatch)

    def weights(wrap: Make) -> Any:
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((6,)), *(keras.layers.Dense(6) for _ in range(4)), keras.layers.Dense(3)])
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.3)
        optimizer.exclude_from_weight_decay([model.layers[1].kernel])
        return trained(wrap(optimizer), model)

    assert_close(weights(compiled), weights(lambda plain: plain))
    assert count == [5]  # kernels that decay, and one that does not; biases; the last layer's two


def count_compilations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    count, compile_now = [0], compiling.CompiledFunction.compile

    def counted(self: Any) -> None:
        count[0] += 1
        compile_now(self)

    monkeypatch.setattr(compiling.CompiledFunction, "compile", counted)
    return count


@pytest.mark.nightly
def test_traces_share_a_compilation_until_the_optimizer_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    count = count_compilations(monkeypatch)
    optimizer = compiled(keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=3))
    model = dense()
    for rows in (len(X), 7):  # with a smaller last batch
        model.compile(optimizer, "mse")
        model.fit(X[:rows], Y[:rows], batch_size=BATCH, verbose=0)
    assert count == [1]
    optimizer.beta_1 = 0.5
    model.compile(optimizer, "mse")
    model.fit(X, Y, batch_size=BATCH, verbose=0)
    assert count == [2]


@pytest.mark.nightly
def test_layers_frozen_between_fits_and_gradients_that_are_none() -> None:
    def train(wrap: Any) -> Any:
        model, optimizer = dense(), wrap(keras.optimizers.AdamW(0.01))
        trained(optimizer, model)
        model.layers[0].trainable = False
        with_none = [None, *(tf.ones(variable.shape) for variable in model.trainable_variables[1:])]

        @tf.function(autograph=False)  # type: ignore[untyped-decorator]
        def step() -> None:
            optimizer.apply_gradients(zip(with_none, model.trainable_variables, strict=True))

        trained(optimizer, model)
        with pytest.warns(UserWarning, match="Gradients do not exist"):
            step()
        return model.get_weights()

    assert_close(train(compiled), train(lambda plain: plain))


@pytest.mark.parametrize(("options", "reason"), [
    ({"steps_per_execution": 5}, ""),
    pytest.param({"run_eagerly": True}, "the step is not a function", marks=pytest.mark.nightly),
    ({"jit_compile": True}, "XLA compiles the whole step"),
])
def test_ways_to_run_a_step(options: Any, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_close(trained(compiled(keras.optimizers.Adam(0.01)), **options), plain("Adam"), 1e-5)
    assert [reason in line if reason else " is compiled: " in line for line in said(capsys)] == [True]


@pytest.mark.parametrize("accumulating", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_loop_of_ones_own(accumulating: bool) -> None:
    def train(wrap: Any) -> Any:
        model, optimizer = dense(), wrap(keras.optimizers.Adam(0.01))

        @tf.function  # type: ignore[untyped-decorator]
        def step(x: Any, y: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

        for start in range(0, len(X), BATCH):
            step(X[start : start + BATCH], Y[start : start + BATCH])
        return model.get_weights()

    options = {"backward_passes_per_step": 2, "average_aggregated_gradients": True} if accumulating else {}
    assert_close(train(lambda plain: compiled(plain, **options)),
                 train(lambda plain: hvd.DistributedOptimizer(plain, compile_update=False, **options)))


@pytest.mark.parametrize("options", [{}, pytest.param({"use_ema": True, "ema_overwrite_frequency": 3,
                                                       "global_clipnorm": 0.1, "weight_decay": 0.1},
                                                      marks=pytest.mark.nightly)])
def test_keras_2(options: Any, capsys: pytest.CaptureFixture[str]) -> None:
    def make() -> Any:
        return tf_keras.optimizers.Adam(tf_keras.optimizers.schedules.ExponentialDecay(0.05, 4, 0.8), **options)

    assert_close(trained(compiled(make()), dense(tf_keras)), trained(make(), dense(tf_keras)))
    assert " is compiled: " in said(capsys)[0]


def test_auto_compiles_what_is_large_enough_and_takes_several_passes(capsys: pytest.CaptureFixture[str]) -> None:
    def lines_of(optimizer: Any, width: int) -> list[str]:
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(width), keras.layers.Dense(3)])
        trained(hvd.DistributedOptimizer(optimizer), model, X[:BATCH])
        return said(capsys)

    assert ["have only" in line for line in lines_of(keras.optimizers.Adam(1e-4), 8)] == [True]
    assert [" is compiled: " in line for line in lines_of(keras.optimizers.Adam(1e-4), 100_000)] == [True]
    assert ["its operations move only" in line for line in lines_of(keras.optimizers.SGD(1e-6), 50_000)] == [True]


def test_layers_that_thaw_are_looked_at_anew(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rank that joins the job by then would not know what was decided before."""
    for name, least in (("LEAST_BYTES", 0), ("LEAST_TRAFFIC_EACH", 0), ("LEAST_TRAFFIC", 2500)):
        monkeypatch.setattr(compiled_update, name, least)

    def train(wrap: Any) -> Any:
        model, optimizer = dense(), wrap(keras.optimizers.Adam(0.01))
        optimizer.build(model.trainable_variables)
        for is_frozen in (True, False):
            model.layers[0].trainable = not is_frozen
            model.compile(optimizer, "mse")
            model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
        return model.get_weights()

    assert_close(train(hvd.DistributedOptimizer), train(lambda plain: plain))
    assert ["its operations move only" in line for line in said(capsys)] == [True, False]


@pytest.mark.nightly
def test_dtypes(capsys: pytest.CaptureFixture[str]) -> None:
    def train(wrap: Any, dtype: str) -> Any:
        variable, optimizer = keras.Variable([1.0, 2.0, 4.0], dtype=dtype), wrap(keras.optimizers.Adam(0.1))
        optimizer.build([variable])

        @tf.function(autograph=False)  # type: ignore[untyped-decorator]
        def step() -> None:
            optimizer.apply([tf.cast(variable.value, dtype) / 3], [variable])

        for _ in range(5):
            step()
        return tf.cast(variable.value, "float64").numpy()

    for dtype, tolerance in (("float64", 1e-14), ("bfloat16", 0.0)):
        assert_close([train(compiled, dtype)], [train(lambda plain: plain, dtype)], tolerance)
    first, second = said(capsys)
    assert " is compiled: " in first
    assert second == "the update of Adam is not compiled: a gradient or its variable is of bfloat16"


def test_a_setting_serves_scripts_that_say_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hvd.shutdown()
    for value, line in (("on", " is compiled: "), ("off", "compile_update is off")):
        monkeypatch.setenv("HVKERAS_COMPILE_UPDATE", value)
        hvd.init("local")
        trained(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), x=X[:BATCH])
        assert line in said(capsys)[0]
        hvd.shutdown()
    hvd.init("local")


def test_wrong_values_are_errors() -> None:
    with pytest.raises(hvd.UsageError, match='compile_update must be "auto", True or False'):
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), compile_update="always")


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:Skipping variable loading")
def test_copies_compile_their_own_updates() -> None:
    optimizer = compiled(keras.optimizers.Adam(0.01))
    before = trained(optimizer)
    for again in (copy.deepcopy(compiled(keras.optimizers.Adam(0.01))), pickle.loads(pickle.dumps(optimizer))):
        part = distributed_part(again)
        assert part is not None and part.options.compile_update is True
    assert_close(trained(copy.deepcopy(compiled(keras.optimizers.Adam(0.01)))), before)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:__array__ implementation")
def test_training_resumes_alike(tmp_path: Any) -> None:
    """What was saved by one way of updating goes on by the other."""
    results = []
    for first, second in ((True, False), (False, True)):
        model, path = dense(), str(tmp_path / f"{first}.keras")
        trained(hvd.DistributedOptimizer(keras.optimizers.AdamW(0.01), compile_update=first), model)
        model.save(path)
        again = keras.models.load_model(path)
        hvd.DistributedOptimizer(again.optimizer, compile_update=second)
        again.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
        results.append(again.get_weights())
    expected = trained(keras.optimizers.AdamW(0.01), epochs=2)
    for result in results:
        assert_close(result, expected)

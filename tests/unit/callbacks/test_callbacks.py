"""Callbacks in one process: what they refuse, what they say, and learning rates where steps are hard to count."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import hvkeras as hvd
from hvkeras import compat
from hvkeras.callbacks import (
    BestModelCheckpoint,
    LearningRateScheduleCallback,
    LearningRateWarmupCallback,
    MetricAverageCallback,
)
from hvkeras.horovod import as_horovod

STEPS, BATCH = 4, 2
RATE = 0.4


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "warning")  # init() would set it for the rest of the process
    hvd.init("local")
    yield
    hvd.shutdown()


def compiled(optimizer: Any = None, **options: Any) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer or keras.optimizers.SGD(RATE), "mse", run_eagerly="steps_per_execution" not in options,
                  **options)
    return model


def data(steps: int = STEPS) -> tuple[Any, Any]:
    random = np.random.default_rng(1)
    return random.normal(size=(steps * BATCH, 3)).astype("float32"), np.ones((steps * BATCH, 1), "float32")


def unknown(steps: int = STEPS) -> Any:
    """Data whose number of batches Keras cannot know."""
    return tf.data.Dataset.from_tensor_slices(data(steps)).batch(BATCH).filter(lambda *_: True)


class Watch(keras.callbacks.Callback):  # type: ignore[misc]
    """Notes the learning rate of each execution."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.rates.append(float(np.asarray(self.model.optimizer.learning_rate)))


def rates(model: Any, *callbacks: Any, x: Any = None, **options: Any) -> list[float]:
    watch = Watch()
    given = (x,) if x is not None else data()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras warns of the end of data of unknown length
        model.fit(*given, batch_size=None if x is not None else BATCH, verbose=0, callbacks=[*callbacks, watch],
                  **options)
    return watch.rates


def halving(epoch: float) -> float:
    return 0.5**epoch


def smooth(**options: Any) -> LearningRateScheduleCallback:
    return LearningRateScheduleCallback(RATE, halving, staircase=False, **options)


EPOCHS = [RATE * 0.5 ** (step // STEPS) for step in range(20 * STEPS)]
SMOOTH = [RATE * 0.5 ** (step / STEPS) for step in range(20 * STEPS)]


def test_rates_of_whole_epochs_and_of_steps() -> None:
    assert rates(compiled(), LearningRateScheduleCallback(RATE, halving), epochs=3) == pytest.approx(EPOCHS[:12])
    assert rates(compiled(), smooth(), epochs=3) == pytest.approx(SMOOTH[:12])


def test_a_number_multiplies_the_initial_rate_within_its_epochs() -> None:
    found = rates(compiled(), LearningRateScheduleCallback(RATE, 0.1, 1, 3), epochs=4)
    assert found == pytest.approx([0.4] * 4 + [0.04] * 12)  # what comes after is another callback's


def test_in_scripts_of_horovod_a_number_multiplies_the_rate_with_each_epoch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    as_horovod.install()
    try:
        callback = LearningRateScheduleCallback(RATE, 0.1, 1, 3)
        assert rates(compiled(), callback, epochs=4) == pytest.approx([0.4] * 8 + [0.04] * 8)
        assert [callback.multiplier(epoch) for epoch in (1, 1.5, 3)] == pytest.approx([1, 0.1**0.5, 0.01])
    finally:
        as_horovod.uninstall()
    assert capsys.readouterr().err.splitlines()[-1] == (
        "hvkeras: learning rate: 0.4 x 0.1^(epoch - 1) from epoch 1 to 3")
    assert callback.multiplier(3) == 0.1
    assert callback.backend is tf.keras.backend


def test_logs_and_history_have_the_rate() -> None:
    history = compiled().fit(*data(), verbose=0, epochs=2, callbacks=[LearningRateScheduleCallback(RATE, halving)])
    assert history.history["lr"] == pytest.approx([0.4, 0.2])


@pytest.mark.parametrize("options", [{}, {"initial_epoch": 2}])
def test_it_resumes_with_the_optimizer(options: dict[str, int], capsys: pytest.CaptureFixture[str]) -> None:
    model = compiled()
    rates(model, smooth(), epochs=2)
    assert rates(model, smooth(), epochs=4 if options else 2, **options) == pytest.approx(SMOOTH[8:16])
    assert capsys.readouterr().err.splitlines()[-1] == (
        "hvkeras: learning rate: 0.4 x halving(epoch) from epoch 0 on, changing at each step; resumes at epoch 2: 0.1")


def test_it_resumes_in_the_middle_of_an_epoch() -> None:
    model = compiled()
    model.optimizer.iterations.assign(6)
    assert rates(model, smooth(), epochs=1) == pytest.approx(SMOOTH[6:10])
    model.optimizer.iterations.assign(6)
    assert rates(model, smooth(), epochs=2, initial_epoch=1) == pytest.approx(SMOOTH[6:10])
    model.optimizer.iterations.assign(6)
    found = rates(model, LearningRateScheduleCallback(RATE, halving), epochs=1)
    assert found == pytest.approx(EPOCHS[6:10])


def test_initial_epoch_counts_for_a_new_optimizer_and_for_other_batches(capsys: pytest.CaptureFixture[str]) -> None:
    model = compiled()
    assert rates(model, smooth(), epochs=4, initial_epoch=3) == pytest.approx(SMOOTH[12:16])
    assert rates(model, smooth(), epochs=9, initial_epoch=8) == pytest.approx(SMOOTH[32:36])
    assert "(initial_epoch takes precedence, though the optimizer is at step 4)" in capsys.readouterr().err


def test_executions_of_several_steps_end_at_the_right_rate() -> None:
    model = compiled(steps_per_execution=2)
    ending = LearningRateScheduleCallback(RATE, halving, end_epoch=2, staircase=False)
    assert rates(model, ending, epochs=2) == pytest.approx([SMOOTH[step] for step in (0, 2, 4, 6)])
    assert rates(model, ending, epochs=2) == pytest.approx([SMOOTH[7]] * 4)
    model = compiled(steps_per_execution=2)
    ending = LearningRateScheduleCallback(RATE, halving, end_epoch=0.5, staircase=False)
    assert rates(model, ending, epochs=1) == pytest.approx([SMOOTH[0], SMOOTH[1]])


def test_passes_and_keras_accumulation_count_as_steps() -> None:
    for model in (compiled(hvd.DistributedOptimizer(keras.optimizers.SGD(RATE), backward_passes_per_step=3)),
                  compiled(keras.optimizers.SGD(RATE, gradient_accumulation_steps=3))):
        assert rates(model, smooth(), epochs=2) + rates(model, smooth()) == pytest.approx(SMOOTH[:12])


def test_the_optimizer_within_a_loss_scale() -> None:
    model = compiled(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(RATE, momentum=0.5)))
    assert rates(model, smooth(), epochs=2) + rates(model, smooth()) == pytest.approx(SMOOTH[:12])


def test_data_of_unknown_length() -> None:
    stairs = LearningRateScheduleCallback(RATE, halving)
    assert rates(compiled(), stairs, x=unknown(), epochs=2) == pytest.approx(EPOCHS[:8])
    assert rates(compiled(), smooth(steps_per_epoch=STEPS), x=unknown(), epochs=2) == pytest.approx(SMOOTH[:8])
    with pytest.raises(hvd.UsageError, match=r"LearningRateScheduleCallback: the steps of an epoch must be known\. .*"
                                             "HINT: pass steps_per_epoch= to LearningRateScheduleCallback"):
        rates(compiled(), smooth(), x=unknown())
    ended = LearningRateWarmupCallback(RATE, 0)
    assert rates(compiled(), ended, x=unknown()) == pytest.approx([RATE] * STEPS)
    model = compiled()
    rates(model, stairs, x=unknown())
    with pytest.raises(hvd.UsageError, match=r"where training resumes.*or initial_epoch= to fit"):
        rates(model, stairs, x=unknown())
    assert rates(model, stairs, x=unknown(), epochs=2, initial_epoch=1) == pytest.approx(EPOCHS[4:8])


def test_epochs_longer_than_given_stay_one_epoch() -> None:
    found = rates(compiled(), LearningRateScheduleCallback(RATE, halving, steps_per_epoch=3), epochs=2)
    assert found == pytest.approx(EPOCHS[:8])


FAMILIES = {"keras": keras.optimizers, "tf_keras": tf_keras.optimizers, "legacy": tf_keras.optimizers.legacy}


# On the oldest TensorFlow, AutoGraph takes 10 s for an optimizer of tf_keras.
@pytest.mark.parametrize("family", [pytest.param(name, marks=pytest.mark.oldest if name == "keras" else ())
                                    for name in FAMILIES])
@pytest.mark.parametrize("name", ["SGD", "nesterov", "RMSprop"])
def test_momentum_is_corrected_in_graphs(name: str, family: str) -> None:
    optimizers = FAMILIES[family]
    optimizer = (optimizers.RMSprop(RATE, rho=0.8, momentum=0.9) if name == "RMSprop"
                 else optimizers.SGD(RATE, 0.9, nesterov=name == "nesterov"))
    weight = keras.Variable([1.0, 2.0]) if family == "keras" else tf.Variable([1.0, 2.0])
    callback = LearningRateScheduleCallback(RATE, halving, steps_per_epoch=STEPS, staircase=False)
    model = type("Model", (), {"optimizer": optimizer, "built": True, "trainable_variables": [weight]})()
    callback.set_model(model)
    callback.on_train_begin()
    callback.on_epoch_begin(0)
    apply = tf.function(lambda gradient: [optimizer.apply_gradients([(gradient, weight)]), gradient][1])
    expected, summed, square = np.array([1.0, 2.0]), np.zeros(2), np.zeros(2)
    for step in range(STEPS):
        gradient = np.array([0.3, -0.2 * step])
        callback.on_batch_begin(step)
        apply(tf.constant(gradient, tf.float32))
        if name == "RMSprop":
            square = 0.8 * square + 0.2 * gradient**2
            gradient = gradient / np.sqrt(square + 1e-7)
        summed = 0.9 * summed + gradient
        expected = expected - SMOOTH[step] * (gradient + 0.9 * summed if name == "nesterov" else summed)
        assert np.asarray(weight) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_velocities_are_corrected(family: str) -> None:
    optimizers = FAMILIES[family]
    for make in (optimizers.Adam, optimizers.SGD, optimizers.RMSprop, optimizers.Nadam):
        optimizer = make(0.1)
        compat.build_optimizer(optimizer, [tf.Variable([1.0])])
        assert compat.velocities(optimizer) == []


@pytest.mark.parametrize(("arguments", "message"), [
    ((None, 1.0), "initial_lr must be a positive number"),
    (("0.1", 1.0), "initial_lr must be a positive number"),
    ((keras.optimizers.schedules.CosineDecay(0.1, 10), 1.0), "leave the callback out"),
    ((0.1, "x"), "multiplier must be a number of at least 0"),
    ((0.1, -1.0), "multiplier must be a number of at least 0"),
    ((0.1, keras.optimizers.schedules.CosineDecay(0.1, 10)), "give the schedule to the optimizer"),
    ((0.1, 1.0, -1), "start_epoch must be a number of at least 0"),
    ((0.1, 1.0, 5, 3), "end_epoch must be a number of at least 5"),
    ((0.1, 1.0, 0, None, True, True, 0), "steps_per_epoch must be a positive integer"),
])
def test_wrong_arguments_of_the_schedule(arguments: Any, message: str) -> None:
    with pytest.raises(hvd.UsageError, match=message):
        LearningRateScheduleCallback(*arguments)


@pytest.mark.parametrize("epochs", [None, "5", -1, float("nan"), True])
def test_wrong_arguments_of_the_warm_up(epochs: Any) -> None:
    with pytest.raises(hvd.UsageError, match=r"Warmup.*: warmup_epochs must be a number of at least 0"):
        LearningRateWarmupCallback(0.1, epochs)


@pytest.mark.parametrize("result", [None, "fast", -1.0, float("nan")])
def test_wrong_multipliers(result: Any) -> None:
    with pytest.raises(hvd.UsageError, match="multiplier must return a number"):
        rates(compiled(), LearningRateScheduleCallback(0.1, lambda epoch: result))


@pytest.mark.parametrize("kind", ["keras", "tf_keras", "legacy"])
def test_schedules_in_the_optimizer_get_an_answer(kind: str) -> None:
    schedules = keras.optimizers.schedules if kind == "keras" else tf_keras.optimizers.schedules
    optimizer = FAMILIES[kind].SGD(schedules.CosineDecay(0.1, 10))
    for callback, hint in ((LearningRateWarmupCallback(0.1), "warmup_target=rate"),
                           (LearningRateScheduleCallback(0.1, 1.0), "let the schedule in the optimizer decide")):
        callback.set_model(type("Model", (), {"optimizer": optimizer, "built": False})())
        with pytest.raises(hvd.UsageError, match=f"learning rate must be a number. Received: .*CosineDecay.*{hint}"):
            callback.on_train_begin()


def test_one_rank_needs_no_warm_up(capsys: pytest.CaptureFixture[str]) -> None:
    found = rates(compiled(), LearningRateWarmupCallback(RATE, 1, verbose=1), epochs=2)
    assert found == pytest.approx([RATE] * 8)
    assert capsys.readouterr().err.splitlines()[-2:] == [
        "hvkeras: learning rate: 0.4, without a warm-up (1 rank)",
        "hvkeras: epoch 1: the warm-up has reached the learning rate 0.4",
    ]


def test_callback_lists_of_the_user() -> None:
    model, watch = compiled(), Watch()
    ours = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), MetricAverageCallback(), smooth(steps_per_epoch=STEPS)]
    callbacks = keras.callbacks.CallbackList([*ours, watch], add_history=True, model=model)
    history = model.fit(*data(), batch_size=BATCH, verbose=0, callbacks=callbacks)
    assert watch.rates == pytest.approx(SMOOTH[:4])
    assert history.history["lr"] == pytest.approx([SMOOTH[3]])


def test_one_rank_averages_nothing() -> None:
    logs = {"loss": 1.5, "text": "left alone"}
    callback = MetricAverageCallback()
    callback.set_model(compiled())
    callback.on_epoch_end(0, logs)
    callback.on_epoch_end(0, None)
    assert logs == {"loss": 1.5, "text": "left alone"}


def test_callbacks_before_init() -> None:
    hvd.shutdown()
    for callback in (LearningRateScheduleCallback(0.1, 1.0), LearningRateWarmupCallback(0.1),
                     BestModelCheckpoint(filepath="best.keras")):
        callback.set_model(compiled())
        with pytest.raises(hvd.NotInitializedError):
            callback.on_train_begin()

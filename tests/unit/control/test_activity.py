"""What a process says it is doing, and whether it moves, asked by another thread in the midst of it."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from harness.processes import run_python
from hvkeras.compat import patches
from hvkeras.control import activity, location, stalls
from hvkeras.control.heartbeat import Watch
from hvkeras.diagnostics.record import Record
from hvkeras.diagnostics.recorder import Recorder
from hvkeras.training import fit_hooks


@pytest.fixture(autouse=True)
def followed() -> Iterator[None]:
    """Keras as `init()` changes it on several ranks."""
    fit_hooks.install()
    yield
    patches.uninstall_job()


def asked() -> tuple[str, str, bool]:
    """What another thread learns of this one."""
    answers: list[activity.Doing] = []
    asker = threading.Thread(target=lambda: answers.append(activity.doing(", 3 steps")))
    asker.start()
    asker.join(10)
    return answers[0].phase, answers[0].text, answers[0].may_end


class Asking(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[str, tuple[str, str, bool]] = {}

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.answers[f"epoch end {epoch}"] = asked()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.answers[f"batch end {batch}"] = asked()

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self.answers[f"test batch begin {batch}"] = asked()


def compiled(step: Callable[[Any], Any] = lambda x: x, **options: Any) -> Any:
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Lambda(step, output_shape=(2,)),
                              keras.layers.Dense(1)])
    model.compile("sgd", loss="mse", **options)
    return model


X, Y = np.ones((12, 2), "float32"), np.ones((12, 1), "float32")


def test_a_callback_is_named_with_its_hook_step_and_epoch() -> None:
    asking = Asking()
    compiled().fit(X, Y, batch_size=4, epochs=2, validation_data=(X, Y), verbose=0, callbacks=[asking])
    assert asking.answers["batch end 1"] == ("callback", "callback Asking.on_train_batch_end, train step 2 of epoch 2",
                                             True)
    assert asking.answers["epoch end 0"] == ("callback", "callback Asking.on_epoch_end, train step 3 of epoch 1", True)
    assert asking.answers["test batch begin 0"] == (
        "callback", "callback Asking.on_test_batch_begin, validation step 1 of epoch 2", True)
    assert asked() == ("outside", "outside of fit, 3 steps", False)


def test_a_list_of_callbacks_that_a_callback_calls_does_not_move_fit() -> None:
    asking, model = Asking(), compiled()
    callbacks = keras.callbacks.CallbackList([asking], model=model)

    class Nested(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            callbacks.on_epoch_begin(epoch=epoch + 5, logs=logs)
            callbacks.on_train_batch_begin(batch=7, logs=logs)
            callbacks.on_train_batch_end(batch=7, logs=logs)

    model.fit(X, Y, batch_size=4, verbose=0, callbacks=[Nested()])
    assert asking.answers["batch end 7"][1] == (
        "callback Asking.on_train_batch_end, train, before the first step of epoch 1")


def test_an_evaluation_and_a_prediction_are_no_validation() -> None:
    asking, model = Asking(), compiled()
    model.evaluate(X, Y, verbose=0, callbacks=[asking])
    assert asking.answers["test batch begin 0"][1] == "callback Asking.on_test_batch_begin, evaluation step 1"
    steps: list[Any] = []

    class InPredict(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
        def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
            steps.append(asked())

    model.predict(X, verbose=0, callbacks=[InPredict()])
    assert steps[0][1] == "callback InPredict.on_predict_batch_end, prediction step 1"


@pytest.mark.parametrize("eager", [False, True])
def test_waiting_for_a_batch_is_input_and_computing_is_not(eager: bool) -> None:
    answers: list[tuple[str, str, bool]] = []
    awaited = ("input", "input, the batch of train step 3 of epoch 1", True)

    def load() -> Iterator[Any]:
        for number in range(3):
            deadline = time.monotonic() + 20.0
            while number == 2 and awaited not in answers and time.monotonic() < deadline:
                note(None)  # data are made ahead, so it takes a moment until they are missed
            yield X[:4], Y[:4]

    def note(value: Any) -> Any:
        doing = activity.doing()
        answers.append((doing.phase, doing.text, doing.may_end))
        return value

    def compute(value: Any) -> Any:
        deadline = time.monotonic() + 20.0  # the batch is counted beside this
        while activity.doing().phase == "input" and time.monotonic() < deadline:
            time.sleep(0.001)
        return note(value)

    def look(x: Any) -> Any:
        return tf.ensure_shape(tf.numpy_function(compute, [x], tf.float32), x.shape)

    data = tf.data.Dataset.from_generator(load, output_signature=(tf.TensorSpec((4, 2)), tf.TensorSpec((4, 1))))
    data = data.apply(tf.data.experimental.assert_cardinality(3))
    compiled(look, run_eagerly=eager).fit(data, shuffle=False, verbose=0)
    assert awaited in answers
    assert answers[-1] == ("train", "train step 3 of epoch 1", True)
    assert ("train", "train step 1 of epoch 1", False) in answers  # it may still be compiled


def test_several_steps_in_a_call_are_not_distinguished_from_their_input() -> None:
    answers: list[tuple[str, str, bool]] = []

    def look(x: Any) -> Any:
        def note(value: Any) -> Any:
            doing = activity.doing()
            answers.append((doing.phase, doing.text, doing.lacks_batch))
            return value

        return tf.ensure_shape(tf.numpy_function(note, [x], tf.float32), x.shape)

    compiled(look, steps_per_execution=2).fit(X, Y, batch_size=2, verbose=0)
    assert answers[-1] == ("train", "train step 5 of epoch 1, or its input", True)


def test_tracing_may_take_as_long_as_it_likes() -> None:
    answers: list[Any] = []

    def trace(x: Any) -> Any:
        if not tf.executing_eagerly() and activity.moves():
            answers.append(asked())
        return x

    compiled(trace).fit(X, Y, batch_size=4, verbose=0)
    assert ("train", "train step 1 of epoch 1, being traced", False) in answers


def test_an_error_leaves_the_loop() -> None:
    class Fails(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            raise ValueError("the sky is falling")

    with pytest.raises(ValueError, match="the sky"):
        compiled().fit(X, Y, verbose=0, callbacks=[Fails()])
    assert asked()[0] == "outside"


def test_a_watch_sees_steps_batches_and_collectives_move_and_nothing_else() -> None:
    watch = Watch(10.0, 0.0)
    assert watch.check(0.0, False) is None
    assert watch.check(9.0, False) is None
    model = compiled()
    with activity.running(activity.TRAIN, model):  # a movement
        assert watch.check(12.0, False) is None
        watch.check(13.0, False)
        report = watch.check(25.0, False)
        assert report is not None
        assert report.in_loop
        assert report.seconds >= 12.0
        activity._Process.fetched += 1
        assert watch.check(26.0, False) is None
        report = watch.check(40.0, True)
        assert report is None


def test_a_reported_rank_says_when_it_moves() -> None:
    told = list[float]()
    watch = Watch(10.0, on_move=told.append)
    watch.check(0.0, True)
    watch.check(1.0, True)
    watch.check(20.0, False)
    watch.is_reported = True
    watch.check(31.0, False)
    assert told == []
    watch.check(41.0, True)
    assert told == [40.0]
    watch.check(51.0, True)
    assert len(told) == 1


def test_what_was_said_of_a_late_rank_is_recorded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept_by = Recorder(tmp_path, Record(1, 2, "native", pid=os.getpid()))
    monkeypatch.setattr(stalls, "listeners", [kept_by.record_stall])
    asker = threading.Thread(target=location.report, args=(1, "node", "", 61.0, "rank 0 has waited 60 s for rank 1"))
    asker.start()
    asker.join(10)
    said = capsys.readouterr().err
    assert "hvkeras: rank 1 on node (pid " in said
    assert "has made no progress for 61 s: outside of fit, at " in said
    assert "; the innermost call last:\n  " in said
    kept_by.finish("well")
    (kept,) = Record.read(tmp_path, 1).stalls
    assert kept.startswith("rank 0 has waited 60 s for rank 1; rank 1 on node (pid ")
    assert "\n" not in kept


def test_stacks_of_a_running_thread_are_complete() -> None:
    over = threading.Event()

    def deep(calls: int) -> int:
        return deep(calls - 1) if calls else sum(number for number in range(50))

    def work() -> None:
        while not over.is_set():
            deep(40)

    worker = threading.Thread(target=work)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads change as often as they can
    worker.start()
    try:
        stacks = [activity.frames_of(worker.ident or 0) for _ in range(20_000)]
    finally:
        sys.setswitchinterval(interval)
        over.set()
        worker.join()
    assert {frames[-1].f_code.co_name for frames in stacks} == {"_bootstrap"}
    assert activity.frames_of(0) == []


READS_STACKS_WHILE_FINALIZERS_RUN = """
import gc, random, sys, threading, time
from hvkeras.control import activity

class Garbage:
    def __init__(self):
        self.itself = self
    def __del__(self):
        time.sleep(0)  # lets other threads run

def deep(levels):
    time.sleep(0) if levels == 0 else deep(levels - 1)

def work():
    while not over.is_set():
        deep(random.randrange(30))
        Garbage()

gc.set_threshold(20, 2, 2)
over = threading.Event()
worker = threading.Thread(target=work)
worker.start()
end = time.monotonic() + 1.5
while time.monotonic() < end:
    Garbage()
    frames = activity.frames_of(worker.ident)
    assert frames[-1].f_code.co_name == "_bootstrap", frames
    assert worker.ident in activity.all_threads()
over.set()
worker.join()
"""


def test_stacks_are_read_while_garbage_is_collected(tmp_path: Path) -> None:
    done = run_python(READS_STACKS_WHILE_FINALIZERS_RUN, cwd=tmp_path)
    assert done.returncode == 0, done.stderr

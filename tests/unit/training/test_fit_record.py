"""Causes of different weights: callbacks that only some ranks have, and numbers of optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from hvkeras import compat
from hvkeras.training.fit_record import FitRecord, names_of_changing, partial_callbacks


@pytest.mark.parametrize(("partial", "of_rates", "cause", "hint"), [
    ({}, False, "", ""),
    ({"Own": [0], "EarlyStopping": [0]}, False, "EarlyStopping, a callback that only rank 0 has",
     "pass EarlyStopping to fit on every rank"),
    ({"Own": [0], "ReduceLROnPlateau": [0]}, False, "Own, a callback that only rank 0 has",
     "pass Own to fit on every rank"),
    ({"Own": [0], "ReduceLROnPlateau": [0, 2]}, True, "ReduceLROnPlateau, a callback that only ranks 0, 2 have",
     "pass ReduceLROnPlateau to fit on every rank"),
    ({"Own": [1], "Other": [1], "Third": [2]}, False, "Own or Other, callbacks that only rank 1 has",
     "pass Own and Other to fit on every rank"),
    ({"ReduceLROnPlateau": [0]}, False, "", ""),
])
def test_callbacks_that_are_known_to_change_weights_come_first(
    partial: dict[str, list[int]], of_rates: bool, cause: str, hint: str
) -> None:
    assert FitRecord(partial=partial).cause(of_rates) == (cause, hint)


def test_logs_that_differ_are_a_cause_if_all_ranks_have_the_same_callbacks() -> None:
    logs = {"same": False, "own": True}
    assert FitRecord(logs=logs).cause(True) == ("a callback that decides by 'own', a number of its own on each rank",
                                                "place hvd.callbacks.MetricAverageCallback() before it")
    assert FitRecord(partial={"Own": [0]}, logs=logs).cause()[0] == "Own, a callback that only rank 0 has"
    assert FitRecord(logs={"same": False}).cause() == ("", "")


def test_callbacks_that_only_print_or_write_are_no_cause() -> None:
    keras: Any = tf.keras

    class Own(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
        pass

    stopping = keras.callbacks.EarlyStopping
    callbacks = [stopping(), stopping(restore_best_weights=True), keras.callbacks.CSVLogger("log.csv"), Own(),
                 keras.callbacks.ModelCheckpoint("best.keras")]
    mine = names_of_changing(callbacks)
    assert mine == ["EarlyStopping", "Own"]
    assert partial_callbacks([0, 4, 7], [mine, ["Own"], ["Own", "Own"]]) == {"EarlyStopping": [0]}


@pytest.mark.parametrize("family", ["keras", "tf_keras"])
def test_numbers_of_optimizers_have_names(family: str) -> None:
    keras: Any = pytest.importorskip(family)
    halved = keras.optimizers.schedules.ExponentialDecay(0.25, 1, 0.5)
    for rate, found in ((0.25, 0.25), (halved, 0.125)):
        optimizer = keras.optimizers.SGD(rate, momentum=0.5, weight_decay=0.0625)
        optimizer.iterations.assign(1)
        assert compat.numbers_of(optimizer) == {
            "the learning rate": found, "the momentum": 0.5, "the weight decay": 0.0625,
            "the number of iterations": 1.0}
    kept = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.25, momentum=0.5))
    kept.build([])
    assert compat.numbers_of(kept) == {
        "the learning rate": 0.25, "the momentum": 0.5, "the loss scale": 32768.0, "the number of iterations": 0.0}


def test_numbers_of_legacy_optimizers() -> None:
    keras: Any = pytest.importorskip("tf_keras")
    halved = keras.optimizers.schedules.ExponentialDecay(0.25, 1, 0.5)
    for rate in (0.25, halved):
        assert compat.numbers_of(keras.optimizers.legacy.SGD(rate, momentum=0.5))["the learning rate"] == 0.25

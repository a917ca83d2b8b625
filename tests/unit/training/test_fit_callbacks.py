"""The callbacks around those of `fit`: where they are, and what Keras makes of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tf_keras

from hvkeras.training.fit_callbacks import with_hook_callbacks


class Run:
    """A call of `fit` that notes what it is told."""

    def __init__(self, model: Any) -> None:
        self.model, self.told = model, list[Any]()

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.told.append((name, *arguments))


@pytest.fixture(params=[keras, tf_keras], ids=["keras", "tf_keras"])
def made(request: pytest.FixtureRequest) -> Any:
    """A Keras, and a model of it."""
    model = request.param.Sequential([request.param.layers.Dense(1)])
    model.compile("sgd", loss="mse")
    return SimpleNamespace(keras=request.param, model=model, run=Run(model))


def names(callbacks: Any) -> list[str]:
    return [type(each).__name__ for each in callbacks]


def test_ours_are_around_those_of_the_user(made: Any) -> None:
    own = made.keras.callbacks.EarlyStopping()
    assert names(with_hook_callbacks(made.model, None)) == ["ActivityCallback"]
    for given in (own, [own], (own,)):
        assert names(with_hook_callbacks(made.model, given, made.run)) == [
            "ActivityCallback", "EarlyStopping", "FitCallback"]
    assert names(with_hook_callbacks(made.model, [], None, SimpleNamespace())) == ["ActivityCallback", "FitCallback"]


def test_a_list_of_keras_has_ours_once(made: Any) -> None:
    own = made.keras.callbacks.EarlyStopping()
    given = made.keras.callbacks.CallbackList([own], add_history=True, model=made.model)
    for run in (made.run, Run(made.model)):
        assert with_hook_callbacks(made.model, given, run) is given
        assert names(given.callbacks) == ["ActivityCallback", "EarlyStopping", "History", "FitCallback"]
    before = list(given.callbacks)
    with_hook_callbacks(made.model, given)  # the validation of fit
    assert given.callbacks == before


def test_keras_calls_callbacks_asynchronously_as_before() -> None:
    model = keras.Sequential([keras.layers.Dense(1)])
    plain = keras.callbacks.CallbackList([], model=model)
    if not hasattr(plain, "_async_train"):
        pytest.skip("this Keras calls all callbacks synchronously")
    ours = keras.callbacks.CallbackList(with_hook_callbacks(model, None, Run(model)), model=model)
    for name in ("_async_train", "_async_test", "_async_predict"):
        assert getattr(ours, name) == getattr(plain, name)


def test_a_run_and_an_account_are_told_of_each_step_and_epoch(made: Any) -> None:
    account = Run(made.model)
    history = made.model.fit(np.ones((3, 1)), np.ones((3, 1)), batch_size=2, epochs=1, verbose=0,
                             callbacks=with_hook_callbacks(made.model, None, made.run, account))
    assert made.run.told == [("begin",), ("begin_epoch",), ("before_step", 0), ("before_step", 1),
                             ("epoch_end", 0, 2, {"loss": history.history["loss"][0]}), ("compare_at_end",), ("end",)]
    assert account.told == [("begin_epoch",), ("begin_step", 0), ("begin_step", 1), ("end_epoch",)]

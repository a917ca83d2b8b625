"""`fit` that goes on in the middle of an epoch: its data, and Keras 3's callbacks and random seeds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvkeras.compat.families import default_keras, is_keras_3
from hvkeras.compat.hooks import hook
from hvkeras.compat.variables import native


@dataclass(frozen=True)
class PassFacts:
    """What is known of the data when a pass over them begins.

    Attributes:
        steps: The steps of an epoch; None if unknown.
        rows: The rows of a batch that this process is given; None if unknown.
        runs_on: Whether an epoch's data go on where those of the epoch before ended (`steps_per_epoch`).
    """

    steps: int | None
    rows: int | None
    runs_on: bool


@dataclass(frozen=True)
class Done:
    """What of the data was trained on before.

    Attributes:
        epochs: Epochs that are over.
        steps: Steps of the epoch that begins now.
        before: Called when the data of the epochs before are behind.
        after: Called when the steps before are behind.
    """

    epochs: int
    steps: int
    before: Callable[[], None]
    after: Callable[[], None]


# What shall look at the next pass over data that begins; it says what to skip, or None for nothing.
_next_pass: list[Callable[[PassFacts], Done | None]] = []


def hook_resuming() -> None:
    """Sets the hooks, once."""
    import keras
    from keras.src.backend.tensorflow import trainer

    hook(keras.callbacks.CallbackList, "on_train_begin", _put_last)
    iterator = trainer.TFEpochIterator
    method = "_enumerate_iterator" if hasattr(iterator, "_enumerate_iterator") else "enumerate_epoch"
    hook(iterator, method, _follow)


def hook_skipping() -> None:
    """Sets the hooks through which `at_next_pass` works, once, in the Keras that `tf.keras` is."""
    if is_keras_3(default_keras()):
        hook_resuming()
        return
    from tf_keras.src.engine import data_adapter

    hook(data_adapter.DataHandler, "enumerate_epochs", _with_iterator)
    hook(data_adapter.DataHandler, "steps", _follow_tf_keras)


def _with_iterator(original: Callable[..., Any], self: Any) -> Iterator[Any]:
    """Keeps the iterator of an epoch where `_follow_tf_keras` finds it."""
    for epoch, iterator in original(self):
        self._hvkeras_iterator = iterator
        yield epoch, iterator


def _follow_tf_keras(original: Callable[..., Any], self: Any) -> Iterator[Any]:
    if _next_pass:
        done = _next_pass.pop()(PassFacts(self._inferred_steps, None, bool(self._steps_per_epoch)))
        if done is not None:
            done.before()
            _take(self._hvkeras_iterator, done.steps)
            self._initial_step = done.steps
            done.after()
    yield from original(self)


def at_next_pass(look: Callable[[PassFacts], Done | None]) -> None:
    """Has `look` called when the next pass over data begins, which is that of `fit` right after `on_epoch_begin`."""
    _next_pass[:] = [look]


def _put_last(original: Callable[..., Any], self: Any, logs: Any = None) -> None:
    """Gives callbacks with a method `comes_last` the last place in the list, once training has begun."""
    original(self, logs)
    for callback in [one for one in self.callbacks if hasattr(one, "comes_last")]:
        self.callbacks.remove(callback)
        self.callbacks.append(callback)
        callback.comes_last(list(self.callbacks))


def _follow(original: Callable[..., Any], self: Any) -> Any:
    done = None
    if _next_pass:
        rows = None
        with contextlib.suppress(Exception):  # many a data adapter cannot tell, each in a way of its own
            rows = int(self.data_adapter.batch_size)
        done = _next_pass.pop()(PassFacts(self.num_batches, rows, bool(self.steps_per_epoch)))
    return original(self) if done is None else _go_on(original, self, done)


def _go_on(original: Callable[..., Any], self: Any, done: Done) -> Iterator[Any]:
    """The steps of an epoch that are not done yet."""
    for _ in range(done.epochs):
        _pass_over(original, self)
    done.before()
    each = int(self.steps_per_execution)
    executions, more = divmod(done.steps, each)
    begun = False
    for number, (step, *rest) in enumerate(original(self)):
        if number < executions and _take(rest[-1], each):
            continue
        if not begun:  # where the data have come to their end, the train function finds that out
            _take(rest[-1], more)
            done.after()
            begun = True
        yield step, *rest


def _pass_over(original: Callable[..., Any], self: Any) -> None:
    """Goes through an epoch as Keras does; data are read only where one iterator gives those of all epochs."""
    steps = original(self)
    for made in steps:
        if self.steps_per_epoch and not _take(made[-1], int(self.steps_per_execution)):
            break
        if self.num_batches is None:  # Keras would go on until the data end
            steps.close()
            self.data_adapter.on_epoch_end()
            return


def _take(iterator: Any, count: int) -> bool:
    """Reads so many batches; says whether there were as many."""
    try:
        for _ in range(count):
            next(iterator)
    except (StopIteration, tf.errors.OutOfRangeError):
        return False
    return True


def begin_with_epoch(model: Any, epoch: int | None) -> None:
    """Has `fit` begin with an epoch, from `on_train_begin` on; None for what `fit` was told."""
    model._initial_epoch = epoch


def seed_variables(model: Any) -> list[Any]:
    """The states of the layers' random seeds, in the model's order."""
    others = {id(variable) for variable in [*model.weights, *model.metrics_variables]}
    return [native(variable) for variable in model.variables
            if id(variable) not in others and "seed" in variable.path and tuple(variable.shape) == (2,)]


def global_seed(make: bool = False) -> Any:
    """The state of Keras's own random seed, for random functions without one; None if nothing has drawn from it."""
    from keras.src.backend.common import global_state
    from keras.src.random import seed_generator

    if not make and global_state.get_global_attribute("global_seed_generator") is None:
        return None
    return native(seed_generator.global_seed_generator().state)

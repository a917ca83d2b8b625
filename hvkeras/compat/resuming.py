"""Resuming `fit` in the middle of an epoch: its data, and Keras 3's callbacks and random seeds."""

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
    """What is known about the data when a pass over them begins.

    Attributes:
        steps: Steps per epoch; None if unknown.
        rows: Rows in a batch of this process; None if unknown.
        runs_on: Whether an epoch's data continue where those of the previous epoch ended (`steps_per_epoch`).
    """

    steps: int | None
    rows: int | None
    runs_on: bool


@dataclass(frozen=True)
class Done:
    """The part of the data that training has already covered.

    Attributes:
        epochs: Completed epochs.
        steps: Completed steps of the epoch that begins now.
        before: Called when the data of the completed epochs have been skipped.
        after: Called when the completed steps have been skipped.
        reads: Whether the data of the completed steps are read and thrown away, as the data begin with them.
    """

    epochs: int
    steps: int
    before: Callable[[], None]
    after: Callable[[], None]
    reads: bool = True


# The function, if any, that inspects the next pass over data when it begins; returns what to skip, or None for nothing.
_next_pass: list[Callable[[PassFacts], Done | None]] = []


def hook_resuming() -> None:
    """Installs the hooks, once."""
    import keras
    from keras.src.backend.tensorflow import trainer

    hook(keras.callbacks.CallbackList, "on_train_begin", _put_last)
    iterator = trainer.TFEpochIterator
    method = "_enumerate_iterator" if hasattr(iterator, "_enumerate_iterator") else "enumerate_epoch"
    hook(iterator, method, _follow)


def hook_skipping() -> None:
    """Installs the hooks that `at_next_pass` relies on, once, in the Keras behind `tf.keras`."""
    if is_keras_3(default_keras()):
        hook_resuming()
        return
    from tf_keras.src.engine import data_adapter

    hook(data_adapter.DataHandler, "enumerate_epochs", _with_iterator)
    hook(data_adapter.DataHandler, "steps", _follow_tf_keras)


def _with_iterator(original: Callable[..., Any], self: Any) -> Iterator[Any]:
    """Stores the iterator of an epoch for `_follow_tf_keras`."""
    for epoch, iterator in original(self):
        self._hvkeras_iterator = iterator
        yield epoch, iterator


def _follow_tf_keras(original: Callable[..., Any], self: Any) -> Iterator[Any]:
    if _next_pass:
        done = _next_pass.pop()(PassFacts(self._inferred_steps, None, bool(self._steps_per_epoch)))
        if done is not None:
            done.before()
            if done.reads:
                _take(self._hvkeras_iterator, done.steps)
            self._initial_step = done.steps
            done.after()
    yield from original(self)


def at_next_pass(decide: Callable[[PassFacts], Done | None]) -> None:
    """Calls `decide` when the next pass over data begins; right after `on_epoch_begin`, that is the pass of `fit`."""
    _next_pass[:] = [decide]


def _put_last(original: Callable[..., Any], self: Any, logs: Any = None) -> None:
    """Moves callbacks with a method `after_other_callbacks` to the end of the list, once training has begun."""
    original(self, logs)
    for callback in [one for one in self.callbacks if hasattr(one, "after_other_callbacks")]:
        self.callbacks.remove(callback)
        self.callbacks.append(callback)
        callback.after_other_callbacks(list(self.callbacks))


def _follow(original: Callable[..., Any], self: Any) -> Any:
    done = None
    if _next_pass:
        rows = None
        with contextlib.suppress(Exception):  # many data adapters do not know it, and raise different errors
            rows = int(self.data_adapter.batch_size)
        done = _next_pass.pop()(PassFacts(self.num_batches, rows, bool(self.steps_per_epoch)))
    return original(self) if done is None else _resume(original, self, done)


def _resume(original: Callable[..., Any], self: Any, done: Done) -> Iterator[Any]:
    """Yields the remaining steps of an epoch."""
    for _ in range(done.epochs):
        _skip_pass(original, self)
    done.before()
    each = int(self.steps_per_execution)
    executions, more = divmod(done.steps, each)
    resumed = False
    for number, (step, *rest) in enumerate(original(self)):
        if number < executions and (not done.reads or _take(rest[-1], each)):
            continue
        if not resumed:  # if the data have ended, the train function detects it
            if done.reads:
                _take(rest[-1], more)
            done.after()
            resumed = True
        yield step, *rest


def _skip_pass(original: Callable[..., Any], self: Any) -> None:
    """Skips an epoch in the way Keras runs it; data are read only where one iterator serves all epochs."""
    steps = original(self)
    for made in steps:
        if self.steps_per_epoch and not _take(made[-1], int(self.steps_per_execution)):
            break
        if self.num_batches is None:  # Keras would continue until the data end
            steps.close()
            self.data_adapter.on_epoch_end()
            return


def _take(iterator: Any, count: int) -> bool:
    """Reads `count` batches; returns whether there were that many."""
    try:
        for _ in range(count):
            next(iterator)
    except (StopIteration, tf.errors.OutOfRangeError):
        return False
    return True


def begin_with_epoch(model: Any, epoch: int | None) -> None:
    """Sets the epoch with which `fit` begins, from `on_train_begin` on; None restores the argument of `fit`."""
    model._initial_epoch = epoch


def seed_variables(model: Any) -> list[Any]:
    """Returns the states of the layers' random seeds, in the model's order."""
    others = {id(variable) for variable in [*model.weights, *model.metrics_variables]}
    return [native(variable) for variable in model.variables
            if id(variable) not in others and "seed" in variable.path and tuple(variable.shape) == (2,)]


def global_seed(make: bool = False) -> Any:
    """Returns the state of Keras's global random seed, the default of random functions; None if it was never used."""
    from keras.src.backend.common import global_state
    from keras.src.random import seed_generator

    if not make and global_state.get_global_attribute("global_seed_generator") is None:
        return None
    return native(seed_generator.global_seed_generator().state)

"""Keras's training: arguments and callbacks of `fit`, training steps of a model, and resuming within an epoch."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import tensorflow as tf

from hvkeras.compat import patches
from hvkeras.compat.families import loaded_families
from hvkeras.compat.variables import as_tf_variable

# The parameters of `fit` with their defaults, in the order that all versions of Keras 3 and tf_keras share.
_FIT: dict[str, Any] = {
    "x": None, "y": None, "batch_size": None, "epochs": 1, "verbose": "auto", "callbacks": None,
    "validation_split": 0.0, "validation_data": None, "shuffle": True, "class_weight": None,
    "sample_weight": None, "initial_epoch": 0, "steps_per_epoch": None, "validation_steps": None,
    "validation_batch_size": None, "validation_freq": 1,
}


def fit_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of `fit` by name, with Keras's defaults.

    They are not bound to the signature of `fit`, as a library's wrapper of `fit` may take Keras's parameters in
    `**kwargs`.
    """
    return {**_FIT, **dict(zip(_FIT, args, strict=False)), **kwargs}


def with_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], changed: dict[str, Any],
                   names: Sequence[str] = tuple(_FIT)) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call of `fit` with some values replaced, each passed by position or by name as before.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
        changed: New values by parameter name.
        names: Parameter names in order.
    """
    indices = {name: index for index, name in enumerate(names)}
    by_index = [changed.get(name, value) for name, value in zip(names, args, strict=False)]
    others = {name: value for name, value in changed.items() if indices[name] >= len(args)}
    return (*by_index, *args[len(by_index):]), {**kwargs, **others}


def new_history(model: Any) -> Any:
    """Return an empty `History` such as `fit` returns."""
    owner = next(module for module in loaded_families() if isinstance(model, sys.modules[module].Model))
    history = sys.modules[owner].callbacks.History()
    history.set_model(model)
    history.on_train_begin()
    return history


def callback_class(model: Any) -> Any:
    """Return the base class of callbacks for a model."""
    owner = next(module for module in loaded_families() if isinstance(model, sys.modules[module].Model))
    return sys.modules[owner].callbacks.Callback


def steps_per_execution(model: Any) -> int:
    """Return the number of steps in one call of a model's train function."""
    steps: Any = getattr(model, "steps_per_execution", None)
    steps = getattr(model, "_steps_per_execution", 1) if steps is None else steps
    return int(steps.numpy() if hasattr(steps, "numpy") else steps)


def steps_by_itself(model: Any) -> bool:
    """Return whether the model trains with Keras's own `train_step`, through `model.optimizer`."""
    return type(model).train_step.__module__.split(".")[0] in ("keras", "tf_keras")


def forget_train_function(model: Any) -> None:
    """Have Keras retrace the training step."""
    model.train_function = None


def make_train_function(model: Any) -> None:
    """Rebuild the train function during `fit`, which looks it up in `model.train_function`."""
    model.make_train_function(force=True)


def metric_groups(model: Any) -> list[list[Any]]:
    """Return the model's metrics in order, in one list per entry of `model.metrics`; empty if not built yet."""
    return [list(metric.metrics) if type(metric).__name__ == "CompileMetrics" else [metric] for metric in model.metrics]


def settle_direction(callback: Any) -> None:
    """Have a callback determine whether its monitored value is minimized or maximized.

    Newer Keras 3 does so only at the end of an epoch, and fails earlier if the callback saves every few batches.
    """
    if getattr(callback, "monitor_op", True) is None and hasattr(callback, "_set_monitor_op"):
        callback._set_monitor_op()


@dataclass(frozen=True)
class PassFacts:
    """Facts about the data when a pass over them begins.

    Attributes:
        steps: Steps per epoch; None if unknown.
        rows: Rows in a batch of this process; None if unknown.
        runs_on: Whether each epoch continues with the data after the previous epoch's (`steps_per_epoch`).
    """

    steps: int | None
    rows: int | None
    runs_on: bool


@dataclass(frozen=True)
class Done:
    """Part of the data that training has already covered.

    Attributes:
        epochs: Completed epochs.
        steps: Completed steps of the epoch that is resumed.
        before: Called when the data of the completed epochs have been skipped.
        after: Called when the completed steps have been skipped.
        reads: Whether the data begin with the completed steps, which must then be read and discarded.
    """

    epochs: int
    steps: int
    before: Callable[[], None]
    after: Callable[[], None]
    reads: bool = True


class Passes:
    """Passes over data, of which the next one can resume where training stopped."""

    def __init__(self) -> None:
        self._next: Callable[[PassFacts], Done | None] | None = None
        self._iterators: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # of tf_keras's handlers

    def at_next(self, decide: Callable[[PassFacts], Done | None]) -> None:
        """Call `decide` when the next pass begins; after `on_epoch_begin`, this is the training pass of `fit`.

        Args:
            decide: Takes facts about the data; returns the part to skip, or None to skip nothing.
        """
        self._next = decide

    def put_last(self, original: Callable[..., Any], callbacks: Any, logs: Any = None) -> None:
        """Move callbacks with a method `after_other_callbacks` to the end of the list when training begins."""
        original(callbacks, logs)
        for callback in [one for one in callbacks.callbacks if hasattr(one, "after_other_callbacks")]:
            callbacks.callbacks.remove(callback)
            callbacks.callbacks.append(callback)
            callback.after_other_callbacks(list(callbacks.callbacks))

    def follow(self, original: Callable[..., Any], iterator: Any) -> Any:
        """Iterate over an epoch of Keras 3, skipping completed steps."""
        done = None
        if self._next is not None:
            rows = None
            with contextlib.suppress(Exception):  # many data adapters lack it, and raise different errors
                rows = int(iterator.data_adapter.batch_size)
            done = self._decide(PassFacts(iterator.num_batches, rows, bool(iterator.steps_per_epoch)))
        return original(iterator) if done is None else _resume(original, iterator, done)

    def with_iterator(self, original: Callable[..., Any], handler: Any) -> Iterator[Any]:
        """Store the iterator of an epoch for `follow_tf_keras`."""
        for epoch, iterator in original(handler):
            self._iterators[handler] = iterator
            yield epoch, iterator

    def follow_tf_keras(self, original: Callable[..., Any], handler: Any) -> Iterator[Any]:
        """Iterate over an epoch of tf_keras, skipping completed steps."""
        if self._next is not None:
            done = self._decide(PassFacts(handler._inferred_steps, None, bool(handler._steps_per_epoch)))
            if done is not None:
                done.before()
                if done.reads:
                    _take(self._iterators[handler], done.steps)
                handler._initial_step = done.steps
                done.after()
        yield from original(handler)

    def _decide(self, facts: PassFacts) -> Done | None:
        decide, self._next = self._next, None
        return None if decide is None else decide(facts)


def passes() -> Passes:
    """Return this process's passes over data, and install their patches in every loaded Keras."""
    return cast(Passes, patches.install(patches.PASSES, patches.behaviour_of(patches.PASSES) or Passes()))


@contextlib.contextmanager
def assigning_locally() -> Iterator[None]:
    """Context manager in which Keras 3 assigns only to this process's copies of a strategy's variables."""
    with patches.installed(patches.LOCAL):
        yield


def _resume(original: Callable[..., Any], self: Any, done: Done) -> Iterator[Any]:
    for _ in range(done.epochs):
        _skip_pass(original, self)
    done.before()
    each = int(self.steps_per_execution)
    executions, more = divmod(done.steps, each)
    resumed = False
    for number, (step, *rest) in enumerate(original(self)):
        if number < executions and (not done.reads or _take(rest[-1], each)):
            continue
        if not resumed:  # the train function detects the end of the data
            if done.reads:
                _take(rest[-1], more)
            done.after()
            resumed = True
        yield step, *rest


def _skip_pass(original: Callable[..., Any], self: Any) -> None:
    """Skip an epoch; data are read only where one iterator serves all epochs."""
    steps = original(self)
    for made in steps:
        if self.steps_per_epoch and not _take(made[-1], int(self.steps_per_execution)):
            break
        if self.num_batches is None:  # unknown length: Keras would continue until the data end
            steps.close()
            self.data_adapter.on_epoch_end()
            return


def _take(iterator: Any, count: int) -> bool:
    """Read `count` batches; return whether there were that many."""
    try:
        for _ in range(count):
            next(iterator)
    except (StopIteration, tf.errors.OutOfRangeError):
        return False
    return True


def begin_with_epoch(model: Any, epoch: int | None) -> None:
    """Override the initial epoch of `fit`, from `on_train_begin` on; None restores the argument of `fit`."""
    model._initial_epoch = epoch


def seed_variables(model: Any) -> list[Any]:
    """Return the states of the layers' random seeds, in the model's order."""
    others = {id(variable) for variable in [*model.weights, *model.metrics_variables]}
    return [as_tf_variable(variable) for variable in model.variables
            if id(variable) not in others and "seed" in variable.path and tuple(variable.shape) == (2,)]


def global_seed(make: bool = False) -> Any:
    """Return the state of Keras's global random seed, the default of random functions; None if it was never used."""
    from keras.src.backend.common import global_state
    from keras.src.random import seed_generator

    if not make and global_state.get_global_attribute("global_seed_generator") is None:
        return None
    return as_tf_variable(seed_generator.global_seed_generator().state)

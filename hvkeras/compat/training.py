"""Keras's training: arguments and callbacks of `fit`, the steps of a model, and resuming in the middle of an epoch."""

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
    """Returns the arguments of a call of `fit` by name, with Keras's defaults.

    They are not bound to the signature of `fit`, because `fit` may be the wrapper of a library, which has its own
    parameters and takes Keras's in `**kwargs`.
    """
    return {**_FIT, **dict(zip(_FIT, args, strict=False)), **kwargs}


def with_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], changed: dict[str, Any],
                   names: Sequence[str] = tuple(_FIT)) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call of `fit` with some changed, each passed by position or by name as before.

    Args:
        args: The arguments by position.
        kwargs: Those by name.
        changed: New values, by name.
        names: The names of parameters, in their order.
    """
    indices = {name: index for index, name in enumerate(names)}
    by_index = [changed.get(name, value) for name, value in zip(names, args, strict=False)]
    others = {name: value for name, value in changed.items() if indices[name] >= len(args)}
    return (*by_index, *args[len(by_index):]), {**kwargs, **others}


def new_history(model: Any) -> Any:
    """Returns an empty `History`, as `fit` returns it."""
    owner = next(module for module in loaded_families() if isinstance(model, sys.modules[module].Model))
    history = sys.modules[owner].callbacks.History()
    history.set_model(model)
    history.on_train_begin()
    return history


def callback_class(model: Any) -> Any:
    """Returns the base class of callbacks for a model."""
    owner = next(module for module in loaded_families() if isinstance(model, sys.modules[module].Model))
    return sys.modules[owner].callbacks.Callback


def steps_per_execution(model: Any) -> int:
    """Returns how many steps of the model run in one call of its train function."""
    steps: Any = getattr(model, "steps_per_execution", None)
    steps = getattr(model, "_steps_per_execution", 1) if steps is None else steps
    return int(steps.numpy() if hasattr(steps, "numpy") else steps)


def steps_by_itself(model: Any) -> bool:
    """Whether the model trains with Keras's own `train_step`, through `model.optimizer`."""
    return type(model).train_step.__module__.split(".")[0] in ("keras", "tf_keras")


def forget_train_function(model: Any) -> None:
    """Makes Keras retrace the training step."""
    model.train_function = None


def make_train_function(model: Any) -> None:
    """Makes the training step again while `fit` runs, which calls it through `model.train_function`."""
    model.make_train_function(force=True)


def metric_groups(model: Any) -> list[list[Any]]:
    """Returns the model's metrics in order, in one list per entry of `model.metrics`; empty if not built yet."""
    return [list(metric.metrics) if type(metric).__name__ == "CompileMetrics" else [metric] for metric in model.metrics]


def settle_direction(callback: Any) -> None:
    """Makes a callback determine whether it monitors the smallest or the largest value.

    Newer Keras 3 does so only at the end of an epoch, and fails before that if the callback saves every few batches.
    """
    if getattr(callback, "monitor_op", True) is None and hasattr(callback, "_set_monitor_op"):
        callback._set_monitor_op()


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


class Passes:
    """The passes over data: the next one may begin where training has ended before."""

    def __init__(self) -> None:
        self._next: Callable[[PassFacts], Done | None] | None = None
        self._iterators: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # of tf_keras's handlers

    def at_next(self, decide: Callable[[PassFacts], Done | None]) -> None:
        """Calls `decide` when the next pass begins; right after `on_epoch_begin`, that is the pass of `fit`.

        Args:
            decide: Takes what is known about the data; returns what to skip, or None for nothing.
        """
        self._next = decide

    def put_last(self, original: Callable[..., Any], callbacks: Any, logs: Any = None) -> None:
        """Moves callbacks with a method `after_other_callbacks` to the end of a list, once training has begun."""
        original(callbacks, logs)
        for callback in [one for one in callbacks.callbacks if hasattr(one, "after_other_callbacks")]:
            callbacks.callbacks.remove(callback)
            callbacks.callbacks.append(callback)
            callback.after_other_callbacks(list(callbacks.callbacks))

    def follow(self, original: Callable[..., Any], iterator: Any) -> Any:
        """Iterates over an epoch of Keras 3."""
        done = None
        if self._next is not None:
            rows = None
            with contextlib.suppress(Exception):  # many data adapters do not know it, and raise different errors
                rows = int(iterator.data_adapter.batch_size)
            done = self._decided(PassFacts(iterator.num_batches, rows, bool(iterator.steps_per_epoch)))
        return original(iterator) if done is None else _resume(original, iterator, done)

    def with_iterator(self, original: Callable[..., Any], handler: Any) -> Iterator[Any]:
        """Stores the iterator of an epoch for `follow_tf_keras`."""
        for epoch, iterator in original(handler):
            self._iterators[handler] = iterator
            yield epoch, iterator

    def follow_tf_keras(self, original: Callable[..., Any], handler: Any) -> Iterator[Any]:
        """Iterates over an epoch of tf_keras."""
        if self._next is not None:
            done = self._decided(PassFacts(handler._inferred_steps, None, bool(handler._steps_per_epoch)))
            if done is not None:
                done.before()
                if done.reads:
                    _take(self._iterators[handler], done.steps)
                handler._initial_step = done.steps
                done.after()
        yield from original(handler)

    def _decided(self, facts: PassFacts) -> Done | None:
        decide, self._next = self._next, None
        return None if decide is None else decide(facts)


def passes() -> Passes:
    """Returns the passes over data in this process, and makes every loaded Keras follow them."""
    return cast(Passes, patches.install(patches.PASSES, patches.behaviour_of(patches.PASSES) or Passes()))


@contextlib.contextmanager
def assigning_locally() -> Iterator[None]:
    """A scope in which Keras 3 assigns to this process's variables, where a strategy would involve other workers."""
    with patches.installed(patches.LOCAL):
        yield


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
    return [as_tf_variable(variable) for variable in model.variables
            if id(variable) not in others and "seed" in variable.path and tuple(variable.shape) == (2,)]


def global_seed(make: bool = False) -> Any:
    """Returns the state of Keras's global random seed, the default of random functions; None if it was never used."""
    from keras.src.backend.common import global_state
    from keras.src.random import seed_generator

    if not make and global_state.get_global_attribute("global_seed_generator") is None:
        return None
    return as_tf_variable(seed_generator.global_seed_generator().state)

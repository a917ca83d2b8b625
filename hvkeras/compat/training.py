"""Training: the arguments of `fit` and `evaluate`, their callbacks, and what a model keeps of its steps."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from hvkeras.compat.families import loaded_families

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
    places = {name: place for place, name in enumerate(names)}
    by_place = [changed.get(name, value) for name, value in zip(names, args, strict=False)]
    others = {name: value for name, value in changed.items() if places[name] >= len(args)}
    return (*by_place, *args[len(by_place):]), {**kwargs, **others}


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

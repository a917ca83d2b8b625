"""Training: hooks for `fit` and `evaluate`, their arguments and their logs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hvkeras.compat.families import KERAS, loaded_families
from hvkeras.compat.fit_data import KerasData, TfKerasData
from hvkeras.compat.hooks import hook, hook_stop_training


@dataclass(frozen=True)
class TrainingHooks:
    """Wrappers of a Keras model's training methods; each gets the original method as its first argument and calls it.

    Attributes:
        fit: Wraps `fit`.
        evaluate: Wraps `evaluate`.
        predict: Wraps `predict`.
        reset_metrics: Wraps `reset_metrics`.
        logs: Wraps the method that computes the logs of an epoch or an evaluation from the metrics, outside of graphs.
        data: Called with a `KerasData` or `TfKerasData` whenever data are prepared for iteration.
        stop_training: Called with a model and the value that this rank set; returns the value of `model.stop_training`.
        callbacks: Takes the name of a hook of all callbacks, such as `on_epoch_end`; returns the wrapper of the hook.
        step: Called with a model and its function of a batch, which is traced later; returns the function to use
            instead. In a Keras that is too old for this hook, only explanations in messages are missing.
    """

    fit: Callable[..., Any]
    evaluate: Callable[..., Any]
    predict: Callable[..., Any]
    reset_metrics: Callable[..., Any]
    logs: Callable[..., Any]
    data: Callable[[Any], None]
    stop_training: Callable[[Any, bool], bool]
    callbacks: Callable[[str], Callable[..., Any]]
    step: Callable[[Any, Callable[[Any], Any]], Callable[[Any], Any]]


# The parameters of `fit` with their defaults, in the order that all versions of Keras 3 and tf_keras share.
_FIT: dict[str, Any] = {
    "x": None, "y": None, "batch_size": None, "epochs": 1, "verbose": "auto", "callbacks": None,
    "validation_split": 0.0, "validation_data": None, "shuffle": True, "class_weight": None,
    "sample_weight": None, "initial_epoch": 0, "steps_per_epoch": None, "validation_steps": None,
    "validation_batch_size": None, "validation_freq": 1,
}

_CALLBACKS = ("on_epoch_begin", "on_epoch_end", *(f"on_{kind}_{when}" for kind in ("train", "test", "predict")
                                                  for when in ("begin", "end", "batch_begin", "batch_end")))


def hook_training(family: str, hooks: TrainingHooks) -> list[str]:
    """Installs the hooks for the models of one Keras.

    Returns:
        Descriptions of what this version of Keras lacks; usually empty.
    """
    model = sys.modules[family].Model
    if family == KERAS:
        from keras.src.backend.tensorflow import trainer

        hook(trainer.TensorFlowTrainer, "_autoconvert_optionals", lambda original, self, step: hooks.step(
            self, original(self, step)))
        source, method = getattr(trainer, "TFEpochIterator", object), "__init__"
        seen_as: Any = KerasData
        logs = "_get_metrics_result_or_logs"
    else:
        from tf_keras.src.engine import data_adapter

        source, method = data_adapter.DataHandler, "_configure_dataset_and_inferred_steps"
        seen_as = TfKerasData
        logs = "_validate_and_get_metrics_result"

    def ready(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        hooks.data(seen_as(self))

    hook_stop_training(family, hooks.stop_training)
    for name in _CALLBACKS:
        hook(sys.modules[family].callbacks.CallbackList, name, hooks.callbacks(name))
    found = {name: hook(model, name, getattr(hooks, name)) for name in ("fit", "evaluate", "predict", "reset_metrics")}
    found["the logs of fit"] = hook(model, logs, hooks.logs)
    found["the data of fit"] = source is not object and hook(source, method, ready)
    return [what for what, there in found.items() if not there]


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

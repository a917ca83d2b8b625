"""Training: `fit`, `evaluate`, their arguments and logs."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hvkeras.compat.families import KERAS, loaded_families
from hvkeras.compat.fit_data import KerasData, TfKerasData
from hvkeras.compat.hooks import hook, hook_stop_training


@dataclass(frozen=True)
class TrainingHooks:
    """What stands around the training methods of a Keras model; each calls the original that it is given first.

    Attributes:
        fit: Around `fit`.
        evaluate: Around `evaluate`.
        predict: Around `predict`.
        reset_metrics: Around `reset_metrics`.
        logs: Around the method that makes the logs of an epoch or an evaluation from the metrics, outside of graphs.
        data: Called with a `KerasData` or `TfKerasData` whenever data is made ready to be iterated over.
        stop_training: Called with a model and what this rank set; says what `model.stop_training` is.
        callbacks: Makes what stands around a hook of all callbacks, such as `on_epoch_end`, given its name.
        step: Called with a model and its function of a batch, which is traced later; returns what serves instead. Where
            Keras is too old for it, nothing is missing but words.
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


_CALLBACKS = ("on_epoch_begin", "on_epoch_end", *(f"on_{kind}_{when}" for kind in ("train", "test", "predict")
                                                  for when in ("begin", "end", "batch_begin", "batch_end")))


def hook_training(family: str, hooks: TrainingHooks) -> list[str]:
    """Sets the hooks for the models of one Keras.

    Returns:
        What this version of Keras lacks, in words; empty as a rule.
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


def bound_fit(model: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> inspect.BoundArguments:
    """The arguments of a call of Keras's own `fit` by name, with their defaults."""
    owner = next(module for module in loaded_families() if isinstance(model, sys.modules[module].Model))
    bound = inspect.signature(sys.modules[owner].Model.fit).bind(model, *arguments, **named)
    bound.apply_defaults()
    return bound


def callback_class(model: Any) -> Any:
    """The base class of callbacks for a model."""
    owner = next(module for module in loaded_families() if isinstance(model, sys.modules[module].Model))
    return sys.modules[owner].callbacks.Callback


def steps_per_execution(model: Any) -> int:
    """How many steps of the model run in one call of its train function."""
    steps: Any = getattr(model, "steps_per_execution", None)
    steps = getattr(model, "_steps_per_execution", 1) if steps is None else steps
    return int(steps.numpy() if hasattr(steps, "numpy") else steps)


def steps_by_itself(model: Any) -> bool:
    """Whether the model trains in Keras's own `train_step`, through `model.optimizer`."""
    return type(model).train_step.__module__.split(".")[0] in ("keras", "tf_keras")


def forget_train_function(model: Any) -> None:
    """Makes Keras trace the training step anew."""
    model.train_function = None


def metric_groups(model: Any) -> list[list[Any]]:
    """The model's metrics in order; one list for each entry of `model.metrics`, empty where it is not built yet."""
    return [list(metric.metrics) if type(metric).__name__ == "CompileMetrics" else [metric] for metric in model.metrics]


def settle_direction(callback: Any) -> None:
    """Has a callback find out whether it looks for the least or the greatest value.

    Newer Keras 3 does so at the end of an epoch, and fails before that if it is to save after so many batches.
    """
    if getattr(callback, "monitor_op", True) is None and hasattr(callback, "_set_monitor_op"):
        callback._set_monitor_op()

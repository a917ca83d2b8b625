"""Untrained state of layers: variables that no optimizer trains, and that the layer's call may assign."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvkeras.compat.families import is_of_keras
from hvkeras.compat.models import model_weights
from hvkeras.compat.variables import local_parts, variable_key

# The moving statistics of BatchNormalization. With `renorm`, each step derives the variance from `moving_stddev`.
_STATISTICS = ("moving_mean", "moving_variance", "moving_stddev", "renorm_mean", "renorm_stddev")


@dataclass(frozen=True)
class UntrainedVariable:
    """Floating-point variable that no optimizer trains.

    Attributes:
        layer: The innermost layer that contains it.
        layers: All layers that contain it, outermost first.
        is_statistic: Whether it is a moving statistic of one of Keras's own layers.
    """

    variable: Any
    layer: Any
    layers: Sequence[Any]
    is_statistic: bool

    @property
    def key(self) -> Any:
        """Key of the variable."""
        return variable_key(self.variable)


def kept_variables(model: Any) -> list[UntrainedVariable]:
    """Return the untrained floating-point variables of a model's layers, in the same order on all ranks.

    State that Keras does not count among the weights is excluded: metrics, and the states of random generators and
    stateful RNNs. Integers, such as counters, are also excluded.
    """
    if not hasattr(model, "_flatten_layers"):
        return []
    trained = {variable_key(variable) for variable in model.trainable_variables}
    owners: dict[Any, list[Any]] = {}
    found: dict[Any, Any] = {}
    for layer in model._flatten_layers():
        for variable in [*model_weights(layer), *_untracked(layer)]:
            key = variable_key(variable)
            if key not in trained and tf.as_dtype(variable.dtype).is_floating:
                found[key] = variable
                owners.setdefault(key, []).append(layer)
    return [UntrainedVariable(variable, owners[key][-1], owners[key], _is_statistic(owners[key][-1], key))
            for key, variable in found.items()]


def derive_statistics(model: Any, local: Collection[Any]) -> None:
    """Recompute the variances that layers derive from other moving statistics, as Keras does in each step.

    Args:
        local: Keys of variables that are local to each rank.
    """
    for layer in model._flatten_layers():
        if _normalizes(layer) and layer.built and layer.trainable and getattr(layer, "renorm", False) and not any(
                variable_key(one) in local for one in (layer.moving_variance, layer.moving_stddev)):
            for variance, stddev in zip(*map(local_parts, (layer.moving_variance, layer.moving_stddev)), strict=True):
                variance.assign(tf.nn.relu(stddev * stddev - tf.cast(layer.epsilon, stddev.dtype)))


def _normalizes(layer: Any) -> bool:
    return any(cls.__name__.startswith("BatchNormalization") and is_of_keras(cls) for cls in type(layer).__mro__)


def _is_statistic(layer: Any, key: Any) -> bool:
    return _normalizes(layer) and bool(layer.trainable) and any(
        variable_key(variable) == key for variable in (getattr(layer, name, None) for name in _STATISTICS)
        if variable is not None)


def _untracked(layer: Any) -> list[tf.Variable]:
    """Return `tf.Variable`s in a layer of Keras 3 and in its modules, which are not among its weights."""
    if isinstance(layer, tf.Module):  # tf_keras counts them
        return []
    found: list[tf.Variable] = []
    for part in layer._trackable_children().values():
        if isinstance(part, tf.Variable):
            found.append(part)
        elif isinstance(part, tf.Module) and not hasattr(part, "_flatten_layers"):
            found += part.variables
    return found

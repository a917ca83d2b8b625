"""Describes the layers of a model, so that ranks find out before the first step that they have built different models.

Different shapes would be found by the first collective as well, but as tensors that do not fit together. Different
dropout rates or activations would never be found: the ranks would train a mixture, with equal weights.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvkeras import compat
from hvkeras.errors import DivergenceError, explain

# Arguments of layers that may differ between ranks; initial weights are broadcast, and have their own check.
_FREE = {"name", "dtype", "seed"}
_BY_PARTS = {"Regularizer", "Constraint"}  # Keras base classes whose instances are described by their attributes


@dataclass(frozen=True)
class Layer:
    """One layer, as far as it must be the same on all ranks.

    Attributes:
        name: Its name, which may differ.
        kind: Its class.
        built: Whether it has its weights; building changes some arguments.
        values: Pairs of an argument or weight, and its value or shape.
    """

    name: str
    kind: str
    built: bool
    values: tuple[tuple[str, str], ...]


def layers_of(model: Any, local: Collection[Any], local_layers: Sequence[Any] = ()) -> list[Layer]:
    """Describes the layers of a model that all ranks must share, including nested ones.

    Of layers that Keras defines, the arguments that are numbers, texts, functions, regularizers or constraints are
    described; of all layers, the shapes of their weights.

    Args:
        model: The model.
        local: Keys of the variables that each rank has for itself; layers that consist of them are left out.
        local_layers: Layers that each rank has for itself, built or not.
    """
    if not hasattr(model, "_flatten_layers"):
        return []
    # What layers have learned from data is compared by itself.
    apart = {id(layer) for layer in compat.learned_layers(model)}
    apart |= {id(inner) for layer in local_layers for inner in layer._flatten_layers()}
    found = {id(layer): layer for layer in model._flatten_layers(include_self=False)}
    return [_described(layer) for key, layer in found.items()
            if key not in apart and not _is_input(layer) and not _is_local(layer, local)]


def digest_of(layers: Sequence[Layer]) -> str:
    """Returns a digest that is the same on all ranks if their models are."""
    return hashlib.sha256(repr([(one.kind, one.built, one.values) for one in layers]).encode()).hexdigest()


def require_same_model(ranks: Sequence[int], everyone: Sequence[Sequence[Layer]]) -> None:
    """Checks that all ranks have built the same model.

    Args:
        ranks: The global ranks that train together.
        everyone: The layers on each rank, in the same order.

    Raises:
        DivergenceError: The models differ; the message names the first difference.
    """
    for rank, layers in zip(ranks[1:], everyone[1:], strict=True):
        found = _difference(everyone[0], layers)
        if found is not None:
            what, first, other = found
            raise DivergenceError(explain(
                f"All ranks must train the same model, but the models themselves differ in {what}",
                "build the model alike on every rank; a tuner must give all ranks the same trial (Keras Tuner:"
                " hvd.DistributedTuner(tuner), or the same seed= and a directory of its own on every rank); register"
                " layers that are meant to differ with optimizer.register_local_var(variable)",
                **{f"rank_{ranks[0]}": first, f"rank_{rank}": other}))


def _difference(first: Sequence[Layer], other: Sequence[Layer]) -> tuple[str, str, str] | None:
    """Returns what differs first, and what it is in both; None if nothing does."""
    for one, two in zip(first, other, strict=False):
        if one.kind != two.kind:
            return "the class of a layer", f"{one.name} ({one.kind})", f"{two.name} ({two.kind})"
        mine, theirs = dict(one.values), dict(two.values)
        for what in {**mine, **theirs} if one.built == two.built else ():
            if mine.get(what) != theirs.get(what):
                where = f"{what} of the layer {one.name} ({one.kind})"
                return where, mine.get(what, "nothing"), theirs.get(what, "nothing")
    return None if len(first) == len(other) else ("the number of layers", str(len(first)), str(len(other)))


def _is_input(layer: Any) -> bool:
    """Whether Keras itself may have made the layer, when it built a model."""
    return compat.is_of_keras(type(layer)) and type(layer).__name__ == "InputLayer"


def _is_local(layer: Any, local: Collection[Any]) -> bool:
    if not layer.built:  # tf_keras raises when asked for the weights of a model that has none yet
        return False
    keys = [compat.variable_key(weight) for weight in layer.trainable_weights]
    return bool(keys) and all(key in local for key in keys)


def _described(layer: Any) -> Layer:
    names = _arguments(next(cls for cls in type(layer).__mro__ if compat.is_of_keras(cls)))
    kept = {name: _value(vars(layer)[name]) for name in names if name in vars(layer)}
    weights = compat.model_weights(layer) if layer.built else []
    shapes = [(f"the shape of weight {number}", str(list(weight.shape))) for number, weight in enumerate(weights, 1)]
    values = [(name, value) for name, value in kept.items() if value is not None]
    return Layer(str(layer.name), type(layer).__name__, bool(layer.built), (*values, *shapes))


@functools.cache
def _arguments(cls: type) -> tuple[str, ...]:
    """The arguments of a class of Keras's that must be the same on all ranks."""
    names = inspect.signature(cls.__init__).parameters  # type: ignore[misc]  # only asked for its signature
    return tuple(name for name in names if name not in _FREE and not name.endswith("initializer"))


def _value(value: Any) -> str | None:
    """Describes the value of an argument; None if it is not compared."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return f"{value:.6g}"  # tuners may round differently on different processors
    if value is None or isinstance(value, (bool, int, str)):
        return str(value)
    if isinstance(value, (list, tuple)):
        parts = [_value(part) for part in value]
        return None if None in parts else str(parts)
    if inspect.isfunction(value):
        return value.__name__
    if _BY_PARTS & {base.__name__ for base in type(value).__mro__} and compat.is_of_keras(type(value)):
        return f"{type(value).__name__} {sorted((name, _value(part)) for name, part in vars(value).items())}"
    return None

"""Description of a model and its `compile` arguments, to detect different models before the first step.

The first collective would also detect different shapes, but only report tensors that do not match. Different dropout
rates or activations would never be detected: the ranks would train a mixture, with equal weights. Ranks with different
losses or loss weights would still apply the same gradients.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras import compat
from hvkeras.errors import DivergenceError, UsageError, explain

Arguments = tuple[tuple[str, str], ...]  # pairs of a path, such as "metrics[1]", and its description

_COMPARED_ARGUMENTS = ("loss", "loss_weights", "metrics", "weighted_metrics", "optimizer")
_DESCRIBED_BY_CONFIG = {"Loss", "Metric", "Optimizer"}  # base classes in Keras
_NOT_COMPARED = {"learning_rate"}  # values that are broadcast
_MAX_DEPTH = 6  # maximum nesting of containers and functions


def arguments_of(model: Any) -> Arguments:
    """Describe the `compile` arguments of a model, as far as the model stores them."""
    given: Any = getattr(getattr(model, "_compile_config", None), "config", {})
    if given:  # lacks the optimizer once Keras 3 has saved the model as HDF5
        given = {**given, "optimizer": model.optimizer}
    found = [leaf for name in _COMPARED_ARGUMENTS if name in given for leaf in _leaves(name, given[name], _MAX_DEPTH)]
    return (*found, ("steps_per_execution", str(compat.steps_per_execution(model))))


def require_equal_arguments(ranks: Sequence[int], everyone: Sequence[Arguments]) -> None:
    """Check that all ranks compiled their models with the same arguments.

    Args:
        ranks: The global ranks that train together.
        everyone: Their descriptions, in the same order.

    Raises:
        UsageError: The arguments differ; the message names the first difference.
    """
    first = dict(everyone[0])
    for rank, arguments in zip(ranks[1:], everyone[1:], strict=True):
        other = dict(arguments)
        for path in {**first, **other}:
            if first.get(path) != other.get(path):
                raise UsageError(explain(
                    f"All ranks must compile the model alike, but {path} differs", "pass the same losses, weights,"
                    " metrics and optimizer to compile() on every rank",
                    **{f"rank_{ranks[0]}": first.get(path, "nothing"), f"rank_{rank}": other.get(path, "nothing")}))


def _leaves(path: str, thing: Any, depth: int) -> Iterator[tuple[str, str]]:
    """Yield the path and the description of each leaf of a nested value."""
    if depth and isinstance(thing, Mapping):
        for key in sorted(thing, key=str):
            if key not in _NOT_COMPARED:
                value = thing[key]
                if key == "name" and isinstance(value, str):
                    value = re.sub(r"_\d+$", "", value)  # the number depends on earlier layers of the process
                yield from _leaves(f"{path}[{key!r}]", value, depth - 1)
    elif depth and isinstance(thing, (list, tuple)):
        for number, value in enumerate(thing):
            yield from _leaves(f"{path}[{number}]", value, depth - 1)
    elif depth and isinstance(thing, functools.partial):
        yield from _leaves(path, thing.func, depth - 1)
        yield from _leaves(f"{path}'s arguments", [*thing.args, thing.keywords], depth - 1)
    elif depth and hasattr(thing, "__code__"):
        yield from _function_leaves(path, thing, depth - 1)
    elif _DESCRIBED_BY_CONFIG & {base.__name__ for base in type(thing).__mro__}:
        yield path, type(thing).__name__
        yield from _leaves(path, _config(thing), depth - 1)
    else:
        yield path, _describe_leaf(thing)


def _function_leaves(path: str, function: Any, depth: int) -> Iterator[tuple[str, str]]:
    code: CodeType = function.__code__
    yield path, getattr(function, "__qualname__", type(function).__name__)
    plain = [constant for constant in code.co_consts if isinstance(constant, (bool, int, float))]
    yield f"{path}'s code", f"{', '.join(code.co_names)} {plain}"
    closure = getattr(function, "__closure__", None) or ()
    for name, cell in zip(code.co_freevars, closure, strict=False):
        try:
            value = cell.cell_contents
        except ValueError:  # the cell is still empty
            continue
        yield from _leaves(f"{path}'s {name}", value, depth)
    yield from _leaves(f"{path}'s defaults", getattr(function, "__defaults__", None) or (), depth)


def _config(thing: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about objects that cannot be saved
        try:
            return thing.get_config()
        except Exception:  # noqa: BLE001  # a user's get_config may raise anything, or be missing
            return {}


def _describe_leaf(thing: Any) -> str:
    if thing is None or isinstance(thing, (str, bool, int, float, np.generic, tf.DType)):
        return str(thing.item() if isinstance(thing, np.generic) else thing)
    if isinstance(thing, type):
        return thing.__qualname__
    shape = getattr(thing, "shape", None)
    if isinstance(thing, (np.ndarray, tf.Tensor)) and hasattr(thing, "__array__"):
        values = np.ascontiguousarray(thing)
        return f"{values.dtype}{list(values.shape)} {hashlib.sha256(values.tobytes()).hexdigest()[:12]}"
    return type(thing).__name__ if shape is None else f"{type(thing).__name__} {shape}"


# Arguments of layers that may differ between ranks. Initial weights are broadcast and checked separately.
_LOCAL_ARGUMENTS = {"name", "dtype", "seed"}
_DESCRIBED_BY_ATTRIBUTES = {"Regularizer", "Constraint"}  # base classes in Keras


@dataclass(frozen=True)
class Layer:
    """Description of one layer, as far as it must be equal on all ranks.

    Attributes:
        built: Whether the layer has weights; building changes some arguments.
        values: Pairs of an argument and its value, or of a weight and its shape.
    """

    name: str
    kind: str
    built: bool
    values: tuple[tuple[str, str], ...]


def layers_of(model: Any, local: Collection[Any], local_layers: Sequence[Any] = ()) -> list[Layer]:
    """Describe the layers of a model that must be equal on all ranks, including nested ones.

    For Keras layers, the arguments that are numbers, strings, functions, regularizers or constraints are described; for
    all layers, the shapes of their weights.

    Args:
        local: Keys of local variables; layers with only such variables are left out.
        local_layers: Layers that are local to each rank, built or not.
    """
    if not hasattr(model, "_flatten_layers"):
        return []
    # Layers that learn from data are compared separately (`learned_state`).
    excluded = {id(layer) for layer in compat.learned_layers(model)}
    excluded |= {id(inner) for layer in local_layers for inner in layer._flatten_layers()}
    found = {id(layer): layer for layer in model._flatten_layers(include_self=False)}
    return [_describe_layer(layer) for key, layer in found.items()
            if key not in excluded and not _is_input_layer(layer) and not _is_local(layer, local)]


def digest_of(layers: Sequence[Layer]) -> str:
    """Return a digest that is equal on all ranks if their models are."""
    return hashlib.sha256(repr([(one.kind, one.built, one.values) for one in layers]).encode()).hexdigest()


def require_same_model(ranks: Sequence[int], everyone: Sequence[Sequence[Layer]]) -> None:
    """Check that all ranks have built the same model.

    Args:
        ranks: The global ranks that train together.
        everyone: The layers of each rank, in the same order.

    Raises:
        DivergenceError: The models differ; the message names the first difference.
    """
    for rank, layers in zip(ranks[1:], everyone[1:], strict=True):
        found = _first_difference(everyone[0], layers)
        if found is not None:
            what, first, other = found
            raise DivergenceError(explain(
                f"All ranks must train the same model, but the models themselves differ in {what}",
                "build the model alike on every rank; a tuner must give all ranks the same trial (Keras Tuner:"
                " hvd.DistributedTuner(tuner), or the same seed= and a directory of its own on every rank); register"
                " layers that are meant to differ with optimizer.register_local_var(variable)",
                **{f"rank_{ranks[0]}": first, f"rank_{rank}": other}))


def _first_difference(first: Sequence[Layer], other: Sequence[Layer]) -> tuple[str, str, str] | None:
    """Return the location of the first difference and both values; None if there is none."""
    for one, second in zip(first, other, strict=False):
        if one.kind != second.kind:
            return "the class of a layer", f"{one.name} ({one.kind})", f"{second.name} ({second.kind})"
        mine, theirs = dict(one.values), dict(second.values)
        for what in {**mine, **theirs} if one.built == second.built else ():
            if mine.get(what) != theirs.get(what):
                where = f"{what} of the layer {one.name} ({one.kind})"
                return where, mine.get(what, "nothing"), theirs.get(what, "nothing")
    return None if len(first) == len(other) else ("the number of layers", str(len(first)), str(len(other)))


def _is_input_layer(layer: Any) -> bool:
    """Return whether Keras itself may have created the layer when it built a model."""
    return compat.is_of_keras(type(layer)) and type(layer).__name__ == "InputLayer"


def _is_local(layer: Any, local: Collection[Any]) -> bool:
    if not layer.built:  # tf_keras raises when asked for the weights of a model that has none yet
        return False
    keys = [compat.variable_key(weight) for weight in layer.trainable_weights]
    return bool(keys) and all(key in local for key in keys)


def _describe_layer(layer: Any) -> Layer:
    names = _compared_arguments(next(cls for cls in type(layer).__mro__ if compat.is_of_keras(cls)))
    described = {name: _describe_value(vars(layer)[name]) for name in names if name in vars(layer)}
    weights = compat.model_weights(layer) if layer.built else []
    shapes = [(f"the shape of weight {number}", str(list(weight.shape))) for number, weight in enumerate(weights, 1)]
    values = [(name, value) for name, value in described.items() if value is not None]
    return Layer(str(layer.name), type(layer).__name__, bool(layer.built), (*values, *shapes))


@functools.cache
def _compared_arguments(cls: type) -> tuple[str, ...]:
    names = inspect.signature(cls.__init__).parameters  # type: ignore[misc]  # only its signature is used
    return tuple(name for name in names if name not in _LOCAL_ARGUMENTS and not name.endswith("initializer"))


def _describe_value(value: Any) -> str | None:
    """Describe the value of an argument; None if it is not compared."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return f"{value:.6g}"  # tuners may round differently on different processors
    if value is None or isinstance(value, (bool, int, str)):
        return str(value)
    if isinstance(value, (list, tuple)):
        parts = [_describe_value(part) for part in value]
        return None if None in parts else str(parts)
    if inspect.isfunction(value):
        return value.__name__
    if _DESCRIBED_BY_ATTRIBUTES & {base.__name__ for base in type(value).__mro__} and compat.is_of_keras(type(value)):
        return f"{type(value).__name__} {sorted((name, _describe_value(part)) for name, part in vars(value).items())}"
    return None

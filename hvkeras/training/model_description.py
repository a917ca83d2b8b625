"""Description of a model and its `compile` arguments, so that ranks detect different models before the first step.

Different shapes would be detected by the first collective as well, but as tensors that do not match. Different dropout
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

Arguments = tuple[tuple[str, str], ...]  # pairs of a place, such as "metrics[1]", and its content

_GIVEN = ("loss", "loss_weights", "metrics", "weighted_metrics", "optimizer")
_CONFIGURED = {"Loss", "Metric", "Optimizer"}  # Keras base classes whose instances are described by their config
_OWN_TO_RANKS = {"learning_rate"}  # values that broadcasts make equal
_DEPTH = 6  # maximum nesting of containers and functions


def arguments_of(model: Any) -> Arguments:
    """Describes what a model was compiled with, as far as the model keeps it.

    Args:
        model: The model.
    """
    given: Any = getattr(getattr(model, "_compile_config", None), "config", {})
    if given:  # without the optimizer once Keras 3 has saved the model as HDF5
        given = {**given, "optimizer": model.optimizer}
    found = [leaf for name in _GIVEN if name in given for leaf in _leaves(name, given[name], _DEPTH)]
    return (*found, ("steps_per_execution", str(compat.steps_per_execution(model))))


def require_equal_arguments(ranks: Sequence[int], everyone: Sequence[Arguments]) -> None:
    """Checks that all ranks compiled their models with the same arguments.

    Args:
        ranks: The global ranks that train together.
        everyone: The description from each rank, in the same order.

    Raises:
        UsageError: The arguments differ; the message names the first difference.
    """
    first = dict(everyone[0])
    for rank, arguments in zip(ranks[1:], everyone[1:], strict=True):
        other = dict(arguments)
        for index in {**first, **other}:
            if first.get(index) != other.get(index):
                raise UsageError(explain(
                    f"All ranks must compile the model alike, but {index} differs", "pass the same losses, weights,"
                    " metrics and optimizer to compile() on every rank",
                    **{f"rank_{ranks[0]}": first.get(index, "nothing"), f"rank_{rank}": other.get(index, "nothing")}))


def _leaves(index: str, thing: Any, depth: int) -> Iterator[tuple[str, str]]:
    """Yields the place and the description of each leaf of a nested value."""
    if depth and isinstance(thing, Mapping):
        for key in sorted(thing, key=str):
            if key not in _OWN_TO_RANKS:
                value = thing[key]
                if key == "name" and isinstance(value, str):
                    value = re.sub(r"_\d+$", "", value)  # the number depends on what the process made before
                yield from _leaves(f"{index}[{key!r}]", value, depth - 1)
    elif depth and isinstance(thing, (list, tuple)):
        for number, value in enumerate(thing):
            yield from _leaves(f"{index}[{number}]", value, depth - 1)
    elif depth and isinstance(thing, functools.partial):
        yield from _leaves(index, thing.func, depth - 1)
        yield from _leaves(f"{index}'s arguments", [*thing.args, thing.keywords], depth - 1)
    elif depth and hasattr(thing, "__code__"):
        yield from _of_function(index, thing, depth - 1)
    elif _CONFIGURED & {base.__name__ for base in type(thing).__mro__}:
        yield index, type(thing).__name__
        yield from _leaves(index, _config(thing), depth - 1)
    else:
        yield index, _one(thing)


def _of_function(index: str, function: Any, depth: int) -> Iterator[tuple[str, str]]:
    code: CodeType = function.__code__
    yield index, getattr(function, "__qualname__", type(function).__name__)
    plain = [constant for constant in code.co_consts if isinstance(constant, (bool, int, float))]
    yield f"{index}'s code", f"{', '.join(code.co_names)} {plain}"
    closure = getattr(function, "__closure__", None) or ()
    for name, cell in zip(code.co_freevars, closure, strict=False):
        try:
            value = cell.cell_contents
        except ValueError:  # the cell is still empty
            continue
        yield from _leaves(f"{index}'s {name}", value, depth)
    yield from _leaves(f"{index}'s defaults", getattr(function, "__defaults__", None) or (), depth)


def _config(thing: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about objects that cannot be saved
        try:
            return thing.get_config()
        except Exception:  # noqa: BLE001  # a user's get_config may raise anything, or be missing
            return {}


def _one(thing: Any) -> str:
    if thing is None or isinstance(thing, (str, bool, int, float, np.generic, tf.DType)):
        return str(thing.item() if isinstance(thing, np.generic) else thing)
    if isinstance(thing, type):
        return thing.__qualname__
    shape = getattr(thing, "shape", None)
    if isinstance(thing, (np.ndarray, tf.Tensor)) and hasattr(thing, "__array__"):
        values = np.ascontiguousarray(thing)
        return f"{values.dtype}{list(values.shape)} {hashlib.sha256(values.tobytes()).hexdigest()[:12]}"
    return type(thing).__name__ if shape is None else f"{type(thing).__name__} {shape}"


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

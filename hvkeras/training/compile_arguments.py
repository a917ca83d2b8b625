"""Describes the arguments of `compile` as text, so that ranks can compare them.

Ranks with different losses or loss weights still apply the same gradients, so no other check would notice.
"""

from __future__ import annotations

import functools
import hashlib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras import compat
from hvkeras.errors import UsageError, explain

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
        for place in {**first, **other}:
            if first.get(place) != other.get(place):
                raise UsageError(explain(
                    f"All ranks must compile the model alike, but {place} differs", "pass the same losses, weights,"
                    " metrics and optimizer to compile() on every rank",
                    **{f"rank_{ranks[0]}": first.get(place, "nothing"), f"rank_{rank}": other.get(place, "nothing")}))


def _leaves(place: str, thing: Any, depth: int) -> Iterator[tuple[str, str]]:
    """Yields the place and the description of each leaf of a nested value."""
    if depth and isinstance(thing, Mapping):
        for key in sorted(thing, key=str):
            if key not in _OWN_TO_RANKS:
                value = thing[key]
                if key == "name" and isinstance(value, str):
                    value = re.sub(r"_\d+$", "", value)  # the number depends on what the process made before
                yield from _leaves(f"{place}[{key!r}]", value, depth - 1)
    elif depth and isinstance(thing, (list, tuple)):
        for number, value in enumerate(thing):
            yield from _leaves(f"{place}[{number}]", value, depth - 1)
    elif depth and isinstance(thing, functools.partial):
        yield from _leaves(place, thing.func, depth - 1)
        yield from _leaves(f"{place}'s arguments", [*thing.args, thing.keywords], depth - 1)
    elif depth and hasattr(thing, "__code__"):
        yield from _of_function(place, thing, depth - 1)
    elif _CONFIGURED & {base.__name__ for base in type(thing).__mro__}:
        yield place, type(thing).__name__
        yield from _leaves(place, _config(thing), depth - 1)
    else:
        yield place, _one(thing)


def _of_function(place: str, function: Any, depth: int) -> Iterator[tuple[str, str]]:
    code: CodeType = function.__code__
    yield place, getattr(function, "__qualname__", type(function).__name__)
    plain = [constant for constant in code.co_consts if isinstance(constant, (bool, int, float))]
    yield f"{place}'s code", f"{', '.join(code.co_names)} {plain}"
    closure = getattr(function, "__closure__", None) or ()
    for name, cell in zip(code.co_freevars, closure, strict=False):
        try:
            value = cell.cell_contents
        except ValueError:  # the cell is still empty
            continue
        yield from _leaves(f"{place}'s {name}", value, depth)
    yield from _leaves(f"{place}'s defaults", getattr(function, "__defaults__", None) or (), depth)


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

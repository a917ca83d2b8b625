"""What `compile` was given, in words that ranks can compare.

Ranks that minimise unlike losses, or weigh them unlike, still apply the same gradients, so nothing else would tell.
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

Words = tuple[tuple[str, str], ...]  # where, such as "metrics[1]", and what is there

_GIVEN = ("loss", "loss_weights", "metrics", "weighted_metrics", "optimizer")
_CONFIGURED = {"Loss", "Metric", "Optimizer"}  # classes of Keras whose objects say by their config what they are
_OWN_TO_RANKS = {"learning_rate"}  # what broadcasts make equal
_DEPTH = 6  # of lists in lists and functions in functions


def words_of(model: Any) -> Words:
    """Says what a model was compiled with; nothing for one that does not keep it.

    Args:
        model: The model.
    """
    given: Any = getattr(getattr(model, "_compile_config", None), "config", {})
    found = [leaf for name in _GIVEN if name in given for leaf in _leaves(name, given[name], _DEPTH)]
    return (*found, ("steps_per_execution", str(compat.steps_per_execution(model))))


def require_alike(ranks: Sequence[int], everyone: Sequence[Words]) -> None:
    """Makes sure that all ranks compiled their models alike.

    Args:
        ranks: The global ranks that train together.
        everyone: What each said, in that order.

    Raises:
        UsageError: Some did not; the message names the first difference.
    """
    first = dict(everyone[0])
    for rank, words in zip(ranks[1:], everyone[1:], strict=True):
        other = dict(words)
        for place in {**first, **other}:
            if first.get(place) != other.get(place):
                raise UsageError(explain(
                    f"All ranks must compile the model alike, but {place} differs", "pass the same losses, weights,"
                    " metrics and optimizer to compile() on every rank",
                    **{f"rank_{ranks[0]}": first.get(place, "nothing"), f"rank_{rank}": other.get(place, "nothing")}))


def _leaves(place: str, thing: Any, depth: int) -> Iterator[tuple[str, str]]:
    """Each part of a thing that has no parts: where it is, and what."""
    if depth and isinstance(thing, Mapping):
        for key in sorted(thing, key=str):
            if key not in _OWN_TO_RANKS:
                value = thing[key]
                if key == "name" and isinstance(value, str):
                    value = re.sub(r"_\d+$", "", value)  # Keras numbers them by what a process made before
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
        except ValueError:  # nothing in it yet
            continue
        yield from _leaves(f"{place}'s {name}", value, depth)
    yield from _leaves(f"{place}'s defaults", getattr(function, "__defaults__", None) or (), depth)


def _config(thing: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what cannot be saved
        try:
            return thing.get_config()
        except Exception:  # noqa: BLE001  # a user's, or one that is not there
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

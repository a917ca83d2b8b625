"""States of Keras's own callbacks whose decisions depend on what they have seen."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

# Attributes by the class of the callback, or one of its bases.
_KEPT = {
    "EarlyStopping": ("best", "wait", "best_epoch", "stopped_epoch", "best_weights"),
    "ReduceLROnPlateau": ("best", "wait", "cooldown_counter"),
    "ModelCheckpoint": ("best",),
}


def states_of(callbacks: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Returns what Keras's callbacks have seen so far, as numbers and arrays, by names that a later run has too."""
    return {key: {name: _plain(getattr(callback, name)) for name in names if hasattr(callback, name)}
            for key, callback, names in _known(callbacks)}


def restore(callbacks: Sequence[Any], states: Mapping[str, Mapping[str, Any]]) -> None:
    """Restores the states of callbacks, matched by kind, monitor and position in the list."""
    for key, callback, names in _known(callbacks):
        for name in names:
            if name in states.get(key, {}):
                setattr(callback, name, states[key][name])
        if "best" in states.get(key, {}):
            _keep_best(callback, states[key]["best"])


def _keep_best(callback: Any, best: Any) -> None:
    """Makes a callback keep its best value when it determines, at an epoch's end, whether less or more is better.

    Older versions of Keras 3 reset the best value to the worst possible one at that point.
    """
    set_direction = getattr(callback, "_set_monitor_op", None)
    if set_direction is None or getattr(callback, "monitor_op", True) is not None:
        return

    def once() -> None:
        set_direction()
        callback.best = best
        del callback._set_monitor_op  # this function, which hides the method

    callback._set_monitor_op = once


def _known(callbacks: Sequence[Any]) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    seen: dict[str, int] = {}
    for callback in callbacks:
        kind = next((cls.__name__ for cls in type(callback).__mro__ if cls.__name__ in _KEPT), None)
        if kind is not None:
            name = f"{kind} of {getattr(callback, 'monitor', '')}"
            seen[name] = seen.get(name, 0) + 1
            yield f"{name}, number {seen[name]}", callback, _KEPT[kind]


def _plain(value: Any) -> Any:
    """Converts numbers to Python's types, and arrays to NumPy's."""
    if isinstance(value, (list, tuple)):
        return [np.asarray(one) for one in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(np.asarray(value))

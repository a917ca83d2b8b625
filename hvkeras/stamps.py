"""When the collectives of training steps begin and end on this rank, for `hvkeras.callbacks.TensorBoard`.

While it is on, functions that are traced get two stamps around each collective, and so do collectives that steps make
in eager mode. Otherwise nothing is added to any graph. Nothing is stamped inside XLA, which cannot ask for the time.

Unlike the timeline, this runs no Python and keeps no order among collectives, so that several stay in flight.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from hvkeras import graphs

if TYPE_CHECKING:
    from hvkeras.backends.interface import Backend

CAPACITY = 1024  # runs of a collective that are kept, the latest ones: 16 KiB

Array = np.ndarray[Any, Any]

# All of this process; functions that were traced meanwhile write to their stamps for as long as they live.
_stamps: dict[str, Stamps] = {}
_lock = threading.Lock()


class _State:
    tracing = False  # functions that are traced now get stamps
    in_step = False  # eager collectives belong to a training step


def start() -> None:
    """Begins to stamp what is traced from now on."""
    _State.tracing = True


def stop() -> None:
    """Ends it; functions that have stamps keep them."""
    _State.tracing = _State.in_step = False


def set_in_step(inside: bool) -> None:
    """Says whether a training step runs, outside of which eager collectives are not stamped."""
    _State.in_step = inside and _State.tracing


def collected() -> dict[str, Array]:
    """The latest runs of each collective by its key: float64, [runs, 2], seconds since the epoch at begin and end."""
    with _lock:
        return {key: stamps.rows() for key, stamps in _stamps.items()}


def stamped(backend: Backend) -> Any:
    """The backend, whose collectives are stamped if that is on."""
    if tf.executing_eagerly():
        return _Stamped(backend) if _State.in_step else backend
    off = not _State.tracing or graphs.compiled_by_xla() or not graphs.of_functions()
    return backend if off else _Stamped(backend)


class Stamps:
    """The stamps of one collective, in variables on the CPU that functions write to, without Python."""

    def __init__(self) -> None:
        self._began = graphs.lasting_variable(0.0, tf.float64, "hvkeras_began")
        self._runs = graphs.lasting_variable(0, tf.int64, "hvkeras_runs")
        self._rows = graphs.lasting_variable(np.zeros((CAPACITY, 2)), tf.float64, "hvkeras_stamps")
        # TensorFlow puts all that asks for the time in one graph into one order, and collectives with it. Not so
        # functions that have variables of their own.
        self.begin = tf.function(self._begin)
        self.end = tf.function(self._end)

    def _begin(self) -> Any:
        with tf.device("CPU:0"):
            return self._began.assign(tf.timestamp())

    def _end(self) -> Any:
        with tf.device("CPU:0"):
            row = tf.stack([self._began.read_value(), tf.timestamp()])
            place = (self._runs.assign_add(1) - 1) % CAPACITY
            self._rows.scatter_nd_update([[place]], [row])
            return row

    def rows(self) -> Array:
        """The latest runs, the oldest one first."""
        runs = int(self._runs.numpy())
        rows: Array = self._rows.numpy()
        return rows[:runs].copy() if runs <= CAPACITY else np.roll(rows, -(runs % CAPACITY), axis=0)


def _stamps_of(key: str) -> Stamps:
    with _lock:
        if key not in _stamps:
            _stamps[key] = Stamps()
        return _stamps[key]


class _Stamped:
    """A backend whose collectives are stamped."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        run = getattr(self._backend, operation)

        def stamped(data: Any, *others: Any) -> Any:
            stamps = _stamps_of(next(other for other in others if isinstance(other, str)))
            inputs = [tf.convert_to_tensor(tensor) for tensor in (data if isinstance(data, (list, tuple)) else [data])]
            with tf.control_dependencies(inputs):
                began = stamps.begin()
            with tf.control_dependencies([began]):
                results = run(data, *others)
            with tf.control_dependencies(tf.nest.flatten(results)):
                stamps.end()
            return results

        return stamped

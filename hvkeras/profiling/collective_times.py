"""When the collectives of training steps begin and end on this rank, for the TensorBoard callback and for records.

While it is on, functions that are traced get two stamps around each collective, and so do collectives that steps make
in eager mode; but where the engine keeps the times by itself (`Backend.keep_times`). Otherwise nothing is added to any
graph. Nothing is stamped inside XLA, which cannot ask for the time.

Unlike the timeline, this runs no Python and keeps no order among collectives, so that several stay in flight.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from hvkeras.compat import graphs
from hvkeras.profiling.ring_buffer import ring

if TYPE_CHECKING:
    from hvkeras.backends.interface import Backend
    from hvkeras.plans.plan import Plan

CAPACITY = 1024  # runs of a collective that are kept, the latest ones: 16 KiB
COLLECTIVES = 1024  # that are stamped, at most

Array = np.ndarray[Any, Any]

# All of this process; functions that were traced meanwhile write to their stamps for as long as they live.
_stamps: dict[str, Stamps | EngineTimes] = {}
_lock = threading.Lock()


class _State:
    users: set[str] = set()  # noqa: RUF012 - one per process on purpose: who wants functions to get stamps
    in_step = False  # eager collectives belong to a training step


def start(user: str) -> None:
    """Begins to stamp what is traced from now on, for somebody who calls `stop` with the same name."""
    _State.users.add(user)


def stop(user: str) -> None:
    """Ends it; functions that have stamps keep them."""
    _State.users.discard(user)
    _State.in_step = False


def set_in_step(inside: bool) -> None:
    """Says whether a training step runs, outside of which eager collectives are not stamped."""
    _State.in_step = inside and bool(_State.users)


@contextlib.contextmanager
def in_step() -> Iterator[None]:
    """A context that belongs to a training step, as the exchange of its gradients does."""
    before = _State.in_step
    set_in_step(True)
    try:
        yield
    finally:
        _State.in_step = before


def collected() -> dict[str, Array]:
    """The latest runs of each collective by its key: float64, [runs, 2], seconds since the epoch at begin and end."""
    return {key: stamps.rows()[0] for key, stamps in _snapshot().items()}


def numbered() -> dict[str, tuple[Array, int]]:
    """The same, each with the number of its first row among all runs of that collective in this process."""
    return {key: stamps.rows() for key, stamps in _snapshot().items()}


def described() -> dict[str, Content]:
    """What the stamped collectives carry, by key."""
    return {key: stamps.content for key, stamps in _snapshot().items()}


def _snapshot() -> dict[str, Stamps | EngineTimes]:
    with _lock:
        return dict(_stamps)


def stamped(backend: Backend, plan: Plan) -> Any:
    """The backend, whose collectives are stamped if that is on."""
    if tf.executing_eagerly():
        return _Stamped(backend, plan) if _State.in_step else backend
    off = not _State.users or graphs.compiled_by_xla() or not graphs.of_functions()
    return backend if off else _Stamped(backend, plan)


@dataclass(frozen=True)
class Content:
    """What a collective carries.

    Attributes:
        label: How messages call it.
        operation: What is done, as its plan says: `gradients average`, `allgather`, ...
        bytes: The size of this rank's tensors; None where their shapes are not known before they are there.
        collective: What the engine does: `allreduce`, ...
    """

    label: str
    operation: str
    bytes: int | None
    collective: str = ""


class Stamps:
    """The stamps of one collective, in variables on the CPU that functions write to without Python."""

    def __init__(self, content: Content) -> None:
        self.content = content
        self._runs = ring("hvkeras_stamps", 2, CAPACITY)

    def end(self, began: Any, count: Any = 1) -> None:
        """Keeps a run that began then and ends now; one of count 0 gives way to the next."""
        with tf.device("CPU:0"):
            self._runs.append([began, graphs.now()], count)

    def rows(self) -> tuple[Array, int]:
        """The latest runs, the oldest one first, and the number of that one."""
        return self._runs.rows()


class EngineTimes:
    """The same of a collective whose times its engine keeps by itself, which costs the graph nothing."""

    def __init__(self, content: Content, backend: Backend, key: str) -> None:
        self.content = content
        self._backend, self._key = backend, key

    def rows(self) -> tuple[Array, int]:
        """The latest runs, the oldest one first, and the number of that one."""
        return self._backend.times(self._key, CAPACITY)


def _stamps_of(key: str, backend: Backend, content: Callable[[], Content]) -> Stamps | EngineTimes | None:
    with _lock:
        if key not in _stamps and len(_stamps) < COLLECTIVES:
            kept = backend.keep_times(key, CAPACITY)
            _stamps[key] = EngineTimes(content(), backend, key) if kept else Stamps(content())
        return _stamps.get(key)


class _Stamped:
    """A backend whose collectives are stamped."""

    def __init__(self, backend: Backend, plan: Plan) -> None:
        self._backend, self._plan = backend, plan

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        run = getattr(self._backend, operation)

        def stamped(data: Any, *others: Any) -> Any:
            key = next(other for other in others if isinstance(other, str))
            inputs = [tf.convert_to_tensor(tensor) for tensor in (data if isinstance(data, (list, tuple)) else [data])]
            stamps = _stamps_of(key, self._backend, lambda: self._content(key, inputs, operation))
            if stamps is None or isinstance(stamps, EngineTimes):
                return run(data, *others)
            with tf.control_dependencies(inputs):
                began = graphs.now()
            with tf.control_dependencies([began]):
                results = run(data, *others)
            with tf.control_dependencies(tf.nest.flatten(results)):
                stamps.end(began)
            return results

        return stamped

    def _content(self, key: str, inputs: list[Any], collective: str) -> Content:
        sizes = [tensor.shape.num_elements() for tensor in inputs]
        known = None if None in sizes else sum(size * tensor.dtype.size
                                               for size, tensor in zip(sizes, inputs, strict=True))
        return Content(labelled(self._plan, key), self._plan.operation, known, collective)


def labelled(plan: Plan, key: str) -> str:
    """How messages call one collective of a plan."""
    part = key.removeprefix(plan.key).lstrip(".")
    return plan.label + (f", part {part}" if part else "")

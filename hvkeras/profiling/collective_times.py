"""Start and end times of the collectives in this rank's training steps, for the TensorBoard callback and for records.

While recording is on, two timestamps surround each collective in functions that are traced, and each collective that
a training step runs eagerly. Engines that record the times themselves (`RecordsTimes`) need no timestamps.
While recording is off, nothing is added to any graph. Nothing is recorded inside XLA, which cannot read the clock.

Unlike the timeline, this runs no Python and does not serialize collectives, so several can be in flight.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from hvkeras.backends.interface import RecordsTimes
from hvkeras.compat import graphs
from hvkeras.profiling.ring_buffer import ring

if TYPE_CHECKING:
    from hvkeras.backends.interface import Backend
    from hvkeras.plans.plan import Plan

CAPACITY = 1024  # latest runs kept per collective: 16 KiB
COLLECTIVES = 1024  # maximum number of collectives that are recorded

Array = np.ndarray[Any, Any]

# One per process: functions traced while recording was on write to their timestamps for as long as they live.
_stamps: dict[str, Stamps | EngineTimes] = {}
_lock = threading.Lock()


class _State:
    users: set[str] = set()  # noqa: RUF012 - one per process on purpose: the users that requested timestamps
    in_step = False  # whether eager collectives belong to a training step


def start(user: str) -> None:
    """Starts to time collectives traced from now on, on behalf of a user who later calls `stop` with the same name."""
    _State.users.add(user)


def stop(user: str) -> None:
    """Stops recording for this user; functions that already have timestamps keep them."""
    _State.users.discard(user)
    _State.in_step = False


def set_in_step(inside: bool) -> None:
    """Sets whether a training step is running; outside of steps, eager collectives are not timed."""
    _State.in_step = inside and bool(_State.users)


@contextlib.contextmanager
def in_step() -> Iterator[None]:
    """Marks its body as part of a training step, such as the exchange of gradients."""
    before = _State.in_step
    set_in_step(True)
    try:
        yield
    finally:
        _State.in_step = before


def collected() -> dict[str, Array]:
    """The latest runs of each collective by key: float64, [runs, 2], start and end in seconds since the epoch."""
    return {key: stamps.rows()[0] for key, stamps in _snapshot().items()}


def numbered() -> dict[str, tuple[Array, int]]:
    """Like `collected`, each with the index of its first row among all runs of that collective in this process."""
    return {key: stamps.rows() for key, stamps in _snapshot().items()}


def described() -> dict[str, Content]:
    """The content of the recorded collectives, by key."""
    return {key: stamps.content for key, stamps in _snapshot().items()}


def _snapshot() -> dict[str, Stamps | EngineTimes]:
    with _lock:
        return dict(_stamps)


def stamped(backend: Backend, plan: Plan) -> Any:
    """Returns the backend, wrapped so that its collectives are timed if recording is on."""
    if tf.executing_eagerly():
        return _Stamped(backend, plan) if _State.in_step else backend
    off = not _State.users or graphs.compiled_by_xla() or not graphs.of_functions()
    return backend if off else _Stamped(backend, plan)


@dataclass(frozen=True)
class Content:
    """The content of a collective.

    Attributes:
        label: Its name in messages.
        operation: The operation of its plan: `gradients average`, `allgather`, ...
        bytes: The size of this rank's tensors; None if their shapes are known only at run time.
        collective: The engine's operation: `allreduce`, ...
    """

    label: str
    operation: str
    bytes: int | None
    collective: str = ""


class Stamps:
    """The timestamps of one collective, in variables on the CPU that functions write to without running Python."""

    def __init__(self, content: Content) -> None:
        self.content = content
        self._runs = ring("hvkeras_stamps", 2, CAPACITY)

    def end(self, began: Any, count: Any = 1) -> None:
        """Records a run that started at `began` and ends now; the next run overwrites one whose `count` is 0."""
        with tf.device("CPU:0"):
            self._runs.append([began, graphs.now()], count)

    def rows(self) -> tuple[Array, int]:
        """The latest runs, oldest first, and the index of the first of them."""
        return self._runs.rows()


class EngineTimes:
    """The timestamps of a collective that its engine records itself, at no cost to the graph."""

    def __init__(self, content: Content, backend: RecordsTimes, key: str) -> None:
        self.content = content
        self._backend, self._key = backend, key

    def rows(self) -> tuple[Array, int]:
        """The latest runs, oldest first, and the index of the first of them."""
        return self._backend.times(self._key, CAPACITY)


def _stamps_of(key: str, backend: Backend, content: Callable[[], Content]) -> Stamps | EngineTimes | None:
    with _lock:
        if key not in _stamps and len(_stamps) < COLLECTIVES:
            if isinstance(backend, RecordsTimes) and backend.keep_times(key, CAPACITY):
                _stamps[key] = EngineTimes(content(), backend, key)
            else:
                _stamps[key] = Stamps(content())
        return _stamps.get(key)


class _Stamped:
    """A backend whose collectives are timed."""

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
    """The name of one of a plan's collectives in messages."""
    part = key.removeprefix(plan.key).lstrip(".")
    return plan.label + (f", part {part}" if part else "")

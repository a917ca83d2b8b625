"""Store of a rank's spans: measures all times, and holds the latest ones for reports and traces.

A track holds spans, each with its begin and end in seconds since the epoch: runs of a collective (by its key), input
waits, or calls of fit's train function. The track of steps holds timestamps. Tracks are written in three ways:

- Functions append timestamps to a ring buffer, without running Python and without serializing collectives. Eager
  collectives of steps share these tracks.
- Backends record times themselves (`RecordsTimes`), without operations in graphs.
- Python appends eager input waits and calls of the train function. For timelines only, it also appends collectives
  outside of steps, eager or in sessions of TensorFlow 1.

If recording is off, nothing is added to any graph. Nothing is recorded inside XLA, which cannot read the clock.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from hvkeras import compat
from hvkeras.backends.capabilities import RecordsTimes
from hvkeras.compat import graphs
from hvkeras.diagnostics.ring_buffer import NativeRing, PythonRing, Ring, Rows, Track, ring
from hvkeras.host.forks import ForkSafeLock
from hvkeras.job.session import this_process

if TYPE_CHECKING:
    from hvkeras.backends.interface import Backend
    from hvkeras.job.plans import Plan

CAPACITY = 1024  # runs of each collective, and input waits, in the ring buffers: 16 KiB each
COLLECTIVES = 1024  # maximum number of recorded collectives
# Names of tracks; those of collectives are their keys.
STEPS, CALLS, INPUT_WAITS, OUTSIDE = "steps", "train function", "input waits", "outside of steps"
UPDATE = "update"  # operation of the tracks of optimizer updates


@dataclass(frozen=True)
class Content:
    """Description of a collective.

    Attributes:
        label: Name in messages.
        operation: Operation of the plan: `gradients`, `allgather`, ...
        bytes: Size of this rank's tensors; None if their shapes are known only at run time.
        collective: Operation of the backend: `allreduce`, ...
        how: Qualifiers of the plan's operation: `average`, ...
    """

    label: str
    operation: str
    bytes: int | None
    collective: str = ""
    how: str = ""


@dataclass(frozen=True)
class Collective:
    """Track of a collective: a ring buffer, or a reader of the times that the backend records itself."""

    content: Content
    ring: Ring | NativeRing | None
    read: Callable[[], Rows]

    def rows(self, since: int = 0) -> Rows:
        """Return the available runs from an index on."""
        return self.read().since(since)

    def append(self, times: Sequence[Any]) -> None:
        """Append a run to the ring buffer, if there is one."""
        if self.ring is not None:
            self.ring.append(times)


class SpanStore:
    """Tracks of this process. Functions traced while recording is on write to them for their whole lifetime."""

    def __init__(self) -> None:
        self._users: dict[str, bool] = {}  # whether each one also records collectives outside of steps
        self._is_in_step = False  # whether eager collectives belong to a training step
        self._lock = ForkSafeLock()
        self._collectives: dict[str, Collective] = {}
        self._updates: dict[str, Collective] = {}  # the tracks of optimizers' updates, by their labels
        # Collectives outside of steps: begin, end, and index in `_contents`.
        self.outside: PythonRing = PythonRing(3, 16 * CAPACITY)
        self._contents: dict[Content, int] = {}

    def start(self, user: str, outside_steps: bool = False) -> None:
        """Start recording collectives in steps, and in functions traced from now on.

        Args:
            user: Name of the user, to be passed to `stop`.
            outside_steps: Whether to record all other collectives as well, in the track `OUTSIDE`.
        """
        self._users[user] = outside_steps

    def stop(self, user: str) -> None:
        """Stop recording for this user; functions traced before continue to record."""
        self._users.pop(user, None)
        self._is_in_step = False

    def set_in_step(self, inside: bool) -> None:
        """Set whether eager collectives belong to a training step."""
        self._is_in_step = inside and bool(self._users)

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Return a context manager for a part of a training step, such as the exchange of gradients."""
        before = self._is_in_step
        self.set_in_step(True)
        try:
            yield
        finally:
            self._is_in_step = before

    def collectives(self) -> dict[str, Collective]:
        """Return the tracks of collectives, by their keys."""
        with self._lock:
            return dict(self._collectives)

    def updates(self) -> dict[str, Track]:
        """Return the tracks of optimizers' updates, by their labels."""
        with self._lock:
            return dict(self._updates)

    def runs_outside(self, rows: Rows) -> Iterator[tuple[dict[str, Any], float, float]]:
        """Yield (content, begin, end) of collectives outside of steps, from rows of `outside`."""
        with self._lock:
            contents = list(self._contents)
        for began, ended, index in rows.table.tolist():
            yield vars(contents[int(index)]), began, ended

    def timed(self, backend: Backend, plan: Plan) -> Any:
        """Return the backend, wrapped to record its collectives if recording is on.

        Args:
            backend: Backend to wrap.
            plan: Plan that the collectives belong to.
        """
        if not self._users or graphs.compiled_by_xla():
            return backend
        if self._is_in_step if tf.executing_eagerly() else graphs.from_function_graphs():
            return _TimedBackend(backend, plan, self._run_in_track)
        return _TimedBackend(backend, plan, self._run_timed_by_python) if any(self._users.values()) else backend

    @contextlib.contextmanager
    def update(self, name: str, gradients: Sequence[Any], variables: Sequence[Any]) -> Iterator[None]:
        """Return a context manager that records an optimizer's update, eagerly or in the function being traced.

        The span begins when all reduced gradients are available, and ends when all variables have their new values.
        Parts of the update that overlap with collectives are therefore not included.

        Args:
            gradients: Reduced gradients: tensors, `tf.IndexedSlices` or None.
            variables: Variables to be updated.
        """
        values = [getattr(gradient, "values", gradient) for gradient in gradients if gradient is not None]
        if (not self._users or not values or graphs.compiled_by_xla() or not graphs.from_function_graphs()
                or tf.distribute.has_strategy()):
            yield
            return
        label = f"the update of {name}"
        with self._lock:
            if label not in self._updates:
                buffer = ring("hvkeras_update", 2, CAPACITY)
                self._updates[label] = Collective(Content(label, UPDATE, None, UPDATE), buffer, buffer.rows)
        with tf.device("CPU:0"), tf.control_dependencies(values):
            began = graphs.now()
        yield
        new_values = [compat.as_tf_variable(variable).read_value() for variable in variables]
        with tf.device("CPU:0"), tf.control_dependencies([began, *new_values]):
            self._updates[label].append([began, graphs.now()])

    def _run_in_track(self, run: Callable[[], Any], inputs: Sequence[Any], content: Callable[[], Content], key: str,
                      backend: Backend) -> Any:
        """Run a collective of a step, or add it to a function; each of its runs is recorded."""
        track = self._track_of(key, content, backend)
        if track is None or track.ring is None:
            return run()
        with tf.control_dependencies(inputs):
            began = graphs.now()
        with tf.control_dependencies([began]):
            results = run()
        with tf.control_dependencies(tf.nest.flatten(results)):
            track.append([began, graphs.now()])
        return results

    def _track_of(self, key: str, content: Callable[[], Content], backend: Backend) -> Collective | None:
        with self._lock:
            if key not in self._collectives and len(self._collectives) < COLLECTIVES:
                if isinstance(backend, RecordsTimes) and backend.keep_times(key, CAPACITY):
                    self._collectives[key] = Collective(content(), None, lambda: Rows(*backend.times(key, CAPACITY)))
                else:
                    buffer = ring("hvkeras_collective", 2, CAPACITY)
                    self._collectives[key] = Collective(content(), buffer, buffer.rows)
            return self._collectives.get(key)

    def _run_timed_by_python(self, run: Callable[[], Any], inputs: Sequence[Any], content: Callable[[], Content],
                             *_: Any) -> Any:
        """Run an eager collective, or add one to a graph of TensorFlow 1; Python takes the times of each run."""
        with tf.control_dependencies(inputs):
            size = tf.add_n([tf.size(tensor, tf.int64) * tensor.dtype.size for tensor in inputs])
            began = tf.numpy_function(lambda _: np.float64(time.time()), [size], tf.float64)
        with tf.control_dependencies([began]):
            results = run()
        flat = tf.nest.flatten(results)
        with tf.control_dependencies(flat):
            ended = tf.numpy_function(lambda *values: self._record_outside(content(), *values), [began, size],
                                      tf.float64)
        with tf.control_dependencies([ended]):
            return tf.nest.pack_sequence_as(results, [tf.identity(result) for result in flat])

    def _record_outside(self, content: Content, began: Any, size: Any) -> Any:
        ended = np.float64(time.time())
        if any(self._users.values()):
            with self._lock:
                index = self._contents.setdefault(replace(content, bytes=int(size)), len(self._contents))
            self.outside.append(float(began), float(ended), index)
        return ended


def store() -> SpanStore:
    """Return the span store of this process."""
    return this_process().part(SpanStore)


class _TimedBackend:
    """Proxy of a backend that records its collectives."""

    def __init__(self, backend: Backend, plan: Plan, run_timed: Callable[..., Any]) -> None:
        self._backend, self._plan, self._run_timed = backend, plan, run_timed

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        run = getattr(self._backend, operation)

        def recorded(data: Any, *others: Any) -> Any:
            key = next(other for other in others if isinstance(other, str))
            inputs = [tf.convert_to_tensor(tensor) for tensor in (data if isinstance(data, (list, tuple)) else [data])]
            return self._run_timed(lambda: run(data, *others), inputs, lambda: self._content(key, inputs, operation),
                                   key, self._backend)

        return recorded

    def _content(self, key: str, inputs: Sequence[Any], collective: str) -> Content:
        part = key.removeprefix(self._plan.key).lstrip(".")
        sizes = [tensor.shape.num_elements() for tensor in inputs]
        known = None if None in sizes else sum(size * tensor.dtype.size
                                               for size, tensor in zip(sizes, inputs, strict=True))
        label = self._plan.label + (f", part {part}" if part else "")
        return Content(label, self._plan.operation, known, collective, self._plan.how)


class Steps:
    """Track of steps, with the columns of `Record.stamps`.

    Args:
        capacity: Maximum number of steps that it holds.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._steps: Ring | NativeRing | None = None

    def batch_arrived(self, rows: Any, inputs: Sequence[Any]) -> None:
        """Add the batch size to the samples, and record when the batch is available to the model."""
        self._prepare()
        with tf.device("CPU:0"):
            count = tf.cast(rows, tf.int64)
            with tf.control_dependencies(inputs):
                self._arrival.assign(graphs.now(), read_value=False)
                self._samples.assign_add(count, read_value=False)

    def ready(self, gradients: Sequence[Any], kind: int) -> None:
        """Append a step of this kind once its gradients are computed."""
        steps = self._prepare()
        with tf.device("CPU:0"), tf.control_dependencies(gradients):
            samples = tf.cast(self._samples.read_value(), tf.float64)
            number = tf.constant(kind, tf.float64)
            steps.append([graphs.now(), samples, number, self._arrival.read_value()])
            self._arrival.assign(0.0, read_value=False)

    def _prepare(self) -> Ring | NativeRing:
        if self._steps is None:  # not earlier: scripts configure devices after init()
            self._samples = graphs.persistent_variable(0, tf.int64, "hvkeras_samples")
            self._arrival = graphs.persistent_variable(0.0, tf.float64, "hvkeras_batch_arrival")
            self._steps = ring("hvkeras_steps", 4, self._capacity)
        return self._steps

    def rows(self, since: int = 0) -> Rows:
        """Return the available steps from an index on, with the columns of `Record.stamps`."""
        return Rows(np.zeros((0, 4)), 0) if self._steps is None else self._steps.rows(since)


class InputWaits:
    """Tracks of input waits: fetches of training batches from a `tf.data.Dataset`, eagerly and in functions."""

    def __init__(self) -> None:
        self._eager = PythonRing(2, CAPACITY)
        self._in_functions: Ring | NativeRing | None = None
        self._on = True
        self._pauses = 0

    def stop(self) -> None:
        """Stop recording in eager mode and in functions traced from now on."""
        self._on = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context manager whose batches do not count as training, such as those of an evaluation."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def tracks(self) -> dict[str, Track]:
        """Return the tracks of the waits in eager mode and in functions, by name."""
        found: dict[str, Track] = {INPUT_WAITS: self._eager}
        return found if self._in_functions is None else {**found, f"{INPUT_WAITS} in functions": self._in_functions}

    def around(self, original: Callable[..., Any], iterator: Any, *args: Any, **kwargs: Any) -> Any:
        """Fetch the next batch from an iterator, and record the wait."""
        if not self._on or self._pauses or graphs.compiled_by_xla() or not graphs.from_function_graphs():
            return original(iterator, *args, **kwargs)
        if tf.executing_eagerly():
            began = time.time()
            batch = original(iterator, *args, **kwargs)
            self._eager.append(began, time.time())
            return batch
        if self._in_functions is None:
            self._in_functions = ring("hvkeras_input_waits", 2, CAPACITY)
        began = graphs.now()
        with tf.control_dependencies([began]):
            batch = original(iterator, *args, **kwargs)
        optional = isinstance(batch, tf.experimental.Optional)  # empty at the end of the data
        parts = [batch.has_value()] if optional else tf.nest.flatten(batch, expand_composites=True)
        count = tf.cast(parts[0], tf.int64) if optional else tf.constant(1, tf.int64)
        with tf.control_dependencies(parts):  # create no constant here: constant folding would drop the dependencies
            self._in_functions.append([began, graphs.now()], count)
        return batch

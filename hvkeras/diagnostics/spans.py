"""Per-rank span store: takes all times, and holds the latest for the readers that report them.

A track holds spans, each with its begin and end in seconds since the epoch: runs of a collective (by its key), input
waits, calls of fit's train function; or steps, which are timestamps. Tracks are written in three ways:

- Functions append timestamps to a ring buffer. They run no Python and do not serialize collectives, so several can be
  in flight. Eager collectives of steps share these tracks.
- Engines record times themselves (`RecordsTimes`), without operations in graphs.
- Python appends the eager input waits, the calls of the train function, and for the timeline alone the collectives
  outside of steps, eager or in sessions of TensorFlow 1.

While nobody records, nothing is added to any graph. Nothing is recorded inside XLA, which cannot read the clock.
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

CAPACITY = 1024  # latest runs of each collective, and latest input waits, that are held: 16 KiB
COLLECTIVES = 1024  # maximum number of collectives that are recorded
# Names of tracks; others are the keys of collectives.
STEPS, CALLS, INPUT_WAITS, OUTSIDE = "steps", "train function", "input waits", "outside of steps"
UPDATE = "update"  # the operation of the tracks of updates



@dataclass(frozen=True)
class Content:
    """The content of a collective.

    Attributes:
        label: Its name in messages.
        operation: The operation of its plan: `gradients`, `allgather`, ...
        bytes: The size of this rank's tensors; None if their shapes are known only at run time.
        collective: The engine's operation: `allreduce`, ...
        how: The qualifiers of its plan's operation: `average`, ...
    """

    label: str
    operation: str
    bytes: int | None
    collective: str = ""
    how: str = ""


@dataclass(frozen=True)
class Collective:
    """The track of a collective: a ring buffer if it takes timestamps, else what reads the engine's own times."""

    content: Content
    ring: Ring | NativeRing | None
    read: Callable[[], Rows]

    def rows(self, since: int = 0) -> Rows:
        """Return the latest runs, from an index on."""
        return self.read().since(since)

    def append(self, times: Sequence[Any]) -> None:
        """Add a run, if timestamps are taken of it."""
        if self.ring is not None:
            self.ring.append(times)


class SpanStore:
    """The tracks of this process: functions traced while recording was on write to theirs for as long as they live."""

    def __init__(self) -> None:
        self._users: dict[str, bool] = {}  # whether each records what is outside of steps, too
        self._is_in_step = False  # whether eager collectives belong to a training step
        self._lock = ForkSafeLock()
        self._collectives: dict[str, Collective] = {}
        self._updates: dict[str, Collective] = {}  # the tracks of optimizers' updates, by their labels
        # of collectives outside of steps: begin, end, and the index in `_contents`
        self.outside: PythonRing = PythonRing(3, 16 * CAPACITY)
        self._contents: dict[Content, int] = {}

    def start(self, user: str, outside_steps: bool = False) -> None:
        """Start to record collectives, in steps and in functions traced from now on.

        Args:
            user: Who later calls `stop` with the same name.
            outside_steps: Whether to record all others as well, in the track `OUTSIDE`.
        """
        self._users[user] = outside_steps

    def stop(self, user: str) -> None:
        """Stop recording for this user; functions traced meanwhile go on."""
        self._users.pop(user, None)
        self._is_in_step = False

    def set_in_step(self, inside: bool) -> None:
        """Set whether eager collectives belong to a training step."""
        self._is_in_step = inside and bool(self._users)

    @contextlib.contextmanager
    def in_step(self) -> Iterator[None]:
        """Mark its body as part of a training step, such as the exchange of gradients."""
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
        """Yield the content of collectives outside of steps, and when they began and ended, from rows of `outside`."""
        with self._lock:
            contents = list(self._contents)
        for began, ended, index in rows.table.tolist():
            yield vars(contents[int(index)]), began, ended

    def timed(self, backend: Backend, plan: Plan) -> Any:
        """Return the backend, wrapped so that its collectives are recorded if anybody wants them to be.

        Args:
            backend: The engine.
            plan: The plan that the collectives belong to.
        """
        if not self._users or graphs.compiled_by_xla():
            return backend
        if self._is_in_step if tf.executing_eagerly() else graphs.from_function_graphs():
            return _Timed(backend, plan, self._in_track)
        return _Timed(backend, plan, self._by_python) if any(self._users.values()) else backend

    @contextlib.contextmanager
    def update(self, name: str, gradients: Sequence[Any], variables: Sequence[Any]) -> Iterator[None]:
        """Record when an optimizer's update runs, which its body makes: eagerly, or in the function being built.

        It begins when all reduced gradients are there, and ends when all variables have their new values. What of it
        runs before that, beside collectives, is not part of it.

        Args:
            name: The optimizer's name.
            gradients: Its reduced gradients: tensors, `tf.IndexedSlices` or None.
            variables: The variables.
        """
        there = [getattr(gradient, "values", gradient) for gradient in gradients if gradient is not None]
        if (not self._users or not there or graphs.compiled_by_xla() or not graphs.from_function_graphs()
                or tf.distribute.has_strategy()):
            yield
            return
        label = f"the update of {name}"
        with self._lock:
            if label not in self._updates:
                made = ring("hvkeras_update", 2, CAPACITY)
                self._updates[label] = Collective(Content(label, UPDATE, None, UPDATE), made, made.rows)
        with tf.device("CPU:0"), tf.control_dependencies(there):
            began = graphs.now()
        yield
        values = [compat.as_tf_variable(variable).read_value() for variable in variables]
        with tf.device("CPU:0"), tf.control_dependencies([began, *values]):
            self._updates[label].append([began, graphs.now()])

    def _in_track(self, run: Callable[[], Any], inputs: Sequence[Any], content: Callable[[], Content], key: str,
                  backend: Backend) -> Any:
        """Make a collective of a step, or of a function, that is recorded whenever it runs."""
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
                    made = ring("hvkeras_collective", 2, CAPACITY)
                    self._collectives[key] = Collective(content(), made, made.rows)
            return self._collectives.get(key)

    def _by_python(self, run: Callable[[], Any], inputs: Sequence[Any], content: Callable[[], Content],
                   *_: Any) -> Any:
        """Make a collective that Python times: an eager one now, or one of a session whenever it runs."""
        with tf.control_dependencies(inputs):
            size = tf.add_n([tf.size(tensor, tf.int64) * tensor.dtype.size for tensor in inputs])
            began = tf.numpy_function(lambda _: np.float64(time.time()), [size], tf.float64)
        with tf.control_dependencies([began]):
            results = run()
        flat = tf.nest.flatten(results)
        with tf.control_dependencies(flat):
            ended = tf.numpy_function(lambda *values: self._note_outside(content(), *values), [began, size],
                                      tf.float64)
        with tf.control_dependencies([ended]):
            return tf.nest.pack_sequence_as(results, [tf.identity(result) for result in flat])

    def _note_outside(self, content: Content, began: Any, size: Any) -> Any:
        ended = np.float64(time.time())
        if any(self._users.values()):
            with self._lock:
                index = self._contents.setdefault(replace(content, bytes=int(size)), len(self._contents))
            self.outside.append(float(began), float(ended), index)
        return ended


def store() -> SpanStore:
    """Return the spans of this process."""
    return this_process().part(SpanStore)


class _Timed:
    """A backend whose collectives are recorded."""

    def __init__(self, backend: Backend, plan: Plan, how: Callable[..., Any]) -> None:
        self._backend, self._plan, self._how = backend, plan, how

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        run = getattr(self._backend, operation)

        def recorded(data: Any, *others: Any) -> Any:
            key = next(other for other in others if isinstance(other, str))
            inputs = [tf.convert_to_tensor(tensor) for tensor in (data if isinstance(data, (list, tuple)) else [data])]
            return self._how(lambda: run(data, *others), inputs, lambda: self._content(key, inputs, operation), key,
                             self._backend)

        return recorded

    def _content(self, key: str, inputs: Sequence[Any], collective: str) -> Content:
        part = key.removeprefix(self._plan.key).lstrip(".")
        sizes = [tensor.shape.num_elements() for tensor in inputs]
        known = None if None in sizes else sum(size * tensor.dtype.size
                                               for size, tensor in zip(sizes, inputs, strict=True))
        label = self._plan.label + (f", part {part}" if part else "")
        return Content(label, self._plan.operation, known, collective, self._plan.how)


class Steps:
    """The steps: when this rank's gradients were ready, the samples so far, the step's kind, when its batch arrived.

    Args:
        capacity: How many of the latest steps are held.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._steps: Ring | NativeRing | None = None

    def batch_arrived(self, rows: Any, inputs: Sequence[Any]) -> None:
        """Count the samples of a batch that a model is called on, and records when its tensors are available."""
        self._prepare()
        with tf.device("CPU:0"):
            count = tf.cast(rows, tf.int64)
            with tf.control_dependencies(inputs):
                self._arrival.assign(graphs.now(), read_value=False)
                self._samples.assign_add(count, read_value=False)

    def ready(self, gradients: Sequence[Any], kind: int) -> None:
        """End a step of this kind once its gradients are computed."""
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
        """Return the latest steps from an index on, in the columns of `Record.stamps`."""
        return Rows(np.zeros((0, 4)), 0) if self._steps is None else self._steps.rows(since)


class InputWaits:
    """The input waits: when each training batch was fetched from a `tf.data.Dataset`, eagerly and in functions."""

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
        """Mark the batches fetched in its body as not those of training: an evaluation, a prediction."""
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
        """Fetch the next batch from an iterator."""
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

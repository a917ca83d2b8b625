"""What `hvkeras compare` learns of a rank: when it made steps, on how many samples, and where they led.

With HVKERAS_RECORD=<folder>, which `hvkeras compare` sets, each rank writes `rank.<n>.npz` there, and rank 0
`weights.npz`, when it leaves the job. Otherwise nothing is added to any graph.

Every step of a distributed optimizer or tape passes `hvkeras.buckets.reduce_gradients`, and leaves a stamp there
once this rank's gradients are computed. Samples are the rows of the outermost model call under a gradient tape,
so that loops of one's own are counted as `fit` is.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from hvkeras import compat, graphs
from hvkeras.record import Array, Record, write_weights

if TYPE_CHECKING:
    from hvkeras.context import Job

CAPACITY = 65_536  # stamps that are kept, the latest ones: 1.5 MiB
COMPILED = "the step is compiled by XLA, where no clock can be read"
SEVERAL_CALLS = "a model is called more than once in a step"

# All of this process; stamps that are in graphs write to their variables for as long as the graphs live.
_recorders: list[Recorder] = []
_recording: Recorder | None = None


def start(job: Job) -> None:
    """Begins to record; called by `init()` when the setting `record` names a folder.

    Args:
        job: The job that has just been built.
    """
    global _recording  # noqa: PLW0603 - a process takes part in one job
    if not _recorders:
        atexit.register(finish)
    record = Record(job.topology.rank, job.topology.size, job.backend.name)
    _recording = Recorder(Path(job.settings.record), record)
    _recorders.append(_recording)
    compat.hook_model_calls(_recording.around_call)
    compat.hook_jit_compile(lambda: _recording is not None)


def step(gradients: Sequence[Any], variables: Sequence[Any], local: Collection[Any] = ()) -> None:
    """Records a step; in graphs, each run of the step under construction.

    Args:
        gradients: This rank's gradients: tensors, `tf.IndexedSlices` or None.
        variables: Their variables.
        local: Keys of the variables that are this rank's own, whose values say nothing of the job.
    """
    if _recording is not None:
        _recording.step(gradients, variables, local)


def note_logs(kind: str, logs: Mapping[str, Any]) -> None:
    """Records what Keras says at the end of an epoch or an evaluation.

    Args:
        kind: `fit` or `evaluate`.
        logs: Numbers by name, such as `loss` and `val_accuracy`.
    """
    if _recording is not None:
        _recording.note_logs(kind, logs)


def finish() -> None:
    """Writes what was recorded; at `shutdown()` or at the process's exit, whichever comes first."""
    global _recording
    recorder, _recording = _recording, None
    if recorder is not None:
        recorder.write()


class Recorder:
    """Fills the record of this rank.

    Args:
        folder: Where it is written.
        record: What is known already.
    """

    def __init__(self, folder: Path, record: Record) -> None:
        self._folder = folder
        self._record = record
        self._variables: dict[Any, Any] = {}
        self._kinds: dict[Any, int] = {}
        self._counters: _Counters | None = None
        self._calls = threading.local()
        self._eager_models: set[int] = set()

    def step(self, gradients: Sequence[Any], variables: Sequence[Any], local: Collection[Any]) -> None:
        """Leaves a stamp, and remembers the variables; see the module's `step`."""
        sources = [getattr(variable, "source", variable) for variable in variables]  # a tape's may be tensors
        known = {compat.variable_key(source): source for source in sources if hasattr(source, "trainable")}
        for key, variable in known.items():
            if key not in local:
                self._variables.setdefault(key, variable)
        self._models_of_step().clear()
        if graphs.compiled_by_xla():
            self._record.no_steps = COMPILED
            return
        kind = self._kinds.setdefault(tuple(known), len(self._kinds))
        done = [getattr(gradient, "values", gradient) for gradient in gradients if gradient is not None]
        with tf.control_dependencies(done):  # else all steps of one graph would read the clock at once
            self._ready_counters().stamp(kind)

    def around_call(self, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls a model, and counts the samples if it is the outermost one and trains."""
        depth = getattr(self._calls, "depth", 0)
        if depth == 0 and self is _recording and graphs.under_tape():
            self._count(model, (args, kwargs))
        self._calls.depth = depth + 1
        try:
            return original(model, *args, **kwargs)
        finally:
            self._calls.depth = depth

    def _count(self, model: Any, inputs: Any) -> None:
        """Adds the rows of a model call; of several models in one step, those of the first one alone."""
        models = self._models_of_step()
        if id(model) in models:
            self._record.no_samples = SEVERAL_CALLS
        rows = _rows_of(inputs) if not models else None
        models.add(id(model))
        if rows is not None and not graphs.compiled_by_xla():
            self._ready_counters().add(rows)

    def _models_of_step(self) -> set[int]:
        """The models that were called since the last step, in the function under construction or eagerly."""
        graph = graphs.function_graph()
        if graph is None:
            return self._eager_models
        if not hasattr(graph, "_hvkeras_models"):
            graph._hvkeras_models = set()
        models: set[int] = graph._hvkeras_models
        return models

    def _ready_counters(self) -> _Counters:
        if self._counters is None:  # not before it is needed: scripts set up devices after init()
            self._counters = _Counters()
        return self._counters

    def note_logs(self, kind: str, logs: Mapping[str, Any]) -> None:
        """Keeps the latest logs of a kind; see the module's `note_logs`."""
        numbers = {}
        for name, value in logs.items():
            with contextlib.suppress(TypeError, ValueError):
                numbers[name] = float(value)
        self._record.logs[kind] = numbers
        self._record.last_logs = kind

    def write(self) -> None:
        """Writes the files, each whole or not at all."""
        if self._record.rank == 0:
            write_weights(self._folder, [_value(variable) for variable in self._variables.values()])
        if self._counters is not None:
            self._record.stamps = self._counters.stamps()
        self._record.write(self._folder)


class _Counters:
    """The variables that steps write to, in graphs and eagerly: on the CPU, in a few microseconds."""

    def __init__(self) -> None:
        with tf.init_scope(), tf.device("CPU:0"):
            self._steps = tf.Variable(0, dtype=tf.int64, trainable=False, name="hvkeras_recorded_steps")
            self._samples = tf.Variable(0, dtype=tf.int64, trainable=False, name="hvkeras_recorded_samples")
            self._stamps = tf.Variable(tf.zeros((CAPACITY, 3), tf.float64), trainable=False,
                                       name="hvkeras_recorded_stamps")

    def add(self, rows: Any) -> None:
        """Counts samples."""
        with tf.device("CPU:0"):
            self._samples.assign_add(rows)

    def stamp(self, kind: int) -> None:
        """Writes a row: the time in seconds, the samples until now, and the kind of step."""
        with tf.device("CPU:0"):
            samples = tf.cast(self._samples.read_value(), tf.float64)
            row = tf.stack([tf.timestamp(), samples, tf.constant(kind, tf.float64)])
            place = (self._steps.assign_add(1) - 1) % CAPACITY
            self._stamps.scatter_nd_update([[place]], [row])

    def stamps(self) -> Array:
        """The rows, the oldest one first."""
        count = int(self._steps.numpy())
        rows: Array = self._stamps.numpy()
        return rows[:count] if count <= CAPACITY else np.roll(rows, -(count % CAPACITY), axis=0)


def _rows_of(inputs: Any) -> Any:
    """The length of the first axis of the first tensor among a call's arguments; None where there is none."""
    for tensor in tf.nest.flatten(inputs):
        if isinstance(tensor, tf.SparseTensor):
            return tf.cast(tensor.dense_shape[0], tf.int64)
        if isinstance(tensor, tf.RaggedTensor):
            return tf.cast(tensor.nrows(), tf.int64)
        if isinstance(tensor, np.ndarray):
            return tensor.shape[0] if tensor.ndim else None
        if tf.is_tensor(tensor):
            return None if tensor.shape.rank == 0 else tf.shape(tensor, out_type=tf.int64)[0]
    return None


def _value(variable: Any) -> Array:
    """A variable's value, in a dtype that numpy's files know."""
    value = np.asarray(compat.native(variable))
    return value if value.dtype.kind in "biufc" else value.astype(np.float32)

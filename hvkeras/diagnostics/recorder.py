"""Recording of a rank's training: steps, samples, time breakdown, logs and losses.

With HVKERAS_REPORT=<folder> (set by users) or HVKERAS_RECORD=<folder> (set by `hvkeras compare`), a thread of each rank
periodically rewrites `rank.<n>.npz` in that folder. With the latter, rank 0 also writes `weights.npz` at its end. With
HVKERAS_TRACE_STEPS, `hvkeras.diagnostics.tracer` writes a trace. Otherwise nothing is added to any graph.

Every step of a distributed optimizer or tape calls `hvkeras.gradients.reducer.GradientReducer`, which records a
timestamp once this rank's gradients are computed. Samples are the rows of the outermost model call under a gradient
tape, so custom training loops are counted like `fit`. All times are those of `hvkeras.diagnostics.spans`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from hvkeras import compat
from hvkeras.compat import graphs, patches
from hvkeras.control import stalls
from hvkeras.control.launch_environments import hvkeras_run
from hvkeras.diagnostics import spans
from hvkeras.diagnostics.final_report import await_records, report_folder, report_on_run
from hvkeras.diagnostics.record import WELL, Array, Record, remove, write_weights
from hvkeras.diagnostics.ring_buffer import PythonRing, Rows, Track, counts
from hvkeras.diagnostics.spans import CALLS, STEPS, InputWaits, Steps
from hvkeras.diagnostics.tracer import StepsTrace, Timeline
from hvkeras.errors import summary
from hvkeras.host.console import say
from hvkeras.host.forks import at_exit, detach_in_children
from hvkeras.host.gpus import gpus_in_use
from hvkeras.host.machine import busy_seconds, core_limit, cpu_seconds, resident_memory, usable_cores
from hvkeras.host.network import sent_bytes
from hvkeras.job.session import Session, this_process

if TYPE_CHECKING:
    from hvkeras.control.client import ControlClient

CAPACITY = 16_384  # steps, and calls of fit's train function, in the ring buffers: 0.5 MiB each
STALLS = 100  # maximum number of stall warnings in a record
LOSS_EVERY = 1.0  # seconds between two recorded losses within an epoch
LOSSES = 10_000  # losses in the ring buffer
WRITE_EVERY = 2.0  # seconds between two writes of the record
WRITE_SHARE = 0.005  # maximum share of the time spent writing; the interval grows to respect it
CLOCKS_EVERY = 60.0  # seconds between two measurements of the hosts' clock offset
LAST_WRITE = 5.0  # seconds that a rank waits at exit for a write in progress
COMPILED = "the step is compiled by XLA, where no clock can be read"
SESSIONS = "sessions of TensorFlow 1 are not recorded"
SEVERAL_CALLS = "a model is called more than once in a step"


class Recorder:
    """Recorder of this rank, which writes its record periodically from a thread.

    Args:
        folder: Folder to write to; None to write nothing.
        record: Initial record.
        keeps_weights: Whether to write the final weights as well.
        control: Control client, which measures the common clock; None for a single process.
    """

    def __init__(self, folder: Path | None, record: Record, keeps_weights: bool = False,
                 control: ControlClient | None = None) -> None:
        self._folder = folder
        self._record = record
        self._keeps_weights = keeps_weights
        self._control = control
        self._clock_measured = -CLOCKS_EVERY
        self.trace: StepsTrace | None = None
        self.timeline: Timeline | None = None
        self.has_whole_batches: bool = False  # whether models are called on the batches of all ranks
        self.is_on: Callable[[], bool] = lambda: False  # whether this recorder is the active one
        self._variables: dict[Any, Any] = {}
        self._kinds: dict[Any, int] = {}
        self._steps, self._calls = Steps(CAPACITY), PythonRing(2, CAPACITY)
        self._losses = PythonRing(2, LOSSES)
        self._training_began = self._last_loss = 0.0
        self._depth = threading.local()
        self._eager_models: set[int] = set()
        self._models: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()  # by function
        # First rows of this job; an earlier job in this process may have written to the same tracks.
        self.first_rows: dict[str, int] = counts({**spans.store().collectives(), **spans.store().updates()})
        self._busy_before, self._used_before = busy_seconds(record.cores), cpu_seconds()
        self._write_seconds = 0.0  # CPU time of the writer thread
        self._done = threading.Event()
        self._writing, self._updating = threading.Lock(), threading.Lock()
        self._writer = threading.Thread(target=self._write_periodically, name="hvkeras-recorder", daemon=True)
        self.input_waits: InputWaits = InputWaits()
        self.report: Path | None = None  # folder of the job's report, if this rank writes it at the end

    def begin(self) -> None:
        """Write the initial record, replacing that of an earlier job, and start the writer thread."""
        self._write()
        self._writer.start()

    def step(self, gradients: Sequence[Any], variables: Sequence[Any], local: Collection[Any]) -> None:
        """Record a step; see `Recording.step`."""
        sources = [getattr(variable, "source", variable) for variable in variables]  # sources of a tape may be tensors
        known = {compat.variable_key(source): source for source in sources if hasattr(source, "trainable")}
        if self._keeps_weights:
            for key, variable in known.items():
                if key not in local:
                    self._variables.setdefault(key, variable)
        self._models_in_step().clear()
        if graphs.compiled_by_xla() or not graphs.from_function_graphs():
            self._record.no_steps = COMPILED if graphs.from_function_graphs() else SESSIONS
            return
        kind = self._kinds.setdefault(tuple(known), len(self._kinds))
        done = [getattr(gradient, "values", gradient) for gradient in gradients if gradient is not None]
        self._steps.ready(done, kind)

    def end_step(self) -> None:
        """End a step; see `Recording.end_step`."""
        self._models_in_step().clear()

    def around_call(self, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a model, and count its samples if this is the outermost call under a gradient tape."""
        depth = getattr(self._depth, "value", 0)
        if depth == 0 and self.is_on() and graphs.under_tape():
            self._count(model, (args, kwargs))
        self._depth.value = depth + 1
        try:
            return original(model, *args, **kwargs)
        finally:
            self._depth.value = depth

    def _count(self, model: Any, inputs: Any) -> None:
        """Add the rows of a model call; if a step calls several models, only the first one counts."""
        models = self._models_in_step()
        if id(model) in models:
            self._record.no_samples = SEVERAL_CALLS
        rows = _rows_of(inputs) if not models else None
        models.add(id(model))
        if rows is not None and not graphs.compiled_by_xla() and graphs.from_function_graphs():
            if self.has_whole_batches and not tf.executing_eagerly():  # a function, of which this rank has its rows
                rank, size = self._record.rank, self._record.size
                rows = rows // size + tf.cast(rows % size > rank, tf.int64)
            tensors = [tensor for tensor in tf.nest.flatten(inputs, expand_composites=True) if tf.is_tensor(tensor)]
            self._steps.batch_arrived(rows, tensors)

    def _models_in_step(self) -> set[int]:
        graph = graphs.function_graph()
        if graph is None:
            return self._eager_models
        return self._models.setdefault(graph, set())

    def record_call(self, began: float, ended: float, logs: Any) -> None:
        """Record the begin and end of a call of fit's train function, and its loss every `LOSS_EVERY` seconds."""
        if not self.is_on():
            return
        self._calls.append(began, ended)
        self._training_began = self._training_began or began
        if ended - self._last_loss >= LOSS_EVERY:
            self.record_loss(ended, logs)

    def record_loss(self, now: float, logs: Any) -> None:
        """Record the loss, if the logs have one."""
        self._last_loss = now
        with contextlib.suppress(TypeError, ValueError, KeyError, AttributeError):
            self._losses.append(now - self._training_began, float(logs["loss"]))

    def record_logs(self, kind: str, logs: Mapping[str, Any]) -> None:
        """Record the latest logs of a kind; see `Recording.record_logs`."""
        numbers = {}
        for name, value in logs.items():
            with contextlib.suppress(TypeError, ValueError):
                numbers[name] = float(value)
        self._record.logs = {**self._record.logs, kind: numbers}  # replaced, not modified: the writer may be reading it
        self._record.last_logs = kind

    def record_stall(self, text: str) -> None:
        """Record a stall warning; see `Recording.record_stall`."""
        if len(self._record.stalls) < STALLS:
            self._record.stalls.append(text)

    def record_function(self, facts: dict[str, Any]) -> None:
        """Record what became of a function; see `Recording.record_function`."""
        self._record.functions = [*self._record.functions, facts]  # replaced, not modified

    def record_compilation(self, seconds: float) -> None:
        """Record a compilation of the update; see `Recording.record_compilation`."""
        self._record.compiling += seconds

    def steps_made(self) -> int:
        """Return the number of completed steps of this rank."""
        return self._steps.rows().after

    def tracks(self) -> dict[str, Track]:
        """Return this rank's tracks by name; a call of the train function is recorded after its steps."""
        return {**spans.store().collectives(), **spans.store().updates(), CALLS: self._calls, STEPS: self._steps,
                **self.input_waits.tracks()}

    def tables(self, rows: Mapping[str, Rows]) -> dict[str, Any]:
        """Convert rows of tracks to attributes of a record.

        Args:
            rows: Rows by track name.
        """
        store = spans.store()
        collectives = {key: track for key, track in store.collectives().items() if key in rows and len(rows[key].table)}
        steps, calls = rows[STEPS], rows[CALLS].table
        indices = np.searchsorted(steps.table[:, 0], calls) + steps.first
        updates = np.concatenate([np.zeros((0, 2)), *(rows[name].table for name in store.updates() if name in rows)])
        inputs = np.concatenate([rows[name].table for name in self.input_waits.tracks() if name in rows])
        return {
            "stamps": steps.table, "first_step": steps.first,
            "calls": np.column_stack([calls, indices[:, 0], indices[:, 1] - 1]).astype(np.float64),
            "inputs": inputs[np.argsort(inputs[:, 1], kind="stable")],
            "updates": updates[np.argsort(updates[:, 1], kind="stable")],
            "collectives": {key: rows[key].table for key in collectives},
            "first_runs": {key: rows[key].first - self.first_rows.get(key, 0) for key in collectives},
            "buckets": {key: vars(track.content) for key, track in collectives.items()},
        }

    def current(self) -> Record:
        """Return the current record."""
        with self._updating:
            rows = {name: track.rows(self.first_rows.get(name, 0)) for name, track in self.tracks().items()}
            for name, table in self.tables(rows).items():
                setattr(self._record, name, table)
            self._record.losses = self._losses.rows().table
            self._update_clock_offset()
            self._record.peak_memory = resident_memory("VmHWM") or 0
            self._record.gpu = gpus_in_use()
            if steps := self.steps_made():
                self._record.sent = [*self._record.sent[:1], [steps, sent_bytes()]]
            self._record.busy = busy_seconds(self._record.cores) - self._busy_before
            # The search for running children takes milliseconds, and they count at the end.
            self._record.used = cpu_seconds(with_children=self._done.is_set()) - self._used_before
            self._record.written = time.time()
            return dataclasses.replace(self._record)

    def finish(self, ended: str) -> None:
        """Stop the writer thread and write the final record."""
        if os.getpid() != self._record.pid:  # a forked process is not a rank
            return
        self._done.set()
        self.input_waits.stop()
        if self._writer.is_alive():
            self._writer.join(LAST_WRITE)
        if self._keeps_weights and self._folder is not None:
            write_weights(self._folder, [_value(variable) for variable in self._variables.values()])
        self._record.ended = ended
        try:
            self._write()
        except OSError as error:
            say(f"the record of this rank cannot be written: {error}")
        if self.timeline is not None:
            self.timeline.close()
        if self.trace is not None:
            self.trace.finish(ended)

    def write_report(self, patient: bool) -> None:
        """Write the report if this rank is responsible for it; `patient`: wait for the final records of other ranks."""
        if self.report is not None and os.getpid() == self._record.pid:
            if patient:
                await_records(self.report, self._record.size)
            say(report_on_run(self.report).removeprefix("hvkeras: "))

    def amend(self, ended: str) -> None:
        """Rewrite the record after the job failed after `finish`."""
        if self._folder is not None and os.getpid() == self._record.pid and self._record.ended != ended:
            self._record.ended = ended
            self._record.write(self._folder)

    def _write_periodically(self) -> None:
        pause = WRITE_EVERY
        while not self._done.wait(pause):
            began = time.thread_time()
            try:
                self._write()
            except OSError as error:
                say(f"the record of this rank cannot be written: {error}")
                return
            seconds = time.thread_time() - began
            self._write_seconds += seconds
            pause = max(WRITE_EVERY, seconds / WRITE_SHARE)

    def writing_share(self) -> float:
        """Return the fraction of time that the writer thread was busy."""
        return self._write_seconds / (time.time() - self._record.began)

    def _write(self) -> None:
        if not self._writing.acquire(timeout=LAST_WRITE):
            return
        try:
            record = self.current()
            if self._folder is not None:
                record.write(self._folder)
        finally:
            self._writing.release()

    def _update_clock_offset(self) -> None:
        """Record this host's clock offset, and request a new measurement every `CLOCKS_EVERY` seconds."""
        if self._control is None:
            self._record.clock_uncertainty = 0.0
            return
        if time.monotonic() - self._clock_measured >= CLOCKS_EVERY:
            self._clock_measured = time.monotonic()
            self._control.measure_clock()
        if (offset := self._control.clock.offset) is not None:
            self._record.clock_offset, self._record.clock_uncertainty = offset.seconds, offset.uncertainty


def _rows_of(inputs: Any) -> Any:
    """Return the batch size of a call: the length of the first axis of its first tensor argument, or None."""
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
    # Returns a dtype that NumPy's file format supports, unlike bfloat16.
    value = np.asarray(compat.as_tf_variable(variable))
    return value if value.dtype.kind in "biufc" else value.astype(np.float32)


_USER, _TIMELINE = "recording", "timeline"


def folder_of(settings: Any) -> Path | None:
    """Return the folder of a job's records according to its settings; None if it writes none."""
    if settings.record:
        return Path(settings.record)
    return Path(settings.report) / "records" if settings.report else None


class Recording:
    """Recorders of this process: that of the current session, and those of earlier ones.

    Earlier recorders stay alive because graphs traced for them still write to their tracks.
    """

    def __init__(self) -> None:
        self._recorders: list[Recorder] = []
        self._active: Recorder | None = None
        self._is_for_timeline = False
        detach_in_children(self)

    def in_child(self) -> None:
        """Stop recording in a forked child; the record belongs to its parent."""
        self._active = None
        self._recorders.clear()

    def start(self, session: Session) -> None:
        """Start recording a session, if its settings request it."""
        settings, folder = session.settings, folder_of(session.settings)
        if folder is None and settings.trace_steps is None:
            return
        recorder = self._begin(session, folder)
        if settings.trace_steps is not None and all(one.trace is None for one in self._recorders):
            recorder.trace = StepsTrace(session, recorder)  # only the first session of a process is traced

    @property
    def timeline(self) -> Timeline | None:
        """The running timeline, or None."""
        return None if self._active is None else self._active.timeline

    def start_timeline(self, session: Session, path: str) -> None:
        """Start a timeline; if the session is not being recorded, record it until the timeline is stopped.

        Args:
            session: Current session.

        Raises:
            OSError: The file cannot be written.
        """
        self._is_for_timeline = self._active is None
        recorder = self._begin(session, None) if self._active is None else self._active
        spans.store().start(_TIMELINE, outside_steps=True)
        try:
            recorder.timeline = Timeline(recorder, path)
        except OSError:
            self.stop_timeline()
            raise

    def stop_timeline(self) -> None:
        """Stop the timeline, if one is running, and write its remaining spans."""
        spans.store().stop(_TIMELINE)
        if self._active is None:
            return
        if self._active.timeline is not None:
            self._active.timeline.close()
            self._active.timeline = None
        if self._is_for_timeline:
            self.finish()

    def _begin(self, session: Session, folder: Path | None) -> Recorder:
        settings, topology = session.settings, session.topology
        if not self._recorders:
            at_exit(self.finish)
        rank = topology.rank
        if rank == 0 and folder is not None:
            remove(folder, since=topology.size)
        cores = usable_cores()
        record = Record(rank, topology.size, session.backend.name, host=topology.host, pid=os.getpid(),
                        cores=cores, core_limit=core_limit(len(cores)), began=time.time())
        recorder = self._active = Recorder(folder, record, bool(settings.record) and rank == 0, session.control)
        if rank == 0 and session.launch.launcher != hvkeras_run.LAUNCHER:  # that launcher writes the report itself
            recorder.report = report_folder(settings)
        recorder.is_on = lambda: self._active is recorder
        self._recorders.append(recorder)
        if self.record_stall not in stalls.listeners:
            stalls.listeners.append(self.record_stall)
        if session.hooks is not None and self.finish not in session.hooks.before_last_line:
            session.hooks.before_last_line.append(self.finish)
        patches.install(patches.RECORDING, patches.RecordingBehaviour(
            recorder.around_call, recorder.record_call, self.is_on, recorder.input_waits.around))
        spans.store().start(_USER)
        recorder.begin()
        return recorder

    def is_on(self) -> bool:
        """Return whether this rank is being recorded."""
        return self._active is not None

    def step(self, gradients: Sequence[Any], variables: Sequence[Any], local: Collection[Any] = ()) -> None:
        """Record a step. In a function being traced, add operations that record each of its runs.

        Args:
            gradients: This rank's gradients: tensors, `tf.IndexedSlices` or None.
            local: Keys of the variables that are local to this rank, whose values differ between ranks.
        """
        if self._active is not None:
            self._active.step(gradients, variables, local)

    def end_step(self) -> None:
        """End a step in the function under construction, of which a later one records its runs."""
        if self._active is not None:
            self._active.end_step()

    def divide_rows(self) -> None:
        """Count this rank's rows only where functions call models on the batches of all ranks."""
        if self._active is not None:
            self._active.has_whole_batches = True

    def record_logs(self, kind: str, logs: Mapping[str, Any]) -> None:
        """Record the Keras logs at the end of an epoch or an evaluation.

        Args:
            kind: `fit` or `evaluate`.
            logs: Numbers by name, such as `loss` and `val_accuracy`.
        """
        if self._active is not None:
            self._active.record_logs(kind, logs)

    def record_epoch(self, logs: Any) -> None:
        """Record the loss at the end of an epoch.

        Args:
            logs: Keras logs, combined over all ranks.
        """
        if self._active is not None:
            self._active.record_loss(time.time(), logs)

    def record_stall(self, text: str) -> None:
        """Record a stall warning, on the rank that receives it first."""
        if self._active is not None:
            self._active.record_stall(text)

    def record_function(self, facts: dict[str, Any]) -> None:
        """Record what became of a function that the ranks carry out together.

        Args:
            facts: As in `Record.functions`.
        """
        if self._active is not None:
            self._active.record_function(facts)

    def record_compilation(self, seconds: float) -> None:
        """Record the seconds in which XLA compiled the optimizer's update."""
        if self._active is not None:
            self._active.record_compilation(seconds)

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager whose batches do not count as training."""
        return contextlib.nullcontext() if self._active is None else self._active.input_waits.paused()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context manager that suspends recording, also for functions traced in it."""
        recorder, self._active = self._active, None
        spans.store().stop(_USER)
        try:
            with contextlib.nullcontext() if recorder is None else recorder.input_waits.paused():
                yield
        finally:
            self._active = recorder
            if recorder is not None:
                spans.store().start(_USER)

    def writing_share(self) -> float:
        """Return the fraction of time that the writer thread was busy."""
        return 0.0 if self._active is None else self._active.writing_share()

    def finish(self, ended: str | None = None) -> None:
        """Write the final record: at `shutdown()`, at process exit or at the end of the job, whichever comes first.

        Args:
            ended: Value of `Record.ended`; by default `WELL`, or the current exception.
        """
        recorder, self._active = self._active, None
        if recorder is not None:
            spans.store().stop(_USER)
            spans.store().stop(_TIMELINE)
            recorder.finish(_end_of_process() if ended is None else ended)
            recorder.write_report(patient=ended is None)
        elif ended is not None and self._recorders:
            self._recorders[-1].amend(ended)


def recording() -> Recording:
    """Return the recording of this process."""
    return this_process().part(Recording)


def _end_of_process() -> str:
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if error is None:
        return WELL
    return summary(error)

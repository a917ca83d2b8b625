"""Records a rank's training: when its steps ran, on how many samples, where the time went, and the results.

With HVKERAS_REPORT=<folder> (set by users) or HVKERAS_RECORD=<folder> (set by `hvkeras compare`), each rank keeps
`rank.<n>.npz` in that folder up to date; with the latter, rank 0 also writes `weights.npz` when it leaves the job. With
HVKERAS_TRACE_STEPS, `hvkeras.profiling.tracer` writes a trace. Otherwise nothing is added to any graph.

Every step of a distributed optimizer or tape calls `hvkeras.gradients.buckets.reduce_gradients`, which records a
timestamp once this rank's gradients are computed. Samples are the rows of the outermost model call under a gradient
tape, so custom training loops are counted like `fit`. All times are those of `hvkeras.profiling.spans`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvkeras import compat
from hvkeras.host.error_text import summary
from hvkeras.host.forks import at_exit, call_in_children
from hvkeras.launch_environments import hvkeras_run
from hvkeras.profiling import spans
from hvkeras.profiling.rank_recorder import Recorder
from hvkeras.profiling.tracer import Tracer
from hvkeras.progress import stalls
from hvkeras.records.record import WELL, Record, remove
from hvkeras.report.after_run import reports_to

if TYPE_CHECKING:
    from hvkeras.job.state import Job

_USER = "recording"

# One per process: graphs write to the tracks of their recorder for as long as they live.
_recorders: list[Recorder] = []
_recording: Recorder | None = None


def folder_of(settings: Any) -> Path | None:
    """The folder for a job's records according to its settings; None if it writes none."""
    if settings.record:
        return Path(settings.record)
    return Path(settings.report) / "records" if settings.report else None


def start(job: Job) -> None:
    """Starts to record if the settings ask for it; called by `init()`.

    Args:
        job: The job that has just been built.
    """
    global _recording  # noqa: PLW0603 - a process belongs to one job
    folder = folder_of(job.settings)
    if folder is None and job.settings.trace_steps is None:
        return
    if not _recorders:
        at_exit(finish)
    rank, size = job.topology.rank, job.topology.size
    if rank == 0 and folder is not None:
        remove(folder, since=size)
    record = Record(rank, size, job.backend.name, host=job.topology.hosts[rank], pid=os.getpid(), began=time.time())
    recorder = _recording = Recorder(folder, record, bool(job.settings.record) and rank == 0, job.control)
    if rank == 0 and job.launch.launcher != hvkeras_run.LAUNCHER:  # that launcher writes the report itself
        recorder.report = reports_to(job.settings)
    recorder.is_on = lambda: _recording is recorder
    _recorders.append(recorder)
    if job.hooks is not None and finish not in job.hooks.before_last_line:
        job.hooks.before_last_line.append(finish)
    compat.hook_model_calls(recorder.around_call)
    compat.hook_train_calls(recorder.note_call)
    compat.hook_jit_compile(lambda: _recording is not None)
    spans.start(_USER)
    recorder.begin()
    if job.settings.trace_steps is not None and all(one.tracer is None for one in _recorders):  # a process's first job
        recorder.tracer = Tracer(job, recorder)


def step(gradients: Sequence[Any], variables: Sequence[Any], local: Collection[Any] = ()) -> None:
    """Records a step; in a graph, each run of the step under construction.

    Args:
        gradients: This rank's gradients: tensors, `tf.IndexedSlices` or None.
        variables: Their variables.
        local: Keys of the variables that are local to this rank; their values do not represent the job.
    """
    if _recording is not None:
        _recording.step(gradients, variables, local)


def note_logs(kind: str, logs: Mapping[str, Any]) -> None:
    """Records the logs of Keras at the end of an epoch or an evaluation.

    Args:
        kind: `fit` or `evaluate`.
        logs: Numbers by name, such as `loss` and `val_accuracy`.
    """
    if _recording is not None:
        _recording.note_logs(kind, logs)


def note_epoch(logs: Any) -> None:
    """Records the loss at the end of an epoch.

    Args:
        logs: The logs of Keras, combined over all ranks.
    """
    if _recording is not None:
        _recording.note_loss(time.time(), logs)


def note_stall(text: str) -> None:
    """Records a warning about late ranks, on the rank that receives it first.

    Args:
        text: The warning.
    """
    if _recording is not None:
        _recording.note_stall(text)


stalls.listeners.append(note_stall)


def note_compilation(seconds: float) -> None:
    """Records that XLA has compiled the optimizer's update.

    Args:
        seconds: How long that took.
    """
    if _recording is not None:
        _recording.note_compilation(seconds)


def evaluating() -> contextlib.AbstractContextManager[None]:
    """Returns a context whose batches do not count as training."""
    return contextlib.nullcontext() if _recording is None else _recording.input_waits.paused()


def is_on() -> bool:
    """Whether this rank is being recorded."""
    return _recording is not None


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Suspends recording in its body, and for functions that are traced in it."""
    global _recording  # noqa: PLW0603 - a process belongs to one job
    recorder, _recording = _recording, None
    spans.stop(_USER)
    try:
        with contextlib.nullcontext() if recorder is None else recorder.input_waits.paused():
            yield
    finally:
        _recording = recorder
        if recorder is not None:
            spans.start(_USER)


def writing_share() -> float:
    """The fraction of time that the thread which writes the record was busy."""
    return 0.0 if _recording is None else _recording.writing_share()


def finish(ended: str | None = None) -> None:
    """Writes the final record: at `shutdown()`, at process exit or at the end of the job, whichever comes first.

    Args:
        ended: How this rank ends; by default, well, or with the exception being handled.
    """
    global _recording
    recorder, _recording = _recording, None
    if recorder is not None:
        spans.stop(_USER)
        recorder.finish(_ending() if ended is None else ended)
        recorder.write_report(patient=ended is None)
    elif ended is not None and _recorders:
        _recorders[-1].amend(ended)


def _in_child() -> None:
    """Leaves the record to the process that a child was forked from."""
    global _recording  # noqa: PLW0603 - a process belongs to one job
    _recording = None
    _recorders.clear()


call_in_children(_in_child)


def _ending() -> str:
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if error is None:
        return WELL
    return summary(error)

"""What is learned of a rank: when it made steps, on how many samples, where its time went, and where they led.

With HVKERAS_REPORT=<folder>, which users set, or HVKERAS_RECORD=<folder>, which `hvkeras compare` sets, each rank keeps
`rank.<n>.npz` there up to date; with the latter, rank 0 writes `weights.npz` when it leaves the job. With
HVKERAS_TRACE_STEPS, `hvkeras.profiling.tracer` makes a trace of it. Otherwise nothing is added to any graph.

Every step of a distributed optimizer or tape passes `hvkeras.gradients.buckets.reduce_gradients`, and leaves a stamp
there once this rank's gradients are computed. Samples are the rows of the outermost model call under a gradient tape,
so that loops of one's own are counted as `fit` is. Collectives are stamped by `hvkeras.profiling.collective_times`, and
fetches of batches by `hvkeras.profiling.input_times`.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvkeras import compat
from hvkeras.host.error_text import summary
from hvkeras.launch_environments import hvkeras_run
from hvkeras.profiling import collective_times
from hvkeras.profiling.rank_recorder import Recorder
from hvkeras.profiling.tracer import Tracer
from hvkeras.progress import stalls
from hvkeras.records.record import WELL, Record, remove
from hvkeras.report.after_run import reports_to

if TYPE_CHECKING:
    from hvkeras.job.state import Job

_USER = "recording"

# All of this process; stamps that are in graphs write to their variables for as long as the graphs live.
_recorders: list[Recorder] = []
_recording: Recorder | None = None


def folder_of(settings: Any) -> Path | None:
    """Where a job's records go by its settings; None if it leaves none."""
    if settings.record:
        return Path(settings.record)
    return Path(settings.report) / "records" if settings.report else None


def start(job: Job) -> None:
    """Begins to record; called by `init()` when the settings name a folder.

    Args:
        job: The job that has just been built.
    """
    global _recording  # noqa: PLW0603 - a process takes part in one job
    folder = folder_of(job.settings)
    if folder is None and job.settings.trace_steps is None:
        return
    if not _recorders:
        atexit.register(finish)
    rank, size = job.topology.rank, job.topology.size
    if rank == 0 and folder is not None:
        remove(folder, since=size)
    record = Record(rank, size, job.backend.name, host=job.topology.hosts[rank], pid=os.getpid(), began=time.time())
    recorder = _recording = Recorder(folder, record, bool(job.settings.record) and rank == 0, job.control)
    if rank == 0 and job.launch.launcher != hvkeras_run.LAUNCHER:  # which writes the report itself
        recorder.report = reports_to(job.settings)
    recorder.is_on = lambda: _recording is recorder
    _recorders.append(recorder)
    if job.hooks is not None and finish not in job.hooks.before_last_line:
        job.hooks.before_last_line.append(finish)
    compat.hook_model_calls(recorder.around_call)
    compat.hook_train_calls(recorder.note_call)
    compat.hook_jit_compile(lambda: _recording is not None)
    collective_times.start(_USER)
    recorder.begin()
    if job.settings.trace_steps is not None and all(one.tracer is None for one in _recorders):  # a process's first job
        recorder.tracer = Tracer(job, recorder)


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


def note_epoch(logs: Any) -> None:
    """Records the loss at the end of an epoch.

    Args:
        logs: Keras's, those of all ranks.
    """
    if _recording is not None:
        _recording.note_loss(time.time(), logs)


def note_stall(text: str) -> None:
    """Records what is said of late ranks, on the rank that hears it first.

    Args:
        text: The warning.
    """
    if _recording is not None:
        _recording.note_stall(text)


stalls.listeners.append(note_stall)


def evaluating() -> contextlib.AbstractContextManager[None]:
    """A context whose batches are not those of training."""
    return contextlib.nullcontext() if _recording is None else _recording.fetches.of_others()


def is_on() -> bool:
    """Whether this rank is recorded now."""
    return _recording is not None


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """A context in which nothing is recorded, neither now nor of functions that are traced in it."""
    global _recording  # noqa: PLW0603 - a process takes part in one job
    recorder, _recording = _recording, None
    collective_times.stop(_USER)
    try:
        with contextlib.nullcontext() if recorder is None else recorder.fetches.of_others():
            yield
    finally:
        _recording = recorder
        if recorder is not None:
            collective_times.start(_USER)


def writing_share() -> float:
    """The part of the time that the thread which writes the record was at work."""
    return 0.0 if _recording is None else _recording.writing_share()


def finish(ended: str | None = None) -> None:
    """Writes what was recorded; at `shutdown()`, at the process's exit or at the job's end, whichever comes first.

    Args:
        ended: How this rank ends; by default it ends well, or with the exception that is being handled.
    """
    global _recording
    recorder, _recording = _recording, None
    if recorder is not None:
        collective_times.stop(_USER)
        recorder.finish(_ending() if ended is None else ended)
        recorder.write_report(patient=ended is None)
    elif ended is not None and _recorders:
        _recorders[-1].amend(ended)


def _ending() -> str:
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if error is None:
        return WELL
    return summary(error)

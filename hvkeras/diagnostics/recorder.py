"""Records a rank's training: when its steps ran, on how many samples, where the time went, and the results.

With HVKERAS_REPORT=<folder> (set by users) or HVKERAS_RECORD=<folder> (set by `hvkeras compare`), each rank keeps
`rank.<n>.npz` in that folder up to date; with the latter, rank 0 also writes `weights.npz` when it leaves the job. With
HVKERAS_TRACE_STEPS, `hvkeras.diagnostics.tracer` writes a trace. Otherwise nothing is added to any graph.

Every step of a distributed optimizer or tape calls `hvkeras.gradients.reducer.GradientReducer`, which records a
timestamp once this rank's gradients are computed. Samples are the rows of the outermost model call under a gradient
tape, so custom training loops are counted like `fit`. All times are those of `hvkeras.diagnostics.spans`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvkeras.compat import patches
from hvkeras.control import stall_listeners
from hvkeras.control.launch_environments import hvkeras_run
from hvkeras.diagnostics import spans
from hvkeras.diagnostics.after_run import reports_to
from hvkeras.diagnostics.rank_recorder import Recorder
from hvkeras.diagnostics.record import WELL, Record, remove
from hvkeras.diagnostics.tracer import Tracer
from hvkeras.host.error_text import summary
from hvkeras.host.forks import at_exit, detach_in_children
from hvkeras.job.session import Session, this_process

_USER = "recording"

def folder_of(settings: Any) -> Path | None:
    """The folder for a job's records according to its settings; None if it writes none."""
    if settings.record:
        return Path(settings.record)
    return Path(settings.report) / "records" if settings.report else None


class Recording:
    """The recorder of this process's session, and those of former ones.

    Graphs write to the tracks of their recorder for as long as they live.
    """

    def __init__(self) -> None:
        self._recorders: list[Recorder] = []
        self._active: Recorder | None = None
        detach_in_children(self)

    def in_child(self) -> None:
        """Leaves the record to the process that a child was forked from."""
        self._active = None
        self._recorders.clear()

    def start(self, session: Session) -> None:
        """Starts to record a session, if its settings ask for it."""
        settings, topology = session.settings, session.topology
        folder = folder_of(settings)
        if folder is None and settings.trace_steps is None:
            return
        if not self._recorders:
            at_exit(self.finish)
        rank = topology.rank
        if rank == 0 and folder is not None:
            remove(folder, since=topology.size)
        record = Record(rank, topology.size, session.backend.name, host=topology.host, pid=os.getpid(),
                        began=time.time())
        recorder = self._active = Recorder(folder, record, bool(settings.record) and rank == 0, session.control)
        if rank == 0 and session.launch.launcher != hvkeras_run.LAUNCHER:  # that launcher writes the report itself
            recorder.report = reports_to(settings)
        recorder.is_on = lambda: self._active is recorder
        self._recorders.append(recorder)
        if self.note_stall not in stall_listeners.listeners:
            stall_listeners.listeners.append(self.note_stall)
        if session.hooks is not None and self.finish not in session.hooks.before_last_line:
            session.hooks.before_last_line.append(self.finish)
        patches.install(patches.RECORDING, patches.RecordingBehaviour(
            recorder.around_call, recorder.note_call, self.is_on, recorder.input_waits.around))
        spans.store().start(_USER)
        recorder.begin()
        if settings.trace_steps is not None and all(one.tracer is None for one in self._recorders):
            recorder.tracer = Tracer(session, recorder)  # of a process's first session

    def is_on(self) -> bool:
        """Whether this rank is being recorded."""
        return self._active is not None

    def step(self, gradients: Sequence[Any], variables: Sequence[Any], local: Collection[Any] = ()) -> None:
        """Records a step; in a graph, each run of the step under construction.

        Args:
            gradients: This rank's gradients: tensors, `tf.IndexedSlices` or None.
            variables: Their variables.
            local: Keys of the variables that are local to this rank; their values do not represent the job.
        """
        if self._active is not None:
            self._active.step(gradients, variables, local)

    def note_logs(self, kind: str, logs: Mapping[str, Any]) -> None:
        """Records the logs of Keras at the end of an epoch or an evaluation.

        Args:
            kind: `fit` or `evaluate`.
            logs: Numbers by name, such as `loss` and `val_accuracy`.
        """
        if self._active is not None:
            self._active.note_logs(kind, logs)

    def note_epoch(self, logs: Any) -> None:
        """Records the loss at the end of an epoch.

        Args:
            logs: The logs of Keras, combined over all ranks.
        """
        if self._active is not None:
            self._active.note_loss(time.time(), logs)

    def note_stall(self, text: str) -> None:
        """Records a warning about late ranks, on the rank that receives it first."""
        if self._active is not None:
            self._active.note_stall(text)

    def note_compilation(self, seconds: float) -> None:
        """Records how long XLA has compiled the optimizer's update."""
        if self._active is not None:
            self._active.note_compilation(seconds)

    def evaluating(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context whose batches do not count as training."""
        return contextlib.nullcontext() if self._active is None else self._active.input_waits.paused()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Suspends recording in its body, and for functions that are traced in it."""
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
        """Returns the fraction of time that the thread which writes the record was busy."""
        return 0.0 if self._active is None else self._active.writing_share()

    def finish(self, ended: str | None = None) -> None:
        """Writes the final record: at `shutdown()`, at process exit or at the end of the job, whichever comes first.

        Args:
            ended: How this rank ends; by default, well, or with the exception being handled.
        """
        recorder, self._active = self._active, None
        if recorder is not None:
            spans.store().stop(_USER)
            recorder.finish(_ending() if ended is None else ended)
            recorder.write_report(patient=ended is None)
        elif ended is not None and self._recorders:
            self._recorders[-1].amend(ended)


def recording() -> Recording:
    """Returns what this process records."""
    return this_process().part(Recording)


def _ending() -> str:
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if error is None:
        return WELL
    return summary(error)

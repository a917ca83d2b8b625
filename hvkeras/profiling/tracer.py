"""Writes a trace of a window of this rank's steps: HVKERAS_TRACE_STEPS, `hvkeras run --trace-steps`.

From the first step of the window on, the tracer copies the recorder's data (`hvkeras.profiling.recorder`) before newer
steps overwrite it, and writes it as a trace periodically until the window has passed.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hvkeras.errors import HvkerasError, MachineError, explain
from hvkeras.host.console import say
from hvkeras.host.network import host_identity
from hvkeras.launch_environments import hvkeras_run
from hvkeras.profiling import trace_files
from hvkeras.profiling.trace_events import Recorded, events
from hvkeras.records.record import WELL, Array, Record

if TYPE_CHECKING:
    from hvkeras.job.state import Job
    from hvkeras.profiling.rank_recorder import Recorder

LOOK_EVERY = 0.25  # seconds between two reads of the recording: hundreds of steps, of the thousand that are kept
LOOK_SHARE = 0.01  # maximum share of the time spent reading; the interval grows to respect it
WRITE_EVERY = 2.0  # seconds between two writes
WRITE_SHARE = 0.01  # maximum share of the time spent writing; the interval grows to respect it
BEFORE = 1024  # steps kept from before the window, for the train function call in which the window begins
CLOCK_WAIT = 1.0  # seconds that the last write waits for a new clock measurement
OTHERS_WAIT = 3.0  # seconds that rank 0 waits at its end for the last writes of the ranks whose files it can see


class Tracer:
    """Traces this rank in a thread.

    Args:
        job: The job.
        recorder: The recorder of this rank.

    Raises:
        MachineError: The rank's file cannot be written.
    """

    def __init__(self, job: Job, recorder: Recorder) -> None:
        self.path = Path(job.settings.trace_file).absolute()
        self._first, self._after = job.settings.trace_steps
        self._job, self._recorder = job, recorder
        self._kept = Kept(self._first, self._after)
        self._wrote_last = False
        self._writing = threading.Lock()
        self._over = threading.Event()
        try:
            self._write(recorder.current())
        except OSError as error:
            raise MachineError(explain(f"The trace's file must be writable ({error.strerror})",
                                       "set HVKERAS_TRACE_FILE to one in a folder that exists, on every host",
                                       trace_file=str(self.path))) from None
        self._thread = threading.Thread(target=self._watch, name="hvkeras-tracer", daemon=True)
        self._thread.start()

    def finish(self, ended: str) -> None:
        """Ends the thread, writes what remains, and on rank 0 merges the ranks' files unless the launcher does.

        Args:
            ended: How this rank ends; see `Record.ended`.
        """
        self._over.set()
        self._thread.join(timeout=WRITE_EVERY)
        try:
            if not self._wrote_last:
                self._keep_and_write()
        except OSError as error:
            say(f"the trace of this rank cannot be written: {error}")
        try:
            if self._job.topology.rank == 0 and self._job.launch.launcher != hvkeras_run.LAUNCHER:
                self._merge(OTHERS_WAIT if ended == WELL else 0.0)
        except (OSError, HvkerasError) as error:
            say(f"the ranks' traces cannot be merged: {error}")

    def _watch(self) -> None:
        began = False
        look, written, pause, seen = LOOK_EVERY, 0.0, WRITE_EVERY, 0
        while not self._over.wait(look):
            if self._recorder.steps_made() <= self._first:
                continue
            if not began and self._job.control is not None:  # an offset is most accurate close to its measurement
                self._job.control.measure_clock()
            began = True
            looked = time.monotonic()
            record = self._recorder.current()
            self._kept.add(record)
            now = time.monotonic()
            look = max(LOOK_EVERY, (now - looked) / LOOK_SHARE)
            try:
                if self._kept.passed:
                    self._write_last()
                    return
                if now - written >= pause and self._kept.count != seen:
                    self._write(record)
                    written, seen = now, self._kept.count
                    pause = max(WRITE_EVERY, (time.monotonic() - now) / WRITE_SHARE)
            except OSError as error:
                say(f"the trace of this rank cannot be written: {error}")
                return

    def _write_last(self) -> None:
        if self._job.control is not None:
            self._job.control.measure_clock()
            self._job.control.clock.wait(CLOCK_WAIT)
        self._keep_and_write()
        self._wrote_last = True

    def _keep_and_write(self) -> None:
        record = self._recorder.current()
        self._kept.add(record)
        self._write(record, over=True)

    def _write(self, record: Record, over: bool = False) -> None:
        recorded = self._kept.recorded(record.buckets)
        facts = {"rank": record.rank, "size": record.size, "host": record.host, "machine": host_identity(),
                 "pid": record.pid, "backend": record.backend, "steps": f"{self._first}:{self._after}",
                 "missing_steps": self._after - self._first - self._kept.steps, "over": over,
                 "no_steps": record.no_steps, "clock_offset": record.clock_offset,
                 "clock_uncertainty": record.clock_uncertainty}
        found = events(recorded, record.rank, self._first, self._after, record.clock_offset)
        with self._writing:
            trace_files.write_rank(self.path, found, facts)

    def _merge(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        size = self._job.topology.size
        while True:
            found = trace_files.parts(self.path)
            over = len(found) < size or all(part["otherData"]["over"] for part in found.values())
            if over or time.monotonic() >= deadline:
                break
            time.sleep(0.1)
        if len(found) < size:
            say(f"{len(found)} of {size} ranks' traces are in {self.path.parent}; bring them into one folder, and run"
                " hvkeras trace there")
        elif (merged := trace_files.merge(self.path)) is not None:
            say(merged.sentence())


class Kept:
    """The recorded data of a window of steps, and of some steps before it.

    Args:
        first: The window's first step.
        after: The step after the last one.
    """

    def __init__(self, first: int, after: int) -> None:
        self._first, self._after = first, after
        self._stamps = _Rows(4, max(0, first - BEFORE))
        self._runs: dict[str, _Rows] = {}
        self._inputs: dict[tuple[float, ...], None] = {}
        self._calls: dict[float, list[float]] = {}  # by start time

    @property
    def passed(self) -> bool:
        """Whether the window has passed: the step after it has been computed, so its last step is complete."""
        return self._stamps.after > self._after

    @property
    def count(self) -> int:
        """A number that grows with the amount of data kept."""
        return len(self._calls) + self._stamps.count + sum(rows.count for rows in self._runs.values())

    @property
    def steps(self) -> int:
        """How many steps of the window have been recorded."""
        return max(0, min(self._stamps.after, self._after) - max(self._stamps.after - self._stamps.count, self._first))

    def add(self, record: Record) -> None:
        """Copies what is new in a record."""
        self._stamps.add(record.stamps[:max(0, self._after + 1 - record.first_step)], record.first_step)
        calls = record.calls
        near = (calls[:, 3] >= np.maximum(calls[:, 2], self._first - 1)) & (calls[:, 2] <= self._after)
        self._calls.update({call[0]: call for call in calls[near].tolist()})
        self._inputs.update(dict.fromkeys(map(tuple, record.inputs.tolist())))
        for key, rows in record.collectives.items():
            self._runs.setdefault(key, _Rows(2)).add(rows, record.first_runs.get(key, 0))

    def recorded(self, buckets: dict[str, dict[str, Any]]) -> Recorded:
        """All data kept, in the form that becomes a trace."""
        stamps = self._stamps.table()
        inputs, calls = np.array(sorted(self._inputs)), np.array(sorted(self._calls.values()))
        return Recorded(self._stamps.after - len(stamps), stamps[:, 0], inputs.reshape(-1, 2),
                        calls.reshape(-1, 4),
                        {key: rows.table() for key, rows in self._runs.items()}, buckets)


class _Rows:
    """Numbered rows, extended at each read of a ring buffer."""

    def __init__(self, columns: int, first: int = 0) -> None:
        self._parts = [np.zeros((0, columns))]
        self.after = first  # the next index
        self.count = 0

    def add(self, rows: Array, first: int) -> None:
        new = rows[max(0, self.after - first):]
        if len(new):
            self._parts.append(new)
            self.count += len(new)
            self.after = first + len(rows)

    def table(self) -> Array:
        self._parts = [np.concatenate(self._parts)]
        return self._parts[0]

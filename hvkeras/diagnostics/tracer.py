"""Chrome traces of this rank: a window of steps, or Horovod's timeline.

HVKERAS_TRACE_STEPS (`hvkeras run --trace-steps`) traces a window of steps on all ranks, and merges their files at the
end. A timeline traces one rank until it is stopped. In both cases a thread reads this rank's spans
(`hvkeras.diagnostics.spans`) before newer ones overwrite them, and periodically rewrites the file.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from hvkeras.control.launch_environments import hvkeras_run
from hvkeras.diagnostics import spans, trace_files
from hvkeras.diagnostics.record import WELL, Record
from hvkeras.diagnostics.ring_buffer import RingReader, Rows, Track, concatenate
from hvkeras.diagnostics.spans import OUTSIDE, STEPS
from hvkeras.diagnostics.trace_events import events
from hvkeras.errors import HvkerasError, MachineError, explain
from hvkeras.host.console import say
from hvkeras.host.network import host_identity
from hvkeras.job.session import Session

LOOK_EVERY = 0.2  # seconds between two reads: hundreds of steps, of about a thousand in the ring buffers
LOOK_SHARE = 0.01  # maximum share of the time spent reading; the interval grows to respect it
WRITE_EVERY = 1.0  # seconds between two writes
WRITE_SHARE = 0.02  # maximum share of the time spent writing; the interval grows to respect it
CLOCK_WAIT = 1.0  # seconds that the last write waits for a new clock measurement
OTHERS_WAIT = 3.0  # seconds that rank 0 waits at its end for the last writes of other ranks
CAPACITY = 200_000  # maximum number of spans in a timeline, about 40 MB; the file has the number of omitted ones


class Traced(Protocol):
    """Protocol of recorders that can be traced."""

    first_rows: dict[str, int]

    def tracks(self) -> Mapping[str, Track]:
        """Return the tracks of the rank's training, by name."""

    def tables(self, rows: Mapping[str, Rows]) -> dict[str, Any]:
        """Convert rows of tracks to attributes of a record."""

    def current(self) -> Record:
        """Return the current record."""

    def steps_made(self) -> int:
        """Return the number of completed steps."""


class _Spans:
    """Spans that a trace has read so far; thread-safe."""

    def __init__(self, reader: RingReader, capacity: float = float("inf")) -> None:
        self._reader, self._capacity = reader, capacity
        self._parts: dict[str, list[Rows]] = {}
        self._lock = threading.Lock()
        self.count = 0
        self.left_out = 0

    @property
    def lost(self) -> int:
        return self._reader.lost

    def read(self) -> dict[str, Rows]:
        """Read new spans, and return all spans by track."""
        with self._lock:
            for name, rows in self._reader.new().items():
                if self.count <= self._capacity:
                    self._parts.setdefault(name, []).append(rows)
                    self.count += len(rows.table)
                else:
                    self.left_out += len(rows.table)
            spans_by_track = {name: concatenate(parts) for name, parts in self._parts.items()}
            self._parts = {name: [rows] for name, rows in spans_by_track.items()}
            return spans_by_track


def _facts(record: Record) -> dict[str, Any]:
    return {"rank": record.rank, "size": record.size, "host": record.host, "machine": host_identity(),
            "pid": record.pid, "backend": record.backend, "no_steps": record.no_steps,
            "clock_offset": record.clock_offset, "clock_uncertainty": record.clock_uncertainty}


class Timeline:
    """Trace of everything that this rank records, until it is closed.

    Args:
        recorder: Recorder of this rank.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(self, recorder: Traced, path: str) -> None:
        self.path: Path = Path(path).absolute()
        self._recorder = recorder
        self._spans = _Spans(RingReader(lambda: {**recorder.tracks(), OUTSIDE: spans.store().outside}), CAPACITY)
        self._done = threading.Event()
        self._write()
        self._thread = threading.Thread(target=self._watch, name="hvkeras-timeline", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, and write the remaining spans."""
        if self._done.is_set():
            return
        self._done.set()
        self._thread.join()
        try:
            self._write()
        except OSError as error:
            say(f"the timeline cannot be written: {error}")

    def _watch(self) -> None:
        written, pause, seen = time.monotonic(), WRITE_EVERY, 0
        while not self._done.wait(min(LOOK_EVERY, pause)):
            self._spans.read()
            now = time.monotonic()
            if now - written >= pause and self._spans.count != seen:
                seen = self._spans.count
                try:
                    self._write()
                except OSError as error:
                    say(f"the timeline cannot be written: {error}")
                    return
                written = time.monotonic()
                pause = max(WRITE_EVERY, (written - now) / WRITE_SHARE)

    def _write(self) -> None:
        rows = self._spans.read()
        record = dataclasses.replace(self._recorder.current(), **self._recorder.tables(rows))
        found = events(record, None, spans.store().runs_outside(rows[OUTSIDE]))
        found += [{"name": f"{count} {what}", "ph": "i", "s": "g", "pid": record.rank, "tid": 0,
                   "ts": time.time() * 1e6}
                  for count, what in ((self._spans.lost, "spans were overwritten before they were read"),
                                      (self._spans.left_out, "later spans are left out")) if count]
        trace_files.write(self.path, [*trace_files.process_name(record), *found], _facts(record))


class StepsTrace:
    """Trace of a window of steps.

    Args:
        session: Current session.
        recorder: Recorder of this rank.

    Raises:
        MachineError: The rank's file cannot be written.
    """

    def __init__(self, session: Session, recorder: Traced) -> None:
        self.path: Path = Path(session.settings.trace_file).absolute()
        self._first, self._after = session.settings.trace_steps
        self._session, self._recorder = session, recorder
        self._spans = _Spans(RingReader(recorder.tracks, recorder.first_rows))
        self._wrote_last = False
        self._done = threading.Event()
        try:
            self._write()
        except OSError as error:
            raise MachineError(explain(f"The trace's file must be writable ({error.strerror})",
                                       "set HVKERAS_TRACE_FILE to one in a folder that exists, on every host",
                                       trace_file=str(self.path))) from None
        self._thread = threading.Thread(target=self._watch, name="hvkeras-trace", daemon=True)
        self._thread.start()

    def finish(self, ended: str) -> None:
        """Stop the thread, write the remaining spans, and on rank 0 merge the rank files unless the launcher does.

        Args:
            ended: Value of `Record.ended`.
        """
        self._done.set()
        self._thread.join(timeout=WRITE_EVERY)
        try:
            if not self._wrote_last:
                self._write(done=True)
        except OSError as error:
            say(f"the trace of this rank cannot be written: {error}")
        try:
            if self._session.topology.rank == 0 and self._session.launch.launcher != hvkeras_run.LAUNCHER:
                self._merge(OTHERS_WAIT if ended == WELL else 0.0)
        except (OSError, HvkerasError) as error:
            say(f"the ranks' traces cannot be merged: {error}")

    def _watch(self) -> None:
        began = False
        look, written, pause, seen = LOOK_EVERY, 0.0, WRITE_EVERY, 0
        while not self._done.wait(look):
            if self._recorder.steps_made() <= self._first:
                continue
            if not began and self._session.control is not None:  # an offset is most accurate close to its measurement
                self._session.control.measure_clock()
            began = True
            looked = time.monotonic()
            steps = self._spans.read()[STEPS]
            now = time.monotonic()
            look = max(LOOK_EVERY, (now - looked) / LOOK_SHARE)
            try:
                if steps.after > self._after:  # the last step of the window is complete
                    self._write_last()
                    return
                if now - written >= pause and self._spans.count != seen:
                    seen = self._spans.count
                    self._write()
                    written = now
                    pause = max(WRITE_EVERY, (time.monotonic() - now) / WRITE_SHARE)
            except OSError as error:
                say(f"the trace of this rank cannot be written: {error}")
                return

    def _write_last(self) -> None:
        if self._session.control is not None:
            self._session.control.measure_clock()
            self._session.control.clock.wait(CLOCK_WAIT)
        self._write(done=True)
        self._wrote_last = True

    def _write(self, done: bool = False) -> None:
        rows = self._spans.read()
        record = dataclasses.replace(self._recorder.current(), **self._recorder.tables(rows))
        steps = rows[STEPS]
        present = max(0, min(steps.after, self._after) - max(steps.first, self._first))
        facts = {**_facts(record), "steps": f"{self._first}:{self._after}",
                 "missing_steps": self._after - self._first - present, "done": done}
        found = events(record, (self._first, self._after))
        trace_files.write(trace_files.rank_file(self.path, record.rank),
                          [*trace_files.process_name(record), *found], facts)

    def _merge(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        size = self._session.topology.size
        while True:
            found = trace_files.parts(self.path)
            done = len(found) < size or all(part["otherData"]["done"] for part in found.values())
            if done or time.monotonic() >= deadline:
                break
            time.sleep(0.1)
        if len(found) < size:
            say(f"{len(found)} of {size} ranks' traces are in {self.path.parent}; copy them into one folder, and run"
                " hvkeras trace there")
        elif (merged := trace_files.merge(self.path)) is not None:
            say(merged.sentence())

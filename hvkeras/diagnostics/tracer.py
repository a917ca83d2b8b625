"""Chrome traces of this rank: of a window of its steps, and Horovod's timeline of all that runs.

HVKERAS_TRACE_STEPS (`hvkeras run --trace-steps`) traces a window of steps on all ranks, whose files are merged at the
end. A timeline traces one rank until it is stopped. In either case a thread reads this rank's spans
(`hvkeras.diagnostics.spans`) before newer ones overwrite them, and rewrites the file periodically.
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
from hvkeras.diagnostics.ring_buffer import RingReader, Rows, Track, joined
from hvkeras.diagnostics.spans import OUTSIDE, STEPS
from hvkeras.diagnostics.trace_events import events
from hvkeras.errors import HvkerasError, MachineError, explain
from hvkeras.host.console import say
from hvkeras.host.network import host_identity
from hvkeras.job.session import Session

LOOK_EVERY = 0.2  # seconds between two reads: hundreds of steps, of the thousand that are held
LOOK_SHARE = 0.01  # maximum share of the time spent reading; the interval grows to respect it
WRITE_EVERY = 1.0  # seconds between two writes
WRITE_SHARE = 0.02  # maximum share of the time spent writing; the interval grows to respect it
CLOCK_WAIT = 1.0  # seconds that the last write waits for a new clock measurement
OTHERS_WAIT = 3.0  # seconds that rank 0 waits at its end for the last writes of the ranks whose files it can see
CAPACITY = 200_000  # spans in a timeline, about 40 MB; the file says how many were left out


class Traced(Protocol):
    """What is recorded of a rank."""

    first_rows: dict[str, int]

    def tracks(self) -> Mapping[str, Track]:
        """Return the tracks of its training, by name."""

    def tables(self, rows: Mapping[str, Rows]) -> dict[str, Any]:
        """Convert rows of tracks to attributes of a record."""

    def current(self) -> Record:
        """Return the record as it is now."""

    def steps_made(self) -> int:
        """Return the number of steps so far."""


class _Spans:
    """Spans that a trace has read so far; safe to use from several threads."""

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
        """Read what is new, and return everything by track."""
        with self._lock:
            for name, rows in self._reader.new().items():
                if self.count <= self._capacity:
                    self._parts.setdefault(name, []).append(rows)
                    self.count += len(rows.table)
                else:
                    self.left_out += len(rows.table)
            whole = {name: joined(parts) for name, parts in self._parts.items()}
            self._parts = {name: [rows] for name, rows in whole.items()}
            return whole


def _facts(record: Record) -> dict[str, Any]:
    return {"rank": record.rank, "size": record.size, "host": record.host, "machine": host_identity(),
            "pid": record.pid, "backend": record.backend, "no_steps": record.no_steps,
            "clock_offset": record.clock_offset, "clock_uncertainty": record.clock_uncertainty}


class Timeline:
    """Trace of everything that this rank records, until it is closed.

    Args:
        recorder: The recorder of this rank.
        path: The file.

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
        """End the thread, and write what remains."""
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
        session: The session.
        recorder: The recorder of this rank.

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
        """End the thread, writes what remains, and on rank 0 merges the ranks' files unless the launcher does.

        Args:
            ended: How this rank ends; see `Record.ended`.
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
        there = max(0, min(steps.after, self._after) - max(steps.first, self._first))
        facts = {**_facts(record), "steps": f"{self._first}:{self._after}",
                 "missing_steps": self._after - self._first - there, "done": done}
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
            say(f"{len(found)} of {size} ranks' traces are in {self.path.parent}; bring them into one folder, and run"
                " hvkeras trace there")
        elif (merged := trace_files.merge(self.path)) is not None:
            say(merged.sentence())

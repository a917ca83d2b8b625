"""Writes a trace of a window of this rank's steps: HVKERAS_TRACE_STEPS, `hvkeras run --trace-steps`.

From the first step of the window on, the tracer reads this rank's spans (`hvkeras.diagnostics.spans`) before newer ones
overwrite them, and writes them as a trace periodically until the window has passed.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from hvkeras.control.launch_environments import hvkeras_run
from hvkeras.diagnostics import trace_files
from hvkeras.diagnostics.record import WELL, Record
from hvkeras.diagnostics.ring_buffer import RingReader, Rows, Track, joined
from hvkeras.diagnostics.spans import STEPS
from hvkeras.diagnostics.trace_events import events
from hvkeras.errors import HvkerasError, MachineError, explain
from hvkeras.host.console import say
from hvkeras.host.network import host_identity
from hvkeras.job.session import Session

LOOK_EVERY = 0.25  # seconds between two reads: hundreds of steps, of the thousand that are held
LOOK_SHARE = 0.01  # maximum share of the time spent reading; the interval grows to respect it
WRITE_EVERY = 2.0  # seconds between two writes
WRITE_SHARE = 0.01  # maximum share of the time spent writing; the interval grows to respect it
CLOCK_WAIT = 1.0  # seconds that the last write waits for a new clock measurement
OTHERS_WAIT = 3.0  # seconds that rank 0 waits at its end for the last writes of the ranks whose files it can see


class Traced(Protocol):
    """What is recorded of a rank."""

    first_rows: dict[str, int]

    def tracks(self) -> Mapping[str, Track]:
        """Returns the tracks of its training, by name."""

    def tables(self, rows: Mapping[str, Rows]) -> dict[str, Any]:
        """Converts rows of tracks to attributes of a record."""

    def current(self) -> Record:
        """Returns the record as it is now."""

    def steps_made(self) -> int:
        """Returns the number of steps so far."""


class Tracer:
    """Traces this rank in a thread.

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
        self._reader = RingReader(recorder.tracks, recorder.first_rows)
        self._parts: dict[str, list[Rows]] = {}  # what has been read, by track
        self._wrote_last = False
        self._reading = threading.RLock()
        self._over = threading.Event()
        try:
            self._write()
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
                self._write(over=True)
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
        while not self._over.wait(look):
            if self._recorder.steps_made() <= self._first:
                continue
            if not began and self._session.control is not None:  # an offset is most accurate close to its measurement
                self._session.control.measure_clock()
            began = True
            looked = time.monotonic()
            self._read()
            now = time.monotonic()
            look = max(LOOK_EVERY, (now - looked) / LOOK_SHARE)
            count = sum(rows.after for parts in self._parts.values() for rows in parts[-1:])
            try:
                if self._parts[STEPS][-1].after > self._after:  # the last step of the window is complete
                    self._write_last()
                    return
                if now - written >= pause and count != seen:
                    self._write()
                    written, seen = now, count
                    pause = max(WRITE_EVERY, (time.monotonic() - now) / WRITE_SHARE)
            except OSError as error:
                say(f"the trace of this rank cannot be written: {error}")
                return

    def _write_last(self) -> None:
        if self._session.control is not None:
            self._session.control.measure_clock()
            self._session.control.clock.wait(CLOCK_WAIT)
        self._write(over=True)
        self._wrote_last = True

    def _read(self) -> None:
        """Reads what is new before it is overwritten."""
        with self._reading:
            for name, rows in self._reader.new().items():
                self._parts.setdefault(name, []).append(rows)

    def _write(self, over: bool = False) -> None:
        with self._reading:
            self._read()
            rows = {name: joined(parts) for name, parts in self._parts.items()}
            self._parts = {name: [whole] for name, whole in rows.items()}
            record = dataclasses.replace(self._recorder.current(), **self._recorder.tables(rows))
            steps = rows[STEPS]
            there = max(0, min(steps.after, self._after) - max(steps.first, self._first))
            facts = {"rank": record.rank, "size": record.size, "host": record.host, "machine": host_identity(),
                     "pid": record.pid, "backend": record.backend, "steps": f"{self._first}:{self._after}",
                     "missing_steps": self._after - self._first - there, "over": over,
                     "no_steps": record.no_steps, "clock_offset": record.clock_offset,
                     "clock_uncertainty": record.clock_uncertainty}
            trace_files.write_rank(self.path, events(record, self._first, self._after), facts)

    def _merge(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        size = self._session.topology.size
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

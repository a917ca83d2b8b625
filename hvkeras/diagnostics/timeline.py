"""The timeline: when each collective of a rank began and ended, as a trace for Chrome and Perfetto.

While the timeline is on, it covers collectives that run eagerly and those in functions traced meanwhile. With
HVKERAS_TIMELINE it is on from `init()` onwards and therefore covers all of them. A thread reads what is recorded
(`hvkeras.diagnostics.spans`), and writes the file.

The format is Chrome's Trace Event Format (complete and metadata events), which Perfetto opens:
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
import os
import threading
import time
from typing import IO, Any

from hvkeras.diagnostics import spans
from hvkeras.diagnostics.ring_buffer import RingReader
from hvkeras.diagnostics.spans import SpanStore
from hvkeras.errors import MachineError, UsageError, explain
from hvkeras.host.forks import at_exit, detach_in_children
from hvkeras.job.session import Session, current_session, is_initialized

CAPACITY = 200_000  # maximum number of collectives in a timeline, about 40 MB; the file says how many were left out
FLUSH_EVERY = 1.0  # seconds between two writes
COLLECT_EVERY = 0.2  # seconds between two reads of the spans: each collective's latest 1,024 runs are held
_END = b"\n]\n"
_USER = "timeline"


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:  # noqa: ARG001 - Horovod's parameter
    """Starts a timeline: a file that shows when collectives began and ended, for ui.perfetto.dev or chrome://tracing.

    Only rank 0 writes a timeline, unless the path contains `{rank}`: then every rank writes its own. The timelines
    share a time base if the hosts' clocks agree. The file is updated about once a second and is valid after each
    write. Functions traced earlier, such as those of a running `fit`, are not timed; `fit` retraces when it is called.

    Example:
        hvd.start_timeline("timeline.{rank}.json")
        model.fit(x, y, steps_per_epoch=20)
        hvd.stop_timeline()

    Args:
        file_path: The file; an existing one is replaced.
        mark_cycles: Accepted for compatibility with Horovod and ignored: there are no negotiation cycles.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: A timeline is already running.
        MachineError: The file cannot be written.
    """
    current_session().part(_RunningTimeline).start(file_path)


def stop_timeline() -> None:
    """Stops the timeline, if one is running, and writes what remains."""
    if is_initialized():
        current_session().part(_RunningTimeline).close()


def is_on() -> bool:
    """Whether this rank's collectives are being timed."""
    return is_initialized() and current_session().part(_RunningTimeline).timeline is not None


class _RunningTimeline:
    """The timeline of a session, if there is one."""

    def __init__(self, session: Session) -> None:
        self._topology = session.topology
        self.timeline: Timeline | None = None

    def start(self, file_path: str) -> None:
        if self.timeline is not None:
            raise UsageError(explain("One timeline can run at a time", "call hvd.stop_timeline() first",
                                     running=self.timeline.path, file_path=file_path))
        rank = self._topology.rank
        if rank and "{rank}" not in file_path:
            return
        path = file_path.replace("{rank}", str(rank))
        spans.store().start(_USER, outside_steps=True)
        try:
            self.timeline = Timeline(path, rank, self._topology.host, spans.store())
        except OSError as error:
            spans.store().stop(_USER)
            raise MachineError(explain(f"The timeline's file must be writable ({error.strerror})",
                                       "choose another folder", file_path=path)) from None

    def close(self) -> None:
        if self.timeline is not None:
            spans.store().stop(_USER)
            self.timeline.close()
            self.timeline = None


class Timeline:
    """A running timeline, and the thread that writes it.

    Args:
        path: The file.
        rank: This rank.
        host: Its host.
        store: The spans.

    Raises:
        OSError: The file cannot be written.
    """

    def __init__(self, path: str, rank: int, host: str, store: SpanStore) -> None:
        self.path = path
        self._rank = rank
        self._file: IO[bytes] = open(path, "wb", buffering=0)  # noqa: SIM115 - `close` closes it
        self._lock = threading.Lock()
        self._events: list[dict[str, Any]] = []
        self._rows: dict[str, int] = {}
        self._count = 0
        self._store = store
        self._reader = RingReader(store.everything)
        self._is_empty = True
        self._over = threading.Event()
        self._file.write(b"[" + _END)
        self._note({"name": "process_name", "ph": "M", "args": {"name": f"rank {rank} on {host}, pid {os.getpid()}"}})
        self._write()
        self._writer = threading.Thread(target=self._write_now_and_then, name="hvkeras-timeline", daemon=True)
        self._writer.start()
        self._forget_exit = at_exit(self.close)

        detach_in_children(self)

    def in_child(self) -> None:
        """Leaves the file to the process that a child was forked from."""
        self._over = threading.Event()
        self._over.set()

    def add(self, label: str, operation: str, began: int, ended: int, size: int | None) -> None:
        """Adds a collective.

        Args:
            label: Its name in messages; each label has its own row.
            operation: `allreduce`, ...
            began: When its tensors were available, in nanoseconds since the epoch.
            ended: When its results were available, in nanoseconds since the epoch.
            size: Bytes of this rank's tensors; None if unknown.
        """
        with self._lock:
            self._count += 1
            if self._count > CAPACITY:
                return
            if label not in self._rows:
                self._rows[label] = len(self._rows) + 1
                self._note({"name": "thread_name", "ph": "M", "tid": self._rows[label], "args": {"name": label}})
            kind = spans.UPDATE if operation == spans.UPDATE else "collective"
            self._note({"name": operation, "cat": kind, "ph": "X", "tid": self._rows[label],
                        "ts": began / 1000, "dur": (ended - began) / 1000, "args": {kind: label, "bytes": size}})

    def close(self) -> None:
        """Writes what remains and ends the thread."""
        if self._over.is_set():
            return
        self._over.set()
        self._writer.join()
        self._collect()
        for count, what in ((self._reader.lost, "collectives came too fast to be seen"),
                            (self._count - CAPACITY, "later collectives are left out")):
            if count > 0:
                self._note({"name": f"{count} {what}", "ph": "i", "s": "g", "tid": 0, "ts": time.time_ns() / 1000})
        self._write()
        self._file.close()
        self._forget_exit()

    def _note(self, event: dict[str, Any]) -> None:
        self._events.append({"pid": self._rank, **event})

    def _write_now_and_then(self) -> None:
        written = time.monotonic()
        while not self._over.wait(min(COLLECT_EVERY, FLUSH_EVERY)):
            self._collect()
            if time.monotonic() - written >= FLUSH_EVERY:
                self._write()
                written = time.monotonic()

    def _collect(self) -> None:
        """Adds the collectives that have been recorded since the last call."""
        for track, rows in self._reader.new().items():
            for content, began, ended in self._store.runs(track, rows):
                self.add(content.label, content.collective, int(1e9 * began), int(1e9 * ended), content.bytes)

    def _write(self) -> None:
        """Appends the events before the bracket that ends the file, so that it is valid JSON after every write."""
        with self._lock:
            events, self._events = self._events, []
        if not events:
            return
        text = ",\n".join(json.dumps(event) for event in events).encode()
        self._file.seek(-len(_END), os.SEEK_END)
        self._file.write((b"\n" if self._is_empty else b",\n") + text + _END)
        self._is_empty = False

"""Commits on disk: rank 0 writes the last two commits of each state to files, and removes them at the end."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvkeras.data.accounts import Positions
from hvkeras.elastic.encoding import decode, encode
from hvkeras.errors import CommitError, HvkerasError, MachineError, PeerError, UsageError, explain
from hvkeras.host.console import format_ranks, prints_at, say
from hvkeras.host.files import (
    commit_path,
    create_private,
    read_private,
    remove_commits,
    replace_durably,
    room_left,
    why_not_private,
)
from hvkeras.host.forks import at_exit
from hvkeras.job.session import Session, current_session

SHARE = 0.02  # maximum fraction of time for writing commits during training
LOOK_EVERY = 0.1  # seconds between two checks whether the main thread has ended


@functools.cache
def _write_lock(path: Path) -> threading.Lock:  # noqa: ARG001 - one for each path
    return threading.Lock()


@dataclass(frozen=True)
class Commit:
    """Commit that was read from disk.

    Attributes:
        saved: Return value of `State.saved`.
        over: Whether the training function had returned None.
        note: Why the newer commit was not used; "" if this is the last commit.
        ranks: Number of ranks of the job; 0 if unknown.
        positions: Positions in the data of `hvd.shard`.
    """

    saved: Any
    over: bool
    note: str = ""
    ranks: int = 0
    positions: Positions = field(default_factory=dict)


class CommitFile:
    """Files with the last two commits of a state.

    Writes are atomic: after a crash or a power loss, the last commit or the previous one is intact. The previous one is
    retained in case the last one is corrupted on disk.

    Args:
        folder: Folder of the commits, which only the user may write to; created if missing.
        number: Index of the state in the script.
        ranks: Current number of ranks.
    """

    def __init__(self, folder: Path, number: int, ranks: int = 0) -> None:
        self._ranks = ranks
        self._path = commit_path(folder, number)
        self._previous = self._path.with_suffix(".former")
        self._write_lock = _write_lock(self._path)
        self._changed = threading.Condition()
        self._not_before = 0.0  # time.monotonic() at which the next commit may be written
        self._write_now = False
        self._writer: threading.Thread | None = None
        self._next: tuple[Any, Positions] | None = None
        self._error: Exception | None = None

    @property
    def is_idle(self) -> bool:
        """Return whether `write_soon` would write immediately."""
        return self._writer is None and time.monotonic() >= self._not_before

    def write_soon(self, saved: Any, positions: Positions) -> None:
        """Replace the last commit in a background thread; a newer commit supersedes one that is still pending.

        The thread is busy for at most a fraction `SHARE` of the time, as it slows down training.

        Args:
            saved: Return value of `State.saved`.
            positions: Positions in the data.

        Raises:
            HvkerasError: An earlier commit could not be written, for the reasons of `write`.
        """
        self._raise_error()
        with self._changed:
            self._next = saved, positions
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_all, name="hvkeras-commits")
                self._writer.start()

    def finish(self) -> None:
        """Wait until all commits are written.

        Raises:
            HvkerasError: A commit could not be written, for the reasons of `write`.
        """
        with self._changed:
            writer, self._write_now = self._writer, True
            self._changed.notify_all()
        if writer is not None:
            writer.join()
        self._write_now = False
        self._raise_error()

    def abandon(self) -> None:
        """Discard the pending commit, because another object takes over the file."""
        with self._changed:
            self._next = None
            self._changed.notify_all()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write_all(self) -> None:
        while True:
            with self._changed:
                while self._next is not None and not self._write_now and threading.main_thread().is_alive() and (
                        remaining := self._not_before - time.monotonic()) > 0:
                    self._changed.wait(min(remaining, LOOK_EVERY))
                if self._next is None:
                    self._writer = None
                    return
                (saved, positions), self._next = self._next, None
            began = time.monotonic()
            try:
                self._write(saved, False, positions)
            except HvkerasError as error:
                self._error = error
            self._not_before = time.monotonic() + (time.monotonic() - began) / SHARE

    def write(self, saved: Any, over: bool = False, positions: Positions | None = None) -> None:
        """Replace the last commit, which becomes the previous one.

        Args:
            saved: Return value of `State.saved`.
            over: Whether the training function has returned None.
            positions: Positions in the data.

        Raises:
            UsageError: The state cannot be pickled.
            CommitError: Other users may write to the folder.
            MachineError: The file cannot be written.
        """
        self.finish()
        self._write(saved, over, positions or {})

    def _write(self, saved: Any, over: bool, positions: Positions) -> None:
        with self._write_lock:
            self._write_locked(saved, over, positions)

    def _write_locked(self, saved: Any, over: bool, positions: Positions) -> None:
        self._require_private_folder()
        unfinished = self._path.with_suffix(".unfinished")
        written = 0
        try:
            with create_private(unfinished) as file:
                for piece in encode({"saved": saved, "over": over, "ranks": self._ranks,
                                     "positions": positions}):
                    file.write(piece)
                    written += len(piece)
            replace_durably(unfinished, self._path, self._previous)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise MachineError(explain(f"Commits must be writable ({error.strerror})", "set HVKERAS_ELASTIC_DIR to a"
                                       " folder with free space", path=str(self._path), written=written,
                                       room_left=room_left(self._path))) from error
        except Exception as error:  # pickling may raise anything
            unfinished.unlink(missing_ok=True)
            raise UsageError(explain(f"What a state commits must be picklable ({type(error).__name__}: {error})",
                                     "keep numbers, arrays and plain objects in the state")) from error

    def read(self) -> Commit | None:
        """Return the last intact commit; None if nothing was committed.

        Raises:
            CommitError: No commit is intact, or other users may have written them.
        """
        self._require_private_folder()
        damaged: list[str] = []
        for path in (self._path, self._previous):
            try:
                found = decode(read_private(path))
                if damaged:  # otherwise the next commit would make the damaged file the previous one
                    self._path.unlink()
                return Commit(found["saved"], found["over"], "; ".join(damaged), found.get("ranks", 0),
                              found.get("positions", {}))
            except FileNotFoundError:
                continue
            except PermissionError as error:
                raise CommitError(explain("A commit must be readable, and writable for nobody else"
                                          f" ({error})", "remove it to start over", path=str(path))) from error
            except Exception as error:  # noqa: BLE001 - unpickling may raise anything
                damaged.append(f"{path.name} is damaged ({type(error).__name__}: {error})")
        if damaged:
            raise CommitError(explain(f"A commit must be readable, but {' and '.join(damaged)}", "remove it to start"
                                      " over", path=str(self._path)))
        return None

    def _require_private_folder(self) -> None:
        folder = self._path.parent
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            reason = why_not_private(folder.stat())
        except OSError as error:
            raise MachineError(explain(f"The folder of commits must exist, or be creatable ({error.strerror})", "set"
                                       " HVKERAS_ELASTIC_DIR to a folder of yours", folder=str(folder))) from error
        if reason:
            raise CommitError(explain(f"Only you must be able to write to the folder of commits, but {reason}",
                                      f"chmod go-w {folder}, or set HVKERAS_ELASTIC_DIR to a folder of yours",
                                      folder=str(folder)))


def commit_file(number: int) -> CommitFile | None:
    """Return the commit file of rank 0, or None if commits are not written to disk.

    Args:
        number: Index of the elastic function.
    """
    session = current_session()
    if session.topology.rank:
        return None
    if session.settings.elastic_dir:
        return CommitFile(Path(session.settings.elastic_dir).absolute(), number, session.topology.size)
    if session.topology.size > 1 and number == 0:
        log_on_rank_0("holds commits in memory only; they are lost if a rank is lost. HINT: start the script with"
                      " hvkeras run --reset-limit 3")
    return None


def remove_commits_at_exit(session: Session) -> None:
    """Register an exit handler that removes the commits once all ranks have ended successfully.

    A failed job may be restarted from its commits. Under `hvkeras run`, the launcher removes them if it can.
    """
    at_exit(_remove_commits, session, Path(session.settings.elastic_dir).absolute())


def log_on_rank_0(text: str) -> None:
    """Print a message about elastic training, on rank 0."""
    session = current_session()
    if session.topology.rank == 0 and prints_at(session.settings, "WARNING"):
        say(f"hvd.elastic.run {text}")


def _remove_commits(session: Session, folder: Path) -> None:
    if session.control is None:
        if not hasattr(sys, "last_type"):  # Python sets it when it prints a traceback
            remove_commits(folder)
        return
    control, hooks = session.control, session.hooks
    if control.cause is not None or control.detached or hooks is None or hooks.exits_with_failure:
        return
    warned = False

    def on_missing(ranks: list[int], waited: float) -> None:
        nonlocal warned
        if waited > session.settings.stall_warning > 0 and not warned and session.topology.rank == 0:
            warned = True
            say(f"rank 0 waits for {format_ranks(ranks)} to end before it removes the commits of hvd.elastic")

    try:
        control.gather("the end of an elastic job", None, session.settings.stall_shutdown or float("inf"), on_missing)
    except PeerError:
        return
    if session.topology.rank == 0:
        remove_commits(folder)

"""Commits that outlive the process: rank 0 writes the last two of each state to files, and removes them at the end."""

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

SHARE = 0.02  # of the time, at most, for writing commits while training goes on
LOOK_EVERY = 0.1  # seconds between two looks whether the script is over


@functools.cache
def _writing(path: Path) -> threading.Lock:  # noqa: ARG001 - one for each path
    """Returns the lock that is held while a file is written."""
    return threading.Lock()


@dataclass(frozen=True)
class Commit:
    """A commit that was read.

    Attributes:
        saved: What the state had saved.
        over: Whether the training function had finished and returned None.
        note: Describes what is wrong with the commit after this one; "" if this is the last commit.
        ranks: How many ranks trained; 0 if that is not known.
        positions: The positions in the data that `hvd.shard` has assigned.
    """

    saved: Any
    over: bool
    note: str = ""
    ranks: int = 0
    positions: Positions = field(default_factory=dict)


class CommitFile:
    """The last two commits of a state.

    A process that is killed at any time leaves the last commit or the one before it, and so does a power loss. The one
    before is kept in case the disk corrupts the last commit.

    Args:
        folder: The folder of the commits, which nobody else may write to; created if missing.
        number: The index of the state among the states of the script.
        ranks: How many ranks train now.
    """

    def __init__(self, folder: Path, number: int, ranks: int = 0) -> None:
        self._ranks = ranks
        self._path = commit_path(folder, number)
        self._former = self._path.with_suffix(".former")
        self._writing = _writing(self._path)
        self._changed = threading.Condition()
        self._not_before = 0.0  # when the next one may be written
        self._write_now = False
        self._writer: threading.Thread | None = None
        self._next: tuple[Any, Positions] | None = None
        self._error: Exception | None = None

    @property
    def is_idle(self) -> bool:
        """Whether `write_soon` would write at once."""
        return self._writer is None and time.monotonic() >= self._not_before

    def write_soon(self, saved: Any, positions: Positions) -> None:
        """Replaces the last commit as `write` does, but in a thread; of commits that wait for it, it writes the newest.

        The thread takes no more than `SHARE` of the time, as it takes it from the training.

        Args:
            saved: What the state has saved.
            positions: The positions in the data.

        Raises:
            HvkerasError: An earlier commit could not be written; as for `write`.
        """
        self._raise_error()
        with self._changed:
            self._next = saved, positions
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_all, name="hvkeras-commits")
                self._writer.start()

    def finish(self) -> None:
        """Waits until all commits are written.

        Raises:
            HvkerasError: One could not be written; as for `write`.
        """
        with self._changed:
            writer, self._write_now = self._writer, True
            self._changed.notify_all()
        if writer is not None:
            writer.join()
        self._write_now = False
        self._raise_error()

    def abandon(self) -> None:
        """Gives up what is not being written yet, as this rank goes on with another object for the same file."""
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
                        left := self._not_before - time.monotonic()) > 0:
                    self._changed.wait(min(left, LOOK_EVERY))
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
        """Replaces the last commit, and keeps the replaced one as the former commit.

        Args:
            saved: What the state has saved.
            over: Whether the training function has finished and returned None.
            positions: The positions in the data.

        Raises:
            UsageError: It cannot be pickled, or others may write to the folder.
            MachineError: The file cannot be written.
        """
        self.finish()
        self._write(saved, over, positions or {})

    def _write(self, saved: Any, over: bool, positions: Positions) -> None:
        with self._writing:
            self._write_alone(saved, over, positions)

    def _write_alone(self, saved: Any, over: bool, positions: Positions) -> None:
        self._require_private_folder()
        unfinished = self._path.with_suffix(".unfinished")
        written = 0
        try:
            with create_private(unfinished) as file:
                for piece in encode({"saved": saved, "over": over, "ranks": self._ranks,
                                     "positions": positions}):
                    file.write(piece)
                    written += len(piece)
            replace_durably(unfinished, self._path, self._former)
        except OSError as error:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise MachineError(explain(f"Commits must be writable ({error.strerror})", "set HVKERAS_ELASTIC_DIR to a"
                                       " folder with free space", path=str(self._path), written=written,
                                       room_left=room_left(self._path))) from error
        except Exception as error:  # whatever an object's own pickling raises
            unfinished.unlink(missing_ok=True)
            raise UsageError(explain(f"What a state commits must be picklable ({type(error).__name__}: {error})",
                                     "keep numbers, arrays and plain objects in the state")) from error

    def read(self) -> Commit | None:
        """Returns the last intact commit; None if nothing was committed.

        Raises:
            CommitError: There are commits but none is intact, or others may have written them.
        """
        self._require_private_folder()
        damaged: list[str] = []
        for path in (self._path, self._former):
            try:
                found = decode(read_private(path))
                if damaged:  # otherwise the next commit would replace this one with it
                    self._path.unlink()
                return Commit(found["saved"], found["over"], "; ".join(damaged), found.get("ranks", 0),
                              found.get("positions", {}))
            except FileNotFoundError:
                continue
            except PermissionError as error:
                raise CommitError(explain("A commit must be readable, and writable for nobody else"
                                          f" ({error})", "remove it to start over", path=str(path))) from error
            except Exception as error:  # noqa: BLE001 - whatever reading or unpickling raises
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
    """Returns the file in which rank 0 keeps its commits for a restart of the job, if any.

    Args:
        number: The index of the elastic function.
    """
    session = current_session()
    if session.topology.rank:
        return None
    if session.settings.elastic_dir:
        return CommitFile(Path(session.settings.elastic_dir).absolute(), number, session.topology.size)
    if session.topology.size > 1 and number == 0:
        say_on_rank_0("keeps commits in memory only, where they are lost if a rank is lost. HINT: start the script"
                      " with hvkeras run --reset-limit 3")
    return None


def remove_commits_at_exit(session: Session) -> None:
    """Makes the ranks remove the commits once all of them have ended successfully.

    A failed job may be restarted from them. Under `hvkeras run`, the launcher removes them if it can.
    """
    at_exit(_remove_commits, session, Path(session.settings.elastic_dir).absolute())


def say_on_rank_0(text: str) -> None:
    """Prints a line about elastic training, on rank 0."""
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
            say("rank 0 removes the commits of hvd.elastic when all ranks have ended, and waits for"
                f" {format_ranks(ranks)}")

    try:
        control.gather("the end of an elastic job", None, session.settings.stall_shutdown or float("inf"), on_missing)
    except PeerError:
        return
    if session.topology.rank == 0:
        remove_commits(folder)

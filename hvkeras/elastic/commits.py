"""Commits that outlive the process: one file for each state, written by rank 0."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from hvkeras.errors import MachineError, UsageError, explain


class CommitFile:
    """The last commit of a state.

    The file is replaced as a whole, so that whoever is killed leaves the last commit or the one before it.

    Args:
        folder: Where it is; made when the first commit is written.
        number: Which of a script's states it is of.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self._path = folder / f"commit-{number}.pickle"

    def write(self, saved: Any) -> None:
        """Replaces the commit.

        Args:
            saved: What the state has saved.

        Raises:
            UsageError: It cannot be pickled.
            MachineError: The file cannot be written.
        """
        try:
            data = pickle.dumps(saved, protocol=5)
        except Exception as error:  # whatever an object's own pickling raises
            raise UsageError(explain(f"What a state commits must be picklable ({type(error).__name__}: {error})",
                                     "keep numbers, arrays and plain objects in the state")) from error
        unfinished = self._path.with_suffix(".unfinished")
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            unfinished.write_bytes(data)
            unfinished.replace(self._path)
        except OSError as error:
            raise MachineError(explain(f"Commits must be writable ({error.strerror})", "set HVKERAS_ELASTIC_DIR to a"
                                       " folder with room", path=str(self._path), size=len(data))) from error

    def read(self) -> Any:
        """Returns what was committed, or None.

        Raises:
            UsageError: The file is no commit.
        """
        try:
            return pickle.loads(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except Exception as error:  # whatever reading or unpickling raises
            raise UsageError(explain(f"A commit must be readable ({type(error).__name__}: {error})",
                                     "remove it to begin anew", path=str(self._path))) from error

    def remove(self) -> None:
        """Forgets the commit: training has come to its end."""
        self._path.unlink(missing_ok=True)

"""Reads launchers' variables, and refuses what cannot be: text for a number, a rank beyond the size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hvkeras.errors import UsageError, explain
from hvkeras.launch_environments.launch import Launch, Rendezvous


@dataclass(frozen=True)
class Names:
    """What one launcher calls the four numbers.

    Attributes:
        rank: The variable of the rank.
        size: The variable of the number of ranks.
        local_rank: The variable of the rank within the host; "" where the launcher has none.
        local_size: The variable of the number of ranks on the host; "" where the launcher has none.
    """

    rank: str
    size: str
    local_rank: str = ""
    local_size: str = ""

    def announced(self, environ: Mapping[str, str]) -> bool:
        """Says whether a launcher has announced rank and size.

        Raises:
            UsageError: Only one of the two is set, so that taking this for a job of one would be wrong.
        """
        there = [bool(environ.get(name, "").strip()) for name in (self.rank, self.size)]
        if any(there) and not all(there):
            have, lack = (self.rank, self.size) if there[0] else (self.size, self.rank)
            raise UsageError(explain(f"{self.rank} and {self.size} must be set together, but {lack} is not",
                                     f"let the launcher set both, or unset {have} to run a single process",
                                     **{have: environ[have]}))
        return all(there)


def number(environ: Mapping[str, str], name: str, launcher: str, least: int = 0) -> int:
    """Reads one variable as a whole number.

    Args:
        environ: The environment.
        name: The variable.
        launcher: Who set it, for the message.
        least: The smallest sensible value.

    Raises:
        UsageError: It is no number, or too small.
    """
    text = environ[name].strip()
    if text.isascii() and text.isdigit() and int(text) >= least:
        return int(text)
    raise UsageError(explain(f"{name} must be a whole number of at least {least}, as {launcher} sets it",
                             f"let the launcher set {name}, or unset it to run a single process",
                             **{name: environ[name]}))


def launch_from(launcher: str, environ: Mapping[str, str], names: Names, rendezvous: Rendezvous,
                mpi: bool = False) -> Launch:
    """Builds the `Launch` of a launcher that announces numbers.

    Args:
        launcher: The launcher's printed name.
        environ: The environment, in which `names.announced` holds.
        names: What the launcher calls the numbers.
        rendezvous: Where the ranks meet.
        mpi: Whether it is an MPI launcher.

    Raises:
        UsageError: A number cannot be read, or a rank is not below its size.
    """
    rank, size = number(environ, names.rank, launcher), number(environ, names.size, launcher, least=1)
    _check_below(rank, size, names.rank, names.size, launcher)
    local_rank = number(environ, names.local_rank, launcher) if environ.get(names.local_rank) else None
    local_size = number(environ, names.local_size, launcher, least=1) if environ.get(names.local_size) else None
    if local_rank is not None and local_size is not None:
        _check_below(local_rank, local_size, names.local_rank, names.local_size, launcher)
    return Launch(launcher, rank, size, rendezvous, local_rank, local_size, mpi=mpi)


def _check_below(rank: int, size: int, rank_name: str, size_name: str, launcher: str) -> None:
    if rank >= size:
        raise UsageError(explain(f"{rank_name} must be below {size_name}, as {launcher} sets them",
                                 "let the launcher set both; do not export one of them by hand",
                                 **{rank_name: rank, size_name: size}))

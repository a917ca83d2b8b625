"""Starts the ranks that try a part of the contract, and collects what each of them found."""

from __future__ import annotations

import enum
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvkeras.backends import backend_class
from hvkeras.control.launch_environments import Launch, Rendezvous
from hvkeras.errors import UsageError, explain

_START = 120.0  # seconds for the start and the end of a job
_LAUNCHES = {"hvkeras": ("hvkeras run", Rendezvous("run"), False),
             "mpirun": ("mpirun (Open MPI)", Rendezvous("mpi"), True)}
# Open MPI refuses root, and more ranks than cores, unless it is told.
_ENVIRONMENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "TF_CPP_MIN_LOG_LEVEL": "2",
                "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_hwloc_base_binding_policy": "none",
                "OMPI_MCA_mpi_yield_when_idle": "1", "PYTHONFAULTHANDLER": "1"}


class Verdict(enum.Enum):
    """What a rank says of a clause."""

    HOLDS = "holds"
    FAILS = "fails"
    NOT_TRIED = "not tried"
    HANGS = "hangs"


@dataclass(frozen=True)
class ClauseResult:
    """What a rank found out about a clause.

    Attributes:
        verdict: What it says of the clause.
        text: Why, unless the clause holds.
    """

    verdict: Verdict
    text: str = ""


@dataclass(frozen=True)
class ContractJob:
    """What a job found.

    Attributes:
        command: Its command line.
        code: Its exit code; None if it was ended after its deadline.
        output: What it printed.
        log: The file with the same.
        found: For each rank, what it found out about each clause that it came to.
    """

    command: str
    code: int | None
    output: str
    log: Path
    found: list[Mapping[str, ClauseResult]]


def launcher_for(backend: str, ranks: int, hosts: str = "") -> str:
    """The first launcher to which the backend has no objection.

    Args:
        backend: The backend's name.
        ranks: The number of ranks.
        hosts: The hosts that they run on; "" for this one alone.

    Raises:
        UsageError: It objects to all.
    """
    objections = {}
    for name, (launcher, rendezvous, mpi) in _LAUNCHES.items():
        objection = backend_class(backend).objection(Launch(launcher, 0, ranks, rendezvous, mpi=mpi),
                                                     bool(hosts))
        if not objection:
            return name
        objections[name] = objection
    raise UsageError(explain("A backend must serve hvkeras run or mpirun to be tested", **objections))


def run(backend: str, part: str, ranks: int, launcher: str, deadline: float, folder: Path,
        hosts: str = "") -> ContractJob:
    """Runs a part of the contract.

    Args:
        backend: The backend's name.
        part: A part of `hvkeras.backends.contract.rank`.
        ranks: The number of ranks.
        launcher: `hvkeras` or `mpirun`.
        deadline: Seconds for each clause.
        folder: Where the ranks write what they found; all hosts see it at this path.
        hosts: The hosts and their slots, as launchers take them; "" for this one alone.
    """
    start = {"hvkeras": [_beside_python("hvkeras"), "run"], "mpirun": [_beside_python("mpirun")]}[launcher]
    placement = ["-np", str(ranks), *(["-H", hosts] if hosts else [])]
    command = [*start, *placement, sys.executable, "-m", "hvkeras.backends.contract.rank", "--backend", backend,
               "--part", part, "--results", str(folder), "--deadline", str(deadline)]
    with (folder / "output").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | _ENVIRONMENT,
                                   cwd=folder)
        try:
            code: int | None = process.wait(timeout=_START + 10 * deadline)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(timeout=_START)
            code = None
    found: list[Mapping[str, ClauseResult]] = []
    for rank in range(ranks):
        path = folder / f"rank.{rank}"
        lines = path.read_text().splitlines() if path.exists() else []
        found.append({entry["clause"]: ClauseResult(Verdict(entry["verdict"]), entry["text"])
                      for entry in map(json.loads, lines)})
    return ContractJob(" ".join(command), code, (folder / "output").read_text(), folder / "output", found)


def _beside_python(command: str) -> str:
    """The path of a command, first in the folder of this Python, whose environment need not be activated."""
    path = Path(sys.executable).parent / command
    return str(path) if path.is_file() else command

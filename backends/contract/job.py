"""Start the ranks that test a part of the contract, and collect their results."""

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
# Let Open MPI run as root, and with more ranks than cores.
_ENVIRONMENT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "TF_CPP_MIN_LOG_LEVEL": "2",
                "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_hwloc_base_binding_policy": "none",
                "OMPI_MCA_mpi_yield_when_idle": "1", "PYTHONFAULTHANDLER": "1"}


class Verdict(enum.Enum):
    """Outcome of a clause on one rank."""

    HOLDS = "holds"
    FAILS = "fails"
    NOT_TRIED = "not tried"
    HANGS = "hangs"


@dataclass(frozen=True)
class ClauseResult:
    """Result of a clause on one rank; `text` is the reason, unless the clause holds."""

    verdict: Verdict
    text: str = ""


@dataclass(frozen=True)
class ContractJob:
    """Results of a job.

    Attributes:
        code: Its exit code; None if it was terminated at its deadline.
        found: For each rank, the result of each clause that it reached.
    """

    command: str
    code: int | None
    output: str
    log: Path
    found: list[Mapping[str, ClauseResult]]


def launcher_for(backend: str, ranks: int, hosts: str = "") -> str:
    """Return the first launcher that the backend supports.

    Args:
        hosts: The hosts of the ranks; "" for this host only.

    Raises:
        UsageError: It supports none of them.
    """
    objections = {}
    for name, (launcher, rendezvous, mpi) in _LAUNCHES.items():
        objection = backend_class(backend).objection(Launch(launcher, 0, ranks, rendezvous, mpi=mpi),
                                                     bool(hosts))
        if not objection:
            return name
        objections[name] = objection
    raise UsageError(explain("A backend must support hvkeras run or mpirun to be tested", **objections))


def run(backend: str, part: str, ranks: int, launcher: str, deadline: float, folder: Path,
        hosts: str = "") -> ContractJob:
    """Run a part of the contract.

    Args:
        backend: The backend's name.
        part: One of `hvkeras.backends.contract.rank.PARTS`.
        ranks: The number of ranks.
        launcher: `hvkeras` or `mpirun`.
        deadline: Timeout of each clause, in seconds.
        folder: Where the ranks write their results; shared by all hosts.
        hosts: The hosts and their slots, in the launcher's syntax; "" for this host only.
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
    # First in the folder of this Python, whose virtual environment may not be activated.
    path = Path(sys.executable).parent / command
    return str(path) if path.is_file() else command

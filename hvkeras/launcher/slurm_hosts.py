"""The hosts of a Slurm allocation, for `hvkeras run` in a batch script or in the shell of `salloc`."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping

from hvkeras.errors import MachineError, explain
from hvkeras.launcher.placement import THIS_HOST

NODES = "SLURM_JOB_NODELIST"
THIS_NODE = "SLURMD_NODENAME"
_TASKS = "SLURM_TASKS_PER_NODE"
_DEADLINE = 10.0  # seconds for scontrol
# The agent's step shares the job's resources with other steps, and leaves binding to cores to the ranks.
SRUN = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--cpu-bind=none", "--mem=0",
        "--unbuffered", "--quiet")


def allocated_hosts(environ: Mapping[str, str], count: int | None) -> str | None:
    """Reads the hosts of the allocation that this process is in.

    Args:
        environ: The environment.
        count: The number of ranks, if it was given: where it is more than the tasks of the allocation, each node gets
            the same share.

    Returns:
        The hosts as `-H` takes them; None where there is no allocation, or where its only node is this one and the
        number of ranks was given.

    Raises:
        MachineError: Slurm's own commands do not work.
    """
    if not environ.get(NODES):
        return None
    names = [THIS_HOST if name == environ.get(THIS_NODE) else name for name in _expanded(environ[NODES])]
    if names == [THIS_HOST] and count is not None:
        return None
    tasks = _tasks(environ.get(_TASKS, ""), len(names))
    if count is not None and count > sum(tasks):
        tasks = [-(-count // len(names))] * len(names)
    return ",".join(f"{name}:{number}" for name, number in zip(names, tasks, strict=True))


def _expanded(nodes: str) -> list[str]:
    """Expands a list such as `node[1-3,7]`."""
    try:
        done = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True,
                              timeout=_DEADLINE, check=False)
        names, why = done.stdout.split(), done.stderr.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        names, why = [], str(error)
    if not names:
        raise MachineError(explain(f"Slurm's scontrol must expand the list of the job's nodes ({why})",
                                   "name the hosts with -H, or unset SLURM_JOB_NODELIST to run on this host alone",
                                   **{NODES: nodes}))
    return names


def _tasks(text: str, nodes: int) -> list[int]:
    """Reads the tasks of each node, such as `2(x3),1`; one each where Slurm does not say."""
    found = [int(number) for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]
    return found if len(found) == nodes else [1] * nodes

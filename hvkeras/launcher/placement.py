"""Placement of ranks on hosts, according to `-np`, `-H`, `-hostfile` or the allocation of a Slurm job."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NewType

from hvkeras.errors import MachineError, UsageError, explain
from hvkeras.host.network import is_local

WorkerId = NewType("WorkerId", int)  # the number of a worker, a process, for its life: in the order of starts
Rank = NewType("Rank", int)  # the index of a worker among those that train together at present

THIS_HOST = "localhost"
RESOLVING = 32  # names that are resolved at a time, as a name server may be slow
_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:]+\]|[A-Za-z0-9_][A-Za-z0-9._-]*)(?::(?P<slots>\d+))?")
_LINE = re.compile(r"(?P<name>\S+?)(?::(?P<colon>\d+))?(?:\s+slots\s*=\s*(?P<slots>\d+))?")


@dataclass(frozen=True)
class HostRanks:
    """The ranks of one host.

    Attributes:
        name: The host, as the user wrote it; `localhost` for this machine, whatever name was given.
        ranks: Their numbers, which are consecutive.
        local: Whether it is this machine, which needs no ssh.
    """

    name: str
    ranks: tuple[int, ...]
    local: bool


def place_ranks(count: int | None, hosts: str | None, hostfile: str | None) -> list[HostRanks]:
    """Distributes ranks over hosts, filling each host's slots in the given order.

    Example:
        >>> place_ranks(3, "node1:2,node2:2", None)[1].ranks
        (2,)

    Args:
        count: The number of ranks, or None for as many as there are slots.
        hosts: `name:slots,name:slots`, or None.
        hostfile: A file with `name slots=n` or `name:n` on each line, or None.

    Returns:
        The hosts that have ranks, in order.

    Raises:
        UsageError: The arguments cannot be read, contradict each other, or request too many ranks.
    """
    if hosts and hostfile:
        raise UsageError(explain("Hosts must come from one place_ranks", "leave out either -H or -hostfile",
                                 hosts=hosts,
                                 hostfile=hostfile))
    if count is not None and count < 1:
        raise UsageError(explain("The number of processes must be at least 1", "-np 2", np=count))
    empty = next((flag for flag, given in (("-H", hosts), ("-hostfile", hostfile)) if given is not None
                  and not given.strip()), None)
    if empty:
        raise UsageError(explain(f"{empty} must be followed by at least one host", "check the variable that it came"
                                 f" from, or leave {empty} out to use this host alone"))
    if not hosts and not hostfile:
        if count is None:
            raise UsageError(explain("The number of processes must be given", "hvkeras run -np 2 python train.py"))
        return [HostRanks(THIS_HOST, tuple(range(count)), local=True)]
    slots = slots_in(hosts, hostfile)
    available = sum(slots.values())
    if count is None:
        count = available
    if count > available:
        raise UsageError(explain(f"There must be a slot for every process, and {len(slots)} host"
                                 f"{'s have' if len(slots) > 1 else ' has'} {available}",
                                 "raise the slots (-H node1:4,node2:4), or lower -np", np=count))
    return fill(slots, count)


def slots_in(hosts: str | None, hostfile: str | None) -> dict[str, int]:
    """Returns the slots of each host of `-H` or `-hostfile`, of which one is given.

    Raises:
        UsageError: They cannot be read.
    """
    return _merged(_from_hosts(hosts) if hosts else _from_file(Path(hostfile or "")))


def slots_in_lines(text: str, default: int) -> dict[str, int]:
    """Returns the slots of each host that a host discovery script has printed: a line `host` or `host:slots` for each.

    Args:
        text: The script's output.
        default: The slots of a host without a number.

    Raises:
        UsageError: A line is no host.
    """
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        match = _HOST.fullmatch(line)
        if match is None:
            raise UsageError(explain("Each line of a host discovery script must be a host, or a host with its slots",
                                     "node1:2", line=line))
        found.append((match["name"].strip("[]"), int(match["slots"] or default)))
    return {name: number for name, number in _merged(found).items() if number}


def fill(slots: Mapping[str, int], count: int) -> list[HostRanks]:
    """Distributes ranks over hosts, filling each host's slots in order.

    Args:
        slots: The slots of each host; at least `count` in all.
        count: The number of ranks.
    """
    placed, first = [], 0
    for name, number in slots.items():
        ranks = tuple(range(first, min(first + number, count)))
        first += number
        if ranks:
            placed.append(HostRanks(name, ranks, local=name == THIS_HOST))
    return placed


def _from_hosts(text: str) -> list[tuple[str, int]]:
    found = []
    for entry in text.split(","):
        match = _HOST.fullmatch(entry.strip())
        if match is None or match["slots"] == "0":
            raise UsageError(explain("Hosts must be written as name:slots, separated by commas",
                                     "-H node1:2,node2:2", hosts=text, entry=entry))
        found.append((match["name"].strip("[]"), int(match["slots"] or 1)))
    return found


def _from_file(path: Path) -> list[tuple[str, int]]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(explain(f"The hostfile must be readable ({getattr(error, 'strerror', None) or 'not text'})",
                                 "check the path after -hostfile", hostfile=str(path))) from None
    found = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _LINE.fullmatch(text)
        slots = (match["slots"] or match["colon"] or "1") if match else "0"
        if match is None or int(slots) < 1 or _HOST.fullmatch(match["name"]) is None:
            raise UsageError(explain("A line of the hostfile must be a host with its slots", "node1 slots=2",
                                     hostfile=str(path), line=number, text=line))
        found.append((match["name"].strip("[]"), int(slots)))
    if not found:
        raise UsageError(explain("The hostfile must name at least one host", "write a line like: node1 slots=2",
                                 hostfile=str(path)))
    return found


def _merged(entries: list[tuple[str, int]]) -> dict[str, int]:
    """Adds up the slots of hosts that are listed more than once; all names of this machine count as one host."""
    slots: dict[str, int] = {}
    names = list(dict.fromkeys(name for name, _ in entries))
    with ThreadPoolExecutor(RESOLVING, "hvkeras-resolve") as pool:
        here = dict(zip(names, pool.map(is_local, names), strict=True))
    for name, number in entries:
        key = THIS_HOST if here[name] else name
        slots[key] = slots.get(key, 0) + number
    return slots


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

"""Placement of ranks on hosts: from `-np`, `-H`, `-hostfile`, or the allocation of a Slurm job."""

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

WorkerId = NewType("WorkerId", int)  # number of a worker process, in the order of starts; never changes
Rank = NewType("Rank", int)  # index of a worker among those that currently train together

THIS_HOST = "localhost"
MAX_CONCURRENT_LOOKUPS = 32  # host names resolved concurrently, as a name server may be slow
_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:]+\]|[A-Za-z0-9_][A-Za-z0-9._-]*)(?::(?P<slots>\d+))?")
_LINE = re.compile(r"(?P<name>\S+?)(?::(?P<colon>\d+))?(?:\s+slots\s*=\s*(?P<slots>\d+))?")


@dataclass(frozen=True)
class HostRanks:
    """Ranks of one host.

    Attributes:
        name: The host, as the user wrote it; `localhost` for all names of this machine.
        local: True for this machine, which needs no ssh.
    """

    name: str
    ranks: tuple[int, ...]
    local: bool


def place_ranks(count: int | None, hosts: str | None, hostfile: str | None) -> list[HostRanks]:
    """Distribute ranks over hosts, filling the slots of each host in order.

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
        UsageError: The arguments are malformed, contradict each other, or request too many ranks.
    """
    if hosts and hostfile:
        raise UsageError(explain("Hosts must come from one source", "leave out either -H or -hostfile", hosts=hosts,
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
    """Return the slots of each host of `-H`, or else of `-hostfile`.

    Raises:
        UsageError: The hosts are malformed, or the file cannot be read.
    """
    return _merge(_parse_hosts(hosts) if hosts else _parse_hostfile(Path(hostfile or "")))


def slots_in_lines(text: str, default: int) -> dict[str, int]:
    """Return the slots of each host in a host discovery script's output: lines of `host` or `host:slots`.

    Args:
        default: The slots of a host without a number.

    Raises:
        UsageError: A line is malformed.
    """
    entries = []
    for line in filter(None, map(str.strip, text.splitlines())):
        match = _HOST.fullmatch(line)
        if match is None:
            raise UsageError(explain("Each line of a host discovery script must be a host, or a host with its slots",
                                     "node1:2", line=line))
        entries.append((match["name"].strip("[]"), int(match["slots"] or default)))
    return {name: number for name, number in _merge(entries).items() if number}


def fill(slots: Mapping[str, int], count: int) -> list[HostRanks]:
    """Distribute ranks over hosts, filling the slots of each host in order.

    Args:
        slots: The slots of each host; at least `count` in all.
    """
    placed, first = [], 0
    for name, number in slots.items():
        ranks = tuple(range(first, min(first + number, count)))
        first += number
        if ranks:
            placed.append(HostRanks(name, ranks, local=name == THIS_HOST))
    return placed


def _parse_hosts(text: str) -> list[tuple[str, int]]:
    entries = []
    for entry in text.split(","):
        match = _HOST.fullmatch(entry.strip())
        if match is None or match["slots"] == "0":
            raise UsageError(explain("Hosts must be written as name:slots, separated by commas",
                                     "-H node1:2,node2:2", hosts=text, entry=entry))
        entries.append((match["name"].strip("[]"), int(match["slots"] or 1)))
    return entries


def _parse_hostfile(path: Path) -> list[tuple[str, int]]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(explain(f"The hostfile must be readable ({getattr(error, 'strerror', None) or 'not text'})",
                                 "check the path after -hostfile", hostfile=str(path))) from None
    entries = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = _LINE.fullmatch(text)
        slots = (match["slots"] or match["colon"] or "1") if match else "0"
        if match is None or int(slots) < 1 or _HOST.fullmatch(match["name"]) is None:
            raise UsageError(explain("A line of the hostfile must be a host with its slots", "node1 slots=2",
                                     hostfile=str(path), line=number, text=line))
        entries.append((match["name"].strip("[]"), int(slots)))
    if not entries:
        raise UsageError(explain("The hostfile must name at least one host", "write a line like: node1 slots=2",
                                 hostfile=str(path)))
    return entries


def _merge(entries: list[tuple[str, int]]) -> dict[str, int]:
    """Sum the slots of hosts that are listed more than once; all names of this machine are one host."""
    slots: dict[str, int] = {}
    names = list(dict.fromkeys(name for name, _ in entries))
    with ThreadPoolExecutor(MAX_CONCURRENT_LOOKUPS, "hvkeras-resolve") as pool:
        here = dict(zip(names, pool.map(is_local, names), strict=True))
    for name, number in entries:
        key = THIS_HOST if here[name] else name
        slots[key] = slots.get(key, 0) + number
    return slots


NODES = "SLURM_JOB_NODELIST"
THIS_NODE = "SLURMD_NODENAME"
_TASKS = "SLURM_TASKS_PER_NODE"
_DEADLINE = 10.0  # time limit of scontrol, in seconds
# The agent's step shares the job's resources with other steps, and does not bind to cores, so that ranks can.
SRUN = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--cpu-bind=none", "--mem=0",
        "--unbuffered", "--quiet")


def allocated_hosts(environ: Mapping[str, str], count: int | None) -> str | None:
    """Return the hosts of the Slurm allocation of this process.

    Args:
        count: The number of ranks, if given. If it exceeds the allocation's tasks, each node gets the same share.

    Returns:
        The hosts in the format of `-H`. None without an allocation, or if this is its only node and `count` was given.

    Raises:
        MachineError: scontrol fails.
    """
    if not environ.get(NODES):
        return None
    names = [THIS_HOST if name == environ.get(THIS_NODE) else name for name in _expand_nodes(environ[NODES])]
    if names == [THIS_HOST] and count is not None:
        return None
    tasks = _parse_tasks(environ.get(_TASKS, ""), len(names))
    if count is not None and count > sum(tasks):
        tasks = [-(-count // len(names))] * len(names)
    return ",".join(f"{name}:{number}" for name, number in zip(names, tasks, strict=True))


def _expand_nodes(nodes: str) -> list[str]:
    """Expand a node list such as `node[1-3,7]`."""
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


def _parse_tasks(text: str, nodes: int) -> list[int]:
    """Parse the tasks of each node, such as `2(x3),1`; one each if Slurm does not specify them."""
    counts = [int(number) for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
              for _ in range(int(times or 1))]
    return counts if len(counts) == nodes else [1] * nodes

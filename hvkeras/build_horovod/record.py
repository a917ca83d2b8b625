"""A note of which TensorFlow Horovod was built against, because another one needs another build."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path

from hvkeras.build_horovod.prerequisites import installed_tensorflow


def record_path() -> Path:
    """Where the note lies: in this Python environment, outside of the horovod package."""
    return Path(sys.prefix) / "share" / "hvkeras" / "horovod-build.json"


def write_record(tensorflow: str, features: dict[str, bool]) -> None:
    """Notes a finished build.

    Args:
        tensorflow: The version it was built against.
        features: What it was built with, by name (`mpi`, `gloo`, `nccl`).
    """
    path = record_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"horovod": metadata.version("horovod"), "tensorflow": tensorflow, **features}) + "\n")


def read_record() -> dict[str, str | bool]:
    """Reads the note; empty when there is none."""
    try:
        found: dict[str, str | bool] = json.loads(record_path().read_text())
    except (OSError, ValueError):
        return {}
    return found


def outdated() -> str:
    """Says in a sentence why the installed Horovod must be built again; "" when it need not, or nobody knows.

    Example:
        if reason := outdated():
            raise MachineError(reason)
    """
    record, tensorflow = read_record(), installed_tensorflow()
    if not record or not tensorflow or record["tensorflow"] == tensorflow:
        return ""
    return (f"Horovod was built against TensorFlow {record['tensorflow']}, and {tensorflow} is installed now."
            " HINT: build it again: python -m hvkeras.build_horovod.")

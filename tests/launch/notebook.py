"""Cells that run in a real kernel of IPython."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

KERNEL = Path(__file__).parent / "workers" / "in_notebook.py"
DEADLINE = 300.0  # seconds


def outputs(folder: Path, *cells: str) -> list[tuple[list[dict[str, Any]], int]]:
    """Return the cells' outputs and the number of changes of outputs; one of the kind `error` is an exception."""
    pytest.importorskip("ipykernel")
    (folder / "cells.json").write_text(json.dumps(cells))
    environment = {**os.environ, "IPYTHONDIR": str(folder / "ipython"), "JUPYTER_RUNTIME_DIR": str(folder)}
    done = subprocess.run([sys.executable, KERNEL, "cells.json"], cwd=folder, env=environment, capture_output=True,
                          text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stderr
    found: list[tuple[list[dict[str, Any]], int]] = json.loads(done.stdout)
    return found

"""Startup hook, imported by Python if it is on PYTHONPATH: prepare the Python process of a rank for its script."""

import contextlib
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path

_HERE = str(Path(__file__).parent)

# Only the first Python process of a rank trains; it stays the same process if it executes another program.
if os.environ.get("HVKERAS_DATA_PARALLEL_PROCESS") in (None, str(os.getpid())):
    with contextlib.suppress(ModuleNotFoundError):  # without hvkeras, Python stays unchanged
        from hvkeras.global_batch.rank_process import install

        install()

# Run the sitecustomize of the environment or the system, which this one shadows.
_spec = importlib.machinery.PathFinder.find_spec(
    "sitecustomize", [path for path in sys.path if path and Path(path) != Path(_HERE)])
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))

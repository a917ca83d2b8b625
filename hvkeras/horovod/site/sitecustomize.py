"""Startup hook, imported by Python if it is on PYTHONPATH: alias `horovod` to hvkeras."""

import contextlib
import importlib.machinery
import importlib.util
import sys
from pathlib import Path

_HERE = str(Path(__file__).parent)

with contextlib.suppress(ImportError):  # without hvkeras, Python stays unchanged
    from hvkeras.horovod.as_horovod import install

    install()

# Run the sitecustomize of the environment or the system, which this one shadows.
_spec = importlib.machinery.PathFinder.find_spec(
    "sitecustomize", [path for path in sys.path if path and Path(path) != Path(_HERE)])
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))

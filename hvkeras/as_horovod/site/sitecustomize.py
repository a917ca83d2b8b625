"""Python imports this at its start where PYTHONPATH says so: `import horovod` then means hvkeras."""

import contextlib
import importlib.machinery
import importlib.util
import sys
from pathlib import Path

_HERE = str(Path(__file__).parent)

with contextlib.suppress(ImportError):  # a Python without hvkeras is left as it is
    from hvkeras.as_horovod import install

    install()

# Whose place this took: the environment's or the system's own.
_spec = importlib.machinery.PathFinder.find_spec(
    "sitecustomize", [path for path in sys.path if path and Path(path) != Path(_HERE)])
if _spec is not None and _spec.loader is not None:
    _spec.loader.exec_module(importlib.util.module_from_spec(_spec))

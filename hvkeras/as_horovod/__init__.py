"""Lets `import horovod` find hvkeras, so that scripts written for Horovod run as they are.

`hvkeras run --as-horovod` and `python -m hvkeras.as_horovod script.py` do so for the script and for all Python
processes that it starts, by a `sitecustomize` of ours on PYTHONPATH. The backend `horovod` still finds Horovod itself.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from hvkeras.as_horovod.keras_2 import hint_for

SITE = Path(__file__).parent / "site"
_NAME = "horovod"

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class _Twins(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `hvkeras.X` for `horovod.X`: one module with two names."""

    def __init__(self) -> None:
        self.aside = False
        self.lock = threading.RLock()
        self.of_horovod: dict[str, ModuleType] = {}
        self.hook: Hook = sys.excepthook
        self._specs: dict[str, Any] = {}

    def find_spec(self, name: str, path: Sequence[str] | None = None,  # noqa: ARG002 - Python's parameter
                  target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:  # noqa: ARG002 - Python's parameter
        if not _is_horovod(name) or self.aside:
            return None
        twin = _twin(name)
        if importlib.util.find_spec(twin) is None:
            raise ModuleNotFoundError(f"hvkeras stands in for Horovod here, and has no {name}: it serves TensorFlow and"
                                      " Keras. HINT: run without --as-horovod, or with PYTHONPATH unset.", name=name)
        return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(_twin(spec.name))
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Gives the module its own spec back, in whose place Python has put that of its second name."""
        assert module.__spec__ is not None
        module.__spec__ = self._specs.pop(module.__spec__.name, module.__spec__)


_twins = _Twins()


def install() -> None:
    """Makes `import horovod` in this process mean hvkeras.

    Example:
        import hvkeras.as_horovod
        hvkeras.as_horovod.install()
        import horovod.tensorflow.keras as hvd
    """
    if not is_installed():
        _twins.of_horovod.update(_taken_out())
        sys.meta_path.insert(0, _twins)
        _twins.hook, sys.excepthook = sys.excepthook, _hinting(sys.excepthook)


def is_installed() -> bool:
    """Whether `import horovod` means hvkeras in this process."""
    return _twins in sys.meta_path


def uninstall() -> None:
    """Takes back what `install` did."""
    if is_installed():
        sys.meta_path.remove(_twins)
        sys.excepthook = _twins.hook
        _taken_out()
        sys.modules.update(_twins.of_horovod)
        _twins.of_horovod.clear()


@contextlib.contextmanager
def horovod_itself() -> Iterator[None]:
    """Has `import horovod` find Horovod itself in the body; what it imports is kept for the next time.

    Example:
        with horovod_itself():
            import horovod.tensorflow
    """
    if not is_installed():
        yield
        return
    with _twins.lock:
        if _twins.aside:
            yield
            return
        ours = _taken_out()
        sys.modules.update(_twins.of_horovod)
        _twins.aside = True
        try:
            yield
        finally:
            _twins.aside = False
            _twins.of_horovod = _taken_out()
            sys.modules.update(ours)


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment in which every Python process begins with `install()`.

    Args:
        environ: The environment to begin with.
    """
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(SITE)]
    return {**environ, "PYTHONPATH": os.pathsep.join([str(SITE), *paths])}


def _hinting(hook: Hook) -> Hook:
    """Says, after what Python says of an exception, what to write instead of a way of Keras 2."""
    def shown(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        hook(kind, error, trace)
        hint = hint_for(error)
        if hint:
            print(hint, file=sys.stderr)

    return shown


def _is_horovod(name: str) -> bool:
    return name == _NAME or name.startswith(f"{_NAME}.")


def _twin(name: str) -> str:
    return "hvkeras" + name[len(_NAME) :]


def _taken_out() -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in list(sys.modules) if _is_horovod(name)}

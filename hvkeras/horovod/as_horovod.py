"""Alias of `horovod` to hvkeras, so that scripts written for Horovod run unchanged.

`hvkeras run --as-horovod` and `hvkeras exec --as-horovod script.py` do this for the script and for all Python
processes that it starts, through a `sitecustomize` on PYTHONPATH. The backend `horovod` still imports Horovod itself.
On Keras 3, scripts may still use Keras 2 features that Keras 3 has dropped (`hvkeras.compat.keras_2`).
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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import wrapt

from hvkeras.host.forks import detach_in_children

SITE = Path(__file__).parent / "site"
_NAME = "horovod"

_KERAS_2 = "hvkeras.horovod.keras_2"
# Modules of Keras 3 and tf_keras that are patched with Keras 2 features on import. The list repeats the group
# --as-horovod of `hvkeras.compat.patches`, which is not imported here, since it would import TensorFlow.
_PATCHED_MODULES = ("keras.src.backend.tensorflow", "keras.src.optimizers.base_optimizer",
             "keras.src.optimizers.loss_scale_optimizer", "keras.src.trainers.trainer",
             "keras.src.backend.tensorflow.trainer", "keras.src.layers.normalization.batch_normalization",
             "keras.src.legacy.backend", "keras.optimizers.legacy", "tf_keras.api._v2.keras", "tensorflow.keras")


class _AliasFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import finder that returns the module `hvkeras.X` for `horovod.X`."""

    def __init__(self) -> None:
        self.disabled = False
        self.lock = threading.RLock()
        self.horovod_modules: dict[str, ModuleType] = {}
        self._specs: dict[str, Any] = {}
        detach_in_children(self)

    def in_child(self) -> None:
        """Replace the lock, which another thread may have held during the fork."""
        self.lock = threading.RLock()

    def find_spec(self, name: str, path: Sequence[str] | None = None,  # noqa: ARG002 - Python's parameter
                  target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:  # noqa: ARG002 - Python's parameter
        if not _is_horovod(name) or self.disabled:
            return None
        target_name = _alias_target(name)
        if importlib.util.find_spec(target_name) is None:
            raise ModuleNotFoundError(f"hvkeras stands in for Horovod here, and has no {name}: it supports TensorFlow"
                                      " and Keras. HINT: run without --as-horovod, or with PYTHONPATH"
                                      " unset.", name=name)
        return importlib.machinery.ModuleSpec(name, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(_alias_target(spec.name))
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's spec, which Python has replaced with that of the alias."""
        assert module.__spec__ is not None
        module.__spec__ = self._specs.pop(module.__spec__.name, module.__spec__)


_finder = _AliasFinder()


def install() -> None:
    """Alias `horovod` to hvkeras in this process.

    Example:
        import hvkeras.horovod.as_horovod
        hvkeras.horovod.as_horovod.install()
        import horovod.tensorflow.keras as hvd
    """
    if not is_installed():
        _finder.horovod_modules.update(_remove_modules())
        sys.meta_path.insert(0, _finder)
        for name in _PATCHED_MODULES:
            wrapt.register_post_import_hook(f"{_KERAS_2}:install_hooks", name)


def is_installed() -> bool:
    """Return whether `import horovod` imports hvkeras in this process."""
    return _finder in sys.meta_path


def uninstall() -> None:
    """Revert `install`."""
    if is_installed():
        sys.meta_path.remove(_finder)
        if _KERAS_2 in sys.modules:
            sys.modules[_KERAS_2].uninstall_hooks()
        _remove_modules()
        sys.modules.update(_finder.horovod_modules)
        _finder.horovod_modules.clear()


@contextlib.contextmanager
def horovod_itself() -> Iterator[None]:
    """Import Horovod itself within the `with` block; its modules are stored for the next use.

    Example:
        with horovod_itself():
            import horovod.tensorflow
    """
    if not is_installed():
        yield
        return
    with _finder.lock:
        if _finder.disabled:
            yield
            return
        ours = _remove_modules()
        sys.modules.update(_finder.horovod_modules)
        _finder.disabled = True
        try:
            yield
        finally:
            _finder.disabled = False
            _finder.horovod_modules = _remove_modules()
            sys.modules.update(ours)


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which every Python process calls `install()` at startup.

    Args:
        environ: The environment to extend.
    """
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(SITE)]
    return {**environ, "PYTHONPATH": os.pathsep.join([str(SITE), *paths])}


def is_set(environ: Mapping[str, str]) -> bool:
    """Return whether Python processes with an environment call `install()` at startup."""
    return str(SITE) in environ.get("PYTHONPATH", "").split(os.pathsep)


def _is_horovod(name: str) -> bool:
    return name == _NAME or name.startswith(f"{_NAME}.")


def _alias_target(name: str) -> str:
    return "hvkeras" + name[len(_NAME) :]


def _remove_modules() -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in list(sys.modules) if _is_horovod(name)}

"""Imports of a fork server: made once, hidden from the ranks' scripts, and released when a script imports them.

A script that runs in a forked process must not notice that its modules are there already. Therefore they are taken out
of `sys.modules`, and an import of one puts it back, with the variables that its import has set, its warning filters
and its output. Before that, the environment is compared: if a variable that the import has read was changed since, by
the launcher or by the script, the import would have had another result (see `Imports.changed`).

Its source text is sent to the ranks' Python (see `hvkeras.launcher.fork_server`), so it uses only the standard library.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.abc
import importlib.machinery
import itertools
import os
import random
import re
import sys
import types
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_bootstrap: Any = importlib._bootstrap  # what `importlib.import_module` calls
_generator: Any = random._inst  # of Python's random numbers

# Variables that Python and the C library read when a process starts.
AT_START = re.compile(r"(PYTHON|LD_|MALLOC_)|GLIBC_TUNABLES$")
# Variables that C++ libraries read when they are loaded; found by tracing `getenv` during `import tensorflow, keras`.
# XLA_FLAGS, CUDA_VISIBLE_DEVICES and the excluded ones are read by the first operation, or later.
BY_LIBRARIES = re.compile(r"OMP_|GOMP_|KMP_|MKL_|ONEDNN_|DNNL_|OPENBLAS_|GOTO_|BLIS_|NPY_|NUMPY_|HDF5_|OPENSSL_")
BY_TENSORFLOW = re.compile(r"TF_(?!CONFIG$|XLA_FLAGS$|DETERMINISTIC_OPS$|FORCE_GPU_|CPU_ALLOCATOR|CUDNN_|GPU_|GRPC_|"
                            r"NUM_)|TF2_|GCS_|GRPC_|LLVM_")
_FORK_AWARE = ("jemalloc_bg_thd",)  # threads that a library starts again after a fork; Ray preloads jemalloc
_NOT_READERS = frozenset({"os", "_collections_abc", "collections", "importlib", __name__})


class PreloadError(RuntimeError):
    """Modules cannot be preloaded, or the script needs others than those that were."""


def changes(names: Iterable[str], before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return those of the variables that have another value now."""
    return sorted(name for name in names if before.get(name) != now.get(name))


def at_start(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return the changed variables that a process reads when it starts."""
    return changes(filter(AT_START.match, {**before, **now}), before, now)


class Imports:
    """Modules that this process has imported for its forks, and what their imports did.

    Attributes:
        environment: The environment before the imports.
    """

    def __init__(self) -> None:
        self.environment: dict[str, str] = dict(os.environ)
        self._filters: list[Any] = list(warnings.filters)
        self._original, self._original_module = builtins.__import__, _bootstrap._gcd_import
        self._reads: dict[str, set[str]] = {}  # by package, as all of these
        self._sets: dict[str, dict[str, str]] = {}
        self._needs: dict[str, set[str]] = {}
        self._added_filters: dict[str, list[Any]] = {}
        self._output: dict[str, list[tuple[int, bytes]]] = {}
        self._draws: dict[str, list[tuple[str, int]]] = {}  # of Python's random numbers: methods and arguments
        self._ends = {1: 0, 2: 0}  # of the output that belongs to a package
        self._captures: dict[int, int] = {}
        self._importing: list[str] = []  # packages, the innermost one last
        self._hidden: dict[str, types.ModuleType] = {}
        self._modules: dict[str, list[str]] = {}  # the hidden ones, by package
        self._with_libraries: set[str] = set()
        self._closures: dict[str, list[str]] = {}
        self._examined: frozenset[str] = frozenset()  # packages that are needed by the one that is being released

    def load(self, names: Sequence[str]) -> None:
        """Import modules, and hide them and all others that they have imported, except Python's own.

        Raises:
            Exception: Whatever the import of a module raises.
            PreloadError: A module has started threads, or opened a GPU: neither survives a fork.
        """
        before = set(sys.modules)
        self._captures = {descriptor: os.memfd_create("output") for descriptor in self._ends}
        kept = {descriptor: os.dup(descriptor) for descriptor in self._captures}
        for descriptor, file in self._captures.items():
            os.dup2(file, descriptor)
        builtins.__import__, os.environ.__class__ = self._import, _watched(self)
        _bootstrap._gcd_import, _generator.__class__ = self._import_module, _watched_generator(self)
        random.random, random.getrandbits = _generator.random, _generator.getrandbits
        try:
            for name in names:
                self._import(name)
                _require_forkable(name)
        finally:
            builtins.__import__, os.environ.__class__ = self._original, _Environment
            _bootstrap._gcd_import, _generator.__class__ = self._original_module, random.Random
            random.random, random.getrandbits = _generator.random, _generator.getrandbits
            for descriptor, ours in kept.items():
                os.dup2(ours, descriptor)
                os.close(ours)
        self._hidden = {name: module for name, module in sys.modules.items()
                        if name not in before and _can_be_hidden(_package(name))}
        for name in sorted(self._hidden, key=lambda name: name.count(".")):  # parents before children
            self._modules.setdefault(_package(name), []).append(name)
        self._with_libraries = {_package(name) for name, module in self._hidden.items()
                                if str(getattr(module, "__file__", "")).endswith(_SUFFIXES)}

    def printed(self) -> str:
        """Return what the imports have printed to standard error."""
        return os.pread(self._captures[2], 1 << 20, 0).decode(errors="replace") if self._captures else ""

    def hide(self) -> None:
        """Restore the state before the imports, in a forked process."""
        for descriptor in self._captures.values():
            os.close(descriptor)
        for name in self._hidden:
            sys.modules.pop(name, None)
        warnings.filters[:] = self._filters  # type: ignore[index]
        warnings._filters_mutated()  # type: ignore[attr-defined]
        sys.meta_path.insert(0, _Finder(self))

    def hidden(self, name: str) -> types.ModuleType | None:
        """Return a hidden module; None if there is none of this name."""
        return self._hidden.get(name)

    def changed(self, environment: Mapping[str, str]) -> list[str]:
        """Return the variables that hidden imports have read, and that have another value in an environment."""
        different = self._different(environment)
        hidden = {_package(name) for name in self._hidden}
        return [name for name in different if any(self._has_read(package, name) for package in hidden)]

    def is_valid(self, package: str) -> bool:
        """Return whether the import of a package would have the same result now; if not, it has to be repeated.

        Raises:
            PreloadError: The import has read a variable that was changed since, and cannot be repeated.
        """
        if package in self._examined:
            return True
        needed = [each for each in self._needed_by(package) if each in self._hidden]
        changed = [(each, name) for name in self._different(dict(os.environ)) for each in needed
                   if self._has_read(each, name)]
        if not changed:
            return True
        affected = {each for each, _ in changed}
        affected |= {each for each in self._needs if each in {**self._hidden, **sys.modules}
                     and affected.intersection(self._needed_by(each))}
        if all(each in self._hidden and each not in self._with_libraries for each in affected):
            self._hidden = {name: found for name, found in self._hidden.items() if _package(name) not in affected}
            return package not in affected
        name = changed[0][1]
        raise PreloadError(
            f"Variables that the import of {package} reads must keep their values in the script, since --preload has"
            f" imported it before. Received: {name}={os.environ.get(name)!r}, which was"
            f" {self.environment.get(name)!r}. HINT: set {name} before hvkeras run, or start with --no-preload.")

    def release(self, package: str) -> None:
        """Do what the import of a package does: put its modules, and those that it needs, into `sys.modules`."""
        if package not in self._examined:
            before, self._examined = self._examined, frozenset(self._needed_by(package))
            try:
                for name in self._needed_by(package):
                    if name in self._hidden and name != package:
                        self._original(name)
            finally:
                self._examined = before
        os.environ.update(self._sets.get(package, {}))
        if added := self._added_filters.pop(package, []):
            warnings.filters[:0] = added  # type: ignore[index]
            warnings._filters_mutated()  # type: ignore[attr-defined]
        for descriptor, text in self._output.pop(package, ()):
            os.write(descriptor, text)
        for method, argument in self._draws.pop(package, ()):  # a script may have seeded the generator
            getattr(_generator, method)(*filter(None, [argument]))
        for name in self._modules.get(package, ()):
            if name in self._hidden:
                self._release_module(name)

    def _release_module(self, name: str) -> None:
        """Put a module into `sys.modules`; by an import if another finder waits for it, such as a hook of wrapt's."""
        parent, _, child = name.rpartition(".")
        attributes = vars(sys.modules[parent])
        finders: Any = itertools.takewhile(lambda finder: not isinstance(finder, _Finder), sys.meta_path)
        if not any(finder.find_spec(name, attributes.get("__path__")) for finder in finders):
            sys.modules[name] = self._hidden.pop(name)
            return
        before = attributes.get(child)  # may be something else than the module
        self._original(name)
        if before is not None:
            attributes[child] = before

    def take(self, name: str) -> types.ModuleType:
        """Return a hidden module, which is no longer hidden."""
        return self._hidden.pop(name)

    def _import(self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (),  # noqa: A002 - Python's
                level: int = 0) -> Any:
        """Import as Python does, and note which package needs which, and what it does."""
        importer = _package(globals["__name__"] or "") if globals and "__name__" in globals else _reader()[0]
        package = importer if level else _package(name)
        if package != importer:
            self._needs.setdefault(importer, set()).add(package)
        if package in sys.modules:
            return self._original(name, globals, locals, fromlist, level)
        self._attribute_effects()
        self._importing.append(package)
        try:
            return self._original(name, globals, locals, fromlist, level)
        finally:
            self._attribute_effects()
            self._importing.pop()

    def _import_module(self, name: str, package: Any = None, level: int = 0) -> Any:
        """Import as `importlib.import_module` does, and note which package needs which."""
        self._import(name if level == 0 else package, {"__name__": _reader()[0]})
        return self._original_module(name, package, level)

    def _attribute_effects(self) -> None:
        """Attribute what has happened since the last call to the package that is being imported."""
        package = self._importing[-1] if self._importing else ""
        known = [*self._filters, *(one for added in self._added_filters.values() for one in added)]
        added = [one for one in warnings.filters if one not in known]
        if added:
            self._added_filters.setdefault(package, [])[:0] = added
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        for descriptor, end in self._ends.items():
            file = self._captures[descriptor]
            self._ends[descriptor] = os.fstat(file).st_size
            if text := os.pread(file, self._ends[descriptor] - end, end):
                self._output.setdefault(package, []).append((descriptor, text))

    def note_read(self, package: str, name: str) -> None:
        """Note that a package has read a variable."""
        self._reads.setdefault(package, set()).add(name)

    def note_set(self, package: str, name: str, value: str) -> None:
        """Note that a package has set a variable."""
        self._sets.setdefault(package, {})[name] = value

    def note_draw(self, method: str, argument: int = 0) -> None:
        """Note that the package that is being imported has drawn a random number."""
        if self._importing:
            self._draws.setdefault(self._importing[-1], []).append((method, argument))

    def _needed_by(self, package: str) -> list[str]:
        """Return a package and all that its import needs; to be called when all are imported."""
        if package not in self._closures:
            found, waiting = {package: None}, [package]
            while waiting:
                needed = sorted(each for each in self._needs.get(waiting.pop(), ()) if each not in found)
                found.update(dict.fromkeys(needed))
                waiting += needed
            self._closures[package] = list(found)
        return self._closures[package]

    def _different(self, environment: Mapping[str, str]) -> list[str]:
        names = changes({**self.environment, **environment}, self.environment, environment)
        return [name for name in names if not self._has_same_effect(name, environment)]

    def _has_read(self, package: str, name: str) -> bool:
        return bool(name in self._reads.get(package, ())
                    or (package in self._with_libraries and BY_LIBRARIES.match(name))
                    or (package == "tensorflow" and BY_TENSORFLOW.match(name)))

    def _has_same_effect(self, name: str, environment: Mapping[str, str]) -> bool:
        now = environment.get(name)
        if name == "KERAS_BACKEND":
            config: Any = self._hidden.get("keras.src.backend.config")
            return config is not None and config.backend() == now
        if name == "TF_USE_LEGACY_KERAS":
            return (now in _ON) == (self.environment.get(name) in _ON)
        return any(name in values and values[name] == now for values in self._sets.values())


_ON = ("1", "true", "True")
_SUFFIXES = tuple(importlib.machinery.EXTENSION_SUFFIXES)
_Environment: Any = type(os.environ)


def _watched(imports: Imports) -> Any:
    """Return the class of `os.environ` during imports, which notes who reads and sets variables."""

    class Watched(_Environment):  # type: ignore[misc]
        def __getitem__(self, name: Any) -> Any:
            package, place = _reader()
            is_listing = place == self.__dict__.get("_listed")  # `dict(os.environ)` reads all, and depends on none
            is_search = sys._getframe(2).f_code is os.get_exec_path.__code__  # for a program, such as `uname`
            if isinstance(name, str) and not is_listing and not is_search:
                imports.note_read(package, name)
            return super().__getitem__(name)

        def __iter__(self) -> Any:
            self.__dict__["_listed"] = _reader()[1]
            return super().__iter__()

        def __setitem__(self, name: Any, value: Any) -> None:
            imports.note_set(_reader()[0], name, value)
            super().__setitem__(name, value)

    return Watched


def _watched_generator(imports: Imports) -> Any:
    """Return the class of Python's random numbers during imports, which notes the draws."""
    below: Any = random.Random._randbelow_with_getrandbits  # type: ignore[attr-defined]

    class Watched(random.Random):
        def random(self) -> float:
            imports.note_draw("random")
            return super().random()

        def getrandbits(self, k: int) -> int:
            if sys._getframe(1).f_code is not below.__code__:
                imports.note_draw("getrandbits", k)
            return super().getrandbits(k)

        def _randbelow(self, n: int) -> int:  # draws bits until the number is small enough
            imports.note_draw("_randbelow", n)
            return int(below(self, n))

    return Watched


def _reader() -> tuple[str, Any]:
    """Return the package that called a method of `os.environ`, and the place of the call."""
    frame: Any = sys._getframe(2)
    place = None
    while frame is not None:
        package = _package(frame.f_globals.get("__name__") or "")
        if package not in _NOT_READERS and frame.f_globals.get("__name__") not in _NOT_READERS:
            place = place or (id(frame), frame.f_lasti)
            if package == "tempfile":  # whose folder is chosen again in each rank; absl chooses one for its tests
                return "", place
            if _can_be_hidden(package):
                return package, place
        frame = frame.f_back
    return "", place


def _require_forkable(name: str) -> None:
    """Raise PreloadError if the import of a module did what does not survive a fork."""
    if (child := os.fork()) == 0:  # libraries that end their threads before a fork, such as OpenBLAS, end them here
        os._exit(0)
    os.waitpid(child, 0)
    threads = []
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/comm", encoding="utf-8", errors="replace") as file:
            threads.append(file.read().strip())
    threads = [thread for thread in threads if thread not in _FORK_AWARE]
    hint = f"HINT: leave {name} out of --preload."
    if len(threads) > 1:
        raise PreloadError(f"Modules of --preload must not start threads, which do not survive a fork. Received:"
                           f" module={name}, threads={sorted(threads)[:-1]}. {hint}")
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        if re.match(r"/dev/(nvidia|kfd|dri/)", path):
            raise PreloadError(f"Modules of --preload must not open a GPU, whose state does not survive a fork."
                               f" Received: module={name}, file={path}. {hint}")


def _package(name: str) -> str:
    return name.partition(".")[0]


def _can_be_hidden(package: str) -> bool:
    """Return whether an import would find the package's module: not Python's own, nor made by a library."""
    module = sys.modules.get(package)
    spec = getattr(module, "__spec__", None)
    return (package not in sys.stdlib_module_names and package not in ("", "__main__", "__mp_main__")
            and getattr(spec, "loader", None) is not None)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import finder and loader of hidden modules."""

    def __init__(self, imports: Imports) -> None:
        self._imports = imports
        self._own: dict[str, tuple[Any, Any]] = {}

    def find_spec(self, name: str, path: Any = None,  # noqa: ARG002 - Python's parameters
                  target: Any = None) -> importlib.machinery.ModuleSpec | None:  # noqa: ARG002 - Python's parameters
        module = self._imports.hidden(name)
        if module is None:
            return None
        with contextlib.suppress(PreloadError):  # an import raises it; whoever only asks for the spec gets it
            if "." not in name and not self._imports.is_valid(name):
                return None
        own = module.__spec__
        assert own is not None
        spec = importlib.machinery.ModuleSpec(name, self, origin=own.origin)
        spec.submodule_search_locations = own.submodule_search_locations
        spec.cached, spec.has_location = own.cached, own.has_location
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        if "." not in spec.name:
            self._imports.is_valid(spec.name)
        module = self._imports.take(spec.name)
        self._own[spec.name] = module.__spec__, getattr(module, "__loader__", None)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Restore the module's spec, which Python has replaced, and release the rest of its package."""
        assert module.__spec__ is not None
        name = module.__spec__.name
        module.__spec__, module.__loader__ = self._own.pop(name)
        if "." not in name:
            self._imports.release(name)

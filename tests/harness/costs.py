"""CPU time of a test session by activity, which `pytest --write-times` (`make test-times`) prints.

Each Python process of the session records its CPU seconds for imports of TensorFlow and Keras, for starting ranks, for
tracing functions, and for their first calls, in which TensorFlow or XLA compiles them. The remainder is computed. Other
processes on the machine do not influence CPU time.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = "HARNESS_COSTS"  # environment variable: the folder of a session's records
IMPORTS, STARTS, TRACES, COMPILATIONS = "imports", "starts of ranks", "tracing", "first calls (compilation)"
_IMPORTED = ("tensorflow", "keras", "tf_keras", "horovod")
_folder = Path(os.environ.get("HARNESS_COSTS", "."))
_busy: list[str] = []  # the outermost running measurement


def total() -> float:
    """Return the CPU seconds of the machine since boot."""
    with open("/proc/stat", encoding="ascii") as stat:
        user, nice, system = map(int, stat.readline().split()[1:4])
    return (user + nice + system) / float(os.sysconf("SC_CLK_TCK"))


def watch() -> None:
    """Start to record this process's costs if the session collects them."""
    if os.environ.get(FOLDER) and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def read(folder: Path) -> Counter[str]:
    """Return the recorded CPU seconds of all processes, by activity."""
    found: Counter[str] = Counter()
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            seconds, _, kind = line.partition(" ")
            found[kind] += float(seconds)  # type: ignore[assignment]
    return found


class Session:
    """Pytest plugin of the main process that prints the costs at the end of the session.

    Args:
        workers: Number of tests that run at the same time.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._folder = Path(tempfile.mkdtemp(prefix="costs-"))
        os.environ[FOLDER] = str(self._folder)
        self._phases: Counter[str] = Counter()
        self._worked, self._began = total(), time.monotonic()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Add the duration of a test's phase."""
        self._phases[report.when] += report.duration

    def pytest_unconfigure(self) -> None:
        """Print the costs."""
        print(table(read(self._folder), total() - self._worked, time.monotonic() - self._began, self._phases,
                    self._workers))
        shutil.rmtree(self._folder)
        del os.environ[FOLDER]


def table(recorded: Mapping[str, float], cpu: float, wall: float, phases: Mapping[str, float], workers: int) -> str:
    """Return the costs as text.

    Args:
        recorded: CPU seconds by activity.
        cpu: CPU seconds of the whole session.
        wall: Its wall-clock seconds.
        phases: Wall-clock seconds of the tests' `setup`, `call` and `teardown`.
        workers: Number of tests that ran at the same time.
    """
    rows = {**{kind: recorded.get(kind, 0.0) for kind in (IMPORTS, STARTS, TRACES, COMPILATIONS)},
            "everything else": cpu - sum(recorded.values())}
    cores = len(os.sched_getaffinity(0))
    lines = [f"{wall:.0f} s wall-clock time, {cpu:.0f} s CPU time on {cores} cores, {workers} tests at a time", ""]
    lines += [f"{kind:<28}{seconds:8.0f} s {seconds / cpu:5.0%}" for kind, seconds in rows.items()]
    lines += [f"{'idle cores':<28}{cores * wall - cpu:8.0f} s", ""]
    lines += [f"{'tests in ' + phase:<28}{seconds:8.0f} s wall-clock time" for phase, seconds in phases.items()]
    return "\n".join(lines)


def _measured(kind: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function, and record its CPU time unless it runs inside another measurement."""
    if _busy:
        return call(*args, **kwargs)
    _busy.append(kind)
    began = time.process_time()
    try:
        return call(*args, **kwargs)
    finally:
        _busy.clear()
        with open(_folder / str(os.getpid()), "a", encoding="ascii") as notes:
            notes.write(f"{time.process_time() - began:.3f} {kind}\n")


class _Finder(importlib.abc.MetaPathFinder):
    """Finder that measures the import of some modules, or wraps their functions with measurements."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        after = {"hvkeras.startup": _in_startup, "tensorflow.python.framework.func_graph": _in_graphs,
                 "tensorflow.python.eager.polymorphic_function.atomic_function": _in_functions}.get(name)
        if name not in _IMPORTED and after is None:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, after)
        return spec


class _Loader(importlib.abc.Loader):
    """Loader that measures the import of its module or, with `after`, calls that with the module."""

    def __init__(self, loader: Any, after: Callable[[ModuleType], None] | None) -> None:
        self._loader, self._after = loader, after

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        found: ModuleType | None = self._loader.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        if self._after is None:
            _measured(IMPORTS, self._loader.exec_module, module)
        else:
            self._loader.exec_module(module)
            self._after(module)


def _attribute_to(module: ModuleType, *functions: Any) -> None:
    """Set the functions' file to the module's, because hvkeras looks for the user's code in stacks."""
    for function in functions:
        function.__code__ = function.__code__.replace(co_filename=str(module.__file__))


def _in_startup(module: Any) -> None:
    _attribute_to(module, _measured)
    module.init = functools.wraps(module.init)(functools.partial(_measured, STARTS, module.init))


def _in_graphs(module: Any) -> None:
    _attribute_to(module, _measured)
    trace = module.func_graph_from_py_func
    module.func_graph_from_py_func = functools.wraps(trace)(functools.partial(_measured, TRACES, trace))


def _in_functions(module: Any) -> None:
    call, called = module.AtomicFunction.call_preflattened, set()

    @functools.wraps(call)
    def first(self: Any, *args: Any) -> Any:
        if self.name in called:
            return call(self, *args)
        called.add(self.name)
        return _measured(COMPILATIONS, call, self, *args)

    _attribute_to(module, first)
    module.AtomicFunction.call_preflattened = first

"""What the processors of a test session work on: `pytest --write-times` (`make test-times`) prints it.

Each Python process of the session notes what it spends on imports of TensorFlow and Keras, on starting ranks, on
tracing functions, and on their first calls, in which TensorFlow or XLA compiles them; the rest is a difference. Seconds
are those of processors, which other processes of the machine do not lengthen.
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

FOLDER = "HARNESS_COSTS"  # the variable that names the folder of all notes of a session
IMPORTS, STARTS, TRACES, COMPILATIONS = "imports", "starts of ranks", "tracing", "first calls (compilation)"
_IMPORTED = ("tensorflow", "keras", "tf_keras", "horovod")
_folder = Path(os.environ.get("HARNESS_COSTS", "."))
_busy: list[str] = []  # the outermost of what is being measured


def total() -> float:
    """Seconds that the machine's processors have worked since it was started."""
    with open("/proc/stat", encoding="ascii") as stat:
        user, nice, system = map(int, stat.readline().split()[1:4])
    return (user + nice + system) / float(os.sysconf("SC_CLK_TCK"))


def watch() -> None:
    """Has this process note its costs, if the session is to know them."""
    if os.environ.get(FOLDER) and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def read(folder: Path) -> Counter[str]:
    """The seconds that all processes have noted, by what they were spent on."""
    found: Counter[str] = Counter()
    for path in folder.iterdir():
        for line in path.read_text().splitlines():
            seconds, _, kind = line.partition(" ")
            found[kind] += float(seconds)  # type: ignore[assignment]
    return found


class Session:
    """A plugin of the process that hears of all tests: prints the costs of the session when it ends.

    Args:
        workers: How many tests run at a time.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._folder = Path(tempfile.mkdtemp(prefix="costs-"))
        os.environ[FOLDER] = str(self._folder)
        self._phases: Counter[str] = Counter()
        self._worked, self._began = total(), time.monotonic()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Adds up."""
        self._phases[report.when] += report.duration

    def pytest_unconfigure(self) -> None:
        """Prints."""
        print(table(read(self._folder), total() - self._worked, time.monotonic() - self._began, self._phases,
                    self._workers))
        shutil.rmtree(self._folder)
        del os.environ[FOLDER]


def table(noted: Mapping[str, float], work: float, clock: float, phases: Mapping[str, float], workers: int) -> str:
    """The costs as text.

    Args:
        noted: Processor seconds by what they were spent on.
        work: Processor seconds of the whole session.
        clock: Its seconds on the clock.
        phases: Seconds on the clock that tests spent in `setup`, `call` and `teardown`.
        workers: How many tests ran at a time.
    """
    rows = {**{kind: noted.get(kind, 0.0) for kind in (IMPORTS, STARTS, TRACES, COMPILATIONS)},
            "everything else": work - sum(noted.values())}
    cores = len(os.sched_getaffinity(0))
    lines = [f"{clock:.0f} s on the clock, {work:.0f} s of {cores} processors, {workers} tests at a time", ""]
    lines += [f"{kind:<28}{seconds:8.0f} s {seconds / work:5.0%}" for kind, seconds in rows.items()]
    lines += [f"{'idle processors':<28}{cores * clock - work:8.0f} s", ""]
    lines += [f"{'tests in ' + phase:<28}{seconds:8.0f} s on the clock" for phase, seconds in phases.items()]
    return "\n".join(lines)


def _measured(kind: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls, and notes what it cost unless it is a part of what is measured already."""
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
    """Measures the import of some modules, and what is called in them."""

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
    """A loader that measures the import of its module, or else has something done after it."""

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


def _be_of(module: ModuleType, *functions: Any) -> None:
    """Lets functions be a library's as far as stacks tell, in which hvkeras looks for the user's code."""
    for function in functions:
        function.__code__ = function.__code__.replace(co_filename=str(module.__file__))


def _in_startup(module: Any) -> None:
    _be_of(module, _measured)
    module.init = functools.wraps(module.init)(functools.partial(_measured, STARTS, module.init))


def _in_graphs(module: Any) -> None:
    _be_of(module, _measured)
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

    _be_of(module, first)
    module.AtomicFunction.call_preflattened = first

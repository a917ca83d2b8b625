"""Runs Keras's own tests in a rank of a job, or in a process alone, and notes how each came out.

Arguments: a file of JSON: the folder of Keras's tests, which files and which tests, and the options of the optimizers.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import sys
import tempfile
import threading
import types
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import keras
import pytest
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.trainers.trainer import Trainer

import hvkeras as hvd
from hvkeras.gradients.optimizer_classes import distributed_part

Request = dict[str, Any]
# A rank that waits in a test for one that has left it raises; then both meet after the test, where the other waits.
_ATTEMPTS = 3
_distributed: list[str] = []  # the optimizers of the running test
_TRAINING = re.compile(r"run_layer_test|run_training|\.(fit|compile|adapt|train_on_batch|evaluate|predict)\(")
# The tests take this from a file that is not installed with them.
_CONFTEST = types.ModuleType("conftest")


def skip_if_backend(name: str, reason: str) -> Any:
    """Marks a test that does not run on one of Keras's backends."""
    return pytest.mark.skipif(keras.backend.backend() == name, reason=reason)


class InStep:
    """Plug-in of pytest: the same seeds on all ranks, one test at a time, and a line for each outcome.

    Args:
        request: What the worker was asked for.
        rank: This rank; None without a job.
        notes: Where the lines go.
    """

    def __init__(self, request: Request, rank: int | None, notes: TextIO) -> None:
        self._request, self._rank, self._notes = request, rank, notes
        self._outcome: tuple[str, str] = ("passed", "")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keeps the tests that were asked for, in the order of their files."""
        items[:] = [item for item in items if self._is_wanted(item)]

    def _is_wanted(self, item: pytest.Item) -> bool:
        only, sample = self._request.get("only"), self._request.get("sample", 1)
        if item.nodeid in self._request.get("done", ()):
            return False
        if only is not None:
            return item.nodeid in only
        if self._request.get("trains") and not _trains(item):
            return False
        return zlib.crc32(item.nodeid.encode()) % sample == 0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Runs a test on all ranks, and then lets them meet."""
        self._note(began=item.nodeid)
        _distributed.clear()
        self._outcome = ("passed", "")
        keras.utils.set_random_seed(zlib.crc32(item.nodeid.encode()))
        result = yield
        outcome, reason = self._outcome
        together = self._rank is None or self._meet(item.nodeid)
        self._note(test=item.nodeid, outcome=outcome, reason=reason, together=together,
                   distributed=len(_distributed))
        if not together:
            item.session.shouldstop = "the ranks are apart"
        return result

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Says that no test is left."""
        if not session.shouldstop:
            self._note(complete=True)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps the worst outcome of set-up, call and tear-down."""
        if report.outcome != "passed" and self._outcome[0] != "failed":
            text = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr or "")
            self._outcome = (report.outcome, text[-6000:])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Notes the files that cannot be imported."""
        if report.failed:
            self._note(test=report.nodeid, outcome="failed", reason=str(report.longrepr)[-2000:], together=True)

    def _meet(self, test: str) -> bool:
        """Whether all ranks have ended this test."""
        for _ in range(_ATTEMPTS):
            try:
                return set(hvd.allgather_object(test)) == {test}
            except Exception as error:  # noqa: BLE001 - whatever it is, the job is begun anew
                self._note(apart=test, reason=str(error)[:2000])
        return False

    def _note(self, **line: Any) -> None:
        self._notes.write(json.dumps(line) + "\n")


def _trains(item: pytest.Item) -> bool:
    """Whether a test trains: most tests of layers have a step of training among other things, and the rest have not."""
    function = getattr(item, "function", None)
    return function is None or bool(_TRAINING.search(inspect.getsource(inspect.unwrap(function))))


def distribute_compiled(options: Request) -> None:
    """Has the optimizer of each model that is compiled reduce its gradients over all ranks."""
    plain = Trainer.compile

    @functools.wraps(plain)
    def compile_distributed(self: Any, optimizer: Any = "rmsprop", *args: Any, **kwargs: Any) -> Any:
        return plain(self, distributed(keras.optimizers.get(optimizer), options), *args, **kwargs)

    Trainer.compile = compile_distributed


def distribute_applied(options: Request) -> None:
    """Does the same to optimizers that no model is compiled with, when they are first applied."""
    running = threading.local()  # each replica of a strategy is a thread

    def around(plain: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)
        def apply_distributed(self: Any, *args: Any, **kwargs: Any) -> Any:
            outer = getattr(running, "optimizer", None)
            if outer is None and distributed_part(self) is None:
                return distributed(self, options).apply(*args, **kwargs)
            running.optimizer = self
            try:
                return plain(self, *args, **kwargs)
            finally:
                running.optimizer = outer

        return apply_distributed

    optimizers = [one for one in vars(keras.optimizers).values() if isinstance(one, type)]
    for cls in {base for one in optimizers for base in one.__mro__ if "apply" in vars(base)}:
        cls.apply = around(cls.apply)  # type: ignore[attr-defined]


def distributed(optimizer: Any, options: Request) -> Any:
    """Makes an optimizer of Keras's distributed, unless it is."""
    if not isinstance(optimizer, BaseOptimizer) or distributed_part(optimizer) is not None:
        return optimizer
    _distributed.append(type(optimizer).__name__)
    return hvd.DistributedOptimizer(optimizer, **options)


def main() -> int:
    """Runs the tests; returns pytest's exit code where it could not run them."""
    request: Request = json.loads(Path(sys.argv[1]).read_text())
    sys.path.extend(request["packages"])
    _CONFTEST.skip_if_backend = skip_if_backend  # type: ignore[attr-defined]
    sys.modules["conftest"] = _CONFTEST
    rank = None
    if not request.get("alone"):
        if request.get("data_parallel"):
            hvd.data_parallel()
        else:
            hvd.init()
            distribute_compiled(request["options"])
            distribute_applied(request["options"])
        rank = hvd.rank()
    folder = Path(tempfile.mkdtemp())
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    os.chdir(folder)
    root = Path(request["root"])
    arguments = ["-c", os.devnull, "--rootdir", str(root), "--import-mode=importlib", "--disable-plugin-autoload",
                 "-p", "no:cacheprovider", "-o", "python_files=*_test.py", "-q", "-W", "ignore", "--durations=25",
                 "--tb=short", "--continue-on-collection-errors", "--basetemp", str(folder / "pytest"),
                 *(str(root / path) for path in request["paths"])]
    with open(Path(request["notes"]) / f"rank.{rank or 0}.jsonl", "a", buffering=1, encoding="utf-8") as notes:
        code = int(pytest.main(arguments, plugins=[InStep(request, rank, notes)]))
    if rank is not None:
        hvd.shutdown()
    return code if code > pytest.ExitCode.INTERRUPTED else 0


if __name__ == "__main__":
    sys.exit(main())

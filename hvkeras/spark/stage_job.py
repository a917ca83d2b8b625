"""A stage on Spark as the driver sees it: started in a thread, with a tag by which it can be cancelled."""

from __future__ import annotations

import contextlib
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hvkeras import __version__
from hvkeras.spark.order import REPORT_BEGINS, REPORT_ENDS

CANCEL_WITHIN = 15.0  # seconds that Spark has to end a cancelled job
# Spark keeps Python workers by their environment, so this variable sets ours apart from those of the user's functions,
# which may have imported TensorFlow.
OWN_WORKERS = ("PYTHON_WORKERS_OF", "hvkeras")
_environment_lock = threading.Lock()


class StageJob:
    """A job of one stage.

    Args:
        context: The Spark context.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._tag = f"hvkeras-{secrets.token_hex(6)}"
        self._rows: list[Any] = []
        self._error: BaseException | None = None

    def _start(self, tasks: Any) -> threading.Thread:
        """Starts the stage of an RDD, with the broadcast variables that this thread has pickled in the call."""
        from pyspark import InheritableThread

        with _own_workers(self._context):
            tasks._jrdd  # noqa: B018 - copies the environment of the Python workers
        thread: threading.Thread = InheritableThread(target=self._collect, args=(tasks,), name="hvkeras-spark",
                                                     daemon=True)
        thread.start()
        return thread

    @staticmethod
    def _on_node(data: bytes, module: str) -> Callable[[Iterable[Any]], Iterator[Any]]:
        """Returns what each task runs: the function `run` of a module, with a pickled order."""
        return _on_node(data, module)

    def _collect(self, tasks: Any) -> None:
        """Runs the stage; called in a thread of its own, whose jobs have the tag."""
        try:
            self._context.addJobTag(self._tag)
            self._context.setInterruptOnCancel(True)
            self._rows = tasks.collect()
        except BaseException as error:  # noqa: BLE001 - raised by `run`
            self._error = error

    def _cancel(self, thread: threading.Thread) -> None:
        """Cancels the job, also one that Spark has not accepted yet and would start later."""
        deadline = time.monotonic() + CANCEL_WITHIN
        while thread.is_alive() and time.monotonic() < deadline:
            self._cancel_now()
            thread.join(0.5)
        if thread.is_alive():
            threading.Thread(target=self._keep_cancelling, args=(thread,), name="hvkeras-spark-cancel",
                             daemon=True).start()

    def _keep_cancelling(self, thread: threading.Thread) -> None:
        while thread.is_alive():
            self._cancel_now()
            thread.join(1.0)

    def _cancel_now(self) -> None:
        with contextlib.suppress(Exception):  # the session may be gone
            self._context.cancelJobsWithTag(self._tag)


def _on_node(data: bytes, module: str) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """Returns what each task runs; it is pickled by value, so that it can tell that a host lacks hvkeras.

    Args:
        data: The pickled order that a module's function `run` gets.
        module: The name of the module.
    """
    version, python = __version__, sys.executable
    begins, ends = REPORT_BEGINS, REPORT_ENDS

    def on_node(_partition: Iterable[Any]) -> Iterator[Any]:
        import importlib
        import pickle
        import socket
        import sys

        where = f"Received: host={socket.gethostname()!r}, python={sys.executable!r}"
        hint = ("HINT: set PYSPARK_PYTHON (spark-submit: --conf spark.pyspark.python=...) to a Python that has it; the"
                f" driver's is {python}")
        try:
            here = importlib.import_module("hvkeras").__version__
        except ImportError as error:
            raise RuntimeError(f"{begins}hvkeras {version} must be installed on every host of Spark, as in the driver"
                               f" ({error}). {where}. {hint}.{ends}") from None
        if here != version:
            raise RuntimeError(f"{begins}All hosts of Spark must have the same hvkeras as the driver, {version}."
                               f" {where}, hvkeras={here!r}. {hint}.{ends}")
        return importlib.import_module(module).run(pickle.loads(data))  # type: ignore[no-any-return]

    return on_node


@contextlib.contextmanager
def _own_workers(context: Any) -> Iterator[None]:
    """Makes functions of RDDs that are completed within the context run in Python workers of hvkeras's own."""
    name, value = OWN_WORKERS
    with _environment_lock:
        context.environment[name] = value
        try:
            yield
        finally:
            del context.environment[name]

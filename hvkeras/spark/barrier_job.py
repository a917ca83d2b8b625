"""Driver side of a job on Spark: waits for slots, runs the barrier stage, and reports failures.

The stage runs in a thread, with a job tag that allows it to be cancelled.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hvkeras import __version__
from hvkeras.errors import MachineError, PeerError, UsageError, explain
from hvkeras.host.console import say
from hvkeras.spark.order import REPORT_BEGINS, REPORT_ENDS, Order, ranks_by_host, report_in
from hvkeras.spark.session import is_fixed, is_on, slots_of

CANCEL_WITHIN = 15.0  # seconds for Spark to end a cancelled job
# Spark reuses Python workers that have the same environment. With this variable, ranks do not get workers that ran the
# user's functions, which may have imported TensorFlow.
OWN_WORKERS = ("PYTHON_WORKERS_OF", "hvkeras")
_environment_lock = threading.Lock()


class StageJob:
    """Spark job of one stage."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._tag = f"hvkeras-{secrets.token_hex(6)}"
        self._rows: list[Any] = []
        self._error: BaseException | None = None

    def _start(self, tasks: Any) -> threading.Thread:
        """Start the stage of an RDD in a thread, which inherits this thread's Spark properties."""
        from pyspark import InheritableThread

        with _own_workers(self._context):
            tasks._jrdd  # noqa: B018 - copies the Python workers' environment, and the broadcasts this thread pickled
        thread: threading.Thread = InheritableThread(target=self._collect, args=(tasks,), name="hvkeras-spark",
                                                     daemon=True)
        thread.start()
        return thread

    @staticmethod
    def _on_node(data: bytes, module: str) -> Callable[[Iterable[Any]], Iterator[Any]]:
        return _on_node(data, module)

    def _collect(self, tasks: Any) -> None:
        try:
            self._context.addJobTag(self._tag)
            self._context.setInterruptOnCancel(True)
            self._rows = tasks.collect()
        except BaseException as error:  # noqa: BLE001 - `run` raises it
            self._error = error

    def _cancel(self, thread: threading.Thread) -> None:
        """Cancel the job repeatedly, since Spark may not have accepted it yet."""
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
        with contextlib.suppress(Exception):  # the session may have stopped
            self._context.cancelJobsWithTag(self._tag)


def _on_node(data: bytes, module: str) -> Callable[[Iterable[Any]], Iterator[Any]]:
    """Return the function of each task: `run` of a module, called with the unpickled data.

    It is pickled by value, so that it can report that a host lacks hvkeras.
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
            installed = importlib.import_module("hvkeras").__version__
        except ImportError as error:
            raise RuntimeError(f"{begins}hvkeras {version} must be installed on every host of Spark, as in the driver"
                               f" ({error}). {where}. {hint}.{ends}") from None
        if installed != version:
            raise RuntimeError(f"{begins}All hosts of Spark must have the same hvkeras as the driver, {version}."
                               f" {where}, hvkeras={installed!r}. {hint}.{ends}")
        return importlib.import_module(module).run(pickle.loads(data))  # type: ignore[no-any-return]

    return on_node


@contextlib.contextmanager
def _own_workers(context: Any) -> Iterator[None]:
    """Run functions of RDDs whose `_jrdd` is created in this context in separate Python workers."""
    name, value = OWN_WORKERS
    with _environment_lock:
        context.environment[name] = value
        try:
            yield
        finally:
            del context.environment[name]


TICK = 0.2  # seconds between checks of a job
FIRST_REPORT, REPORT_EVERY = 5.0, 10.0  # seconds until the first and between further reports of waiting for slots
_TASK = re.compile(r"barrier task ResultTask\((\d+), (\d+)\)")
_CANCELLED = re.compile(r"\[SPARK_JOB_CANCELLED\] (.*?)(?: SQLSTATE.*)?$", re.MULTILINE)


class BarrierJob(StageJob):
    """Spark job of one barrier stage.

    Args:
        order: The order that each task receives.
        start_timeout: Seconds within which Spark must start all tasks.
        watch: Called several times per second with the elapsed seconds; the job is cancelled if it raises.
    """

    def __init__(self, context: Any, order: Order, start_timeout: float, watch: Callable[[float], None] | None = None
                 ) -> None:
        super().__init__(context)
        self._order, self._start_timeout, self._watch = order, start_timeout, watch
        self._started_at = time.monotonic()
        self._next_report = FIRST_REPORT

    def run(self) -> list[bytes]:
        """Run the job until it completes.

        Returns:
            The pickled results, in rank order.

        Raises:
            UsageError: Spark's configuration does not allow the job to start.
            MachineError: Spark did not start all tasks in time.
            PeerError: A rank failed, or Spark cancelled the job.
        """
        self._require_barriers()
        while (slots := slots_of(self._context)) < self._order.size:
            self._wait(f"Spark has {slots} of {self._order.size} task slots", slots=slots)
        size = self._order.size
        thread = self._start(self._context.parallelize(range(size), size).barrier().mapPartitions(
            self._on_node(pickle.dumps(self._order), "hvkeras.spark.rank_task")))
        try:
            started = False
            while thread.is_alive():
                thread.join(TICK)
                if self._watch is not None:
                    self._watch(time.monotonic() - self._started_at)
                started = started or self._has_started()
                if not started and thread.is_alive():
                    self._wait(f"Spark has not started the tasks of {self._order.size} ranks yet, which need as many"
                               " free slots at once", slots=slots)
        except BaseException:
            self._cancel(thread)
            raise
        if self._error is not None:
            report = report_in(str(self._error))
            failure = PeerError(f"{explain('The function must succeed on every rank')}\n"
                                f"{report or self._describe_failure(str(self._error))}")
            raise failure from (None if report else self._error)  # Java's traceback adds nothing to a rank's traceback
        return [result for _, result in sorted(self._rows)]

    # Start.

    def _require_barriers(self) -> None:
        if is_on(self._context, "spark.dynamicAllocation.enabled"):
            raise UsageError(explain("Spark does not support barrier stages with dynamic allocation of executors",
                                     "set spark.dynamicAllocation.enabled=false, and the number of executors"))
        slots = slots_of(self._context)
        if is_fixed(self._context) and slots < self._order.size:
            raise UsageError(explain("Spark must be able to run the tasks of all ranks at the same time",
                                     f"master local[{self._order.size}], or a smaller num_proc",
                                     num_proc=self._order.size, master=self._context.master, slots=slots))

    def _wait(self, reason: str, slots: int) -> None:
        """Sleep for a tick, and report the wait from time to time; raise MachineError after the start timeout."""
        waited = time.monotonic() - self._started_at
        if waited >= self._start_timeout:
            raise MachineError(explain("Spark must start the tasks of all ranks at once within"
                                       f" {self._start_timeout:g} s", "lower num_proc, add executors, end other jobs,"
                                       " or raise start_timeout", num_proc=self._order.size, slots=slots))
        if waited >= self._next_report:
            self._next_report = waited + REPORT_EVERY
            say(f"waiting: {reason}, {waited:.0f} s of {self._start_timeout:g} s")
        time.sleep(TICK)

    def _has_started(self) -> bool:
        """Return whether a task of the stage has started; True if this version of Spark does not provide it."""
        try:
            return self._started_tasks()
        except Exception:  # noqa: BLE001 - internal to Spark
            return True

    def _started_tasks(self) -> bool:
        tracker = self._context._jsc.sc().statusTracker()
        for job in tracker.getJobIdsForTag(self._tag):
            job_info = tracker.getJobInfo(job)
            for stage in job_info.get().stageIds() if job_info.isDefined() else ():
                info = tracker.getStageInfo(stage)
                if info.isDefined() and (info.get().numActiveTasks() or info.get().numFailedTasks()
                                         or info.get().numCompletedTasks()):
                    return True
        return False

    # Failures.

    def _describe_failure(self, text: str) -> str:
        """Describe a failure that no task has reported: of a Python worker, of an executor, or of the job."""
        if cancelled := _CANCELLED.search(text):
            return f"the job was cancelled in Spark ({cancelled[1]})"
        lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith(("at ", "..."))]
        match = _TASK.search(text)
        if match is None:
            return "\n".join(lines[:10])
        after = text[match.end() :].splitlines()[1:]
        reason = next((line.strip() for line in after if line.strip() and not line.lstrip().startswith("at ")), "")
        details = [line for line in after if line and not line.lstrip().startswith(("at ", "..."))][:20]
        hosts = self._hosts(int(match[1]))
        task = int(match[2])
        rank = ranks_by_host(hosts)[task] if self._order.by_host and len(hosts) == self._order.size else task
        where = f" on {hosts[task]}" if len(hosts) == self._order.size else ""
        return "\n".join([f"the task of rank {rank}{where} was lost: {reason}", *details[1:]])

    def _hosts(self, stage: int) -> list[str]:
        """Return the host of each task of a stage; empty if Spark does not provide it."""
        with contextlib.suppress(Exception):  # internal to Spark
            tasks = self._context._jsc.sc().statusStore().taskList(stage, 0, self._order.size)
            hosts = {tasks.apply(number).index(): tasks.apply(number).host() for number in range(tasks.size())}
            return [str(hosts[number]) for number in range(self._order.size)]
        return []

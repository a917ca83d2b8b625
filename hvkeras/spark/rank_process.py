"""The process of one rank on Spark: forked from Spark's Python worker, below a guard that cleans up its descendants.

    Spark's Python worker -> guard -> rank

Spark may reuse the worker, so the function runs in a separate process. Unlike a new interpreter, a fork preserves the
task's context: `BarrierTaskContext.get()`, its `allGather`, and broadcast variables work in it. The fork is safe, since
the worker has imported neither TensorFlow nor other libraries that start threads.

Spark kills workers with SIGKILL. The guard detects this, and terminates the rank and its descendants.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import signal
import socket
import struct
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from hvkeras.control.cause import Cause, CauseKind
from hvkeras.errors import UsageError, explain, format_error, summary
from hvkeras.horovod import as_horovod
from hvkeras.launcher.agent import (
    CHUNK,
    KILL_GRACE,
    POLL_INTERVAL,
    SET_CHILD_SUBREAPER,
    SET_PARENT_DEATH_SIGNAL,
    TERMINATE_GRACE,
    kill_descendants,
    libc,
)
from hvkeras.launcher.calls import loaded_call, pickled_result
from hvkeras.launcher.printer import TAIL
from hvkeras.spark.order import Order

_PIPES = ("order", "result", "cause", "stdout", "stderr", "status")
_STATUS = struct.Struct("=ii")  # the rank's process id and its waitpid status
_WATCHED = {signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP}  # by the guard
_SOFTWARE = 70  # EX_SOFTWARE of <sysexits.h>

Pipes = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class RankExit:
    """Exit of a rank.

    Attributes:
        pid: The process id; 0 if the rank was lost together with its guard.
        code: The exit code, or the negative number of the signal that killed it.
        result: The pickled result; None if the function did not return.
        cause: The cause of the job's failure as the rank reported it, if any.
        tail: The end of the rank's standard error.
    """

    pid: int
    code: int
    result: bytes | None
    cause: Cause | None
    tail: str


class RankProcess:
    """Process of a rank, which waits for its environment before it runs the function."""

    def __init__(self, order: Order) -> None:
        pipes = {name: os.pipe() for name in _PIPES}
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        worker = os.getpid()
        self._guard = _fork()
        if self._guard == 0:
            try:
                _guard(worker, pipes, order)
            except BaseException:  # noqa: BLE001 - this process must not continue as Spark's worker
                traceback.print_exc()
            os._exit(_SOFTWARE)
        self._order = pipes["order"][1]
        os.close(pipes["order"][0])
        self._reads = {pipes[name][0]: name for name in _PIPES[1:]}
        for name in _PIPES[1:]:
            os.close(pipes[name][1])

    def start(self, environment: Mapping[str, str]) -> None:
        """Send the rank its environment variables, which it adds to those of this process, and let it run."""
        with contextlib.suppress(BrokenPipeError), os.fdopen(self._order, "w", encoding="utf-8") as pipe:
            self._order = -1
            json.dump(dict(environment), pipe)

    def wait(self, show: Callable[[str, bytes], None]) -> RankExit:
        """Wait without a timeout for the rank to exit.

        Args:
            show: Called with each chunk of output: `stdout` or `stderr`, and the bytes.
        """
        read: dict[str, bytearray] = {name: bytearray() for name in _PIPES}
        with selectors.DefaultSelector() as selector:
            for descriptor in self._reads:
                selector.register(descriptor, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select():
                    name, data = self._reads[key.fd], os.read(key.fd, CHUNK)
                    if not data:
                        selector.unregister(key.fd)
                        continue
                    if name in ("stdout", "stderr"):
                        show(name, data)
                    read[name] += data
                    if name in ("stdout", "stderr"):
                        del read[name][:-TAIL]
        pid, status = _STATUS.unpack(read["status"]) if len(read["status"]) == _STATUS.size else (0, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(status)
        result = bytes(read["result"]) if code == 0 and read["result"] else None
        return RankExit(pid, code, result, _cause_in(read["cause"]), read["stderr"].decode(errors="replace"))

    def close(self) -> None:
        """Terminate the rank if it is still running, and close the pipes."""
        if self._order >= 0:
            os.close(self._order)  # the rank has not started the function, and exits at end of file
        for descriptor in self._reads:
            os.close(descriptor)
        os.kill(self._guard, signal.SIGTERM)  # the process id stays valid until waitpid
        deadline = time.monotonic() + TERMINATE_GRACE + KILL_GRACE
        while os.waitpid(self._guard, os.WNOHANG)[0] == 0:
            if time.monotonic() > deadline:
                os.kill(self._guard, signal.SIGKILL)
            time.sleep(0.01)


def _cause_in(data: bytes | bytearray) -> Cause | None:
    with contextlib.suppress(ValueError, KeyError):
        return Cause.from_message(json.loads(data))
    return None


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about threads that pyarrow starts on import
        return os.fork()


# The guard.


def _guard(worker: int, pipes: Pipes, order: Order) -> NoReturn:
    libc.prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    libc.prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
    guard, rank = os.getpid(), _fork() if os.getppid() == worker else -1
    if rank == 0:
        libc.prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() == guard:
            _rank(pipes, order)
        os._exit(_SOFTWARE)
    if rank < 0:
        os._exit(_SOFTWARE)
    report = pipes["status"][1]
    for ends in pipes.values():
        for descriptor in ends:
            if descriptor != report:
                os.close(descriptor)
    devnull = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
        os.dup2(devnull, descriptor)
    status = _status_of(rank)
    deadline = time.monotonic() + KILL_GRACE
    while time.monotonic() < deadline and kill_descendants():
        time.sleep(0.01)
        _reap(0)
    with contextlib.suppress(OSError):
        os.write(report, _STATUS.pack(rank, status))
    os._exit(0)


def _status_of(rank: int) -> int:
    """Wait for the rank; terminate it if this process receives SIGTERM, which the parent's death also sends."""
    deadline: float | None = None
    while (status := _reap(rank)) is None:
        received = signal.sigtimedwait(_WATCHED, POLL_INTERVAL)
        if deadline is None and received is not None and received.si_signo != signal.SIGCHLD:
            deadline = time.monotonic() + TERMINATE_GRACE
            os.kill(rank, signal.SIGTERM)
        if deadline is not None and time.monotonic() > deadline:
            os.kill(rank, signal.SIGKILL)
    return status


def _reap(rank: int) -> int | None:
    """Reap exited children, and return the rank's status if it is among them."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid in (0, rank):
                return status if pid else None
    return None


# The rank.


def _rank(pipes: Pipes, order: Order) -> NoReturn:
    """Run the rank after its environment has arrived."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
    for name, ends in pipes.items():
        os.close(ends[name == "order"])
    environment = _read_all(pipes["order"][0])
    if not environment:
        os._exit(0)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(pipes[name][1], descriptor)
        stream = open(descriptor, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115 - for good
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.environ.update(json.loads(environment))
    os.environ["HVKERAS_RUN_CAUSE"] = f"/dev/fd/{pipes['cause'][1]}"
    atexit._clear()  # handlers of Spark's worker
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # otherwise later forks of the worker draw the same numbers
    _run_as_script(lambda: _write_result(order, pipes["result"][1]), pipes["cause"][1])


def _write_result(order: Order, target: int) -> None:
    if order.as_horovod:
        as_horovod.install()
        os.environ.update(as_horovod.environment(os.environ))
    try:
        call = loaded_call(order.call)
    except Exception as error:  # imports and unpickling may raise anything
        raise UsageError(explain(f"The function must be loadable on the hosts of its ranks ({summary(error)})",
                                 "add the missing modules to Spark: spark.sparkContext.addPyFile(...), or"
                                 " spark-submit --py-files", host=socket.gethostname())) from error
    try:
        result: Any = call()
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise
        result = None
    rank = os.environ["HVKERAS_SPARK_RANK"]
    data = memoryview(pickled_result(None if order.one_result and rank != "0" else result))
    while data:
        data = data[os.write(target, data):]


def _run_as_script(function: Callable[[], None], causes: int) -> NoReturn:
    """Run a function like a script: with exception hooks, exit handlers and an exit code."""
    code = 0
    try:
        function()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
        if not isinstance(ended.code, int):
            print(ended.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001 - as Python itself does
        code = 1
        sys.excepthook(type(error), error, error.__traceback__)  # after init(), this ends the process
        _report(error, causes)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _report(error: BaseException, causes: int) -> None:
    """Report an exception to the task; needed without `hvd.init()`, when hvkeras's hooks are not installed."""
    cause = Cause(CauseKind.EXCEPTION, int(os.environ["HVKERAS_SPARK_RANK"]), socket.gethostname(), os.getpid(),
                  f"failed with {summary(error)}", format_error(error)[-TAIL:])
    os.write(causes, json.dumps(cause.to_message()).encode())


def _read_all(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb") as pipe:
        return pipe.read()

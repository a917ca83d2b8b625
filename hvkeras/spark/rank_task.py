"""The task of one rank, in Spark's Python worker: exchanges addresses, starts the rank, and reports its exit.

Tasks exchange addresses by `allGather` of Spark's barrier stage. The task of rank 0 serves the control channel, so that
the channel outlives the rank, and reports its exit to the other ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from hvkeras.control.announcements import own_address
from hvkeras.control.cause import Cause, CauseKind
from hvkeras.control.connection import Introduction
from hvkeras.control.launch_environments import spark as launch
from hvkeras.control.launch_environments import tf_config
from hvkeras.control.launch_environments.horovod_variables import topology_variables, with_launcher
from hvkeras.control.messages import Deadlines
from hvkeras.control.server import ControlServer
from hvkeras.errors import HvkerasError, PeerError, UsageError, explain
from hvkeras.host.console import prints_at, quiet_variables, say
from hvkeras.host.gpus import VISIBLE
from hvkeras.host.network import LOOPBACK, host_identity, interface_address, is_local
from hvkeras.host.topology import Topology, topology_from_hosts
from hvkeras.launcher.exit_report import described_end, exit_report
from hvkeras.launcher.printer import Printer
from hvkeras.settings import Settings
from hvkeras.spark.order import Order, marked, ranks_by_host
from hvkeras.spark.output import OutputLink
from hvkeras.spark.rank_process import RankExit, RankProcess
from hvkeras.spark.task import visible_devices

FIRST_FAILURE_GRACE = 3.0  # seconds for Spark to cancel this task after the task whose rank failed first reports it
WorkT = TypeVar("WorkT")


class TaskFailedError(PeerError):
    """A rank or its task failed; the message is a marked report."""


def run(order: Order) -> Iterator[tuple[int, bytes]]:
    """Run a rank in this process's Spark task.

    Yields:
        The rank and its pickled result.

    Raises:
        TaskFailedError: The rank failed.
    """
    from pyspark import BarrierTaskContext

    with contextlib.ExitStack() as stack:
        task = RankTask(order, BarrierTaskContext.get(), stack)
        try:
            result = task.run()
        except HvkerasError as error:
            raise TaskFailedError(marked(f"{task.name} failed with {type(error).__name__}: {error}")) from error
        yield task.rank, result


class RankTask:
    """Spark task of a rank.

    Args:
        context: The `BarrierTaskContext` of this task.
        stack: Exit stack for the resources of this task.
    """

    def __init__(self, order: Order, context: Any, stack: contextlib.ExitStack) -> None:
        self._order, self._context, self._stack = order, context, stack
        self._hosts: list[str] = [info.address.rpartition(":")[0].strip("[]") for info in context.getTaskInfos()]
        self._task: int = context.partitionId()
        self.rank: int = ranks_by_host(self._hosts)[self._task] if order.by_host else self._task
        self._settings = Settings({**os.environ, **order.environment})
        self._server: ControlServer | None = None
        self._link: OutputLink | None = None
        self._printer: Printer | None = None

    @property
    def name(self) -> str:
        """The rank and its host, for messages."""
        return f"rank {self.rank} on {socket.gethostname()}"

    def run(self) -> bytes:
        """Run the rank until it exits, and return its pickled result.

        Raises:
            HvkerasError: The rank could not start.
            TaskFailedError: The rank failed.
        """
        self._refuse_retry()
        process = RankProcess(self._order)  # first, before this process has threads, which a fork does not copy
        self._stack.callback(process.close)
        self._open_output()
        process.start(self._environment())
        rank_exit = process.wait(self._show)
        if rank_exit.result is None:
            self._fail(rank_exit)
        assert rank_exit.result is not None
        self._context.barrier()  # rank 0's task serves the control channel until all ranks have exited
        return rank_exit.result

    def _refuse_retry(self) -> None:
        if self._context.attemptNumber():
            raise UsageError(explain("A job of hvkeras.spark runs once, and Spark has started its tasks again",
                                     "call hvkeras.spark.run again; save checkpoints to resume from",
                                     attempt=self._context.attemptNumber()))

    # Output.

    def _open_output(self) -> None:
        if self._order.output is not None:
            self._link = OutputLink.connect(self._order.output, self._order.secret.encode(),
                                            Introduction(self.rank, self._order.size, socket.gethostname()))
            if self._link is None:
                say(f"this host cannot connect to the driver at {self._order.output[0]}:{self._order.output[1]}, so the"
                    " output of ranks is only in this log")
        if self._link is not None:
            self._stack.callback(self._link.close)
            return
        self._printer = Printer(self._order.size, sys.stdout.buffer, sys.stderr.buffer,
                                quiet=not prints_at(self._settings, "INFO"))
        self._stack.callback(self._printer.finish)

    def _show(self, stream: str, data: bytes) -> None:
        if self._link is not None:
            self._link.show(stream, data)
        elif self._printer is not None:
            self._printer.show(self.rank, stream, data)

    def _print(self, text: str) -> None:
        self._show("stderr", f"hvkeras: {text}\n".encode())

    # The start.

    def _environment(self) -> dict[str, str]:
        """Exchange addresses with the other tasks, and return the variables of the rank."""
        facts: dict[str, Any] = {"rank": self.rank, "host": socket.gethostname(), "identity": host_identity()}
        if self.rank == 0:
            facts["control"] = self._serve()
        if self._order.tf_config:
            facts["port"] = self._reserve_port()
        tasks = sorted(self._gather(facts), key=lambda fact: int(fact["rank"]))
        topology = topology_from_hosts(self.rank, [fact["host"] for fact in tasks],
                                       [fact["identity"] for fact in tasks])
        assigned = {name: info.addresses for name, info in self._context.resources().items()}
        devices = visible_devices(self._order.gpus, self._task, assigned, os.environ)
        environment = {
            **quiet_variables(self._settings.log_level), **({} if devices is None else {VISIBLE: devices}),
            **self._order.environment,
            "PYTHONUNBUFFERED": "1", "HVKERAS_SECRET": self._order.secret, **self._topology_variables(topology),
            launch.CONTROL_ADDRESS: tasks[0]["control"],
        }
        if self._order.tf_config:
            hosts = [LOOPBACK] * topology.size if self._one_host else [self._address_of(fact) for fact in tasks]
            workers = [f"[{host}]:{fact['port']}" if ":" in host else f"{host}:{fact['port']}"
                       for host, fact in zip(hosts, tasks, strict=True)]
            environment |= tf_config.worker_variables(workers, self.rank, os.environ)
        return environment

    def _topology_variables(self, topology: Topology) -> dict[str, str]:
        numbers = {launch.PROCESS_ID: self.rank, launch.PROCESS_COUNT: topology.size,
                   launch.LOCAL_PROCESS_ID: topology.local_rank, launch.LOCAL_PROCESS_COUNT: topology.local_size}
        return {**{name: str(number) for name, number in numbers.items()},
                **with_launcher(launch.LAUNCHER, topology_variables(topology))}

    @property
    def _one_host(self) -> bool:
        return len(set(self._hosts)) == 1

    def _address_of(self, fact: Mapping[str, Any]) -> str:
        ranks = ranks_by_host(self._hosts) if self._order.by_host else list(range(self._order.size))
        return self._hosts[ranks.index(fact["rank"])]

    def _own_address(self) -> str:
        """Return the address for connections from other tasks: of the selected interface, or else Spark's address."""
        if self._one_host:
            return LOOPBACK
        if self._settings.network_interfaces:
            return interface_address(self._settings.network_interfaces)
        host: str = self._hosts[self._task]
        return socket.gethostbyname(host) if is_local(host) else own_address(self._settings, {})

    def _serve(self) -> str:
        self._server = ControlServer(self._order.size, self._order.secret.encode(), self._own_address(), 0,
                                     Deadlines.from_settings(self._settings), on_warning=self._print,
                                     on_note=self._print)
        self._stack.callback(self._server.stop)
        host, port = self._server.start()
        return f"{host}:{port}"

    def _reserve_port(self) -> int:
        """Reserve a free port with a socket that never listens, so that only servers with SO_REUSEPORT can use it."""
        holder = self._stack.enter_context(socket.socket())
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("", 0))
        return int(holder.getsockname()[1])

    def _gather(self, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Exchange facts with all tasks; raise PeerError if a task does not participate in time."""
        timeout = self._settings.start_timeout
        gathered = _within(timeout, lambda: self._context.allGather(json.dumps(facts)))
        if gathered is None:
            raise PeerError(explain(f"The tasks of all ranks must reach the barrier within {timeout:g} s, and at least"
                                    " one has not", "see the executors' logs, or raise HVKERAS_START_TIMEOUT",
                                    hosts=self._hosts))
        return [json.loads(answer) for answer in gathered]

    # Exit.

    def _fail(self, rank_exit: RankExit) -> None:
        """Raise the report of a failed rank; Spark keeps one report, which should be that of the first failure."""
        description = described_end(rank_exit.code) if rank_exit.code else "exited before its function returned"
        kind = CauseKind.SIGNAL if rank_exit.code < 0 else CauseKind.EXIT
        own_cause = Cause(kind, self.rank, socket.gethostname(), rank_exit.pid or None, description)
        cause = rank_exit.cause or own_cause
        if self._server is not None and self._server.cause is None:
            self._server.fail(cause)
        if cause.rank != self.rank:
            time.sleep(FIRST_FAILURE_GRACE)
        if cause.rank == self.rank and cause.kind is CauseKind.LOST:
            cause = replace(cause, error=description)
        raise TaskFailedError(marked(exit_report(cause, {self.rank: rank_exit.code}, rank_exit.tail, prefix="")))


def _within(seconds: float, function: Callable[[], WorkT]) -> WorkT | None:
    """Call a blocking function in a thread, and return None if it does not return in time."""
    results: list[WorkT] = []
    errors: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    thread = threading.Thread(target=call, name="hvkeras-spark-barrier", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    return results[0] if results else None

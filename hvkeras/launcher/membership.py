"""Membership of a job: what the launcher asks when something happens to its processes.

A *worker* is a process, numbered for its life in the order of starts. A *rank* is its index among those that train
together at present, which a generation of an elastic job changes. In other jobs, both numbers are the same.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hvkeras.control.cause import Cause, CauseKind
from hvkeras.control.messages import Deadlines
from hvkeras.control.server import ControlServer
from hvkeras.diagnostics.outcome import Outcome
from hvkeras.errors import UsageError
from hvkeras.host.network import LOOPBACK, address_towards, interface_address, outward_address
from hvkeras.launcher.exit_report import shell_code
from hvkeras.launcher.job_spec import JobSpec, Order, start_order
from hvkeras.launcher.placement import HostRanks, Rank, WorkerId
from hvkeras.settings import Settings

UNWIND = 1.0  # seconds beyond HVKERAS_EXIT_GRACE that ranks have for their last output


@dataclass(frozen=True)
class Exit:
    """How a worker's process has ended.

    Attributes:
        kind: The kind of the cause, if it is one.
        code: The exit code; minus the number of the signal that has killed it.
        error: What was observed, as the end of a sentence.
        host: The name of its host.
        pid: Its process id; None if it was never started.
    """

    kind: CauseKind
    code: int
    error: str
    host: str
    pid: int | None

    def cause(self, rank: Rank | None) -> Cause:
        """The failure of a rank whose process has ended so; nobody knows the code of one that was lost."""
        code = 1 if self.kind is CauseKind.LOST else shell_code(self.code)
        return Cause(self.kind, rank, self.host, self.pid, self.error, "", code)


class Workers(Protocol):
    """What a membership asks of the launcher, which has the processes."""

    @property
    def running(self) -> frozenset[WorkerId]:
        """The workers that are, or are to be, started, and have not ended."""

    def host_name(self, worker: WorkerId) -> str:
        """Returns what the host of a worker calls itself; "" before the worker is started."""

    async def reach(self, host: str) -> None:
        """Connects to a host, unless an agent serves there already.

        Raises:
            HvkerasError: The host cannot be used.
        """

    def start(self, host: str, order: Order) -> None:
        """Starts workers on a host that was reached."""

    def signal(self, number: int, workers: Iterable[WorkerId]) -> None:
        """Signals those of the workers that run, and discounts them."""

    def discount(self, workers: Iterable[WorkerId]) -> None:
        """Takes care that the exit codes of workers do not decide the job's."""

    def release(self, host: str) -> None:
        """Lets a host go as soon as no worker runs on it."""

    def end_all(self) -> None:
        """Ends all workers: those at once that nothing else informs of the end, the others a moment later."""

    def finish(self, seconds: float) -> None:
        """Ends the run after so many seconds, with all processes that are left."""

    def say(self, text: str) -> None:
        """Prints a line of the launcher's own."""

    def log(self, text: str) -> None:
        """Prints a step, if the user wants to see each."""

    def warn(self, text: str) -> None:
        """Prints a warning about late ranks, and keeps it for a report."""

    def later(self, seconds: float, function: Callable[..., None], *arguments: Any) -> None:
        """Calls a function in the launcher's event loop after so many seconds."""

    def from_thread(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls a function in the launcher's event loop; any thread may call this."""

    def in_background(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine until it or the job ends."""


class Membership(Protocol):
    """Who belongs to a job. The launcher calls all methods in its event loop."""

    @property
    def noun(self) -> str:
        """What the launcher's own lines call a worker."""

    @property
    def server(self) -> ControlServer:
        """The control channel of the present ranks."""

    @property
    def ranks(self) -> Sequence[WorkerId]:
        """The worker of each rank."""

    @property
    def cause(self) -> Cause | None:
        """Why the job ends early; None as long as it does not."""

    @property
    def may_start_workers(self) -> bool:
        """Whether workers may still be started, so that the job goes on although none runs."""

    @property
    def resets(self) -> int:
        """How often the job has gone on after a failure."""

    @property
    def may_restart(self) -> bool:
        """Whether all workers may be started again after a failure."""

    def restarted(self, say: Callable[[str], None]) -> JobSpec:
        """Returns the job to start all workers of again; may wait for hosts.

        Args:
            say: Prints a line.

        Raises:
            MachineError: There are not enough hosts in time.
        """

    def with_changes(self, outcome: Outcome) -> Outcome:
        """Returns an outcome of the job, completed with the changes of its ranks."""

    def serve(self) -> None:
        """Starts the control channel, before any worker."""

    def stop(self) -> None:
        """Stops it, after the last worker."""

    def order(self, host: HostRanks, tf_workers: Sequence[str]) -> Order:
        """Returns the order to start the first workers of a host.

        Args:
            host: The host and its ranks.
            tf_workers: host:port of each rank, for TF_CONFIG; empty without one.
        """

    def begin(self) -> None:
        """Begins what goes on while workers run; called once the first are being started."""

    def on_exit(self, worker: WorkerId, end: Exit) -> None:
        """Handles the end of a worker's process."""

    def on_stopped(self, worker: WorkerId) -> bool:
        """Returns whether a worker counts as ended that something else than the launcher has stopped for too long."""

    def on_host_stopped(self, worker: WorkerId, end: Exit) -> None:
        """Handles a host whose agent was stopped for too long.

        Args:
            worker: The first worker of the host.
            end: How it will end.
        """

    def on_host_lost(self, host: str) -> None:
        """Handles the loss of a host; the ends of its workers follow."""

    def on_host_preempted(self, host: str, cause: Cause) -> None:
        """Handles a host that is being taken away.

        Args:
            host: The host.
            cause: Why the job ends, if it does.
        """

    def on_tick(self) -> None:
        """Looks for what keeps the job waiting; called a few times a second."""

    def fail(self, cause: Cause) -> None:
        """Ends the ranks, because one has failed, or the job as a whole, if the cause is no rank's."""

    def terminate(self, cause: Cause) -> None:
        """Ends the job because a machine is being taken away, but lets the ranks save what they train."""



def control_server(size: int, secret: str, host: str, settings: Settings, workers: Workers,
                   on_end: Callable[[Cause], None]) -> ControlServer:
    """Returns a control channel for ranks, which does not run yet.

    Args:
        size: The number of ranks.
        secret: The job's secret.
        host: The address to listen on.
        settings: The job's settings.
        workers: The launcher.
        on_end: Called in the launcher's event loop with the cause when the ranks end early.

    Raises:
        MachineError: It cannot listen.
    """
    return ControlServer(size, secret.encode(), host, 0, Deadlines.from_settings(settings),
                         on_end=lambda cause: workers.from_thread(on_end, cause),
                         on_warning=lambda text: workers.from_thread(workers.warn, text),
                         on_note=lambda text: workers.from_thread(workers.say, f"hvkeras: {text}"))


def start_serving(server: ControlServer, workers: Workers) -> None:
    """Starts a job's first control channel."""
    address = server.start()
    workers.log(f"the control channel listens on {address[0]}:{address[1]}")


def listening_address(job: JobSpec) -> str:
    """Returns the address of this host that all hosts of the job reach, those that may come included.

    Raises:
        UsageError: There is no such network interface.
    """
    chosen = Settings(job.environment).network_interfaces
    remote = [host.name for host in job.hosts if not host.local]
    found = LOOPBACK
    if job.reporting is not None:
        found = job.reporting.address[0]
    elif remote:
        found = interface_address(chosen) if chosen else address_towards(remote[0])
    if found != LOOPBACK or job.pool is None or not job.pool.changes:
        return found
    try:
        return interface_address(chosen) if chosen else outward_address()
    except UsageError:  # this one has no network
        return found


class FixedMembership:
    """The membership of a job whose ranks stay the same: the first failure ends all.

    Args:
        job: What to run.
        secret: The job's secret.
        workers: The launcher.

    Raises:
        MachineError: The control channel cannot listen.
        UsageError: There is no such network interface.
    """

    noun: str = "rank"
    may_start_workers: bool = False
    may_restart: bool = True
    resets: int = 0

    def __init__(self, job: JobSpec, secret: str, workers: Workers) -> None:
        self._job, self._secret, self._workers = job, secret, workers
        self._settings = Settings(job.environment)
        self._ended: dict[WorkerId, Exit] = {}
        self.ranks: Sequence[WorkerId] = [WorkerId(rank) for rank in range(job.size)]
        self.server: ControlServer = control_server(job.size, secret, listening_address(job), self._settings, workers,
                                                    lambda _: workers.end_all())

    @property
    def cause(self) -> Cause | None:
        """Why the job ends early; only the server knows it, from the ranks and from `fail`.

        A failure reaches the server's thread a moment after `fail` has returned. The cause of a job's end is therefore
        read after the server has stopped, which happens after it has handled everything reported before.
        """
        return self.server.cause

    def restarted(self, say: Callable[[str], None]) -> JobSpec:  # noqa: ARG002 - the signature of memberships
        """Returns the job to start all workers of again: the same."""
        return self._job

    def with_changes(self, outcome: Outcome) -> Outcome:
        """Returns an outcome of the job; there are no changes to complete it with."""
        return outcome

    def serve(self) -> None:
        """Starts the control channel."""
        start_serving(self.server, self._workers)

    def stop(self) -> None:
        """Stops it."""
        self.server.stop()

    def order(self, host: HostRanks, tf_workers: Sequence[str]) -> Order:
        """Returns the order to start the workers of a host."""
        return start_order(self._job, host, self._secret, "{}:{}".format(*self.server.address), tf_workers)

    def begin(self) -> None:
        """Does nothing: all workers are there."""

    def on_exit(self, worker: WorkerId, end: Exit) -> None:
        """Ends the job if a process has failed."""
        self._ended[worker] = end
        if end.code:
            self.fail(end.cause(Rank(worker)))

    def on_stopped(self, worker: WorkerId) -> bool:  # noqa: ARG002 - the signature of memberships
        """Returns False: the control channel notices ranks that give no sign of life."""
        return False

    def on_host_stopped(self, worker: WorkerId, end: Exit) -> None:
        """Ends the job: a rank is lost with its host."""
        self.fail(end.cause(Rank(worker)))

    def on_host_lost(self, host: str) -> None:
        """Does nothing: the ends of its workers follow."""

    def on_host_preempted(self, host: str, cause: Cause) -> None:  # noqa: ARG002 - the signature of memberships
        """Ends the job, which cannot go on without a host."""
        self.terminate(cause)

    def on_tick(self) -> None:
        """Ends a job whose ranks wait for one that ended before calling `hvd.init()`."""
        if self.cause is not None:
            return
        waiting, absent = self.server.connected, self._ended.keys() - self.server.ever_connected
        if waiting and absent:
            worker = WorkerId(min(absent))
            end = self._ended[worker]
            self.fail(Cause(CauseKind.SETUP, Rank(worker), end.host, end.pid,
                            f"exited with code {end.code} and never called hvd.init(), in which {len(waiting)}"
                            f" other{'s wait' if len(waiting) > 1 else ' waits'} for it"))

    def fail(self, cause: Cause) -> None:
        """Ends the job, unless the ranks have already reported a cause; the server then ends all workers."""
        self.server.fail(cause)

    def terminate(self, cause: Cause) -> None:
        """Ends the job because a machine is being taken away, but lets the ranks save what they train."""
        if self._job.size == 1:  # it has no control channel
            self._workers.signal(signal.SIGTERM, self.ranks)
        else:
            self.server.terminate(cause)
        self._workers.later(self._settings.leave_grace, self.fail, cause)

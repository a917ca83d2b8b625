"""Membership of a job: handles the events of workers and hosts, and decides when the job ends.

A *worker* is a process with a fixed number, in the order of starts. Its *rank* is its index among the workers that
currently train together. In an elastic job, each generation assigns new ranks. In other jobs, both numbers are equal.
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

UNWIND = 1.0  # seconds after HVKERAS_EXIT_GRACE for the ranks' last output


@dataclass(frozen=True)
class Exit:
    """End of a worker's process.

    Attributes:
        kind: The kind of the cause, if this is a failure.
        code: The exit code, or the negative number of the signal that killed it.
        error: Description of the end, as a predicate: `exited with code 3`.
        pid: Its process id; None if it was never started.
    """

    kind: CauseKind
    code: int
    error: str
    host: str
    pid: int | None

    def cause(self, rank: Rank | None) -> Cause:
        """Return the cause if the worker was a rank; the exit code of a lost process is unknown, and becomes 1."""
        code = 1 if self.kind is CauseKind.LOST else shell_code(self.code)
        return Cause(self.kind, rank, self.host, self.pid, self.error, "", code)


class Workers(Protocol):
    """Interface of the launcher for memberships: start, signal and end workers."""

    @property
    def running(self) -> frozenset[WorkerId]:
        """Workers that are starting or running."""

    def host_name(self, worker: WorkerId) -> str:
        """Return the name that the host of a worker reported; "" before the worker is started."""

    async def reach(self, host: str) -> None:
        """Connect to a host, unless its agent is connected.

        Raises:
            HvkerasError: The host cannot be used.
        """

    def start(self, host: str, order: Order) -> None:
        """Start workers on a connected host."""

    def signal(self, number: int, workers: Iterable[WorkerId]) -> None:
        """Send a signal to those of the workers that run; their exit codes do not count."""

    def discount(self, workers: Iterable[WorkerId]) -> None:
        """Exclude the exit codes of workers from that of the job."""

    def release(self, host: str) -> None:
        """Disconnect from a host when no worker runs on it any more."""

    def end_all(self) -> None:
        """End all workers: unconnected ones immediately, the others (notified by the channel) after a grace period."""

    def finish(self, seconds: float) -> None:
        """End the run, and all remaining processes, after a delay in seconds."""

    def say(self, text: str) -> None:
        """Print the launcher's own text."""

    def log(self, text: str) -> None:
        """Print a step of the launcher if `JobSpec.verbose` is set."""

    def warn(self, text: str) -> None:
        """Print a stall warning, and store it for the report."""

    def later(self, seconds: float, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function in the launcher's event loop after a delay in seconds."""

    def from_thread(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function in the launcher's event loop; any thread may call this."""

    def in_background(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine until it, or the job, ends."""


class Membership(Protocol):
    """Interface of memberships for the launcher, which calls all methods in its event loop."""

    @property
    def noun(self) -> str:
        """Word for a worker in the launcher's messages."""

    @property
    def server(self) -> ControlServer:
        """Control channel of the current ranks."""

    @property
    def ranks(self) -> Sequence[WorkerId]:
        """Worker of each rank."""

    @property
    def cause(self) -> Cause | None:
        """Cause of an early end of the job; None if there is none."""

    @property
    def may_start_workers(self) -> bool:
        """True if workers may still be started, so that the job continues even if none runs."""

    @property
    def resets(self) -> int:
        """Number of times that the job has continued after a failure."""

    @property
    def may_restart(self) -> bool:
        """True if all workers may be restarted after a failure."""

    def restarted(self, say: Callable[[str], None]) -> JobSpec:
        """Return the job for a restart of all workers; may wait for hosts.

        Args:
            say: Function that prints a line.

        Raises:
            MachineError: Too few slots became available in time.
        """

    def with_changes(self, outcome: Outcome) -> Outcome:
        """Return the outcome with the changes of the ranks added."""

    def serve(self) -> None:
        """Start the control channel; called before any worker starts."""

    def stop(self) -> None:
        """Stop the control channel; called after the last worker has ended."""

    def order(self, host: HostRanks, tf_workers: Sequence[str]) -> Order:
        """Return the order to start the first workers of a host.

        Args:
            tf_workers: `host:port` of each rank, for TF_CONFIG; empty without it.
        """

    def begin(self) -> None:
        """Start background tasks; called when the first workers are starting."""

    def on_exit(self, worker: WorkerId, end: Exit) -> None:
        """Handle the end of a worker's process."""

    def on_stopped(self, worker: WorkerId) -> bool:
        """Return whether a worker that was stopped for too long, but not by the launcher, counts as ended."""

    def on_host_stopped(self, worker: WorkerId, end: Exit) -> None:
        """Handle a host whose agent was stopped for too long.

        Args:
            worker: The first worker of the host.
            end: The end of that worker, if the host counts as lost.
        """

    def on_host_lost(self, host: str) -> None:
        """Handle the loss of a host; the exits of its workers follow."""

    def on_host_preempted(self, host: str, cause: Cause) -> None:
        """Handle a host that is being preempted.

        Args:
            cause: The cause, if this ends the job.
        """

    def on_tick(self) -> None:
        """Check for timeouts; called a few times per second."""

    def fail(self, cause: Cause) -> None:
        """End the current ranks because one has failed; end the whole job if the cause concerns no rank."""

    def terminate(self, cause: Cause) -> None:
        """End the job because a machine is being preempted, and let the ranks save their state first."""


def control_server(size: int, secret: str, host: str, settings: Settings, workers: Workers,
                   on_end: Callable[[Cause], None]) -> ControlServer:
    """Return the control channel of a group of ranks; `start_serving` starts it.

    Args:
        on_end: Called with the cause, in the launcher's event loop, when the ranks end early.

    Raises:
        MachineError: The control channel cannot listen.
    """
    return ControlServer(size, secret.encode(), host, 0, Deadlines.from_settings(settings),
                         on_end=lambda cause: workers.from_thread(on_end, cause),
                         on_warning=lambda text: workers.from_thread(workers.warn, text),
                         on_note=lambda text: workers.from_thread(workers.say, f"hvkeras: {text}"))


def start_serving(server: ControlServer, workers: Workers) -> None:
    """Start the first control channel of a job."""
    address = server.start()
    workers.log(f"the control channel listens on {address[0]}:{address[1]}")


def listening_address(job: JobSpec) -> str:
    """Return the address of this host for all hosts of the job, including those that may join later.

    Raises:
        UsageError: The network interface does not exist.
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
    except UsageError:  # this host has no network
        return found


class FixedMembership:
    """Membership of a job with fixed ranks: the first failure ends the job.

    Raises:
        MachineError: The control channel cannot listen.
        UsageError: The network interface does not exist.
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
        """Cause of an early end of the job, which the server has from the ranks or from `fail`.

        `fail` returns before the server's thread handles the failure. The final cause is therefore read after the
        server has stopped, as it then has handled all earlier failures.
        """
        return self.server.cause

    def restarted(self, say: Callable[[str], None]) -> JobSpec:  # noqa: ARG002 - the signature of memberships
        """Return the job unchanged."""
        return self._job

    def with_changes(self, outcome: Outcome) -> Outcome:
        """Return the outcome unchanged."""
        return outcome

    def serve(self) -> None:
        """Start the control channel."""
        start_serving(self.server, self._workers)

    def stop(self) -> None:
        """Stop the control channel."""
        self.server.stop()

    def order(self, host: HostRanks, tf_workers: Sequence[str]) -> Order:
        """Return the order to start the workers of a host."""
        return start_order(self._job, host, self._secret, "{}:{}".format(*self.server.address), tf_workers)

    def begin(self) -> None:
        """Do nothing: there are no background tasks."""

    def on_exit(self, worker: WorkerId, end: Exit) -> None:
        """End the job if the process has failed."""
        self._ended[worker] = end
        if end.code:
            self.fail(end.cause(Rank(worker)))

    def on_stopped(self, worker: WorkerId) -> bool:  # noqa: ARG002 - the signature of memberships
        """Return False: the control channel notices missing heartbeats."""
        return False

    def on_host_stopped(self, worker: WorkerId, end: Exit) -> None:
        """End the job, as a rank is lost with its host."""
        self.fail(end.cause(Rank(worker)))

    def on_host_lost(self, host: str) -> None:
        """Do nothing: the exits of its workers follow."""

    def on_host_preempted(self, host: str, cause: Cause) -> None:  # noqa: ARG002 - the signature of memberships
        """End the job, which cannot continue without a host."""
        self.terminate(cause)

    def on_tick(self) -> None:
        """End the job if ranks wait for one that exited before it called `hvd.init()`."""
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
        """End the job, unless it has a cause already. The server then calls back to end all workers."""
        self.server.fail(cause)

    def terminate(self, cause: Cause) -> None:
        """End the job because a machine is being preempted, and let the ranks save their state first."""
        if self._job.size == 1:  # a single rank does not connect to the control channel
            self._workers.signal(signal.SIGTERM, self.ranks)
        else:
            self.server.terminate(cause)
        self._workers.later(self._settings.leave_grace, self.fail, cause)

"""The membership of a job whose ranks stay the same: what follows when one of its processes ends."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence

from hvkeras.control.cause import Cause, CauseKind
from hvkeras.control.server import ControlServer
from hvkeras.diagnostics.outcome import Outcome
from hvkeras.launcher.job_spec import JobSpec
from hvkeras.launcher.membership import Exit, Workers, control_server, listening_address, start_serving
from hvkeras.launcher.orders import Order, start_order
from hvkeras.launcher.placement import HostRanks, Rank, WorkerId
from hvkeras.settings import Settings


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

"""This process's link to the ranks of a job: it outlives `shutdown()`, as ranks may call `init()` again."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Mapping

from hvkeras.control.cause import Cause
from hvkeras.control.client import ControlClient
from hvkeras.control.launch_environments import Launch, describe_cluster, hydra, open_mpi, slurm, torchrun
from hvkeras.control.messages import Deadlines
from hvkeras.control.process_exit import ExitWatch
from hvkeras.control.rendezvous import connect
from hvkeras.host.console import prints_at, say
from hvkeras.host.mpi import finalize_mpi, running_mpi
from hvkeras.job.failure import FailureHooks, FailurePolicy
from hvkeras.settings import Settings

CAUSE_TIMEOUT = 2.0  # seconds to wait for a message from the server in the same process
ABORT_WITHIN = 2.0  # seconds for engines to be aborted, once another rank has failed


class JobLink:
    """The control channel of this process, and what happens here when the job fails or this process exits.

    Args:
        launch: How this process was launched.
        settings: The settings in force.
        policy: What this rank does when another one fails.

    Attributes:
        launch: How this process was launched.
        client: This rank's end of the control channel.
        hooks: The hooks for exceptions, exits, signals, and failures of other ranks.
        starts: How many engines have started on this link.

    Raises:
        MachineError: A port or the launcher does not meet the job's needs.
        PeerError: A rank is missing or failed.
    """

    def __init__(self, launch: Launch, settings: Settings, policy: FailurePolicy) -> None:
        self.launch = launch
        self.starts: int = 0
        self._on_end: Callable[[Cause], None] = lambda _: None  # until there are hooks
        if launch.rank == 0 and launch.cluster and prints_at(settings, "WARNING"):
            say(describe_cluster(launch))
        connected = connect(launch, settings, self._job_ended)
        self.client: ControlClient = connected.client
        self._server, self._claim = connected.server, connected.claim
        if launch.rendezvous.kind != "run" and (starter := open_launcher()) is not None:
            self.client.watch_launcher(starter)
        self.hooks: FailureHooks = FailureHooks(
            self.client, socket.gethostname(), settings.exit_grace,
            show_secondary=settings.log_level in ("DEBUG", "TRACE"), cause_file=settings.run_cause, policy=policy)
        self.set_deadlines(settings)
        self._on_end = self.hooks.job_ended
        if self.client.cause is not None:
            self.hooks.job_ended(self.client.cause)

    def set_deadlines(self, settings: Settings) -> None:
        """Sets how long this rank waits, and whoever serves the channel, who may have other settings."""
        client = self.client
        client.watch_progress(settings.stall_warning, settings.stall_shutdown)
        client.liveness = settings.liveness_timeout
        self._exit_watch = ExitWatch(f"rank {self.launch.rank} on {socket.gethostname()} (pid {os.getpid()})",
                                     settings.stall_warning, settings.stall_shutdown, settings.liveness_timeout)
        client.watch_exit(self._exit_watch)
        self.hooks.grace = settings.exit_grace
        if self.launch.rank == 0:
            client.set_deadlines(Deadlines.from_settings(settings))

    def _job_ended(self, cause: Cause) -> None:
        self._on_end(cause)

    @property
    def outlived_failure(self) -> bool:
        """Whether another rank's failure has ended the job, and this process goes on."""
        return self.client.cause is not None and self.hooks.outlives(self.client.cause)

    def await_abort(self) -> None:
        """Waits until engines are aborted, if a rank has failed: later, that would hit the engine of the next ranks."""
        if self.client.cause is not None:
            self.hooks.aborted.wait(ABORT_WITHIN)

    def close(self) -> None:
        """Leaves these ranks for good, which go on without this one or have failed."""
        for backend in self.hooks.backends:  # the ranks did not come together
            backend.stop()
        self.hooks.release()
        self.release_port()
        if self._server is not None:
            self._server.stop()
        self.client.close()

    def release_port(self) -> None:
        """Releases the port from TF_CONFIG for the engine; called once all ranks are connected."""
        if self._claim is not None:
            self._claim.close()

    def script_ended(self) -> None:
        """Reports that Python has run the script; it may still wait for non-daemon threads."""
        self.client.script_ended()

    def exit(self) -> None:
        """Leaves the job at the end of this process, and reports an exit code other than 0."""
        self.hooks.exiting()
        finalize_mpi()
        self._wait_for_exits()
        if self.client.cause is not None:
            self.hooks.exiting()
        self.hooks.uninstall()
        self.release_port()
        if self._server is not None:
            self._server.stop()
        self.client.stop_reading()  # its connection stays open until the process is gone
        self._exit_watch.arm_last_resort()

    def _wait_for_exits(self) -> None:
        """Waits, if this process serves, until ranks with finished scripts have exited or the job has ended."""
        if self._server is None or self.client.detached:
            return
        self.client.excuse_ending()
        # MPI's exit holds this process until the others end.
        self._server.wait_for_exits(self.client.introduction.rank, held=running_mpi() is not None)
        if self._server.cause is not None:
            self.client.wait_for_cause(CAUSE_TIMEOUT)


# One variable of each launcher, of which a step of Slurm's may start the others. `hvkeras run` and horovodrun are left
# out: they look after their ranks themselves.
_LAUNCHER_VARIABLES = (open_mpi.PROCESS_ID, hydra.PROCESS_ID, torchrun.RUN, slurm.STEP)


def open_launcher(environ: Mapping[str, str] | None = None) -> int | None:
    """Opens the nearest ancestor process that lacks a rank's variables: the launcher, which sets them for others.

    Args:
        environ: The environment to read; this process's by default.

    Returns:
        A descriptor that becomes readable when the launcher ends; None if there is none to watch.
    """
    environ = os.environ if environ is None else environ
    own = next((name for name in _LAUNCHER_VARIABLES if environ.get(name)), None)
    pid = os.getppid() if own is not None else 1
    with contextlib.suppress(OSError, AttributeError, ValueError, IndexError):  # pidfd_open came with Linux 5.3
        while pid > 1:
            descriptor = os.pidfd_open(pid)
            if not _was_started_with(pid, f"{own}="):
                return descriptor
            os.close(descriptor)
            with open(f"/proc/{pid}/stat", errors="replace") as file:
                pid = int(file.read().rpartition(")")[2].split()[1])
    return None


def _was_started_with(pid: int, variable: str) -> bool:
    """Returns whether a process was started with a variable; False for another user's process."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return any(entry.startswith(variable.encode()) for entry in file.read().split(b"\0"))
    except PermissionError:
        return False

"""Connection of this process to the other ranks. It persists after `shutdown()`, as ranks may call `init()` again."""

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

CAUSE_TIMEOUT = 2.0  # seconds to wait for a message from the control server in the same process
ABORT_WITHIN = 2.0  # seconds to wait until engines are aborted after another rank failed


class JobLink:
    """Control channel of this process, with its failure hooks and exit handling.

    Args:
        launch: How this process was launched.
        policy: Reaction to the failure of another rank.

    Attributes:
        launch: How this process was launched.
        hooks: Hooks for exceptions, exits, signals, and failures of other ranks.
        starts: Number of engines that were started on this link.

    Raises:
        MachineError: A port is not available, or the launcher is not supported.
        PeerError: A rank is missing or failed.
    """

    def __init__(self, launch: Launch, settings: Settings, policy: FailurePolicy) -> None:
        self.launch = launch
        self.starts: int = 0
        self._on_end: Callable[[Cause], None] = lambda _: None  # until the hooks exist
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
        """Set the timeouts of this rank, and on rank 0 those of the control server."""
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
        """Return whether another rank has failed and this process continues."""
        return self.client.cause is not None and self.hooks.outlives(self.client.cause)

    def await_abort(self) -> None:
        """Wait until engines are aborted if a rank has failed; a late abort would hit the next generation's engine."""
        if self.client.cause is not None:
            self.hooks.aborted.wait(ABORT_WITHIN)

    def close(self) -> None:
        """Disconnect permanently from these ranks, which continue without this one or have failed."""
        for backend in self.hooks.backends:  # the rendezvous did not complete
            backend.stop()
        self.hooks.release()
        self.release_port()
        if self._server is not None:
            self._server.stop()
        self.client.close()

    def release_port(self) -> None:
        """Release the port from TF_CONFIG for the engine; called when all ranks are connected."""
        if self._claim is not None:
            self._claim.close()

    def script_ended(self) -> None:
        """Report that the script has ended; Python may still wait for non-daemon threads."""
        self.client.script_ended()

    def exit(self) -> None:
        """Leave the job at the exit of this process, and report a nonzero exit code."""
        self.hooks.exiting()
        finalize_mpi()
        self._wait_for_exits()
        if self.client.cause is not None:
            self.hooks.exiting()
        self.hooks.uninstall()
        self.release_port()
        if self._server is not None:
            self._server.stop()
        self.client.stop_reading()  # the connection stays open until the process ends
        self._exit_watch.arm_last_resort()

    def _wait_for_exits(self) -> None:
        """On the control server, wait until ranks with completed scripts have exited or the job has failed."""
        if self._server is None or self.client.detached:
            return
        self.client.excuse_ending()
        # MPI_Finalize blocks this process until the others end.
        self._server.wait_for_exits(self.client.introduction.rank, held=running_mpi() is not None)
        if self._server.cause is not None:
            self.client.wait_for_cause(CAUSE_TIMEOUT)


# One variable of each launcher. Slurm comes last, because a job step may start the other launchers. `hvkeras run` and
# horovodrun are omitted: they monitor their ranks themselves.
_LAUNCHER_VARIABLES = (open_mpi.PROCESS_ID, hydra.PROCESS_ID, torchrun.RUN, slurm.STEP)


def open_launcher(environ: Mapping[str, str] | None = None) -> int | None:
    """Open a pidfd of the launcher: the nearest ancestor process that lacks the variables of a rank.

    Args:
        environ: The environment to read; this process's by default.

    Returns:
        A descriptor that becomes readable when the launcher ends; None if there is no launcher to watch.
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
    """Return whether a process was started with a variable; False for another user's process."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return any(entry.startswith(variable.encode()) for entry in file.read().split(b"\0"))
    except PermissionError:
        return False

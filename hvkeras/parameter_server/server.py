"""Workers and parameter servers: they run TensorFlow's server until the chief reports that the job has ended."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

from hvkeras.control.cause import Cause, CauseKind
from hvkeras.control.client import ControlClient
from hvkeras.control.launch_environments import Launch
from hvkeras.control.rendezvous import claim_port, join_parameter_servers
from hvkeras.errors import MachineError, explain
from hvkeras.host.console import mute_engines, say_last
from hvkeras.job.signals import SignalWatch
from hvkeras.settings import Settings

_POLL_INTERVAL = 0.1  # seconds between checks of whether the job has ended
_EXIT_TIMEOUT = 1.0  # seconds for a clean exit before the process is forced to exit


class Registration:
    """Connection of a task to its chief, which reports whether and why the job has ended.

    Args:
        launch: The cluster, and this process's task in it.

    Raises:
        HvkerasError: The chief cannot be found in time, or rejects this task.
    """

    def __init__(self, launch: Launch, settings: Settings) -> None:
        self._name = launch.tasks[launch.rank]
        self._ended = threading.Event()
        self._signals = SignalWatch(self._on_signal)
        self._client: ControlClient = join_parameter_servers(launch, settings, lambda _: self._ended.set())
        if threading.current_thread() is threading.main_thread():
            self._signals.install()

    def wait(self, seconds: float) -> bool:
        """Wait until the job has ended or `seconds` have passed; return `has_ended`."""
        while seconds > 0 and not self.has_ended:
            self._ended.wait(min(_POLL_INTERVAL, seconds))
            seconds -= _POLL_INTERVAL
        return self.has_ended

    @property
    def has_ended(self) -> bool:
        """True if the job has ended, successfully or not."""
        return self._ended.is_set() or self._client.detached

    @property
    def failed(self) -> bool:
        """True if the job has failed."""
        return self._client.cause is not None

    def leave(self) -> NoReturn:
        """Exit with code 0 if the job succeeded; otherwise print the cause, and exit with code 1."""
        self._signals.uninstall()
        self._client.leave()
        cause = self._client.cause
        self._client.close()
        if cause is not None:
            say_last(f"{self._name} on {socket.gethostname()} ends because {_sentence(cause)}")
        mute_engines()
        sys.stdout.flush()
        _exit_after_timeout(1 if cause is not None else 0)
        sys.exit(1 if cause is not None else 0)

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGTERM:
            who = f"{self._name} on {socket.gethostname()} (pid {os.getpid()})"
            if self._name.startswith("ps "):  # report the cause to the other tasks
                self._client.fail(Cause(CauseKind.SIGNAL, None, "", None, f"{who} received SIGTERM"))
            say_last(f"{who} received SIGTERM")
            os._exit(128 + number)


def serve(launch: Launch, settings: Settings) -> NoReturn:
    """Run the server of a worker or parameter server until the job ends, and then exit.

    Args:
        launch: The cluster, and this process's task in it.

    Raises:
        MachineError: The task's port is in use.
        PeerError: The chief cannot be found in time.
        SystemExit: The job has ended.
    """
    server = _started(launch)
    registration = Registration(launch, settings)
    while not registration.wait(60.0):
        pass
    del server  # TensorFlow cannot stop the server; it ends with this process
    registration.leave()


def _started(launch: Launch) -> Any:
    import tensorflow as tf

    claim_port(launch).close()
    role, index = launch.tasks[launch.rank].split()
    cluster: dict[str, list[str]] = {}
    for task, address in zip(launch.tasks, launch.cluster, strict=False):
        if not task.startswith("evaluator "):
            cluster.setdefault(task.split()[0], []).append(address)
    try:
        return tf.distribute.Server(tf.train.ClusterSpec(cluster), job_name=role, task_index=int(index),
                                    protocol="grpc")
    except tf.errors.OpError as error:
        raise MachineError(explain(f"TensorFlow's server must be able to start ({error.message})", "stop the program"
                                   " that uses the port, or give this task another",
                                   address=launch.cluster[launch.rank],
                                   )) from error


def _sentence(cause: Cause) -> str:
    """Describe the cause; on the control channel, the chief is rank 0."""
    return f"chief 0 on {cause.host} {cause.error}" if cause.rank == 0 else cause.sentence()


def _exit_after_timeout(code: int, exit_process: Callable[[int], None] = os._exit) -> None:
    """Force the process to exit after a timeout, as threads of TensorFlow's server can block a clean exit."""
    timer = threading.Timer(_EXIT_TIMEOUT, exit_process, (code,))
    timer.name = "hvkeras-exit"
    timer.daemon = True
    timer.start()

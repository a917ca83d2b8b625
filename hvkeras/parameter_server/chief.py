"""Chief of a cluster: connects to the other tasks, provides the strategy, and ends the job for all tasks.

Each variable is placed on the parameter server that holds the least data so far. Variables are not sharded, as Keras 3
does not support it: `variable_partitioner` creates a `ShardedVariable`, which has no `handle`, but Keras's `Variable`
treats it as a `tf.Variable`, and `GradientTape.gradient` fails on the first weights.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras.control.announcements import remove_announcement
from hvkeras.control.cause import Cause, CauseKind
from hvkeras.control.launch_environments import Launch
from hvkeras.control.rendezvous import claim_port, serve_parameter_servers, uses_announced_port
from hvkeras.errors import HvkerasError, MachineError, PeerError, explain, summary
from hvkeras.host.console import mute_engines, prints_at, say, say_last
from hvkeras.host.forks import at_exit
from hvkeras.host.network import held_port, split_address
from hvkeras.job.signals import SignalWatch
from hvkeras.parameter_server.cluster_membership import ClusterMembership
from hvkeras.settings import Settings


@contextlib.contextmanager
def balanced_scope(strategy: Any, servers: int) -> Iterator[None]:
    """Enter a strategy's scope, and balance the variables created in it over the parameter servers by size.

    Args:
        strategy: A `ParameterServerStrategy`.
        servers: The number of its parameter servers.
    """
    loads = dict.fromkeys(range(servers), 0)
    anchors: list[Any] = []

    def create(next_creator: Callable[..., Any], **options: Any) -> Any:
        if options.get("colocate_with") is None:  # optimizer slots are placed with their variables
            options["colocate_with"] = anchors[min(loads, key=lambda server: loads[server])]
        variable = next_creator(**options)
        loads[server_of(variable)] += _size(variable)
        return variable

    with strategy.scope():
        anchors += [tf.Variable(0, trainable=False, name=f"anchor_{number}") for number in range(servers)]
        anchors.sort(key=server_of)
        with tf.variable_creator_scope(create):
            yield


def server_of(variable: Any) -> int:
    """Return the task index of the parameter server that holds a `tf.Variable`."""
    return int(tf.DeviceSpec.from_string(variable.device).task)


def _size(variable: Any) -> int:
    return int(np.prod(variable.shape.as_list(), dtype=np.int64)) * int(variable.dtype.size)


_CAUSE_GRACE = 3.0  # seconds to wait, after a TensorFlow error, for a report that a task was lost


@contextlib.contextmanager
def running_chief(launch: Launch, settings: Settings) -> Iterator[Chief]:
    """Run the chief of a cluster; on exit from the context, the job ends for all tasks.

    Args:
        launch: The cluster, and this process's task in it.

    Raises:
        PeerError: A task did not connect, or was lost.
        MachineError: A port is in use.
    """
    chief = Chief(launch, settings)
    try:
        chief.start()
        yield chief
    except BaseException as error:
        chief.end(error)
        raise
    chief.end(None)


class Chief:
    """Coordinator of a cluster.

    Args:
        launch: The cluster, and this process's task in it.

    Attributes:
        strategy: The `ParameterServerStrategy`.
        coordinator: The `ClusterCoordinator`.
    """

    def __init__(self, launch: Launch, settings: Settings) -> None:
        self._launch = launch
        self._settings = settings
        self._ended = threading.Event()  # once set, failures of tasks are ignored
        self._log_level = logging.getLogger("tensorflow").level
        self._signals = SignalWatch(self._on_signal)
        self._server: ClusterMembership | None = None
        self.strategy: Any = None
        self.coordinator: Any = None

    @property
    def workers(self) -> int:
        """Number of workers in the cluster."""
        return sum(task.startswith("worker ") for task in self._launch.tasks)

    def start(self) -> None:
        """Wait for the other tasks, and connect to them.

        Raises:
            PeerError: A task did not connect in time.
            MachineError: A port is in use.
        """
        def serve(launch: Launch, settings: Settings, secret: bytes, host: str, port: int = 0) -> ClusterMembership:
            self._server = ClusterMembership(launch, settings, secret, host, port, self._on_job_end)
            self._server.start()
            return self._server

        serve_parameter_servers(self._launch, self._settings, serve)
        server = self._server
        assert server is not None
        if threading.current_thread() is threading.main_thread():
            self._signals.install()
        server.wait_for_all()
        if not prints_at(self._settings, "INFO"):  # TensorFlow logs hundreds of lines about a lost task
            logging.getLogger("tensorflow").setLevel(logging.CRITICAL)
        self.strategy = self._strategy()
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)
        servers = self._launch.size - 1 - self.workers
        if prints_at(self._settings, "WARNING"):
            say(f"asynchronous training on {self.workers} worker{'s' * (self.workers > 1)} and {servers} parameter"
                f" server{'s' * (servers > 1)}")

    def _strategy(self) -> Any:
        entries = list(zip(self._launch.tasks, self._launch.cluster, strict=False))
        cluster = {role: [address for task, address in entries if task.startswith(f"{role} ")]
                   for role in ("chief", "worker", "ps")}
        with contextlib.ExitStack() as held:
            if uses_announced_port(self._launch, self._settings):  # the control channel keeps the announced port
                cluster["chief"] = [held.enter_context(held_port(split_address(cluster["chief"][0])[0]))]
            else:
                claim_port(self._launch).close()
            resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
                tf.train.ClusterSpec(cluster), task_type="chief", task_id=0, rpc_layer="grpc")
            try:
                return tf.distribute.ParameterServerStrategy(resolver)
            except tf.errors.UnknownError as error:
                raise MachineError(explain("TensorFlow's server must be able to start"
                                           f" ({error.message})", "stop the program that uses the port, or give the"
                                           " chief another",
                                           address=cluster["chief"][0])) from error

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        """Return the strategy's scope, in which variables are balanced over the parameter servers by size."""
        return balanced_scope(self.strategy, sum(task.startswith("ps ") for task in self._launch.tasks))

    def end(self, error: BaseException | None) -> None:
        """End the job for all tasks.

        Args:
            error: The exception of training; None if it succeeded.

        Raises:
            PeerError: Training failed because a task was lost.
        """
        if self._server is None:
            return
        lost = self._lost_task(self._server, error) if error is not None else None
        logging.getLogger("tensorflow").setLevel(self._log_level)
        self._signals.uninstall()
        self._ended.set()
        if error is not None:
            at_exit(mute_engines)  # TensorFlow logs lost tasks even during exit
        if error is not None and lost is None:
            interrupted = isinstance(error, KeyboardInterrupt)
            description = "was interrupted (Ctrl-C)" if interrupted else f"failed with {summary(error)}"
            self._server.fail(self._own_cause(CauseKind.SIGNAL if interrupted else CauseKind.EXCEPTION, description))
        self._server.stop()
        with contextlib.suppress(OSError):
            remove_announcement(self._launch, self._settings)
        if lost is not None:
            raise PeerError(explain("All tasks must stay connected until training ends, but"
                                    f" {lost.sentence()}", "restart all tasks; training resumes from the last"
                                    " checkpoint in checkpoint_dir"),
                            ) from None

    def _lost_task(self, server: ClusterMembership, error: BaseException) -> Cause | None:
        """Return the cause of a TensorFlow error if it is a lost task; wait briefly for its report."""
        by_tensorflow = any(isinstance(each, tf.errors.OpError) for each in (error, error.__cause__))
        if isinstance(error, KeyboardInterrupt) or (isinstance(error, HvkerasError) and not by_tensorflow):
            return None
        deadline = time.monotonic() + (_CAUSE_GRACE if by_tensorflow else 0.0)
        while server.cause is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return server.cause

    def _own_cause(self, kind: CauseKind, description: str) -> Cause:
        host = socket.gethostname()
        return Cause(kind, None, host, os.getpid(), f"chief 0 on {host} (pid {os.getpid()}) {description}")

    # Other threads call the methods below.

    def _on_job_end(self, cause: Cause) -> None:
        threading.Thread(target=self._exit_if_blocked, args=(cause,), name="hvkeras-reaper", daemon=True).start()

    def _exit_if_blocked(self, cause: Cause) -> None:
        """Terminate a chief that is blocked inside TensorFlow, waiting for a lost task."""
        # TensorFlow soon reports a task that has exited, but never one that has stopped responding.
        if not self._ended.wait(self._settings.exit_grace + (0 if cause.kind is CauseKind.SILENT else _CAUSE_GRACE)):
            self._end_process(cause, 1)

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGTERM and self._server is not None:
            cause = self._own_cause(CauseKind.SIGNAL, "received SIGTERM")
            self._server.fail(cause)
            self._server.stop()
            self._end_process(cause, 128 + number)

    def _end_process(self, cause: Cause, code: int) -> None:
        with contextlib.suppress(OSError):
            remove_announcement(self._launch, self._settings)
        sys.stdout.flush()
        say_last(f"{cause.sentence()}; the job ends on all tasks" if cause.kind is CauseKind.SIGNAL else
                 f"chief 0 on {socket.gethostname()} ends because {cause.sentence()}")
        os._exit(code)

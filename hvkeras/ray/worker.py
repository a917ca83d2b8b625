"""Actors on Ray: `RankActor` is one rank; `RankSlot` runs one rank of an elastic job after another."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvkeras.control.launch_environments import hvkeras_run
from hvkeras.host.network import host_identity
from hvkeras.host.versions import own_versions
from hvkeras.job.session import current_session, is_initialized
from hvkeras.launcher.reported_job import Results, serve
from hvkeras.ray import ray_logger
from hvkeras.ray.placement import LAUNCHER


class RankActor:
    """Actor that runs functions, one at a time, as a rank of a job.

    Attributes:
        executable: The object of `RayExecutor.start`'s `executable_cls`, or None.
    """

    def __init__(self) -> None:
        self.executable: Any = None

    def facts(self) -> dict[str, Any]:
        """Return `facts_of_process` of the actor."""
        return facts_of_process()

    def prepare(self, variables: Mapping[str, str], queue: Any) -> None:
        """Set the environment variables of the rank, and the queue for the driver's callbacks."""
        os.environ.update(variables)
        ray_logger.configure(queue)

    def create(self, cls: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Create the object that `execute` passes to functions."""
        self.executable = _reporting(lambda: cls(*args, **kwargs))

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a function, and return its result."""
        return _reporting(lambda: function(*args, **kwargs))

    def execute(self, function: Callable[[Any], Any]) -> Any:
        """Run a function with the created object, and return its result."""
        return _reporting(lambda: function(self.executable))

    def leave(self) -> None:
        """Leave the job cleanly before the process is terminated."""
        if is_initialized():
            from hvkeras.startup import shutdown  # noqa: PLC0415 - not needed before

            shutdown()


def facts_of_process() -> dict[str, Any]:
    """Return the host, node, process id, GPUs and versions of this Ray process."""
    import ray

    context = ray.get_runtime_context()
    return {
        "host": socket.gethostname(), "identity": host_identity(), "address": ray.util.get_node_ip_address(),
        "node": context.get_node_id(), "pid": os.getpid(), "gpus": context.get_accelerator_ids().get("GPU", []),
        "versions": own_versions(),
    }


def _reporting(call: Callable[[], Any]) -> Any:
    """Call a function, and report an exception to the job, which then ends on all ranks."""
    try:
        return call()
    except BaseException as error:
        hooks = current_session().hooks if is_initialized() else None
        if hooks is not None:
            hooks.report(error)
        raise


POLL = 0.2  # seconds between reads of rank 0's log


class RankSlot:
    """Actor of a slot, whose child processes are the ranks of an elastic job, one after another."""

    def facts(self) -> dict[str, Any]:
        """Return `facts_of_process` of the actor."""
        return facts_of_process()

    def serve(self, address: str, secret: str, index: int, call: bytes, variables: Mapping[str, str], commits: str,
              queue: Any) -> Results:
        """Run ranks of a job until it ends.

        Args:
            address: host:port of the launcher.
            index: The index of this slot, which no other slot has used.
            variables: Additional environment variables of the ranks.
            commits: The folder of commits, which is removed when the job ends; "" for none.
            queue: The queue for the driver's callbacks, or None.

        Returns:
            The results of the ranks that ran here.
        """
        environment = {**variables, hvkeras_run.STARTED_BY: LAUNCHER}
        with tempfile.TemporaryDirectory(prefix="hvkeras-log-") as folder, contextlib.ExitStack() as stack:
            if queue is not None:
                log = Path(folder) / "log"
                environment[ray_logger.FILE] = str(log)
                stack.enter_context(_forwarded(log, queue))
            return serve(address, secret, index, call, environment, commits)


@contextlib.contextmanager
def _forwarded(log: Path, queue: Any) -> Any:
    """Forward entries that rank 0 appends to a file, while the context is active."""
    stopped = threading.Event()
    thread = threading.Thread(target=_forward, args=(log, queue, stopped), name="hvkeras-ray-log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


def _forward(log: Path, queue: Any, stopped: threading.Event) -> None:
    is_last, position = False, 0
    while not is_last:
        is_last = stopped.wait(POLL)
        if not log.exists():
            continue
        with log.open("rb") as file:
            file.seek(position)
            with contextlib.suppress(EOFError, pickle.UnpicklingError):  # the last entry is incomplete
                while True:
                    entry = pickle.load(file)
                    position = file.tell()
                    queue.put(entry)

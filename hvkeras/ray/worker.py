"""Actors on Ray: `RankActor` is one rank; `Place` is a slot that runs one rank of an elastic job after the other."""

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
    """A process that runs functions, one at a time, as a rank of a job.

    Attributes:
        executable: What `RayExecutor.start` was told to create, or None.
    """

    def __init__(self) -> None:
        self.executable: Any = None

    def facts(self) -> dict[str, Any]:
        """Returns where this process runs, and with which versions."""
        return facts_of_process()

    def prepare(self, variables: Mapping[str, str], queue: Any) -> None:
        """Makes this process a rank.

        Args:
            variables: Its environment variables.
            queue: Where values for the driver's callbacks go.
        """
        os.environ.update(variables)
        ray_logger.configure(queue)

    def create(self, cls: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Creates the object that `execute` passes to functions."""
        self.executable = _reporting(lambda: cls(*args, **kwargs))

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs a function, and returns its result."""
        return _reporting(lambda: function(*args, **kwargs))

    def execute(self, function: Callable[[Any], Any]) -> Any:
        """Runs a function on the created object, and returns its result."""
        return _reporting(lambda: function(self.executable))

    def leave(self) -> None:
        """Leaves the job in good order, before the process ends."""
        if is_initialized():
            from hvkeras.startup import shutdown  # noqa: PLC0415 - not needed before

            shutdown()


def facts_of_process() -> dict[str, Any]:
    """Returns where this process of Ray runs, and with which versions."""
    import ray

    context = ray.get_runtime_context()
    return {
        "host": socket.gethostname(), "identity": host_identity(), "address": ray.util.get_node_ip_address(),
        "node": context.get_node_id(), "pid": os.getpid(), "gpus": context.get_accelerator_ids().get("GPU", []),
        "versions": own_versions(),
    }


def _reporting(call: Callable[[], Any]) -> Any:
    """Calls a function; an exception ends the job on all ranks, as it does where it ends the process."""
    try:
        return call()
    except BaseException as error:
        hooks = current_session().hooks if is_initialized() else None
        if hooks is not None:
            hooks.report(error)
        raise


POLL = 0.2  # seconds between two looks at what rank 0 has logged


class Place:
    """A place. Its ranks are processes below that of the actor, one after the other."""

    def facts(self) -> dict[str, Any]:
        """Returns where this process runs, and with which versions."""
        return facts_of_process()

    def serve(self, address: str, secret: str, number: int, call: bytes, variables: Mapping[str, str], commits: str,
              queue: Any) -> Results:
        """Serves a job until it is over.

        Args:
            address: Where its launcher listens.
            secret: The job's secret.
            number: The number of this place.
            call: The pickled function call.
            variables: More environment variables of the ranks.
            commits: A folder of the job that is removed in the end; "" for none.
            queue: Where values for the driver's callbacks go, or None.

        Returns:
            The results that ranks have saved here.
        """
        own = {**variables, hvkeras_run.STARTED_BY: LAUNCHER}
        with tempfile.TemporaryDirectory(prefix="hvkeras-log-") as folder, contextlib.ExitStack() as stack:
            if queue is not None:
                log = Path(folder) / "log"
                own[ray_logger.FILE] = str(log)
                stack.enter_context(_passed_on(log, queue))
            return serve(address, secret, number, call, own, commits)


@contextlib.contextmanager
def _passed_on(log: Path, queue: Any) -> Any:
    """Passes on what rank 0 appends to a file, as long as the body runs."""
    over = threading.Event()
    thread = threading.Thread(target=_pass_on, args=(log, queue, over), name="hvkeras-ray-log", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _pass_on(log: Path, queue: Any, over: threading.Event) -> None:
    is_last, position = False, 0
    while not is_last:
        is_last = over.wait(POLL)
        if not log.exists():
            continue
        with log.open("rb") as file:
            file.seek(position)
            with contextlib.suppress(EOFError, pickle.UnpicklingError):  # an entry that is still being written
                while True:
                    entry = pickle.load(file)
                    position = file.tell()
                    queue.put(entry)

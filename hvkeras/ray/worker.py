"""One rank on Ray: what runs in the process of its actor."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvkeras.host.network import host_identity
from hvkeras.host.versions import own_versions
from hvkeras.job.session import current_session, is_initialized
from hvkeras.ray import ray_logger


class Worker:
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


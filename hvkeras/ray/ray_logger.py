"""Logging from rank 0 to the driver while a function runs, for the `callbacks` of `RayExecutor.run`."""

from __future__ import annotations

import os
from typing import Any

import cloudpickle

from hvkeras.control.launch_environments.hvkeras_run import PROCESS_ID

FILE = "_HVKERAS_RAY_LOG"  # the file for ranks of elastic executors, whose processes are not actors
_queue: Any = None


def configure(queue: Any) -> None:
    """Set the queue that the driver reads, or None; the executor calls this in each worker."""
    global _queue  # noqa: PLW0603 - one queue per process
    _queue = queue


def log(info_dict: dict[str, Any]) -> None:
    """Send values to the driver, which passes them to each callback; only rank 0 sends, other ranks do nothing.

    Example:
        ray_logger.log({"epoch": epoch, "loss": logs["loss"]})
    """
    if os.environ.get(PROCESS_ID, "0") != "0":
        return
    if _queue is not None:
        _queue.put(dict(info_dict))
    elif FILE in os.environ:
        with open(os.environ[FILE], "ab", buffering=0) as file:
            file.write(cloudpickle.dumps(dict(info_dict)))

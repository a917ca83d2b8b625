"""Values that rank 0 sends to the driver while a function runs, for the `callbacks` of `RayExecutor.run`."""

from __future__ import annotations

import os
from typing import Any

import cloudpickle

from hvkeras.control.launch_environments.hvkeras_run import PROCESS_ID

FILE = "_HVKERAS_RAY_LOG"  # where ranks of elastic executors, which Ray does not know, write instead
_queue: Any = None


def configure(queue: Any) -> None:
    """Sets the queue that the driver reads; the executor calls this in each worker.

    Args:
        queue: The queue, or None.
    """
    global _queue  # noqa: PLW0603 - one per process on purpose
    _queue = queue


def log(info_dict: dict[str, Any]) -> None:
    """Sends values to the driver, which passes them to each callback; does nothing on other ranks than 0.

    Example:
        ray_logger.log({"epoch": epoch, "loss": logs["loss"]})

    Args:
        info_dict: The values by name.
    """
    if os.environ.get(PROCESS_ID, "0") != "0":
        return
    if _queue is not None:
        _queue.put(dict(info_dict))
    elif FILE in os.environ:
        with open(os.environ[FILE], "ab", buffering=0) as file:
            file.write(cloudpickle.dumps(dict(info_dict)))

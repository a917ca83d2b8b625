"""One place of a Ray cluster that has room for a rank of an elastic job: what runs in the process of its actor."""

from __future__ import annotations

import contextlib
import pickle
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvkeras.control.launch_environments import hvkeras_run
from hvkeras.launcher.reported_job import Results, serve
from hvkeras.ray import ray_logger
from hvkeras.ray.placement import LAUNCHER
from hvkeras.ray.worker import facts_of_process

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

"""Elastic executors on Ray: all processes start again, on as many places as there are, after one was lost."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from hvkeras.errors import MachineError, explain
from hvkeras.host.console import say
from hvkeras.ray.installed import require_ray
from hvkeras.ray.job import RankError
from hvkeras.ray.placement import REPORT_EVERY, Shape
from hvkeras.settings import PREFIX, Settings

Callbacks = Sequence[Callable[[dict[str, Any]], Any]]


class Startable(Protocol):
    """An executor, as far as this module needs it."""

    def start_again(self, variables: Mapping[str, str], first: str) -> Mapping[str, Any]:
        """Starts the workers, with rank 0 on a host if there is one, and returns what rank 0 said about itself."""

    def run(self, fn: Callable[..., Any], args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None,
            callbacks: Callbacks | None) -> list[Any]:
        """Runs a function on all workers."""

    def forget_commits(self, folder: str) -> None:
        """Removes the commits on the host of rank 0."""

    def shutdown(self) -> None:
        """Ends the workers."""


class Restarts:
    """Runs a function to its end, with a new executor after each loss.

    Args:
        make: Makes an executor with a number of workers.
        worker: What a worker needs.
        fewest: The fewest workers to train with.
        most: The most workers, or None for as many as there are places.
        reset_limit: How often all workers are started again; None without a limit.
        timeout: Seconds to wait for places for the fewest workers.
    """

    def __init__(self, make: Callable[[int], Startable], worker: Shape, fewest: int, most: int | None,
                 reset_limit: int | None, timeout: float) -> None:
        self._make, self._worker, self._fewest, self._most = make, worker, fewest, most
        self._limit, self._timeout = reset_limit, timeout
        self._executor: Startable | None = None
        self.variables: dict[str, str] = {}  # of all workers, beside those of their ranks

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any],
            callbacks: Callbacks | None) -> list[Any]:
        """Runs a function on all workers, again and again until it succeeds on all or the limit is reached.

        Without a limit, a function that raises the same twice in a row ends it as well.

        Raises:
            RankError: It failed more often than the limit allows.
            MachineError: There were no places in time.
        """
        # Commits lie on the host of rank 0, which therefore goes back to it, unless a shared folder was chosen.
        chosen = Settings().elastic_dir
        folder = chosen or str(Path(tempfile.gettempdir()) / f"hvkeras-ray-{secrets.token_hex(8)}")
        first, resets, last_error = "", 0, ""
        while True:
            executor = self._executor = self._make(self._places())
            try:
                here = executor.start_again({**self.variables, f"{PREFIX}ELASTIC_DIR": folder}, first)
                if first and here["identity"] != first and not chosen:
                    say(f"the host of the commits is gone: training starts over on {here['host']}. HINT: set"
                        " HVKERAS_ELASTIC_DIR to a folder that all nodes share")
                first = here["identity"]
                results = executor.run(fn, args, kwargs, callbacks)
                if not chosen:
                    executor.forget_commits(folder)
                return results
            except RankError as error:
                resets += 1
                raised = error.cause.error if error.cause.kind == "exception" else ""
                if resets > self._limit if self._limit is not None else raised and raised == last_error:
                    raise
                last_error = raised
                of = "" if self._limit is None else f" of at most {self._limit}"
                say(f"starts all workers again, reset {resets}{of}, because {str(error).splitlines()[0]}")
            finally:
                self.shutdown()

    def shutdown(self) -> None:
        """Ends the workers."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown()

    def _places(self) -> int:
        """Waits for places for the fewest workers, and returns how many there are, at most the most."""
        ray = require_ray()
        needs = {name: amount for name, amount in (("CPU", self._worker.cpus), ("GPU", self._worker.gpus)) if amount}
        began = reported = time.monotonic()
        before = -1
        while True:
            alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            slots = sum(int(min(node.get(name, 0) // amount for name, amount in needs.items())) for node in alive)
            free = ray.available_resources()
            slots = min(slots, *(int(free.get(name, 0) // amount) for name, amount in needs.items()))
            now = time.monotonic()
            if slots >= self._fewest and slots == before:  # places of workers that have just ended come back by and by
                return slots if self._most is None else min(slots, self._most)
            before = slots
            if now - began >= self._timeout:
                raise MachineError(explain(
                    f"The Ray cluster must have places for {self._fewest} workers within {self._timeout:g} s",
                    "add nodes, lower min_workers, or raise elastic_timeout", places=slots, nodes=len(alive)))
            if now - reported >= REPORT_EVERY:
                reported = now
                say(f"waiting for {self._fewest} places in the Ray cluster, which has {slots} on {len(alive)} nodes,"
                    f" {now - began:.0f} s of {self._timeout:g} s")
            time.sleep(0.5)

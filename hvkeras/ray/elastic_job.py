"""Elastic jobs on Ray: the surviving ranks continue after a failure, and ranks join where the cluster has free slots.

Each slot is an actor (`hvkeras.ray.worker`), which Ray places on a node with free resources. It reports to a launcher
on the driver's node, which runs the job like `hvkeras run --min-np`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvkeras.errors import MachineError, explain
from hvkeras.host.console import say
from hvkeras.host.versions import own_versions
from hvkeras.launcher.calls import pickled_call
from hvkeras.launcher.reported_job import ReportedJob, Results, values_of
from hvkeras.ray.placement import REPORT_EVERY, Shape, check_versions
from hvkeras.ray.ray_settings import RaySettings, require_ray
from hvkeras.ray.worker import RankSlot
from hvkeras.settings import PREFIX, Settings

Callbacks = Sequence[Callable[[dict[str, Any]], Any]]
POLL_INTERVAL = 0.5  # seconds between checks of the cluster
SLOT_TIMEOUT = 15.0  # seconds until a slot that Ray cannot place is abandoned
RETRY_INTERVAL = 30.0  # seconds until another slot is requested after that
CLEANED_WITHIN = 5.0  # seconds for slots to remove the job's temporary files
COLLECTED_WITHIN = 30.0  # seconds to collect the results after the job has ended


@dataclass
class _Actor:
    """Actor of a slot, possibly not started yet."""

    handle: Any
    facts: Any  # Ray's object reference of its facts
    requested_at: float = field(default_factory=time.monotonic)
    results: Any = None  # Ray's object reference of its results, after `serve` was called


class ElasticRayJob:
    """Elastic job on Ray.

    Args:
        most: The maximum number of ranks; None for as many as there are slots.
        reset_limit: The maximum number of resets. None for no limit, except that the same error twice in a row ends the
            job.
        timeout: Seconds to wait for slots for the minimum number of ranks.
        variables: Additional environment variables of the ranks.
    """

    def __init__(self, worker: Shape, fewest: int, most: int | None, reset_limit: int | None, timeout: float,
                 settings: RaySettings, variables: Mapping[str, str]) -> None:
        self._worker, self._minimum, self._maximum = worker, fewest, most
        self._limit, self._timeout, self._settings = reset_limit, timeout, settings
        self._variables = dict(variables)
        # Without a shared folder, rank 0 stores commits on its host, in case all ranks are lost.
        shared = self._variables.get(f"{PREFIX}ELASTIC_DIR") or Settings().elastic_dir
        self._commits = "" if shared else str(Path(tempfile.gettempdir()) / f"hvkeras-ray-{secrets.token_hex(8)}")
        self._variables[f"{PREFIX}ELASTIC_DIR"] = shared or self._commits
        self._actors: list[_Actor] = []
        self._indices = itertools.count()
        self._next_request = 0.0
        self._queue: Any = None
        self._call = b""
        self._found: list[Results] = []  # of slots that have ended

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any],
            callbacks: Callbacks | None) -> list[Any]:
        """Run a function on all ranks.

        Returns:
            The results of the ranks that participate at the end, in rank order.

        Raises:
            UsageError: The function cannot be pickled.
            PeerError: The function failed too often.
            MachineError: There were not enough slots in time, or nodes have different versions.
        """
        ray = require_ray()
        self._call = pickled_call(fn, args, kwargs)
        self._wait_for_slots(ray)
        job: ReportedJob | None = None
        try:
            if callbacks:
                from ray.util.queue import Queue

                self._queue = Queue(actor_options={"num_cpus": 0})
            nics = {f"{PREFIX}NETWORK_INTERFACES": ",".join(self._settings.nics)} if self._settings.nics else {}
            job = ReportedJob(self._minimum, self._maximum, self._limit, self._timeout, ray.util.get_node_ip_address(),
                              {**self._variables, **nics})
            while not job.is_over(POLL_INTERVAL):
                self._update_slots(ray, job)
                self._call_back(callbacks)
            ended, job = job, None
            try:
                found = self._collect(ray)
                self._call_back(callbacks)
            finally:
                ended.finish()
            return values_of(found)
        finally:
            if job is not None:
                job.interrupt()
                with contextlib.suppress(Exception):  # the original exception propagates
                    job.finish()
            self.shutdown()

    def shutdown(self) -> None:
        """Terminate all slots, which returns their resources to the cluster."""
        actors, self._actors = self._actors, []
        queue, self._queue = self._queue, None
        if not actors and queue is None:
            return
        ray = require_ray()
        if ray.is_initialized():
            if serving := [actor.results for actor in actors if actor.results is not None]:
                ray.wait(serving, num_returns=len(serving), timeout=CLEANED_WITHIN)
            for actor in actors:
                ray.kill(actor.handle)
            if queue is not None:
                queue.shutdown(force=True)

    def _update_slots(self, ray: Any, job: ReportedJob) -> None:
        """Request slots if the cluster has free resources, start ranks on new slots, and remove ended slots."""
        now = time.monotonic()
        for actor in list(self._actors):
            if actor.results is None and ray.wait([actor.facts], timeout=0)[0]:
                self._serve(ray, job, actor)
            elif actor.results is None and now - actor.requested_at > SLOT_TIMEOUT:
                ray.kill(actor.handle)
                self._actors.remove(actor)
                self._next_request = now + RETRY_INTERVAL
            elif actor.results is not None and ray.wait([actor.results], timeout=0)[0]:
                try:
                    self._found.append(ray.get(actor.results))
                except Exception as error:  # noqa: BLE001 - Ray has many exceptions for lost actors and nodes
                    say(f"a slot in the Ray cluster was lost: {_first_line(error)}")
                self._actors.remove(actor)
        if now < self._next_request:
            return
        alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        slots = sum(_slots(node, self._worker) for node in alive)
        for _ in range((slots if self._maximum is None else min(slots, self._maximum)) - len(self._actors)):
            handle = ray.remote(RankSlot).options(num_cpus=self._worker.cpus, num_gpus=self._worker.gpus).remote()
            self._actors.append(_Actor(handle, handle.facts.remote()))

    def _serve(self, ray: Any, job: ReportedJob, actor: _Actor) -> None:
        """Start ranks on a slot whose actor Ray has started."""
        try:
            facts = ray.get(actor.facts)
        except ray.exceptions.RayError as error:
            self._actors.remove(actor)
            self._next_request = time.monotonic() + RETRY_INTERVAL
            say(f"a slot in the Ray cluster could not start: {_first_line(error)}")
            return
        here = {"host": os.uname().nodename, "address": "the driver's node", "versions": own_versions()}
        check_versions([here, facts])
        shared = {name: value for name, value in os.environ.items()
                  if name.startswith(PREFIX) and not name.startswith(f"{PREFIX}RUN_")}
        actor.results = actor.handle.serve.remote(
            job.address, job.secret, next(self._indices), self._call, {**shared, **self._variables}, self._commits,
            self._queue)

    def _collect(self, ray: Any) -> list[Results]:
        serving = [actor.results for actor in self._actors if actor.results is not None]
        done, _ = ray.wait(serving, num_returns=max(1, len(serving)), timeout=COLLECTED_WITHIN) if serving else ([], [])
        for results in done:
            with contextlib.suppress(ray.exceptions.RayError):  # the slot was lost, so its rank did not complete
                self._found.append(ray.get(results))
        return self._found

    def _call_back(self, callbacks: Callbacks | None) -> None:
        while callbacks and not self._queue.empty():
            entry = self._queue.get()
            for callback in callbacks:
                callback(entry)

    def _wait_for_slots(self, ray: Any) -> None:
        started_at = reported_at = time.monotonic()
        while True:
            alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            slots = min(sum(_slots(node, self._worker) for node in alive),
                        _slots(ray.available_resources(), self._worker))
            now = time.monotonic()
            if slots >= self._minimum:
                return
            if now - started_at >= self._timeout:
                raise MachineError(explain(
                    f"The Ray cluster must have slots for {self._minimum} workers within {self._timeout:g} s",
                    "add nodes, lower min_workers, or raise elastic_timeout", slots=slots, nodes=len(alive)))
            if now - reported_at >= REPORT_EVERY:
                reported_at = now
                say(f"waiting for {self._minimum} slots in the Ray cluster, which has {slots} on {len(alive)} nodes,"
                    f" {now - started_at:.0f} s of {self._timeout:g} s")
            time.sleep(POLL_INTERVAL)


def _slots(resources: Mapping[str, float], worker: Shape) -> int:
    needs = {name: amount for name, amount in (("CPU", worker.cpus), ("GPU", worker.gpus)) if amount}
    return int(min(resources.get(name, 0) // amount for name, amount in needs.items()))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)

"""Elastic jobs on Ray: the survivors of a loss go on, and ranks join on the places that the cluster has room for.

Each place is an actor (`hvkeras.ray.worker`), which Ray puts where there is room. It reports to a launcher on the
driver's node, which runs the job as `hvkeras run --min-np` does elsewhere.
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
from hvkeras.ray.worker import Place
from hvkeras.settings import PREFIX, Settings

Callbacks = Sequence[Callable[[dict[str, Any]], Any]]
LOOK_EVERY = 0.5  # seconds between two looks at the cluster
SLOT_TIMEOUT = 15.0  # seconds after which a place that Ray has no room for is given up
TRY_AGAIN = 30.0  # seconds until it is asked for again
CLEANED_WITHIN = 5.0  # seconds for places to remove what the job has left there
COLLECTED_WITHIN = 30.0  # seconds for the results, once the job is over


@dataclass
class _Actor:
    """An actor that is, or is to be, a place."""

    handle: Any
    facts: Any  # Ray's reference to what it says about itself
    asked: float = field(default_factory=time.monotonic)
    results: Any = None  # Ray's reference to its results, once it serves


class ElasticRayJob:
    """One elastic job.

    Args:
        worker: What a rank needs.
        fewest: The fewest ranks to train with.
        most: The most ranks, or None for as many as there are places.
        reset_limit: How often the ranks may change; None for no limit but that of an error that comes twice in a row.
        timeout: Seconds to wait for places for the fewest ranks.
        settings: The settings of the executor.
        variables: More environment variables of the ranks.
    """

    def __init__(self, worker: Shape, fewest: int, most: int | None, reset_limit: int | None, timeout: float,
                 settings: RaySettings, variables: Mapping[str, str]) -> None:
        self._worker, self._fewest, self._most = worker, fewest, most
        self._limit, self._timeout, self._settings = reset_limit, timeout, settings
        self._variables = dict(variables)
        # Rank 0 keeps commits on its host, in case that all ranks are lost, unless a shared folder was chosen.
        chosen = self._variables.get(f"{PREFIX}ELASTIC_DIR") or Settings().elastic_dir
        self._commits = "" if chosen else str(Path(tempfile.gettempdir()) / f"hvkeras-ray-{secrets.token_hex(8)}")
        self._variables[f"{PREFIX}ELASTIC_DIR"] = chosen or self._commits
        self._actors: list[_Actor] = []
        self._numbers = itertools.count()
        self._next_try = 0.0
        self._queue: Any = None
        self._call = b""
        self._found: list[Results] = []  # of places that do not serve any more

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any],
            callbacks: Callbacks | None) -> list[Any]:
        """Runs a function on all ranks.

        Returns:
            The results of the ranks that are there at the end, in rank order.

        Raises:
            UsageError: The function cannot be pickled.
            PeerError: It failed more often than the limit allows.
            MachineError: There were no places in time, or nodes have other versions.
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
            job = ReportedJob(self._fewest, self._most, self._limit, self._timeout, ray.util.get_node_ip_address(),
                              {**self._variables, **nics})
            while not job.is_over(LOOK_EVERY):
                self._look(ray, job)
                self._pass_on(callbacks)
            over, job = job, None
            try:
                found = self._collect(ray)
                self._pass_on(callbacks)
            finally:
                over.finish()
            return values_of(found)
        finally:
            if job is not None:
                job.interrupt()
                with contextlib.suppress(Exception):  # another one is on its way
                    job.finish()
            self.shutdown()

    def shutdown(self) -> None:
        """Gives all places back to the cluster."""
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

    def _look(self, ray: Any, job: ReportedJob) -> None:
        """Asks for places where the cluster has room, and lets those serve that are there."""
        now = time.monotonic()
        for actor in list(self._actors):
            if actor.results is None and ray.wait([actor.facts], timeout=0)[0]:
                self._begin(ray, job, actor)
            elif actor.results is None and now - actor.asked > SLOT_TIMEOUT:
                ray.kill(actor.handle)
                self._actors.remove(actor)
                self._next_try = now + TRY_AGAIN
            elif actor.results is not None and ray.wait([actor.results], timeout=0)[0]:
                try:
                    self._found.append(ray.get(actor.results))
                except Exception as error:  # noqa: BLE001 - whatever Ray raises when an actor or its node is gone
                    say(f"a place in the Ray cluster is gone: {_first_line(error)}")
                self._actors.remove(actor)
        if now < self._next_try:
            return
        alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        room = sum(_slots(node, self._worker) for node in alive)
        for _ in range((room if self._most is None else min(room, self._most)) - len(self._actors)):
            handle = ray.remote(Place).options(num_cpus=self._worker.cpus, num_gpus=self._worker.gpus).remote()
            self._actors.append(_Actor(handle, handle.facts.remote()))

    def _begin(self, ray: Any, job: ReportedJob, actor: _Actor) -> None:
        """Lets an actor serve that Ray has started."""
        try:
            facts = ray.get(actor.facts)
        except ray.exceptions.RayError as error:
            self._actors.remove(actor)
            self._next_try = time.monotonic() + TRY_AGAIN
            say(f"a place in the Ray cluster could not start: {_first_line(error)}")
            return
        here = {"host": os.uname().nodename, "address": "the driver's node", "versions": own_versions()}
        check_versions([here, facts])
        shared = {name: value for name, value in os.environ.items()
                  if name.startswith(PREFIX) and not name.startswith(f"{PREFIX}RUN_")}
        actor.results = actor.handle.serve.remote(
            job.address, job.secret, next(self._numbers), self._call, {**shared, **self._variables}, self._commits,
            self._queue)

    def _collect(self, ray: Any) -> list[Results]:
        serving = [actor.results for actor in self._actors if actor.results is not None]
        done, _ = ray.wait(serving, num_returns=max(1, len(serving)), timeout=COLLECTED_WITHIN) if serving else ([], [])
        for results in done:
            with contextlib.suppress(ray.exceptions.RayError):  # it is gone, and its rank was not there at the end
                self._found.append(ray.get(results))
        return self._found

    def _pass_on(self, callbacks: Callbacks | None) -> None:
        while callbacks and not self._queue.empty():
            entry = self._queue.get()
            for callback in callbacks:
                callback(entry)

    def _wait_for_slots(self, ray: Any) -> None:
        """Waits until the cluster has room for the fewest ranks."""
        began = reported = time.monotonic()
        while True:
            alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            slots = min(sum(_slots(node, self._worker) for node in alive),
                        _slots(ray.available_resources(), self._worker))
            now = time.monotonic()
            if slots >= self._fewest:
                return
            if now - began >= self._timeout:
                raise MachineError(explain(
                    f"The Ray cluster must have places for {self._fewest} workers within {self._timeout:g} s",
                    "add nodes, lower min_workers, or raise elastic_timeout", places=slots, nodes=len(alive)))
            if now - reported >= REPORT_EVERY:
                reported = now
                say(f"waiting for {self._fewest} places in the Ray cluster, which has {slots} on {len(alive)} nodes,"
                    f" {now - began:.0f} s of {self._timeout:g} s")
            time.sleep(LOOK_EVERY)


def _slots(resources: Mapping[str, float], worker: Shape) -> int:
    """Returns how many ranks have room in resources."""
    needs = {name: amount for name, amount in (("CPU", worker.cpus), ("GPU", worker.gpus)) if amount}
    return int(min(resources.get(name, 0) // amount for name, amount in needs.items()))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)

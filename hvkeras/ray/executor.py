"""`RayExecutor`: runs functions on the ranks of a job whose processes are Ray actors."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvkeras.errors import MachineError, UnsupportedError, UsageError, explain
from hvkeras.host.network import LOOPBACK, host_identity
from hvkeras.ray.elastic_job import Callbacks, ElasticRayJob
from hvkeras.ray.job import RayJob
from hvkeras.ray.placement import check_versions, in_order_of_ranks, reserve, shape_of, variables_of_ranks
from hvkeras.ray.ray_settings import RaySettings, interfaces, require_ray, warn_of_ignored
from hvkeras.ray.worker import RankActor
from hvkeras.settings import PREFIX, Settings

_OF_RANKS = f"{PREFIX}RUN_"
_ELASTIC = "An elastic executor supports only run(), as its processes join and leave"


class RayExecutor:
    """Executor of functions on several processes of a Ray cluster, which are the ranks of one job.

    The processes are actors that persist between calls of `run`, together with their job, models and data. Inside a
    trial of Ray Tune, the executor uses the placement group of the trial.

    Example:
        import ray
        from hvkeras.ray import RayExecutor

        ray.init()
        executor = RayExecutor(RayExecutor.create_settings(), num_workers=4)
        executor.start()
        losses = executor.run(train, kwargs={"epochs": 3})    # train() calls hvd.init(); one result per rank
        executor.shutdown()

    Args:
        settings: The settings, as returned by `create_settings`; None for its defaults.
        num_workers: The number of processes, which Ray packs onto few nodes.
        num_hosts: The number of nodes, each with `num_workers_per_host` processes; replaces `num_workers`.
        num_workers_per_host: The number of processes on each of `num_hosts` nodes.
        cpus_per_worker: CPU cores that Ray reserves for each process.
        use_gpu: Whether each process gets GPUs.
        gpus_per_worker: GPUs per process; with `use_gpu`, 1 by default.
        use_current_placement_group: Whether to use the caller's placement group if it has one, as in a trial of Ray
            Tune.
        min_workers: The minimum number of processes of an elastic executor; replaces `num_workers`.
        max_workers: The maximum number of processes of an elastic executor.
        reset_limit: The maximum number of resets of an elastic executor, as processes fail, join or leave. None for no
            limit, except that the same exception twice in a row ends the job.
        cooldown_range: Accepted for compatibility with Horovod: nodes are not blacklisted.
        elastic_timeout: Seconds that an elastic executor waits for the minimum number of processes.
        override_discovery: Accepted for compatibility with Horovod: Ray discovers the nodes.

    Raises:
        UsageError: Arguments are invalid or contradict each other.
    """

    def __init__(
        self, settings: RaySettings | None, num_workers: int | None = None, num_hosts: int | None = None,
        num_workers_per_host: int = 1, cpus_per_worker: int = 1, use_gpu: bool = False,
        gpus_per_worker: int | None = None, use_current_placement_group: bool = True, min_workers: int | None = None,
        max_workers: int | None = None, reset_limit: int | None = None,
        cooldown_range: tuple[int, int] | None = None, elastic_timeout: float = 600, override_discovery: bool = True,
    ) -> None:
        del cooldown_range, override_discovery
        self.settings: RaySettings = settings or RaySettings()
        self._uses_current = use_current_placement_group
        self._elastic: Callable[[Mapping[str, str]], ElasticRayJob] | None = None
        self._variables: dict[str, str] = {}  # of the ranks of an elastic executor
        self._elastic_job: ElasticRayJob | None = None
        minimum = min_workers or (None if max_workers is None else num_workers or 1)
        if minimum is not None and num_hosts is not None:
            raise UsageError(explain("An elastic executor does not accept num_hosts", "pass min_workers and"
                                     " max_workers", num_hosts=num_hosts))
        self._shape = shape_of(minimum or num_workers, num_hosts, num_workers_per_host, cpus_per_worker, use_gpu,
                               gpus_per_worker)
        if minimum is not None:
            limits = (minimum, max_workers, reset_limit, elastic_timeout)
            self._elastic = lambda variables: ElasticRayJob(self._shape, *limits, self.settings, variables)
        self._group: Any = None  # None with the caller's placement group
        self._workers: list[Any] = []  # in rank order
        self._facts: list[Mapping[str, Any]] = []
        self._job: RayJob | None = None
        self._queue: Any = None

    @classmethod
    def create_settings(
        cls, timeout_s: int = 30, ssh_identity_file: str | None = None, ssh_str: str | None = None,
        placement_group_timeout_s: int = 100, nics: set[str] | None = None,
    ) -> RaySettings:
        """Return settings for an executor.

        Args:
            timeout_s: Seconds within which the processes must start after Ray has placed them.
            ssh_identity_file: Accepted for compatibility with Horovod, which uses ssh.
            ssh_str: See `ssh_identity_file`.
            placement_group_timeout_s: Seconds to wait for resources for all processes.
            nics: The network interfaces between hosts.
        """
        warn_of_ignored(ssh_identity_file=ssh_identity_file, ssh_str=ssh_str)
        return RaySettings(timeout_s, placement_group_timeout_s, interfaces(nics))

    def start(
        self, executable_cls: type | None = None, executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None, extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Start the processes, and create an object in each of them if `executable_cls` is given.

        Args:
            executable_cls: A class; each process creates one instance, which `execute` passes to functions.
            executable_args: The positional arguments of the class.
            executable_kwargs: The keyword arguments of the class.
            extra_env_vars: Environment variables of all processes, in addition to this process's HVKERAS_* variables.

        Raises:
            NotInstalledError: Ray is not installed.
            MachineError: The cluster did not have enough resources in time, or its nodes have different versions.
            PeerError: A process failed to create the object.
        """
        if self._elastic is not None:
            if executable_cls is not None:
                raise UnsupportedError(explain(_ELASTIC, "create the object in the function",
                                               executable_cls=executable_cls))
            self._variables = dict(extra_env_vars or {})
            return
        self._start(extra_env_vars or {})
        if executable_cls is not None:
            self._results([worker.create.remote(executable_cls, tuple(executable_args or ()),
                                                dict(executable_kwargs or {})) for worker in self._workers])

    def _start(self, variables: Mapping[str, str]) -> None:
        ray = require_ray()
        if self._workers:
            raise UsageError(explain("An executor must be shut down before it starts again", "call shutdown()"))
        settings = Settings()
        try:
            self._create_actors(ray)
            host = LOOPBACK if {fact["identity"] for fact in self._facts} == {host_identity()} else \
                ray.util.get_node_ip_address()
            self._job = RayJob(len(self._workers), host, settings)
            shared = {name: value for name, value in os.environ.items()
                      if name.startswith(PREFIX) and not name.startswith(_OF_RANKS)}
            if self.settings.nics:
                shared[f"{PREFIX}NETWORK_INTERFACES"] = ",".join(self.settings.nics)
            rank_variables = variables_of_ranks(self._facts, self._job.address, self._job.secret)
            self._get(ray, [worker.prepare.remote({**shared, **variables, **extra}, None)
                            for worker, extra in zip(self._workers, rank_variables, strict=True)])
        except BaseException:
            self.shutdown()
            raise

    def _create_actors(self, ray: Any) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        current = ray.util.get_current_placement_group() if self._uses_current else None
        if current is None:
            self._group = reserve(self._shape, self.settings.placement_group_timeout_s)
        actor = ray.remote(RankActor)
        for number in range(self._shape.size):
            strategy = PlacementGroupSchedulingStrategy(
                current or self._group, -1 if current is not None else self._shape.bundle_of(number))
            self._workers.append(actor.options(num_cpus=self._shape.cpus, num_gpus=self._shape.gpus,
                                               scheduling_strategy=strategy).remote())
        facts = self._get(ray, [worker.facts.remote() for worker in self._workers])
        check_versions(facts)
        order = in_order_of_ranks(facts)
        self._workers = [self._workers[worker] for worker in order]
        self._facts = [facts[worker] for worker in order]

    def _get(self, ray: Any, calls: list[Any]) -> list[Any]:
        timeout = self.settings.timeout_s
        try:
            answers: list[Any] = ray.get(calls, timeout=timeout)
        except ray.exceptions.GetTimeoutError:
            raise MachineError(explain(
                f"All {self._shape.size} workers must start within {timeout:g} s", "look for their errors above, check"
                " that the placement group of a trial has a bundle for each worker, or raise timeout_s in"
                " create_settings", workers=self._shape.describe())) from None
        except ray.exceptions.RayError as error:
            raise MachineError(explain(f"All workers must start ({str(error).strip()})", "install the same hvkeras on"
                                       " each node of the cluster")) from error
        return answers

    def run(self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None,
            callbacks: Callbacks | None = None) -> list[Any]:
        """Run a function on all processes.

        Args:
            fn: The function; it must call `hvd.init()`.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            callbacks: Functions that this process calls with each dict that rank 0 passes to
                `hvkeras.ray.ray_logger.log`.

        Returns:
            The results, in rank order.

        Raises:
            PeerError: The function failed on a rank, which the message names with the cause. All processes are
                terminated.
        """
        if self._elastic is not None:
            self._elastic_job = self._elastic(self._variables)
            return self._elastic_job.run(fn, args or (), kwargs or {}, callbacks)
        self._listen(callbacks)
        return self._results(self.run_remote(fn, args, kwargs), callbacks)

    def run_remote(self, fn: Callable[..., Any], args: Sequence[Any] | None = None,
                   kwargs: Mapping[str, Any] | None = None) -> list[Any]:
        """Start a function on all processes without waiting for it.

        Args:
            fn: The function.
            args: Its positional arguments.
            kwargs: Its keyword arguments.

        Returns:
            Ray's object references of the results, in rank order.
        """
        return [worker.run.remote(fn, tuple(args or ()), dict(kwargs or {})) for worker in self._running()]

    def execute(self, fn: Callable[[Any], Any], callbacks: Callbacks | None = None) -> list[Any]:
        """Run a function on all processes, with the object that `start` created in each of them.

        Args:
            fn: A function that takes the object.
            callbacks: As for `run`.

        Returns:
            The results, in rank order.

        Raises:
            PeerError: As for `run`.
        """
        self._listen(callbacks)
        return self._results([worker.execute.remote(fn) for worker in self._running()], callbacks)

    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Run a function on rank 0 only, with the object that `start` created there.

        Args:
            fn: A function that takes the object, and does not call collectives.

        Returns:
            The result of rank 0.

        Raises:
            PeerError: The function failed.
        """
        return self._results([self._running()[0].execute.remote(fn)])[0]

    def shutdown(self) -> None:
        """Terminate the processes, which returns their resources to the cluster."""
        if self._elastic_job is not None:
            self._elastic_job.shutdown()
        workers, self._workers = self._workers, []
        group, self._group = self._group, None
        job, self._job = self._job, None
        queue, self._queue = self._queue, None
        if not workers and group is None:
            return
        ray = require_ray()
        if ray.is_initialized():
            # Ranks that are lost or still busy cannot shut down cleanly, so the wait is short.
            ray.wait([worker.leave.remote() for worker in workers], num_returns=max(1, len(workers)), timeout=2.0)
            for actor in workers:
                ray.kill(actor)
            if queue is not None:
                queue.shutdown(force=True)
            if group is not None:
                ray.util.remove_placement_group(group)
        if job is not None:
            job.stop()

    def _running(self) -> list[Any]:
        if self._elastic is not None:
            raise UnsupportedError(explain(_ELASTIC, "pass num_workers without min_workers and max_workers"))
        if not self._workers:
            raise UsageError(explain("An executor must be started before it runs functions", "call start() first; after"
                                     " a failure, start() again"))
        return self._workers

    def _listen(self, callbacks: Callbacks | None) -> None:
        if callbacks and self._queue is None:
            ray = require_ray()
            from ray.util.queue import Queue

            first = self._running()[0]
            self._queue = Queue(actor_options={"num_cpus": 0})
            self._get(ray, [first.prepare.remote({}, self._queue)])

    def _results(self, calls: list[Any], callbacks: Callbacks | None = None) -> list[Any]:
        """Wait for the results of all ranks, and shut down if one fails."""
        assert self._job is not None

        def call_back() -> None:
            while not self._queue.empty():
                entry = self._queue.get()
                for callback in callbacks or ():
                    callback(entry)

        try:
            results = self._job.results(calls, self._facts, call_back if callbacks else None)
            if callbacks:
                call_back()
        except BaseException:
            self.shutdown()
            raise
        return results

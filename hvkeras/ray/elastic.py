"""`ElasticRayExecutor`: Horovod's class for training that goes on when processes come and go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hvkeras.ray.elastic_job import Callbacks
from hvkeras.ray.executor import RayExecutor
from hvkeras.ray.ray_settings import RaySettings, interfaces, warn_of_ignored


class ElasticRayExecutor:
    """Runs an elastic function on as many processes of a Ray cluster as there is room for.

    When a process is lost, the others go on from the newest commit in memory. Processes join at a commit where the
    cluster has room: in place of those that were lost, and on new nodes.

    Example:
        settings = ElasticRayExecutor.create_settings(min_num_proc=2, reset_limit=5)
        executor = ElasticRayExecutor(settings, cpus_per_slot=2)
        executor.start()
        results = executor.run(train)

    Args:
        settings: What `create_settings` returns.
        use_gpu: Whether each process gets a GPU.
        cpus_per_slot: Cores of a process.
        gpus_per_slot: GPUs of a process; 1 by default if there are any.
        env_vars: Environment variables for all processes.
        override_discovery: Accepted for compatibility with Horovod: Ray knows the nodes.
    """

    def __init__(self, settings: RaySettings, use_gpu: bool = False, cpus_per_slot: int = 1,
                 gpus_per_slot: int | None = None, env_vars: Mapping[str, str] | None = None,
                 override_discovery: bool = True) -> None:
        del override_discovery
        self.settings: RaySettings = settings
        self._executor = RayExecutor(
            settings, cpus_per_worker=cpus_per_slot, use_gpu=use_gpu, gpus_per_worker=gpus_per_slot,
            min_workers=settings.min_num_proc, max_workers=settings.max_num_proc, reset_limit=settings.reset_limit,
            elastic_timeout=settings.elastic_timeout)
        self._executor.start(extra_env_vars=env_vars)

    @classmethod
    def create_settings(
        cls, min_num_proc: int = 1, max_num_proc: int | None = None, reset_limit: int | None = None,
        elastic_timeout: int = 600, timeout_s: int = 30, ssh_identity_file: str | None = None,
        nics: str | None = None, min_np: int | None = None, max_np: int | None = None, **kwargs: Any,
    ) -> RaySettings:
        """Returns settings for an elastic executor.

        Args:
            min_num_proc: The fewest processes to train with.
            max_num_proc: The most processes; as many as there is room for by default.
            reset_limit: How often the processes may change, as some fail, join or leave; no limit by default, but that
                of an exception that comes twice in a row.
            elastic_timeout: Seconds to wait for room for the fewest processes.
            timeout_s: Seconds within which processes must start, once Ray has placed them.
            ssh_identity_file: Accepted for compatibility with Horovod, which uses ssh.
            nics: The network interfaces between hosts, separated by commas.
            min_np: An older name of `min_num_proc`.
            max_np: An older name of `max_num_proc`.
            **kwargs: Horovod's other settings; each is named once, and ignored.
        """
        warn_of_ignored(ssh_identity_file=ssh_identity_file, **kwargs)
        return RaySettings(timeout_s, nics=interfaces(nics), min_num_proc=min_num_proc if min_np is None else min_np,
                           max_num_proc=max_num_proc if max_np is None else max_np, reset_limit=reset_limit,
                           elastic_timeout=elastic_timeout)

    def start(self) -> None:
        """Does nothing, since `run` starts the processes; Horovod's scripts call it first."""

    def run(self, worker_fn: Callable[[], Any], callbacks: Callbacks | None = None) -> list[Any]:
        """Runs a function on all processes.

        Args:
            worker_fn: The function, which calls `hvd.init()` and a function with `@hvd.elastic.run`.
            callbacks: Called, in this process, with each dict that rank 0 passes to `hvkeras.ray.ray_logger.log`.

        Returns:
            The results of the processes that are there at the end, in the order of the ranks.

        Raises:
            PeerError: The function failed too often, or the processes changed more often than `reset_limit` allows.
            MachineError: There was no room in time.
        """
        return self._executor.run(worker_fn, callbacks=callbacks)

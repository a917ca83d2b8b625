"""`ElasticRayExecutor`: Horovod's class for training that continues while processes join and leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hvkeras.ray.elastic_job import Callbacks
from hvkeras.ray.executor import RayExecutor
from hvkeras.ray.ray_settings import RaySettings, interfaces, warn_of_ignored


class ElasticRayExecutor:
    """Executor of elastic functions, on as many processes as the Ray cluster has resources for.

    When a process is lost, the others resume from the last commit in memory. New processes join at a commit if the
    cluster has free resources: as replacements for lost processes, or on new nodes.

    Example:
        settings = ElasticRayExecutor.create_settings(min_num_proc=2, reset_limit=5)
        executor = ElasticRayExecutor(settings, cpus_per_slot=2)
        executor.start()
        results = executor.run(train)

    Args:
        settings: The settings, as returned by `create_settings`.
        use_gpu: Whether each process gets GPUs.
        cpus_per_slot: CPU cores per process.
        gpus_per_slot: GPUs per process; with `use_gpu`, 1 by default.
        env_vars: Environment variables of all processes.
        override_discovery: Accepted for compatibility with Horovod: Ray discovers the nodes.
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
        """Return settings for an elastic executor.

        Args:
            min_num_proc: The minimum number of processes.
            max_num_proc: The maximum number of processes; by default, as many as the cluster has resources for.
            reset_limit: The maximum number of resets, as processes fail, join or leave. By default there is no limit,
                except that the same exception twice in a row ends the job.
            elastic_timeout: Seconds to wait for resources for the minimum number of processes.
            timeout_s: Seconds within which processes must start after Ray has placed them.
            ssh_identity_file: Accepted for compatibility with Horovod, which uses ssh.
            nics: The network interfaces between hosts, separated by commas.
            min_np: Deprecated alias of `min_num_proc`.
            max_np: Deprecated alias of `max_num_proc`.
            **kwargs: Other settings of Horovod, which are ignored with a warning.
        """
        warn_of_ignored(ssh_identity_file=ssh_identity_file, **kwargs)
        return RaySettings(timeout_s, nics=interfaces(nics), min_num_proc=min_num_proc if min_np is None else min_np,
                           max_num_proc=max_num_proc if max_np is None else max_np, reset_limit=reset_limit,
                           elastic_timeout=elastic_timeout)

    def start(self) -> None:
        """Do nothing: `run` starts the processes. It exists for compatibility with Horovod."""

    def run(self, worker_fn: Callable[[], Any], callbacks: Callbacks | None = None) -> list[Any]:
        """Run a function on all processes.

        Args:
            worker_fn: The function, which calls `hvd.init()` and a function decorated with `@hvd.elastic.run`.
            callbacks: Functions that this process calls with each dict that rank 0 passes to
                `hvkeras.ray.ray_logger.log`.

        Returns:
            The results of the ranks that participate at the end, in rank order.

        Raises:
            PeerError: The function failed too often, or there were more resets than `reset_limit`.
            MachineError: The cluster did not have enough resources in time.
        """
        return self._executor.run(worker_fn, callbacks=callbacks)

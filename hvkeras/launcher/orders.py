"""The orders that the launcher sends to a job's agents: commands, and the environment of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvkeras.host.console import quiet_variables
from hvkeras.launch_environments import hvkeras_run, tf_config
from hvkeras.launch_environments.horovod_variables import rank_variables, with_launcher
from hvkeras.launcher.host_agents import exported
from hvkeras.launcher.job import Job
from hvkeras.launcher.placement import HostRanks
from hvkeras.settings import Settings


def start_order(job: Job, host: HostRanks, secret: str, address: str, workers: Sequence[str]) -> dict[str, Any]:
    """Returns the job in the form that a host's agent expects.

    Args:
        job: The job.
        host: The host and its ranks.
        secret: The job's secret.
        address: The address at which the control channel listens.
        workers: host:port of each rank, for TF_CONFIG; empty without one.
    """
    shared = {"HVKERAS_SECRET": secret, hvkeras_run.CONTROL_ADDRESS: address,
              hvkeras_run.PROCESS_COUNT: str(job.size),
              hvkeras_run.LOCAL_PROCESS_COUNT: str(len(host.ranks))}
    defaults = {"PYTHONUNBUFFERED": "1", **quiet_variables(Settings(job.environment).log_level)}
    environment = dict(job.environment) if host.local else exported(job.environment)
    return {
        "folder": job.folder,
        "environment": {**defaults, **environment, **shared},
        "ranks": [{"rank": rank, "command": list(job.command),
                   "environment": {hvkeras_run.PROCESS_ID: str(rank),
                                   hvkeras_run.LOCAL_PROCESS_ID: str(local_rank),
                                   **_rank_variables(job, host, rank, local_rank),
                                   **(tf_config.worker_variables(workers, rank, environment)
                                      if workers else {})},
                   "terminal": job.terminal if rank == 0 else None}
                  for local_rank, rank in enumerate(host.ranks)],
    }


def _rank_variables(job: Job, host: HostRanks, rank: int, local_rank: int) -> dict[str, str]:
    """Returns Horovod's variables for a rank: rank and size, with their local and cross counterparts."""
    hosts_with_local_rank = [other.name for other in job.hosts if len(other.ranks) > local_rank]
    variables = rank_variables(rank, job.size, local_rank, len(host.ranks),
                               hosts_with_local_rank.index(host.name), len(hosts_with_local_rank), host.name)
    return with_launcher(hvkeras_run.LAUNCHER, variables)

"""The orders that the launcher sends to a job's agents: commands, and the environment of each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hvkeras.host.console import quiet_variables
from hvkeras.launch_environments import hvkeras_run, tf_config
from hvkeras.launch_environments.horovod_variables import rank_variables, with_launcher
from hvkeras.launcher.host_agents import exported
from hvkeras.launcher.job import Job
from hvkeras.launcher.placement import HostRanks
from hvkeras.settings import Settings


def start_order(job: Job, host: HostRanks, secret: str, address: str, workers: Sequence[str],
                membership: str = "") -> dict[str, Any]:
    """Returns the job in the form that a host's agent expects.

    Args:
        job: The job.
        host: The host and its ranks.
        secret: The job's secret.
        address: The address at which the control channel listens.
        workers: host:port of each rank, for TF_CONFIG; empty without one.
        membership: The address of the membership channel, in an elastic job whose survivors go on; "" in others.
    """
    environment = _shared(job, host, secret)
    machines = by_machine(job, job.hosts)
    places = {rank: place_of(machines, rank, address) for rank in host.ranks}
    return {
        "folder": job.folder,
        "environment": environment,
        "ranks": [{"rank": rank, "command": list(job.command),
                   "environment": {**place, **_of_worker(membership, rank),
                                   **(tf_config.worker_variables(workers, rank, environment)
                                      if workers else {})},
                   "terminal": job.terminal if rank == 0 else None}
                  for rank, place in places.items()],
    }


def newcomers_order(job: Job, host: HostRanks, secret: str, membership: str, newcomers: Mapping[int, int],
                    local_size: int, size: int, joins: str) -> dict[str, Any]:
    """Returns the order to start workers that will join a running elastic job.

    Args:
        job: The job.
        host: The host.
        secret: The job's secret.
        membership: The address of the membership channel.
        newcomers: The slots of the workers, by their numbers: a GPU of the host that no other worker uses.
        local_size: The number of workers on the host, these included.
        size: The number of ranks that the job has now; the workers expect those that follow.
        joins: When they join: a value of `hvkeras_run.STANDBY`.
    """
    count = len(newcomers)
    return {
        "folder": job.folder,
        "environment": _shared(job, host, secret),
        "ranks": [{"rank": number, "command": list(job.command), "terminal": None,
                   "environment": {**hvkeras_run.place_variables(size + place, size + count, slot, local_size,
                                                                 membership),
                                   **_of_worker(membership, number), hvkeras_run.STANDBY: joins}}
                  for place, (number, slot) in enumerate(newcomers.items())],
    }


def by_machine(job: Job, hosts: Sequence[HostRanks]) -> list[HostRanks]:
    """Returns hosts and their ranks, with those as one host that are on one machine."""
    if job.reporting is None:
        return list(hosts)
    merged: dict[str, HostRanks] = {}
    for host in hosts:
        machine = host.name if host.local else job.reporting.machine_of(host.name)
        before = merged.get(machine)
        merged[machine] = host if before is None else replace(before, ranks=tuple(sorted(before.ranks + host.ranks)))
    return list(merged.values())


def place_of(hosts: Sequence[HostRanks], rank: int, address: str) -> dict[str, str]:
    """Returns the variables that give a process its place: ours, and Horovod's with local and cross counterparts.

    Args:
        hosts: All hosts and their ranks.
        rank: The rank.
        address: The address at which the control channel listens.
    """
    host = next(host for host in hosts if rank in host.ranks)
    local_rank, local_size, size = host.ranks.index(rank), len(host.ranks), sum(len(each.ranks) for each in hosts)
    alike = [each.name for each in hosts if len(each.ranks) > local_rank]
    variables = rank_variables(rank, size, local_rank, local_size, alike.index(host.name), len(alike), host.name)
    return {**hvkeras_run.place_variables(rank, size, local_rank, local_size, address),
            **with_launcher(hvkeras_run.LAUNCHER, variables)}


def _shared(job: Job, host: HostRanks, secret: str) -> dict[str, str]:
    """Returns the environment that all processes of a host have in common."""
    defaults = {"PYTHONUNBUFFERED": "1", **quiet_variables(Settings(job.environment).log_level)}
    environment = dict(job.environment) if host.local else exported(job.environment)
    return {**defaults, **environment, "HVKERAS_SECRET": secret}


def _of_worker(membership: str, number: int) -> dict[str, str]:
    return {hvkeras_run.MEMBERSHIP_ADDRESS: membership, hvkeras_run.WORKER: str(number)} if membership else {}

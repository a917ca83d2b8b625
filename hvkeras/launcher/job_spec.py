"""Description of a job for `hvkeras run`, and the commands and environments that the launcher sends to its agents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hvkeras.control.launch_environments import hvkeras_run, tf_config
from hvkeras.control.launch_environments.horovod_variables import rank_variables, with_launcher
from hvkeras.host.console import quiet_variables
from hvkeras.host.ssh import Ssh
from hvkeras.launcher.host_agents import exported
from hvkeras.launcher.host_pool import HostPool
from hvkeras.launcher.placement import HostRanks, WorkerId
from hvkeras.launcher.reporting_hosts import ReportingHosts
from hvkeras.settings import Settings


@dataclass(frozen=True)
class JobSpec:
    """What to run.

    Attributes:
        command: The ranks' command line.
        hosts: The hosts and their ranks.
        folder: Their working folder, on every host.
        environment: Their environment, including the settings of hvkeras.
        ssh: How to reach other hosts.
        verbose: Whether the launcher reports each step.
        terminal: Columns and rows for rank 0's standard output, or None for a pipe.
        reset_limit: How often ranks may go on without one that has failed, or all are restarted after that.
        counts_changes: Whether `reset_limit` also counts the times when workers join or leave.
        pool: What chooses the hosts of each restart; None for the same ones.
        reporting: The hosts that report by themselves, which the ranks of others than this one are started on; None to
            start them by ssh.
        ends_on_same_error: Whether an exception that comes a second time in a row ends the job.
        last_error: The exception that the failure before this start was; "" if there was none.
        tf_config: Whether each rank gets a TF_CONFIG in which it is a worker.
    """

    command: Sequence[str]
    hosts: Sequence[HostRanks]
    folder: str
    environment: Mapping[str, str]
    ssh: Ssh = field(default_factory=Ssh)
    verbose: bool = False
    terminal: tuple[int, int] | None = None
    reset_limit: int = 0
    counts_changes: bool = False
    pool: HostPool | None = None
    reporting: ReportingHosts | None = None
    ends_on_same_error: bool = False
    last_error: str = ""
    tf_config: bool = False

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(len(host.ranks) for host in self.hosts)


Order = dict[str, Any]  # in the form that an agent expects


def start_order(job: JobSpec, host: HostRanks, secret: str, address: str, tf_workers: Sequence[str],
                channel: str = "") -> Order:
    """Returns the order to start the first workers of a host, whose numbers are their ranks.

    Args:
        job: The job.
        host: The host and its ranks.
        secret: The job's secret.
        address: The address at which the control channel listens.
        tf_workers: host:port of each rank, for TF_CONFIG; empty without one.
        channel: The address of the membership channel, in an elastic job; "" in others.
    """
    environment = _shared(job, host, secret)
    machines = by_machine(job, job.hosts)
    return {
        "folder": job.folder,
        "environment": environment,
        "workers": [{"worker": rank, "command": list(job.command),
                     "environment": {**rank_environment(machines, rank, address), **_of_worker(channel, WorkerId(rank)),
                                     **(tf_config.worker_variables(tf_workers, rank, environment)
                                        if tf_workers else {})},
                     "terminal": job.terminal if rank == 0 else None}
                    for rank in host.ranks],
    }


def newcomers_order(job: JobSpec, host: HostRanks, secret: str, channel: str, newcomers: Mapping[WorkerId, int],
                    local_size: int, size: int, joins: str) -> Order:
    """Returns the order to start workers that will join a running elastic job.

    Args:
        job: The job.
        host: The host.
        secret: The job's secret.
        channel: The address of the membership channel.
        newcomers: The slots of the workers: a GPU of the host that no other worker uses.
        local_size: The number of workers on the host, these included.
        size: The number of ranks that the job has now; the workers expect those that follow.
        joins: When they join: a value of `hvkeras_run.STANDBY`.
    """
    count = len(newcomers)
    return {
        "folder": job.folder,
        "environment": _shared(job, host, secret),
        "workers": [{"worker": worker, "command": list(job.command), "terminal": None,
                     "environment": {
                         **hvkeras_run.slot_variables(size + index, size + count, slot, local_size, channel),
                         **_of_worker(channel, worker), hvkeras_run.STANDBY: joins}}
                    for index, (worker, slot) in enumerate(newcomers.items())],
    }


def by_machine(job: JobSpec, hosts: Sequence[HostRanks]) -> list[HostRanks]:
    """Returns hosts and their ranks, with those as one host that are on one machine."""
    if job.reporting is None:
        return list(hosts)
    merged: dict[str, HostRanks] = {}
    machines = job.reporting.machines()
    for host in hosts:
        machine = host.name if host.local else machines.get(host.name, host.name)
        before = merged.get(machine)
        merged[machine] = host if before is None else replace(before, ranks=tuple(sorted(before.ranks + host.ranks)))
    return list(merged.values())


def rank_environment(hosts: Sequence[HostRanks], rank: int, address: str) -> dict[str, str]:
    """Returns the variables that make a process a rank: ours, and Horovod's with local and cross counterparts.

    Args:
        hosts: All hosts and their ranks.
        rank: The rank.
        address: The address at which the control channel listens.
    """
    host = next(host for host in hosts if rank in host.ranks)
    local_rank, local_size, size = host.ranks.index(rank), len(host.ranks), sum(len(each.ranks) for each in hosts)
    alike = [each.name for each in hosts if len(each.ranks) > local_rank]
    variables = rank_variables(rank, size, local_rank, local_size, alike.index(host.name), len(alike), host.name)
    return {**hvkeras_run.slot_variables(rank, size, local_rank, local_size, address),
            **with_launcher(hvkeras_run.LAUNCHER, variables)}


def _shared(job: JobSpec, host: HostRanks, secret: str) -> dict[str, str]:
    """Returns the environment that all processes of a host have in common."""
    defaults = {"PYTHONUNBUFFERED": "1", **quiet_variables(Settings(job.environment).log_level)}
    environment = dict(job.environment) if host.local else exported(job.environment)
    return {**defaults, **environment, "HVKERAS_SECRET": secret}


def _of_worker(channel: str, worker: WorkerId) -> dict[str, str]:
    return {hvkeras_run.MEMBERSHIP_ADDRESS: channel, hvkeras_run.WORKER: str(worker)} if channel else {}

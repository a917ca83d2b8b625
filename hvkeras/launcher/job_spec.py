"""Description of a job for `hvkeras run`, and the commands and environments that the launcher sends to its agents."""

from __future__ import annotations

import os
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
from hvkeras.launcher.preload import Preload, preload_of
from hvkeras.launcher.reporting_hosts import ReportingHosts
from hvkeras.settings import Settings


@dataclass(frozen=True)
class JobSpec:
    """Specification of a job.

    Attributes:
        command: Command line of the ranks.
        folder: Working folder of the ranks, on every host.
        environment: Environment of the ranks, including the settings of hvkeras.
        ssh: Connection to other hosts.
        verbose: Log each step of the launcher.
        terminal: Columns and rows of a terminal for rank 0's standard output; None for a pipe.
        reset_limit: Maximum number of resets: of times that the job continues, or restarts, after a failure.
        counts_changes: Whether `reset_limit` also counts the times when workers join or leave.
        pool: The pool of hosts of an elastic job; None for fixed hosts.
        reporting: Connected hosts, on which ranks are started without ssh; None to use ssh.
        ends_on_same_error: End the job if the same exception occurs twice in a row.
        last_error: The exception of the failure before this start; "" if there was none.
        tf_config: Give each rank a TF_CONFIG in which it is a worker.
        forked: Command line of a rank that is forked, if it is not `command`, as something prepares the process:
        prepare: That, as a fork server receives it.
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
    forked: Sequence[str] = ()
    prepare: Mapping[str, Any] | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(len(host.ranks) for host in self.hosts)

    @property
    def preload(self) -> tuple[Preload, str]:
        """What fork servers need to fork the ranks, and why they do not fork them; both empty without --preload."""
        return preload_of(self.forked or self.command, Settings(self.environment), self.folder,
                          self.environment.get("PATH", os.defpath), self.prepare)


Order = dict[str, Any]  # as the agent receives it; see `hvkeras.launcher.agent.Agent`


def start_order(job: JobSpec, host: HostRanks, secret: str, address: str, tf_workers: Sequence[str],
                channel: str = "") -> Order:
    """Return the order to start the first workers of a host, whose numbers are their ranks.

    Args:
        address: `host:port` of the control channel.
        tf_workers: `host:port` of each rank, for TF_CONFIG; empty without it.
        channel: `host:port` of the membership channel in an elastic job; "" in others.
    """
    environment = _host_environment(job, host, secret)
    machines = by_machine(job, job.hosts)
    return {
        "folder": job.folder,
        "environment": environment,
        "preload": job.preload[0],
        "workers": [{"worker": rank, "command": list(job.command),
                     "environment": {**rank_environment(machines, rank, address),
                                     **_worker_variables(channel, WorkerId(rank)),
                                     **(tf_config.worker_variables(tf_workers, rank, environment)
                                        if tf_workers else {})},
                     "terminal": job.terminal if rank == 0 else None}
                    for rank in host.ranks],
    }


def newcomers_order(job: JobSpec, host: HostRanks, secret: str, channel: str, newcomers: Mapping[WorkerId, int],
                    local_size: int, size: int, joins: str) -> Order:
    """Return the order to start workers that will join a running elastic job.

    Args:
        channel: `host:port` of the membership channel.
        newcomers: The slot of each worker: the index of a GPU that no other worker uses.
        local_size: The number of workers on the host, including these.
        size: The current number of ranks; the workers get provisional ranks from there.
        joins: When they join: a value of `hvkeras_run.STANDBY`.
    """
    count = len(newcomers)
    return {
        "folder": job.folder,
        "environment": _host_environment(job, host, secret),
        "preload": job.preload[0],
        "workers": [{"worker": worker, "command": list(job.command), "terminal": None,
                     "environment": {
                         **hvkeras_run.slot_variables(size + index, size + count, slot, local_size, channel),
                         **_worker_variables(channel, worker), hvkeras_run.STANDBY: joins}}
                    for index, (worker, slot) in enumerate(newcomers.items())],
    }


def by_machine(job: JobSpec, hosts: Sequence[HostRanks]) -> list[HostRanks]:
    """Return hosts and their ranks, with all hosts of one machine merged."""
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
    """Return the environment variables of a rank: those of hvkeras, and Horovod's with local and cross ranks.

    Args:
        hosts: All hosts and their ranks.
        address: `host:port` of the control channel.
    """
    host = next(host for host in hosts if rank in host.ranks)
    local_rank, local_size, size = host.ranks.index(rank), len(host.ranks), sum(len(each.ranks) for each in hosts)
    same_slot = [each.name for each in hosts if len(each.ranks) > local_rank]
    variables = rank_variables(rank, size, local_rank, local_size, same_slot.index(host.name), len(same_slot),
                               host.name)
    return {**hvkeras_run.slot_variables(rank, size, local_rank, local_size, address),
            **with_launcher(hvkeras_run.LAUNCHER, variables)}


def start_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment, with variables that ranks have by default and that Python or TensorFlow read at once."""
    return {"PYTHONUNBUFFERED": "1", **quiet_variables(Settings(environment).log_level), **environment}


def _host_environment(job: JobSpec, host: HostRanks, secret: str) -> dict[str, str]:
    environment = dict(job.environment) if host.local else exported(job.environment)
    return {**start_variables(environment), "HVKERAS_SECRET": secret}


def _worker_variables(channel: str, worker: WorkerId) -> dict[str, str]:
    return {hvkeras_run.MEMBERSHIP_ADDRESS: channel, hvkeras_run.WORKER: str(worker)} if channel else {}

"""The description of a job for `hvkeras run`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hvkeras.host.ssh import Ssh
from hvkeras.launcher.host_pool import HostPool
from hvkeras.launcher.placement import HostRanks
from hvkeras.launcher.reporting_hosts import ReportingHosts


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

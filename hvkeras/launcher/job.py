"""What `hvkeras run` is to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hvkeras.launcher.host_agents import Ssh
from hvkeras.launcher.placement import HostRanks


@dataclass
class Job:
    """What to run.

    Attributes:
        command: The ranks' command line.
        hosts: Where they run.
        folder: Their working folder, on every host.
        environment: Their environment, the settings of hvkeras among it.
        ssh: How other hosts are reached.
        verbose: Whether each step is said.
        terminal: Columns and rows for rank 0's standard output, or None for a pipe.
        reset_limit: How often all ranks are started again after one has failed.
        tf_config: Whether ranks get a TF_CONFIG, in which each is a worker.
    """

    command: Sequence[str]
    hosts: Sequence[HostRanks]
    folder: str
    environment: Mapping[str, str]
    ssh: Ssh = field(default_factory=Ssh)
    verbose: bool = False
    terminal: tuple[int, int] | None = None
    reset_limit: int = 0
    tf_config: bool = False

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return sum(len(host.ranks) for host in self.hosts)

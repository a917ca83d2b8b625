"""Rank topology: which rank runs on which host, and the sizes derived from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """This rank's place in the job.

    Attributes:
        rank: This process's number, from 0 to `size - 1`.
        size: The number of processes that train together.
        local_rank: This process's number among those of its host.
        local_size: The number of processes on this host.
        cross_rank: This host's number among the hosts that have a process of this local rank.
        cross_size: The number of hosts that have a process of this local rank.
        hosts: The host name of each rank, in rank order; two machines may have the same name.
        local_sizes: The number of processes on each rank's host, in rank order.
        host_numbers: The number of each rank's host, in rank order; hosts are numbered in the order of their first
            ranks.
        local_cores: The number of cores that the ranks of this host have together; 0 if unknown.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    hosts: tuple[str, ...]
    local_sizes: tuple[int, ...]
    host_numbers: tuple[int, ...]
    local_cores: int = 0

    @property
    def host(self) -> str:
        """The name of the host this rank runs on."""
        return self.hosts[self.rank]

    @property
    def is_homogeneous(self) -> bool:
        """Whether every host runs the same number of ranks."""
        return len(set(self.local_sizes)) == 1

    @property
    def is_one_host(self) -> bool:
        """Whether all ranks run on this host."""
        return self.local_size == self.size


def topology_from_hosts(rank: int, hosts: Sequence[str], identities: Sequence[str] | None = None,
                        cores: Sequence[Sequence[int]] | None = None) -> Topology:
    """Derives all ranks and sizes from the list of hosts.

    Ranks of one host are numbered in rank order. Cross ranks number the hosts that have at least
    `local_rank + 1` processes, in the order of their first rank (Horovod's definition).

    Args:
        rank: This process's rank.
        hosts: The host name of each rank, in rank order.
        identities: What distinguishes hosts, in rank order, when names alone do not (several
            machines may all be called `localhost`); the names by default.
        cores: The cores that each rank may use, in rank order.

    Returns:
        The topology as this rank sees it.
    """
    keys = list(identities if identities is not None else hosts)
    local_ranks = [keys[:index].count(key) for index, key in enumerate(keys)]
    local_rank = local_ranks[rank]
    same_column = [keys[index] for index, number in enumerate(local_ranks) if number == local_rank]
    return Topology(
        rank=rank,
        size=len(keys),
        local_rank=local_rank,
        local_size=keys.count(keys[rank]),
        cross_rank=same_column.index(keys[rank]),
        cross_size=len(same_column),
        hosts=tuple(hosts),
        local_sizes=tuple(keys.count(key) for key in keys),
        host_numbers=tuple(list(dict.fromkeys(keys)).index(key) for key in keys),
        local_cores=len({core for key, own in zip(keys, cores, strict=True) if key == keys[rank] for core in own})
        if cores is not None else 0,
    )

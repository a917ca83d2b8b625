"""Rank topology: the host of each rank, and the ranks and sizes derived from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """Ranks and hosts of the job, as seen by one rank.

    Attributes:
        rank: Rank of this process, from 0 to `size - 1`.
        local_rank: Index of this process among those on its host.
        local_size: Number of processes on this host.
        cross_rank: Index of this host among the hosts that have a process with this local rank.
        cross_size: Number of hosts that have a process with this local rank.
        hosts: Host name of each rank, in rank order; two machines may have the same name.
        local_sizes: Number of processes on each rank's host, in rank order.
        host_numbers: Index of each rank's host, in rank order; hosts are numbered in the order of their first ranks.
        local_cores: Number of cores that the ranks on this host may use together; 0 if unknown.
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
        """Name of this rank's host."""
        return self.hosts[self.rank]

    @property
    def is_homogeneous(self) -> bool:
        """Return whether every host runs the same number of ranks."""
        return len(set(self.local_sizes)) == 1

    @property
    def is_one_host(self) -> bool:
        """Return whether all ranks run on this host."""
        return self.local_size == self.size


def topology_from_hosts(rank: int, hosts: Sequence[str], identities: Sequence[str] | None = None,
                        cores: Sequence[Sequence[int]] | None = None) -> Topology:
    """Derive all ranks and sizes from the list of hosts.

    Local ranks are in rank order. Cross ranks number the hosts that have at least `local_rank + 1` processes, in the
    order of their first rank (Horovod's definition).

    Args:
        rank: Rank of this process.
        hosts: Host name of each rank, in rank order.
        identities: Unique host identities, in rank order, since several machines may have the name `localhost`; the
            names by default.
        cores: Cores that each rank may use, in rank order.
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

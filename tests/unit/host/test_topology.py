"""Rank numbers from lists of hosts."""

from __future__ import annotations

import dataclasses

import pytest

from hvkeras.host.topology import topology_from_hosts

# Hosts by rank, then for each rank: local rank, local size, cross rank, cross size.
CASES = {
    "one rank": (["a"], [(0, 1, 0, 1)]),
    "one host": (["a", "a", "a"], [(0, 3, 0, 1), (1, 3, 0, 1), (2, 3, 0, 1)]),
    "two hosts": (["a", "a", "b", "b"], [(0, 2, 0, 2), (1, 2, 0, 2), (0, 2, 1, 2), (1, 2, 1, 2)]),
    "taking turns": (["a", "b", "a", "b"], [(0, 2, 0, 2), (0, 2, 1, 2), (1, 2, 0, 2), (1, 2, 1, 2)]),
    "uneven": (["a", "b", "b"], [(0, 1, 0, 2), (0, 2, 1, 2), (1, 2, 0, 1)]),
    "uneven, three hosts": (
        ["a", "a", "b", "c", "c"],
        [(0, 2, 0, 3), (1, 2, 0, 2), (0, 1, 1, 3), (0, 2, 2, 3), (1, 2, 1, 2)],
    ),
}


@pytest.mark.parametrize(("hosts", "expected"), CASES.values(), ids=CASES)
def test_every_number_of_every_rank(hosts: list[str], expected: list[tuple[int, ...]]) -> None:
    for rank, numbers in enumerate(expected):
        seen = topology_from_hosts(rank, hosts)
        assert (seen.rank, seen.size, seen.host) == (rank, len(hosts), hosts[rank])
        assert (seen.local_rank, seen.local_size, seen.cross_rank, seen.cross_size) == numbers


def test_identities_distinguish_hosts_of_one_name() -> None:
    seen = topology_from_hosts(1, ["localhost", "localhost"], ["machine 1", "machine 2"])
    assert (seen.local_rank, seen.local_size, seen.cross_rank, seen.cross_size) == (0, 1, 1, 2)
    assert seen.hosts == ("localhost", "localhost")
    assert seen.host_numbers == (0, 1)


@pytest.mark.parametrize(("hosts", "homogeneous"), [("a", True), ("aabb", True), ("abab", True), ("abb", False)])
def test_homogeneous_means_as_many_ranks_on_every_host(hosts: str, homogeneous: bool) -> None:
    assert topology_from_hosts(0, list(hosts)).is_homogeneous is homogeneous


def test_a_topology_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        topology_from_hosts(0, ["a"]).rank = 1  # type: ignore[misc]  # that is the test

"""Which rank keeps the part of which other one, and in what pieces parts are sent."""

from __future__ import annotations

import pytest

from hvkeras.elastic.shared_slots import SlotAssignment, choose_backups

pytestmark = pytest.mark.oldest


@pytest.mark.parametrize(("hosts", "staying", "loads"), [
    ([0, 0, 1, 1], (), [1, 1, 1, 1]), ([0, 1, 1, 1], (), [3, 1, 0, 0]), ([0, 0, 0, 0], (), [1, 1, 1, 1]),
    ([0, 0, 1, 1], (0, 1), [2, 2, 0, 0]), ([0, 0, 0], (2,), [0, 0, 2]), ([0], (), [0]),
])
def test_parts_are_kept_on_another_host_where_there_is_one(hosts: list[int], staying: tuple[int, ...],
                                                           loads: list[int]) -> None:
    found = choose_backups(hosts, staying)
    assert all(rank != guard for rank, guard in found.items())
    allowed = staying or range(len(hosts))
    for rank, guard in found.items():
        assert guard in allowed
        elsewhere = any(hosts[other] != hosts[rank] for other in allowed)  # a rank without others is not found at all
        assert (hosts[guard] != hosts[rank]) == elsewhere
    assert [list(found.values()).count(rank) for rank in range(len(hosts))] == loads


def test_parts_are_sent_in_chunks_of_one_dtype() -> None:
    assignment = SlotAssignment(2, [1, 2, 5, 6], ["float32", "float32", "float32", "float64"],
                [(0, 100, 200), (0, 0, 300), (0, 1000, 2000), (0, 10, 20)])
    assert list(assignment.chunks(1200)) == [range(2), range(2, 3), range(3, 4)]
    assert list(assignment.chunks(10**6)) == [range(3), range(3, 4)]
    assert list(SlotAssignment(1).chunks(10)) == []
    assert [assignment.bytes_of(rank) for rank in (0, 1)] == [4480, 5680]
    assert assignment.range_of(1, 1) == (1, 0, 300)
    assert assignment.has_part(0)
    assert not SlotAssignment(2, [1], ["float32"], [(0, 0, 9)]).has_part(0)

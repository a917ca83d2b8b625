"""How many threads a rank computes with."""

from __future__ import annotations

import pytest

from hvkeras.host.machine import fair_share, operation_threads


@pytest.mark.parametrize(("own", "on_this_host", "share"), [
    ([0, 1], [[0, 1], [0, 1]], 1),
    ([0], [[0], [1]], 1),
    ([0, 1], [[0, 1], [2, 3]], 2),
    ([0, 1, 2, 3], [[0, 1, 2, 3]], 4),
    ([0, 1, 2], [[0, 1, 2], [2, 3]], 2),  # two and a half
    ([0], [[0]] * 4, 1),
])
def test_cores_are_divided_among_those_who_may_use_them(own: list[int], on_this_host: list[list[int]],
                                                        share: int) -> None:
    assert fair_share(own, on_this_host) == share


@pytest.mark.parametrize(("share", "cores", "threads"), [(1, 2, 2), (1, 1, 1), (4, 8, 4), (4, 4, 4), (1, 64, 2)])
def test_operations_have_two_threads_where_tensorflow_would_take_as_many(share: int, cores: int, threads: int) -> None:
    assert operation_threads(share, cores) == threads

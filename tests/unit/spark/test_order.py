"""Ranks of tasks, and reports within Spark's exceptions."""

from __future__ import annotations

import pytest

from hvkeras.spark.order import marked, ranks_by_host, report_in


@pytest.mark.parametrize(("hosts", "ranks"), [
    (["a"], [0]),
    (["a", "b", "a", "b"], [0, 2, 1, 3]),
    (["b", "a", "a", "b", "c"], [0, 2, 3, 1, 4]),
])
def test_the_ranks_of_a_host_are_neighbours(hosts, ranks):
    assert ranks_by_host(hosts) == ranks


def test_a_report_is_found_among_tracebacks():
    text = f"Java says\nTraceback ...\nError: {marked('rank 1 failed' + chr(10) + 'ValueError: x')}\n\tat org.apache"
    assert report_in(f"{text}\n{marked('rank 2 ended')}") == "rank 1 failed\nValueError: x"
    assert report_in("Python worker exited unexpectedly") == ""

"""The cost model: its formulas, the line through measured times, the pipeline, the flags and the rows."""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import pytest

from hvkeras.comparison.report import charts, sections
from hvkeras.comparison.result import Result
from hvkeras.comparison.results_file import document
from hvkeras.comparison.rows import Comparison, rows_of
from hvkeras.comparison.table import explanations, projection_cells
from hvkeras.errors import UsageError
from hvkeras.launcher.run_arguments import Parser
from hvkeras.projection import arguments, cost, model
from hvkeras.projection.cost import Link
from hvkeras.projection.model import HIERARCHICAL, RECURSIVE, RING, Cluster, Engine
from hvkeras.projection.observed import Observed, observed
from hvkeras.projection.pipeline import exposed
from hvkeras.projection.rows import ONE_PROCESS, projected
from hvkeras.records.record import Record

LINK = Link(latency=50e-6, bandwidth=1.25e9, combining=1e-10)
FLAT = (cost.ring, cost.recursive_doubling, cost.halving_doubling, cost.recursive)
MIB = 2**20


@pytest.mark.parametrize("algorithm", FLAT)
def test_one_rank_costs_nothing(algorithm):
    assert algorithm(MIB, 1, LINK) == 0
    assert cost.hierarchical(MIB, 1, 1, LINK, LINK) == 0


@pytest.mark.parametrize("algorithm", FLAT)
@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8, 64, 500, 512])
def test_a_cost_grows_with_bytes_and_latency_and_shrinks_with_bandwidth(algorithm, ranks):
    assert algorithm(MIB, ranks, LINK) < algorithm(2 * MIB, ranks, LINK)
    assert algorithm(MIB, ranks, LINK) < algorithm(MIB, ranks, Link(60e-6, 1.25e9, 1e-10))
    assert algorithm(MIB, ranks, LINK) > algorithm(MIB, ranks, Link(50e-6, 2.5e9, 1e-10))
    assert algorithm(MIB, ranks, LINK) > algorithm(MIB, ranks, Link(50e-6, 1.25e9))


@pytest.mark.parametrize("algorithm", [cost.ring, cost.recursive_doubling])
def test_a_cost_grows_with_ranks(algorithm):
    costs = [algorithm(MIB, 2**power, LINK) for power in range(10)]
    assert costs == sorted(costs) and len(set(costs)) == 10


def test_the_ring_sends_no_byte_more_than_it_must():
    wire = Link(0.0, 1.0)  # a second a byte: the cost is what a rank sends
    assert cost.ring(1000, 4, wire) == pytest.approx(1500)
    for ranks in (2, 3, 5, 8, 64):
        assert cost.ring(1000, ranks, wire) == pytest.approx(2 * 1000 * (ranks - 1) / ranks)
        for algorithm in FLAT:
            assert algorithm(1000, ranks, wire) >= cost.ring(1000, ranks, wire) - 1e-9
    assert cost.ring(1000, 100_000, wire) == pytest.approx(2000, rel=1e-4)  # whatever the ranks, twice the bytes


def test_latencies_are_counted_once_a_message():
    late = Link(1.0, float("inf"))
    assert [cost.ring(8, ranks, late) for ranks in (2, 4, 8)] == [2, 6, 14]
    assert [cost.recursive_doubling(8, ranks, late) for ranks in (2, 4, 8)] == [1, 2, 3]
    assert [cost.halving_doubling(8, ranks, late) for ranks in (2, 4, 8)] == [2, 4, 6]
    assert [cost.recursive_doubling(8, ranks, late) for ranks in (3, 6, 7)] == [3, 4, 4]  # one more before, one after


def test_each_byte_is_added_up_once_where_all_share_the_work():
    adding = Link(0.0, float("inf"), 1.0)
    assert cost.ring(1000, 8, adding) == cost.halving_doubling(1000, 8, adding) == 875
    assert cost.recursive_doubling(1000, 8, adding) == 3000


def test_little_data_doubles_and_much_is_halved():
    assert cost.recursive(64, 64, LINK) == cost.recursive_doubling(64, 64, LINK) < cost.ring(64, 64, LINK)
    assert cost.recursive(64 * MIB, 64, LINK) == cost.halving_doubling(64 * MIB, 64, LINK)


def test_two_ranks_have_one_way_to_halve():
    assert cost.ring(MIB, 2, LINK) == pytest.approx(cost.halving_doubling(MIB, 2, LINK))


@pytest.mark.parametrize("hosts", [1, 2, 6, 64])
def test_a_hierarchy_with_one_rank_a_host_is_a_ring(hosts):
    assert cost.hierarchical(MIB, hosts, 1, Link(1.0, 1.0), LINK) == cost.ring(MIB, hosts, LINK)


def test_a_hierarchy_on_one_host_stays_within_it():
    assert cost.hierarchical(MIB, 1, 8, LINK, Link(1.0, 1.0)) == cost.ring(MIB, 8, LINK)


def test_a_hierarchy_saves_the_latencies_of_a_long_ring():
    inside = Link(1e-6, 1e10)
    assert cost.hierarchical(MIB, 8, 8, inside, LINK) < cost.ring(MIB, 64, LINK)


def test_what_fits_beside_the_backward_pass_costs_nothing():
    assert exposed([], []) == 0
    assert exposed([3.0, 2.0], [1.0, 1.0]) == 0
    assert exposed([0.0], [2.0]) == 2
    assert exposed([3.0, 0.0], [1.0, 2.0]) == 2  # the first one is through before the second one is there
    assert exposed([3.0, 0.0], [5.0, 2.0]) == 4  # the second one waits for the first
    assert exposed([9.0, 8.0, 0.0], [1.0, 6.0, 0.5]) == 0.5


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("start", [0.0, 2e-3])
def test_the_line_through_exact_times_gives_them_back(ranks, start):
    true = Engine(RING, start, Link(0.0, 5e8))
    sizes = [4096, MIB, 25 * MIB]
    seconds = [start + cost.ring(size, ranks, true.inside) for size in sizes]
    found = model.engine_of("horovod", sizes, seconds, ranks)
    assert found.start == pytest.approx(start, abs=1e-9)
    assert found.inside.bandwidth == pytest.approx(5e8)
    one_host = Cluster(ranks, 1.0, 1.0)
    assert [model.allreduce(size, ranks, found, one_host) for size in sizes] == pytest.approx(seconds)


def test_the_line_has_no_negative_part():
    assert model.engine_of("horovod", [1000], [1e-3], 2).start == 0  # one size: all of it is the bytes'
    assert model.engine_of("horovod", [1000, 2000], [1e-3, 5e-3], 2).start == 0
    falling = model.engine_of("horovod", [1000, 2000], [5e-3, 1e-3], 2)
    assert falling.start > 0 and falling.inside.bandwidth > 1e9


@pytest.mark.parametrize("algorithm", model.ALGORITHMS)
def test_an_allreduce_between_hosts_costs_more_than_within_one(algorithm):
    engine = Engine(algorithm, 1e-4, Link(0.0, 5e9))
    inside = model.allreduce(MIB, 8, engine, Cluster(8, 50e-6, 1.25e9))
    assert inside == model.allreduce(MIB, 8, engine, Cluster(8, 1.0, 1.0))  # no network is used
    assert inside < model.allreduce(MIB, 16, engine, Cluster(8, 50e-6, 1.25e9))
    assert model.allreduce(MIB, 1, engine, Cluster(8, 50e-6, 1.25e9)) == 0


def test_a_network_is_no_faster_than_the_engine():
    engine = Engine(RING, 0.0, Link(0.0, 1e8))
    slow, fast = (model.allreduce(MIB, 4, engine, Cluster(1, 0.0, bandwidth)) for bandwidth in (1e8, 1e12))
    assert slow == fast == pytest.approx(1.5 * MIB / 1e8)


def test_ranks_that_exchange_simultaneously_share_their_hosts_network():
    engine = Engine(RECURSIVE, 0.0, Link(0.0, 1e12))
    alone, shared = (model.allreduce(MIB, 8, engine, Cluster(on_each, 0.0, 1e9)) for on_each in (1, 4))
    assert shared == pytest.approx(4 * alone)


def test_hosts_are_counted_up():
    assert [Cluster(8, 0, 1).hosts(ranks) for ranks in (1, 8, 9, 512)] == [1, 1, 2, 64]


def test_known_backends_have_their_ways():
    ways = {name: model.engine_of(name, [1000], [1.0], 2) for name in ("native", "horovod", "a plug-in")}
    assert [engine.algorithm for engine in ways.values()] == [HIERARCHICAL, RING, RING]
    assert model.engine_of("native", [1000], [1.0], 2, RECURSIVE).algorithm == RECURSIVE


def parsed(*words: str) -> argparse.Namespace:
    parser = Parser(prog="hvkeras compare")
    arguments.add_arguments(parser)
    return parser.parse_args(list(words))


def test_the_flags_say_what_to_assume():
    flags = parsed("--project", "64,8,8", "--network-bandwidth", "25Gbit", "--network-latency", "10us",
                   "--ranks-per-host", "4")
    assert flags.project == (8, 64)
    assert arguments.cluster_of(flags) == Cluster(4, pytest.approx(10e-6), 25e9 / 8)
    assert arguments.cluster_of(parsed("--project", "8")) == Cluster(8, 50e-6, 1.25e9)


@pytest.mark.parametrize(("text", "value"), [
    ("10Gbit", 1.25e9), ("100Mbit/s", 12.5e6), ("100 mbit", 12.5e6), ("2.5gbit", 312.5e6), ("800bit", 100),
    ("10Gbps", 1.25e9), ("1.25GB", 1.25e9), ("1.25GB/s", 1.25e9), ("1MiB", MIB)])
def test_a_bandwidth_is_read(text, value):
    assert arguments.bandwidth(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["10", "10Gb", "0Gbit", "-1Gbit", "fast", "", "nanGbit", "infGB"])
def test_what_is_no_bandwidth_is_refused(text):
    with pytest.raises(UsageError, match="10Gbit, not"):
        parsed("--project", "8", f"--network-bandwidth={text}")


@pytest.mark.parametrize(("text", "value"), [("50us", 50e-6), ("1ms", 1e-3), ("0s", 0), ("1.5 µs", 1.5e-6),
                                             ("7ns", 7e-9)])
def test_a_latency_is_read(text, value):
    assert arguments.duration(text) == pytest.approx(value)


@pytest.mark.parametrize(("flag", "text"), [
    ("--network-latency", "50"), ("--network-latency", "-5us"), ("--network-latency", "soon"), ("--project", "0"),
    ("--project", "8,,64"), ("--project", "eight"), ("--project", ""), ("--ranks-per-host", "0"),
    ("--ranks-per-host", "x"), ("--project-algorithm", "tree")])
def test_other_flags_are_refused_in_words(flag, text):
    with pytest.raises(UsageError, match=rf"{flag}.*HINT"):
        parsed(f"{flag}={text}")


def test_an_assumption_without_a_projection_is_refused():
    arguments.check_flags(parsed())
    arguments.check_flags(parsed("--project", "8", "--ranks-per-host", "4"))
    with pytest.raises(UsageError, match=r"--network-latency belongs to a projection\. Received: network_latency"):
        arguments.check_flags(parsed("--network-latency", "1ms"))


def test_nothing_is_projected_unasked():
    assert arguments.projected_by(parsed(), jobs()) is None


def rank(delay: float = 0.0, steps: int = 20, first: int = 0) -> Record:
    """Steps of a second: one bucket from 0.3 to 0.5, one that is there at 0.4 and gets its turn until 0.9."""
    begins = np.arange(first, steps)
    spans = {"a": np.stack([begins + 0.3 + delay, begins + 0.5], axis=1),
             "b": np.stack([begins + 0.4 + delay, begins + 0.9], axis=1)}
    spans["rare"], spans["loss"] = spans["a"][:2] + 0.95, spans["a"] + 0.95
    buckets = {key: {"label": key, "operation": "gradients", "bytes": size}
               for key, size in (("b", 4000), ("a", 1000), ("rare", 8))}
    buckets["loss"] = {"label": "loss", "operation": "allreduce average", "bytes": 9000}
    return Record(0, 2, "native", collectives=spans, buckets=buckets, host="here",
                  first_runs=dict.fromkeys(spans, first))


def test_a_job_is_observed_bucket_by_bucket():
    found = observed([rank(), rank(delay=0.05)])
    assert isinstance(found, Observed)
    assert [bucket.size for bucket in found.buckets] == [1000, 4000]
    assert [bucket.lead for bucket in found.buckets] == pytest.approx([0.1, 0.0])
    # The first one begins when the later rank comes, the second one when the first one is through.
    assert [bucket.seconds for bucket in found.buckets] == pytest.approx([0.15, 0.4])
    assert (found.ranks, found.exposed) == (2, pytest.approx(0.45))


def test_ranks_that_kept_different_parts_are_aligned():
    assert observed([rank(), rank(delay=0.05, first=7)]) == observed([rank(first=7), rank(delay=0.05)])


def test_what_cannot_be_observed_is_said():
    assert observed([rank(), None]) == "not all ranks left a record"
    assert observed([Record(0, 2, "native"), Record(1, 2, "native")]) == "no allreduce of gradients was recorded"
    assert observed([rank(), rank(first=20)]) == "no allreduce of gradients was recorded"
    sparse = rank()
    sparse.collectives["plan.3.values"] = sparse.collectives["a"]
    assert observed([sparse, sparse]) == "sparse gradients are gathered, which is not in the model"
    elsewhere = rank()
    elsewhere.host = "there"
    assert observed([rank(), elsewhere]) == "it is measured within a host, and this job had several"


STEPS = (0.8, 0.9, 1.0, 1.2, 1.3)  # seconds; quartiles 0.9, 1.0, 1.2


def jobs() -> list[Any]:
    return [(Result("native", 2, step_times=STEPS, samples_in_step=128.0), [rank(), rank()]),
            (Result("horovod", 2, reason="broken"), []),
            (Result("tfdist", 2, step_times=STEPS), [rank(), rank()]),
            (Result("plugged", 2), [rank(), rank()]),
            (Result(ONE_PROCESS, 1, step_times=STEPS, samples_in_step=100.0), [None])]


def test_what_was_measured_is_what_is_projected_for_as_many_ranks():
    row = projected(jobs(), [2], Cluster(2, 1.0, 1.0)).rows[0]
    assert row.step == pytest.approx(1.0, rel=0.05)  # the line through two buckets has no negative part
    assert (row.samples, row.share) == (pytest.approx(128, rel=0.05), pytest.approx(0.64, rel=0.05))


def test_rows_are_marked_ordered_and_have_a_range():
    made = projected(jobs(), [8, 64, 512], Cluster(8, 50e-6, 1e5))
    rows = made.rows
    assert [(row.backend, row.ranks, row.hosts) for row in rows] == [
        (name, ranks, ranks // 8) for name in ("native", "tfdist") for ranks in (8, 64, 512)]
    assert all(row.low < row.step < row.high for row in rows)
    assert [row.step for row in rows[:3]] == sorted(row.step for row in rows[:3])
    assert rows[3].samples is rows[3].share is rows[3].samples_range is None  # as its job's are
    low, high = rows[0].samples_range
    assert low < rows[0].samples < high
    assert made.reasons == ("no projection of horovod: its job failed", "no projection of plugged: no step was timed")
    assert [row.algorithm for row in rows[::3]] == [HIERARCHICAL, RING]
    assert made.explanation.startswith("projection: by a cost model (hierarchical for native; ring for tfdist), not")
    assert "8 ranks per host,  0.0008 Gbit/s and 50 us" in made.explanation
    assert projected(jobs()[1:2], [8], Cluster(8, 0, 1)).explanation == ""


def test_the_job_with_the_most_ranks_counts():
    more = (Result("native", 4, step_times=(1.9, 2.0, 2.2)), [rank()] * 4)
    rows = projected([more, *jobs()], [4], Cluster(4, 1.0, 1.0), RING).rows
    assert rows[0].algorithm == RING
    assert rows[0].step == pytest.approx(2.0, rel=0.05)


def comparison(folder: Any, *backends: str) -> Comparison:
    chosen = [job for job in jobs() if job[0].name in backends]
    return Comparison("train.py", (2,), 1, rows_of(result for result, _ in chosen), "", folder, 1.7e9, 1.0, {},
                      projected(chosen, [8, 64], Cluster(8, 50e-6, 1e5)))


def test_a_projection_is_marked_wherever_it_is_shown(tmp_path):
    made = comparison(tmp_path, "native", "horovod", ONE_PROCESS)
    written = document(made)["projection"]
    assert [(row["projection"], row["backend"], row["processes"]) for row in written["rows"]] == [
        (True, "native", 8), (True, "native", 64)]
    assert written["assumed"] == {"ranks_per_host": 8, "network_latency_s": 50e-6, "network_bytes_per_s": 1e5}
    assert written["reasons"] == ["no projection of horovod: its job failed"]
    assert not any("projection" in row for row in document(made)["rows"])
    headers, rows = projection_cells(made.projected)
    assert headers[0] == "projection,\nnot measured" and [row[:3] for row in rows] == [
        ["native", "8", "1"], ["native", "64", "8"]]
    assert [line.split(":")[0] for line in explanations(made)[-2:]] == ["projection", "no projection of horovod"]


def test_a_projection_is_drawn_hollow_and_dotted(tmp_path):
    pytest.importorskip("matplotlib")
    drawn = charts(comparison(tmp_path, "native", ONE_PROCESS))
    svg = drawn["scaling"].svg()
    assert "native, projection" in svg and ">64<" in svg
    scaling = next(each for each in sections(comparison(tmp_path, "native", ONE_PROCESS), drawn)
                   if each.title == "Scaling")
    assert "not measured" in scaling.note and "<td>64</td>" in scaling.html


def test_a_comparison_without_a_projection_has_none(tmp_path):
    made = Comparison("train.py", (2,), 1, rows_of([jobs()[0][0]]), "", tmp_path, 1.7e9, 1.0)
    assert document(made)["projection"] is None
    assert not any("projection" in line for line in explanations(made))

"""Who waits for whom, from counts of entered plans."""

from __future__ import annotations

import collections
import random

import pytest

from hvkeras.control.cause import CauseKind
from hvkeras.control.deadlocks import IDLE, MAX_PLANS, MAX_WARNINGS, PATIENCE, Waits


def plan(label="gradients", tensors=("kernel float32[2, 3]",), ranks=(0, 1), operation="allreduce", how="sum",
         hint="", is_of_model=False):
    return {"operation": operation, "how": how, "hint": hint, "is_of_model": is_of_model, "label": label,
            "ranks": list(ranks),
            "names": [tensor.split(" ", 1)[0] for tensor in tensors],
            "kinds": [tensor.split(" ", 1)[1] for tensor in tensors]}


def make(**plans):
    waits = Waits(8, mismatch_after=3.0, warn_after=10.0, stall_after=60.0)
    for key, content in plans.items():
        waits.describe(key, content)
    return waits


def test_equal_counts_wait_for_nobody():
    waits = make(a=plan())
    waits.update([0], {"a": 4})
    waits.update([1], {"a": 4})
    assert waits.check(0.0) == [] and waits.check(1000.0) == []


def test_two_ranks_in_different_plans_are_a_mismatch_naming_the_first_differing_tensor():
    waits = make(
        a=plan(tensors=["bias float32[4]", "kernel float32[2, 3]"]),
        b=plan(tensors=["bias float32[4]", "kernel float32[2, 5]"]),
    )
    waits.update([0], {"a": 1})
    waits.update([1], {"b": 1})
    assert waits.check(0.0) == [] and waits.check(2.9) == []
    (finding,) = waits.check(3.0)
    assert finding.kind is CauseKind.MISMATCH and finding.rank is None
    assert "tensor 2 is kernel float32[2, 3] on rank 0 and kernel float32[2, 5] on rank 1" in finding.text


def test_other_shapes_for_a_whole_model_say_that_the_models_differ():
    def text(one, other, is_of_model=True):
        waits = make(a=plan(tensors=one, is_of_model=is_of_model), b=plan(tensors=other, is_of_model=is_of_model))
        waits.update([0], {"a": 1})
        waits.update([1], {"b": 1})
        waits.check(0.0)
        (finding,) = waits.check(3.0)
        return finding.text

    differ = "HINT: the models themselves differ: build the same model on every rank; a tuner must give all ranks the"
    assert differ in text(["kernel float32[2, 3]"], ["kernel float32[2, 5]"])
    assert differ in text(["kernel float32[2, 3]"], ["kernel float32[2, 3]", "bias float32[3]"])
    assert differ not in text(["kernel float32[2, 3]"], ["kernel float16[2, 3]"])
    assert differ not in text(["kernel float32[2, 3]"], ["kernel no gradient[?]"])
    assert differ not in text(["x float32[2, 3]"], ["x float32[2, 5]"], is_of_model=False)


def test_a_mismatch_names_a_tensor_that_only_one_rank_has():
    waits = make(a=plan(tensors=["bias float32[4]"]), b=plan(tensors=["bias float32[4]", "extra float32[1]"]))
    waits.update([0], {"a": 1})
    waits.update([1], {"b": 1})
    waits.check(0.0)
    (finding,) = waits.check(3.0)
    assert "rank 0 has 1 tensors and rank 1 2" in finding.text and "extra" in finding.text


def test_names_alone_are_no_difference_between_tensors():
    # Keras numbers the layers of equal models differently.
    waits = make(a=plan(tensors=["dense/kernel float32[2, 3]", "dense/bias float32[3]"]),
                 b=plan(tensors=["dense_1/kernel float32[2, 3]", "dense_1/bias float32[4]"]))
    waits.update([0], {"a": 1})
    waits.update([1], {"b": 1})
    waits.check(0.0)
    (finding,) = waits.check(3.0)
    assert "tensor 2 is dense/bias float32[3] on rank 0 and dense_1/bias float32[4] on rank 1" in finding.text


def test_a_mismatch_of_operations_names_both():
    waits = make(a=plan(label='allreduce "x"'), b=plan(label='broadcast "x"', operation="broadcast", how="from 0"))
    waits.update([0], {"a": 1})
    waits.update([1], {"b": 1})
    waits.check(0.0)
    (finding,) = waits.check(3.0)
    assert 'allreduce "x"' in finding.text and 'broadcast "x"' in finding.text


def test_a_mismatch_says_where_each_rank_entered_its_plan():
    waits = make(a=plan(label='allreduce "x"'), b=plan(label='allreduce "y"'))
    waits.update([0], {"a": 1}, {"a": "train.py:31 in step"})
    waits.update([1], {"b": 1}, {"b": "train.py:35 in step"})
    waits.check(0.0)
    (finding,) = waits.check(3.0)
    assert "; rank 0 at train.py:31 in step, rank 1 at train.py:35 in step. HINT: make the same calls" in finding.text


def test_a_late_rank_learns_where_the_others_wait():
    waits = make(a=plan())
    waits.update([0], {"a": 1}, {"a": "train.py:31 in step"})
    waits.check(0.0)
    (finding,) = waits.check(10.0)
    assert "rank 0 has waited 10 s in gradients (train.py:31 in step) for rank 1" in finding.text
    waits.update([0], {"a": 1}, {"a": "train.py:40 in step"})
    (finding,) = waits.check(60.0)
    assert finding.text.startswith("has not entered gradients (train.py:40 in step), in which rank 0 has waited 60 s")
    assert waits.waited_for_in(0, 1) == "gradients (train.py:40 in step)"


def test_all_ranks_that_wait_for_each_other_are_entangled():
    waits = make(**{key: plan(label=key, ranks=(0, 1, 2)) for key in "abcd"})
    waits.update([0], {"a": 1, "d": 1})
    waits.update([1], {"b": 1, "d": 1})
    waits.update([2], {"d": 1})
    waits.check(0.0)
    waits.check(2.0)
    waits.update([2], {"c": 1})  # the last one has waited for a second only
    (finding,) = waits.check(3.0)
    assert finding.keys == ("a", "b", "c")


def test_a_mismatch_waits_for_late_ranks_before_it_ends_the_job():
    waits = make(**{key: plan(label=key, ranks=(0, 1, 2)) for key in "ab"})
    waits.update([0], {"a": 1})
    waits.update([1], {"b": 1})
    waits.check(0.0)
    assert waits.check(8.9) == []
    (finding,) = waits.check(9.0)
    assert (finding.kind, finding.keys) == (CauseKind.MISMATCH, ())


def test_ranks_that_wait_in_a_circle_are_a_mismatch():
    waits = make(a=plan(label="a", ranks=(0, 1)), b=plan(label="b", ranks=(1, 2)), c=plan(label="c", ranks=(0, 2)))
    waits.update([0], {"a": 1}, {"a": "train.py:31 in step"})
    waits.update([1], {"b": 1})
    waits.check(0.0)
    assert waits.check(5.0) == []  # rank 2 may come to b
    waits.update([2], {"c": 1})
    waits.check(6.0)
    (finding,) = waits.check(9.0)
    assert finding.keys == ("a", "b", "c")
    assert finding.text.startswith(
        "ranks 0, 1, 2 wait for each other: rank 0 in a (train.py:31 in step) for rank 1, rank 1 in b for rank 2, rank"
        " 2 in c for rank 0. HINT: make the same calls")


def test_an_exchange_over_the_channel_is_a_wait_as_well():
    waits = make(a=plan(label="a", ranks=range(8)))
    waits.update([0], {"a": 1})
    waits.enter_exchange(1, "facts")
    waits.check(0.0)
    assert waits.check(20.0)[0].kind is None  # rank 1 may be reading ahead
    waits.set_waiting([1], ["facts"])
    waits.check(30.0)
    (finding,) = waits.check(33.0)
    assert (finding.kind, finding.keys) == (CauseKind.MISMATCH, ())
    assert 'each other: rank 0 in a for rank 1, rank 1 in the exchange "facts" for rank 0. HINT: ' in finding.text
    waits.finish_exchange("facts")
    assert {finding.kind for finding in waits.check(34.0)} <= {None}


def test_progress_makes_a_wait_start_over():
    waits = make(a=plan(), b=plan(label="other"))
    waits.update([0], {"a": 1})
    waits.update([1], {"b": 1})
    waits.check(0.0)
    waits.update([0], {"a": 2})
    waits.update([1], {"a": 1})
    assert waits.check(3.5) == []  # rank 0 waits for another count than before


def test_a_late_rank_is_warned_about_at_intervals_and_then_ends_the_job():
    waits = make(a=plan())
    waits.update([0], {"a": 1})
    waits.update([1], {"a": 0})
    assert waits.check(0.0) == []
    (finding,) = waits.check(10.0)
    assert finding.kind is None and finding.rank == 1 and "rank 0 has waited 10 s in gradients" in finding.text
    assert waits.check(15.0) == []
    assert [found.kind for found in waits.check(20.0)] == [None]
    (finding,) = waits.check(60.0)
    assert finding.kind is CauseKind.STALLED and finding.rank == 1


def test_a_stall_limit_of_zero_never_ends_the_job():
    waits = Waits(2, 3.0, 10.0, 0.0)
    waits.describe("a", plan())
    waits.update([0], {"a": 1})
    waits.check(0.0)
    assert [finding.kind for finding in waits.check(1e6)] == [None]


def test_waiting_for_a_rank_that_left_is_found_soon():
    waits = make(a=plan())
    waits.update([0], {"a": 1})
    waits.set_left(1, True)
    waits.check(0.0)
    (finding,) = waits.check(3.0)
    assert finding.kind is CauseKind.LEFT and finding.rank == 1
    waits.set_left(1, False)
    assert waits.check(4.0) == []


def test_only_members_of_a_process_set_wait():
    waits = make(a=plan(ranks=(1, 3)))
    waits.update([1], {"a": 1})
    waits.update([3], {"a": 1})
    assert waits.check(0.0) == [] and waits.check(1000.0) == []


def test_many_waiters_for_one_rank_are_one_warning():
    waits = make(a=plan(ranks=(0, 1, 2, 3)))
    for rank in (0, 1, 3):
        waits.update([rank], {"a": 1})
    waits.check(0.0)
    assert [(found.kind, found.rank) for found in waits.check(10.0)] == [(None, 2)]


def test_a_warning_names_the_rank_that_has_waited_longest_and_starts_over_with_progress():
    waits = make(a=plan(ranks=(0, 1, 2)))
    waits.update([1], {"a": 1})
    waits.check(0.0)
    waits.update([0], {"a": 1})
    waits.check(4.0)
    (finding,) = waits.check(10.0)
    assert finding.text.startswith("rank 1 has waited 10 s in gradients for rank 2,")
    waits.update([2], {"a": 1})
    waits.update([0, 1], {"a": 2})
    assert waits.check(12.0) == [] and waits.check(21.0) == []
    (finding,) = waits.check(22.0)
    assert finding.text.startswith("rank 0 has waited 10 s in gradients for rank 2,")


def settled(count: int) -> Waits:
    """Two ranks that have entered so many plans once."""
    names = [f"p{number}" for number in range(count)]
    waits = make(**{name: plan() for name in names})
    for rank in range(2):
        waits.update([rank], dict.fromkeys(names, 1))
    return waits


def test_plans_that_nobody_enters_any_more_are_forgotten_where_many_are_known():
    waits = settled(MAX_PLANS + 1)
    assert waits.to_forget(0.0) == {}
    waits.update([0], {"p0": 2})
    asked = waits.to_forget(IDLE)
    assert [sorted(asked[rank]) for rank in range(2)] == [sorted(f"p{one}" for one in range(1, MAX_PLANS + 1))] * 2
    assert waits.to_forget(IDLE) == {}, "they are asked once"
    assert waits.forgotten(0, asked[0], asked[0]) == []
    assert sorted(waits.forgotten(1, asked[1], asked[1])) == sorted(asked[1])
    assert waits.plans_of(0) == ["p0"]
    assert waits.unequal() == ["p0"] and waits.waited_for_in(0, 1) == "gradients", "it waits in the plan that was kept"


def test_a_rank_that_enters_a_plan_again_before_all_have_forgotten_it_counts_on():
    waits = settled(MAX_PLANS + 1)
    waits.to_forget(0.0)
    asked = waits.to_forget(IDLE)
    waits.update([0], {"p1": 2})
    waits.forgotten(0, asked[0], [key for key in asked[0] if key != "p1"])
    gone = waits.forgotten(1, asked[1], asked[1])
    assert "p1" not in gone and len(gone) == MAX_PLANS
    assert waits.counts("p1") == {0: 2, 1: 1}
    waits.update([1], {"p1": 1})  # from zero, since it has forgotten that it did before
    assert waits.counts("p1") == {0: 2, 1: 2}


MANY = 1024


def test_of_very_many_late_ranks_a_few_say_where_they_are_and_one_warning_names_all():
    waits = Waits(MANY, 3.0, 10.0, 60.0)
    waits.describe("a", plan(ranks=range(MANY), hint="call it on all ranks"))
    waits.update(range(MANY), {"a": 1})
    waits.update(range(MANY // 2), {"a": 2}, {"a": "train.py:31 in step"})
    assert waits.check(0.0) == [] and waits.check(9.0) == []
    for now in (10.0, 20.0):
        findings = waits.check(now)
        assert [(found.kind, found.rank) for found in findings] == [(None, MANY // 2 + rank) for rank in range(8)]
        assert findings[0].text == (f"rank 0 has waited {now:.0f} s in gradients (train.py:31 in step) for ranks 512 to"
                                    " 1023, which have not entered it; the job ends after 60 s. HINT: call it on all"
                                    " ranks")
        assert {found.text for found in findings[1:]} == {""}
        assert waits.check(now + 9.0) == []
    waits.update(range(0, MANY, 2), {"a": 2})
    (finding,) = waits.check(60.0)
    assert (finding.kind, finding.rank) == (CauseKind.STALLED, MANY // 2 + 1)
    assert waits.involved() == set(range(MANY))
    waits.update(range(MANY), {"a": 2})
    assert waits.check(120.0) == [] and waits.involved() == set()


def test_late_ranks_that_come_in_part_change_who_is_asked_but_not_when():
    waits = Waits(MANY, 3.0, 10.0, 0.0)
    waits.describe("a", plan(ranks=range(MANY)))
    waits.update(range(10), {"a": 1})
    waits.check(0.0)
    waits.update([rank for rank in range(MANY) if rank % 2], {"a": 1})
    findings = waits.check(10.0)
    assert [found.rank for found in findings] == list(range(10, 26, 2))
    assert " for ranks 10, 12, 14, 16, 18, 20, 22, 24 and 499 more, which have not entered it" in findings[0].text
    waits.update(range(MANY - 2), {"a": 1})
    assert [found.rank for found in waits.check(20.0)] == [MANY - 2]


def test_a_circle_among_very_many_ranks_is_found_and_named():
    waits = Waits(MANY, 3.0, 10.0, 60.0)
    thirds = [range(400), range(400, 700), range(700, MANY)]
    for key, at, other in (("a", 0, 1), ("b", 1, 2), ("c", 2, 0)):
        waits.describe(key, plan(label=key, ranks=sorted([*thirds[at], *thirds[other]])))
        waits.update(thirds[at], {key: 1})
    assert waits.check(0.0) == []
    (finding,) = waits.check(3.0)
    assert (finding.kind, finding.keys) == (CauseKind.MISMATCH, ("a", "b", "c"))
    assert finding.text.partition(". HINT: ")[0] == (
        "ranks 0, 400, 700 wait for each other: rank 0 in a for rank 400, rank 400 in b for rank 700, rank 700 in c for"
        " rank 0")


def test_the_text_of_a_mismatch_is_short_for_very_many_ranks():
    waits = Waits(MANY, 3.0, 10.0, 60.0)
    for key, ranks in (("a", range(512)), ("b", range(512, MANY))):
        waits.describe(key, plan(label=key, ranks=range(MANY), operation=f"all{key}"))
        waits.update(ranks, {key: 1})
    waits.check(0.0)
    (finding,) = waits.check(3.0)
    assert finding.keys == ("a", "b")
    assert finding.text.partition(". HINT: ")[0].endswith(
        ": rank 0 is in a (alla sum, ranks [0 to 1023]), rank 512 in b (allb sum, ranks [0 to 1023])")
    ring = Waits(MANY, 3.0, 0.0, 0.0)
    for rank in range(MANY):
        ring.describe(f"p{rank}", plan(label=f"p{rank}", ranks=sorted((rank, (rank + 1) % MANY))))
        ring.update([rank], {f"p{rank}": 1})
    ring.check(0.0)
    (finding,) = ring.check(3.0)
    assert len(finding.keys) == MANY
    assert finding.text.startswith("ranks 0 to 1023 wait for each other: rank 0 in p0 for rank 1, rank 1 in p1 for ")
    assert finding.text.partition(". HINT: ")[0].endswith(", rank 7 in p7 for rank 8 and 1016 more")


class PairByPair:
    """What `Waits` must find, from each pair of a rank and one that it waits for."""

    def __init__(self, plans, limits):
        self.plans, self.limits = plans, limits
        self.counts = {key: dict.fromkeys(ranks, 0) for key, ranks in plans.items()}
        self.there, self.waiting = set(), set()  # in the exchange "x"
        self.left = set()
        self.since, self.warned = {}, {}

    def pairs(self, size):
        """Yields waiter, missing, key, and what must stay as it is for the two of them to wait."""
        for key, counts in self.counts.items():
            low = min(counts.values())
            for waiter, missing in ((one, two) for one in counts for two in counts if counts[one] > low):
                if counts[missing] == low:
                    yield waiter, missing, key, [("count", key, waiter, counts[waiter]), ("low", key, low)]
        for waiter in sorted(self.waiting) if self.there else ():
            for missing in sorted(set(range(size)) - self.there):
                yield waiter, missing, "x", [("waits", waiter)]

    def check(self, now, size):
        """Returns what each finding is about, and the circle of the mismatch."""
        facts = [("count", key, rank, count) for key, counts in self.counts.items() for rank, count in counts.items()]
        facts += [("low", key, min(counts.values())) for key, counts in self.counts.items()
                  if len(set(counts.values())) > 1]
        self.since = {fact: self.since.get(fact, now) for fact in [*facts, *(("waits", one) for one in self.waiting)]}
        waits = {(waiter, missing, key): max(self.since[fact] for fact in facts)
                 for waiter, missing, key, facts in self.pairs(size)}
        mismatch, circle = self.mismatch(now, waits)
        return [*mismatch, *self.departure(now, waits), *self.stalls(now, waits)], circle

    def mismatch(self, now, waits):
        old = [wait for wait, since in waits.items() if now - since >= self.limits[0]]
        done = set()
        for start in sorted({waiter for waiter, _, _ in old}):
            if start in done or not (circle := self.circle(start, old)):
                continue
            done |= self.connected(start, old)
            stuck = self.connected(start, waits)
            keys = {key for waiter, missing, key in waits if waiter in stuck and missing in stuck}
            waiting = {waiter for waiter, _, key in waits if key in keys}
            if "x" not in keys and all(rank in waiting for key in keys for rank in self.plans[key]):
                return [(CauseKind.MISMATCH, None, tuple(sorted(keys)))], circle
            if "x" in keys or now - max(waits[wait] for wait in circle) >= PATIENCE * self.limits[0]:
                return [(CauseKind.MISMATCH, None, ())], circle
        return [], []

    @staticmethod
    def circle(start, waits):
        paths, queue = {start: []}, collections.deque([start])
        while queue:
            at = queue.popleft()
            for wait in (wait for wait in waits if wait[0] == at):
                if wait[1] == start:
                    return [*paths[at], wait]
                if wait[1] not in paths:
                    paths[wait[1]] = [*paths[at], wait]
                    queue.append(wait[1])
        return []

    @classmethod
    def connected(cls, rank, waits):
        def reached(pairs):
            found = {rank}
            while more := {end for start, end in pairs if start in found} - found:
                found |= more
            return found

        return reached([wait[:2] for wait in waits]) & reached([(missing, waiter) for waiter, missing, _ in waits])

    def departure(self, now, waits):
        found = [(CauseKind.LEFT, missing, ()) for (waiter, missing, key), since in waits.items()
                 if {waiter, missing} & self.left == {missing} and key != "x" and now - since >= self.limits[0]]
        return found[:1]

    def stalls(self, now, waits):
        _, warn_after, stall_after = self.limits
        found = []
        for key in self.plans:
            late = sorted({missing for _, missing, of in waits if of == key})
            if not late:
                continue
            since = min(since for (_, _, of), since in waits.items() if of == key)
            if now - since >= stall_after:
                return [(CauseKind.STALLED, late[0], ())]
            low = key, self.since["low", key, min(self.counts[key].values())]
            if now - self.warned.get(low, since) >= warn_after:
                self.warned[low] = now
                found += [(None, rank, ()) for rank in late[:MAX_WARNINGS]]
        return found


def change(chance, waits, pairs, size):
    """Lets something happen to some ranks."""
    for _ in range(chance.choice((0, 0, 1, 3))):
        key = chance.choice([*pairs.plans])
        low, high = min(pairs.counts[key].values()), max(pairs.counts[key].values())
        behind = [rank for rank, count in pairs.counts[key].items() if count < high or low == high]
        ranks = chance.sample(behind, chance.randint(1, len(behind)))
        count = max(pairs.counts[key][rank] for rank in ranks) + 1
        pairs.counts[key].update(dict.fromkeys(ranks, count))
        waits.update(ranks, {key: count})
    rank = chance.randrange(size)
    if chance.random() < 0.05:
        pairs.left ^= {rank}
        waits.set_left(rank, rank in pairs.left)
    if chance.random() < 0.1:
        pairs.there.add(rank)
        waits.enter_exchange(rank, "x")
        if chance.random() < 0.5:
            pairs.waiting.add(rank)
            waits.set_waiting([rank], ["x"])
    if len(pairs.there) == size or chance.random() < 0.05:
        pairs.there, pairs.waiting = set(), set()
        waits.finish_exchange("x")


@pytest.mark.parametrize("seed", range(40))
def test_groups_of_ranks_are_found_to_wait_as_each_pair_of_them_does(seed):
    chance = random.Random(seed)
    size, limits = chance.randint(3, 6), (3.0, 10.0, 25.0)
    if seed % 2:  # a ring
        members = [(rank, (rank + 1) % size) for rank in range(size)]
    else:
        members = [chance.sample(range(size), chance.randint(2, size)) for _ in range(chance.randint(2, 4))]
    plans = {key: sorted(ranks) for key, ranks in zip("abcdef", members, strict=False)}
    waits, pairs = Waits(size, *limits), PairByPair(plans, limits)
    for key, ranks in plans.items():
        waits.describe(key, plan(label=key, ranks=ranks, tensors=[f"{key} float32[{len(key)}]"]))
    now, kinds = 0.0, collections.Counter()
    for _ in range(150):
        change(chance, waits, pairs, size)
        now += chance.choice((0.25, 0.5, 2.0, 4.0))
        expected, circle = pairs.check(now, size)
        findings = waits.check(now)
        assert [(found.kind, found.rank, found.keys) for found in findings] == expected
        assert waits.involved() == {rank for waiter, missing, *_ in pairs.pairs(size) for rank in (waiter, missing)}
        if len(circle) > 2:
            indices = ", ".join(f"rank {waiter} in {key} for rank {missing}" for waiter, missing, key in circle)
            assert indices.replace(" in x ", ' in the exchange "x" ') in findings[0].text
        kinds.update(found.kind for found in findings)
    assert kinds[CauseKind.MISMATCH] + kinds[CauseKind.LEFT] + kinds[CauseKind.STALLED], "some must wait for long"

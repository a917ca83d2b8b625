"""Who waits for whom, from counts of entered plans."""

from __future__ import annotations

from hvkeras.control.cause import CauseKind
from hvkeras.control.deadlocks import IDLE, MAX_PLANS, Waits


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
    waits.update(0, {"a": 4})
    waits.update(1, {"a": 4})
    assert waits.check(0.0) == [] and waits.check(1000.0) == []


def test_two_ranks_in_different_plans_are_a_mismatch_naming_the_first_differing_tensor():
    waits = make(
        a=plan(tensors=["bias float32[4]", "kernel float32[2, 3]"]),
        b=plan(tensors=["bias float32[4]", "kernel float32[2, 5]"]),
    )
    waits.update(0, {"a": 1})
    waits.update(1, {"b": 1})
    assert waits.check(0.0) == [] and waits.check(2.9) == []
    (finding,) = waits.check(3.0)
    assert finding.kind is CauseKind.MISMATCH and finding.rank is None
    assert "tensor 2 is kernel float32[2, 3] on rank 0 and kernel float32[2, 5] on rank 1" in finding.text


def test_other_shapes_for_a_whole_model_say_that_the_models_differ():
    def text(one, other, is_of_model=True):
        waits = make(a=plan(tensors=one, is_of_model=is_of_model), b=plan(tensors=other, is_of_model=is_of_model))
        waits.update(0, {"a": 1})
        waits.update(1, {"b": 1})
        waits.check(0.0)
        (finding,) = waits.check(3.0)
        return finding.text

    differ = "(the models themselves differ: build the same model on every rank; a tuner must give all ranks the same "
    assert differ in text(["kernel float32[2, 3]"], ["kernel float32[2, 5]"])
    assert differ in text(["kernel float32[2, 3]"], ["kernel float32[2, 3]", "bias float32[3]"])
    assert differ not in text(["kernel float32[2, 3]"], ["kernel float16[2, 3]"])
    assert differ not in text(["kernel float32[2, 3]"], ["kernel no gradient[?]"])
    assert differ not in text(["x float32[2, 3]"], ["x float32[2, 5]"], is_of_model=False)


def test_a_mismatch_names_a_tensor_that_only_one_rank_has():
    waits = make(a=plan(tensors=["bias float32[4]"]), b=plan(tensors=["bias float32[4]", "extra float32[1]"]))
    waits.update(0, {"a": 1})
    waits.update(1, {"b": 1})
    waits.check(0.0)
    (finding,) = waits.check(3.0)
    assert "rank 0 has 1 tensors and rank 1 2" in finding.text and "extra" in finding.text


def test_names_alone_are_no_difference_between_tensors():
    # Keras numbers the layers of equal models differently.
    waits = make(a=plan(tensors=["dense/kernel float32[2, 3]", "dense/bias float32[3]"]),
                 b=plan(tensors=["dense_1/kernel float32[2, 3]", "dense_1/bias float32[4]"]))
    waits.update(0, {"a": 1})
    waits.update(1, {"b": 1})
    waits.check(0.0)
    (finding,) = waits.check(3.0)
    assert "tensor 2 is dense/bias float32[3] on rank 0 and dense_1/bias float32[4] on rank 1" in finding.text


def test_a_mismatch_of_operations_names_both():
    waits = make(a=plan(label='allreduce "x"'), b=plan(label='broadcast "x"', operation="broadcast", how="from 0"))
    waits.update(0, {"a": 1})
    waits.update(1, {"b": 1})
    waits.check(0.0)
    (finding,) = waits.check(3.0)
    assert 'allreduce "x"' in finding.text and 'broadcast "x"' in finding.text


def test_a_mismatch_says_where_each_rank_entered_its_plan():
    waits = make(a=plan(label='allreduce "x"'), b=plan(label='allreduce "y"'))
    waits.update(0, {"a": 1}, {"a": "train.py:31 in step"})
    waits.update(1, {"b": 1}, {"b": "train.py:35 in step"})
    waits.check(0.0)
    (finding,) = waits.check(3.0)
    assert finding.text.endswith("; rank 0 at train.py:31 in step, rank 1 at train.py:35 in step")


def test_a_late_rank_learns_where_the_others_wait():
    waits = make(a=plan())
    waits.update(0, {"a": 1}, {"a": "train.py:31 in step"})
    waits.check(0.0)
    (finding,) = waits.check(10.0)
    assert "rank 0 has waited 10 s in gradients (train.py:31 in step) for rank 1" in finding.text
    waits.update(0, {"a": 1}, {"a": "train.py:40 in step"})
    (finding,) = waits.check(60.0)
    assert finding.text.startswith("has not entered gradients (train.py:40 in step), in which rank 0 has waited 60 s")
    assert waits.waited_for_in(0, 1) == "gradients (train.py:40 in step)"


def test_all_ranks_that_wait_for_each_other_are_entangled():
    waits = make(**{key: plan(label=key, ranks=(0, 1, 2)) for key in "abcd"})
    waits.update(0, {"a": 1, "d": 1})
    waits.update(1, {"b": 1, "d": 1})
    waits.update(2, {"d": 1})
    waits.check(0.0)
    waits.check(2.0)
    waits.update(2, {"c": 1})  # the last one has waited for a second only
    (finding,) = waits.check(3.0)
    assert finding.keys == ("a", "b", "c")


def test_a_mismatch_waits_for_late_ranks_before_it_ends_the_job():
    waits = make(**{key: plan(label=key, ranks=(0, 1, 2)) for key in "ab"})
    waits.update(0, {"a": 1})
    waits.update(1, {"b": 1})
    waits.check(0.0)
    assert waits.check(8.9) == []
    (finding,) = waits.check(9.0)
    assert (finding.kind, finding.keys) == (CauseKind.MISMATCH, ())


def test_ranks_that_wait_in_a_circle_are_a_mismatch():
    waits = make(a=plan(label="a", ranks=(0, 1)), b=plan(label="b", ranks=(1, 2)), c=plan(label="c", ranks=(0, 2)))
    waits.update(0, {"a": 1}, {"a": "train.py:31 in step"})
    waits.update(1, {"b": 1})
    waits.check(0.0)
    assert waits.check(5.0) == []  # rank 2 may come to b
    waits.update(2, {"c": 1})
    waits.check(6.0)
    (finding,) = waits.check(9.0)
    assert finding.keys == ("a", "b", "c")
    assert finding.text == ("ranks 0, 1, 2 wait for each other: rank 0 in a (train.py:31 in step) for rank 1, rank 1 in"
                            " b for rank 2, rank 2 in c for rank 0")


def test_an_exchange_over_the_channel_is_a_wait_as_well():
    waits = make(a=plan(label="a", ranks=range(8)))
    waits.update(0, {"a": 1})
    waits.come(1, "facts")
    waits.check(0.0)
    assert waits.check(20.0)[0].kind is None  # rank 1 may be reading ahead
    waits.set_waiting(1, ["facts"])
    waits.check(30.0)
    (finding,) = waits.check(33.0)
    assert (finding.kind, finding.keys) == (CauseKind.MISMATCH, ())
    assert finding.text.endswith('each other: rank 0 in a for rank 1, rank 1 in the exchange "facts" for rank 0')
    waits.finish("facts")
    assert {finding.kind for finding in waits.check(34.0)} <= {None}


def test_progress_makes_a_wait_start_over():
    waits = make(a=plan(), b=plan(label="other"))
    waits.update(0, {"a": 1})
    waits.update(1, {"b": 1})
    waits.check(0.0)
    waits.update(0, {"a": 2})
    waits.update(1, {"a": 1})
    assert waits.check(3.5) == []  # rank 0 waits for another count than before


def test_a_late_rank_is_warned_about_at_intervals_and_then_ends_the_job():
    waits = make(a=plan())
    waits.update(0, {"a": 1})
    waits.update(1, {"a": 0})
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
    waits.update(0, {"a": 1})
    waits.check(0.0)
    assert [finding.kind for finding in waits.check(1e6)] == [None]


def test_waiting_for_a_rank_that_left_is_found_soon():
    waits = make(a=plan())
    waits.update(0, {"a": 1})
    waits.set_left(1, True)
    waits.check(0.0)
    (finding,) = waits.check(3.0)
    assert finding.kind is CauseKind.LEFT and finding.rank == 1
    waits.set_left(1, False)
    assert waits.check(4.0) == []


def test_only_members_of_a_process_set_wait():
    waits = make(a=plan(ranks=(1, 3)))
    waits.update(1, {"a": 1})
    waits.update(3, {"a": 1})
    assert waits.check(0.0) == [] and waits.check(1000.0) == []


def test_many_waiters_for_one_rank_are_one_warning():
    waits = make(a=plan(ranks=(0, 1, 2, 3)))
    for rank in (0, 1, 3):
        waits.update(rank, {"a": 1})
    waits.check(0.0)
    assert [(found.kind, found.rank) for found in waits.check(10.0)] == [(None, 2)]


def settled(count: int) -> Waits:
    """Two ranks that have entered so many plans once."""
    names = [f"p{number}" for number in range(count)]
    waits = make(**{name: plan() for name in names})
    for rank in range(2):
        waits.update(rank, dict.fromkeys(names, 1))
    return waits


def test_plans_that_nobody_enters_any_more_are_forgotten_where_many_are_known():
    waits = settled(MAX_PLANS + 1)
    assert waits.to_forget(0.0) == {}
    waits.update(0, {"p0": 2})
    asked = waits.to_forget(IDLE)
    assert [sorted(asked[rank]) for rank in range(2)] == [sorted(f"p{one}" for one in range(1, MAX_PLANS + 1))] * 2
    assert waits.to_forget(IDLE) == {}, "they are asked once"
    assert waits.forgotten(0, asked[0], asked[0]) == []
    assert sorted(waits.forgotten(1, asked[1], asked[1])) == sorted(asked[1])
    assert waits.plans_of(0) == ["p0"]
    assert [wait.waiter for wait in waits._current()] == [0], "it still waits in the plan that was kept"


def test_a_rank_that_enters_a_plan_again_before_all_have_forgotten_it_counts_on():
    waits = settled(MAX_PLANS + 1)
    waits.to_forget(0.0)
    asked = waits.to_forget(IDLE)
    waits.update(0, {"p1": 2})
    waits.forgotten(0, asked[0], [key for key in asked[0] if key != "p1"])
    gone = waits.forgotten(1, asked[1], asked[1])
    assert "p1" not in gone and len(gone) == MAX_PLANS
    assert waits.counts("p1") == {0: 2, 1: 1}
    waits.update(1, {"p1": 1})  # from zero, since it has forgotten that it did before
    assert waits.counts("p1") == {0: 2, 1: 2}

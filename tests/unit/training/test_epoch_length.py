"""What ranks decide about the steps of an epoch from what each told."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from hvkeras.errors import UnsupportedError, UsageError
from hvkeras.training.epoch_length import (
    CommonEnd,
    Decision,
    FitFacts,
    Length,
    decide,
    decide_again,
    require_same_data_to_share,
)


def decision(*everyone: FitFacts, policy: str = "trim") -> Decision:
    return decide(range(len(everyone)), everyone, policy)


def of_batches(*batches: int | None, **also: Any) -> list[FitFacts]:
    return [FitFacts(None, count, **also) for count in batches]


def test_equal_ranks_are_left_alone() -> None:
    assert decision(*of_batches(3, 3)) == Decision()
    assert decision(FitFacts(5, None), FitFacts(5, None)) == Decision(steps=5, common_end=True)
    assert decision(FitFacts(5, -1), FitFacts(5, -1)) == Decision()


@pytest.mark.parametrize(("policy", "batches", "joined"), [("trim", 2, False), ("join", 4, True)])
def test_different_numbers_of_batches_are_evened_out(policy: str, batches: int, joined: bool) -> None:
    made = decision(*of_batches(4, 2, 3), policy=policy)
    assert (made.batches, made.joined, made.steps, made.common_end) == (batches, joined, None, False)
    assert len(made.warnings) == 1
    assert "4 on rank 0, 2 on rank 1, 3 on rank 2" in made.warnings[0]


def test_different_numbers_of_batches_are_an_error_on_request() -> None:
    with pytest.raises(UsageError, match=r"Received: rank_1=2, rank_0=4\. HINT: hvd\.shard"):
        decision(*of_batches(4, 2), policy="error")


@pytest.mark.parametrize(("policy", "by_steps", "batches", "joined"), [
    ("trim", False, 2, False), ("join", False, 4, True), ("join", True, 2, False)])
def test_numbers_that_change_are_evened_out(policy: str, by_steps: bool, batches: int, joined: bool) -> None:
    uneven = decide_again((0, 1), [Length(4), Length(2)], Decision(), policy, by_steps)
    assert (uneven.batches, uneven.joined, len(uneven.warnings)) == (batches, joined, 1)
    assert "4 on rank 0, 2 on rank 1" in uneven.warnings[0]
    even = decide_again((0, 1), [Length(3), Length(3)], uneven, policy, by_steps)
    assert (even.batches, even.joined) == (3, joined), "joined ranks stay so"
    assert decide_again((0, 1), [Length(3), Length(3)], Decision(), policy, by_steps) == Decision()


@pytest.mark.parametrize(("lengths", "policy", "text"), [
    ([Length(4), Length(2)], "error", "HVKERAS_UNEVEN=error"), ([Length(4), Length(0)], "trim", "rank_1='0 batches'"),
    ([Length(4, renews=False), Length(2)], "join", "the same kind of data"),
])
def test_numbers_that_change_may_be_an_error(lengths: list[Length], policy: str, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        decide_again((0, 1), lengths, Decision(), policy)


def test_data_to_share_change_alike() -> None:
    require_same_data_to_share((0, 1), [Length(4, 8), Length(4, 8)])
    with pytest.raises(UsageError, match="rank_0=8, rank_1=7"):
        require_same_data_to_share((0, 1), [Length(4, 8), Length(4, 7)])


@pytest.mark.parametrize("batches", [(None, None), (3, None), (-1, 3)])
def test_data_of_unknown_length_ends_on_all_ranks(batches: tuple[int | None, ...]) -> None:
    assert decision(*of_batches(*batches)).common_end


def test_the_fewest_steps_per_epoch_are_taken_and_reported() -> None:
    made = decision(FitFacts(5, -1), FitFacts(3, -1), FitFacts(None, 9))
    assert (made.steps, made.common_end) == (3, True)
    assert "5 on rank 0, 3 on rank 1, no limit on rank 2" in made.warnings[0]


@pytest.mark.parametrize(("field", "one", "other", "text"), [
    ("epochs", 2, 3, r"All ranks must run the same number of epochs in fit\. Received: rank_0=2, rank_1=3"),
    ("initial_epoch", 0, 1, "start with the same epoch"),
    ("validates", True, False, r"run validation, or none in fit\. Received: rank_0='given', rank_1='none'"),
    ("batches", 2, 0, "Each rank needs at least one batch"),
])
def test_ranks_that_cannot_train_together_are_reported(field: str, one: Any, other: Any, text: str) -> None:
    facts = [FitFacts(**{"steps": None, "batches": 2, field: value}) for value in (one, other)]
    with pytest.raises(UsageError, match=text):
        decision(*facts)


def test_odd_data_is_mentioned() -> None:
    same = decision(*of_batches(3, 3, fingerprint="of these rows"))
    assert "all 2 ranks train on the same data; hvd.shard(data)" in same.warnings[0]
    assert not decision(*[FitFacts(None, 3, fingerprint=name) for name in ("one", "other")]).warnings
    unlike = decision(FitFacts(None, 3, last_rows=2), FitFacts(None, 3, last_rows=1))
    assert "different numbers of samples (2 on rank 0, 1 on rank 1)" in unlike.warnings[0]


@pytest.mark.parametrize("element", [
    {"x": tf.zeros([5, 2]), "y": tf.constant(["a"] * 5)}, (tf.zeros([5, 2]), tf.zeros([5], tf.int64)), tf.zeros([5]),
    tf.ragged.constant([[1.0], [2.0, 3.0]] * 2 + [[1.0]]), tf.sparse.from_dense(tf.eye(5)),
])
def test_data_that_ends_on_all_ranks_keeps_its_elements(element: Any) -> None:
    data = tf.data.Dataset.from_tensor_slices(element).batch(2)
    wrapped = CommonEnd(1).wrap(data)
    assert wrapped.element_spec == data.element_spec
    assert len(list(wrapped)) == len(list(data)) == 3


def test_data_that_cannot_end_on_all_ranks_is_refused() -> None:
    data = tf.data.Dataset.range(4).window(2)
    with pytest.raises(UnsupportedError, match="assert_cardinality"):
        CommonEnd(1).wrap(data)

"""Batches that a function reads itself, and those that it is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from unit.partition.ranks import Ranks, same


def of_batches(function: Callable[[Any], Any], batches: Sequence[Any], signature: Any, size: int = 3) -> Ranks:
    """Return ranks that call a function with iterators of their own, each of which yields whole batches."""
    data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)
    iterators = [iter(data) for _ in range(size + 1)]
    return Ranks(
        lambda: function(iterators[0]),
        rows=(),
        size=size,
        copies={id(iterators[0]._iterator_resource): [iterator._iterator_resource for iterator in iterators[1:]]},
    )


PAIR = (tf.TensorSpec([None, 2], tf.float64), tf.TensorSpec([None], tf.float64))


def pairs(*numbers: int) -> list[Any]:
    return [(np.arange(2.0 * number).reshape(number, 2), np.arange(number) + 0.5) for number in numbers]


def weighted(iterator: Any) -> Any:
    rows, weights = next(iterator)
    return tf.reduce_sum(rows * weights[:, None]), tf.reduce_mean(rows, 0), rows + weights[:, None]


def test_batches_of_any_number_of_rows():
    numbers = (7, 2, 3, 1)
    ranks = of_batches(weighted, pairs(*numbers), PAIR)
    for _ in numbers:
        ranks.check()


def test_tensors_of_a_batch_must_have_as_many_rows():
    rows, weights = pairs(6)[0]
    ranks = of_batches(
        lambda iterator: [tf.reduce_sum(part) for part in next(iterator)], [(rows, weights[:4]), (rows, weights)], PAIR
    )
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        ranks.run()
    assert "must have as many rows. Received: rows=[6 4]. HINT: " in str(error.value)
    assert __file__ in str(error.value)
    same(ranks.run()[2][0], rows.sum())


def test_two_batches_of_a_function_are_two_sources():
    def one(iterator: Any) -> Any:
        return tf.function(lambda: next(iterator))()

    def function(iterator: Any) -> Any:
        first, second = one(iterator), one(iterator)
        return (
            tf.reduce_sum(first[0]),
            tf.reduce_sum(second[0]),
            tf.shape(first[0]),
            tf.shape(second[0]),
            tf.concat([first[1], second[1]], 0),
            tf.linalg.matmul(first[0], second[0], transpose_b=True),
        )

    ranks = of_batches(function, pairs(7, 2, 3, 5), PAIR)
    ranks.check()
    ranks.check()


def test_a_batch_and_those_of_a_loop():
    def function(iterator: Any) -> Any:
        rows, weights = next(iterator)
        for _ in tf.range(2):
            its_rows, its_weights = next(iterator)
            rows = rows * tf.reduce_mean(its_rows) + tf.reduce_sum(its_weights)
        return rows, tf.reduce_mean(weights)

    of_batches(function, pairs(7, 2, 3), PAIR).check()


@pytest.mark.oldest
def test_optional_batches():
    def function(iterator: Any) -> Any:
        total, number = tf.constant(0.0, tf.float64), tf.constant(0)
        optional = iterator.get_next_as_optional()
        if optional.has_value():
            rows, weights = optional.get_value()
            total, number = tf.reduce_sum(rows * weights[:, None]), tf.shape(rows)[0]
        return total, number

    ranks = of_batches(function, pairs(5, 2), PAIR)
    for _ in range(3):
        ranks.check()


def test_nested_batches_with_scalars_constants_and_texts():
    more = {"text": tf.TensorSpec([None], tf.string), "step": tf.TensorSpec([], tf.int64)}
    signature = {
        "rows": PAIR[0],
        "more": more,
        "constant": tf.TensorSpec([3], tf.float64),
        "unknown": tf.TensorSpec(None, tf.float64),
    }

    def function(iterator: Any) -> Any:
        batch = next(iterator)
        total = tf.reduce_sum(batch["rows"]) + tf.reduce_sum(batch["constant"])
        return (
            total,
            batch["rows"] + 1,
            batch["constant"] * 2,
            batch["more"]["text"],
            batch["more"]["step"] + 1,
            tf.reduce_sum(batch["unknown"]),
        )

    batches = [
        {
            "rows": np.arange(2.0 * number).reshape(number, 2),
            "constant": np.arange(3.0),
            "more": {"text": np.array([b"a"] * number), "step": np.int64(4)},
            "unknown": np.ones([2] * number),
        }
        for number in (3, 5)
    ]
    ranks = of_batches(function, batches, signature)
    assert any("divided" in str(value.layout) for value in ranks.partitioned.plan.values)
    ranks.check()
    ranks.check()


def statistics(rows: tf.Tensor) -> Any:
    number = tf.shape(rows)[0]
    centred = rows - tf.reduce_mean(rows, 0)
    chosen = tf.cond(number > 0, lambda: tf.reduce_sum(rows), lambda: tf.constant(-1.0, rows.dtype))
    return (
        tf.reduce_sum(rows),
        tf.reduce_mean(rows, 0),
        tf.reduce_max(rows),
        rows * 2,
        tf.shape(rows),
        tf.reduce_mean(centred),
        tf.reduce_sum(rows) / tf.cast(tf.maximum(number, 1), rows.dtype),
        tf.reduce_all(rows > 3),
        tf.linalg.matmul(rows, rows, transpose_a=True),
        rows[1:],
        number == 0,
        tf.nn.softmax(rows),
        tf.tile(rows, [1, 2]),
        tf.reshape(rows, [-1]),
        tf.concat([rows, rows], 0),
        chosen,
    )


def test_a_batch_without_rows():
    ranks = Ranks(statistics, [PAIR[0]])
    for rows in (0, 1, 5):
        ranks.check(np.arange(2.0 * rows).reshape(rows, 2))
    of_batches(weighted, pairs(0), PAIR).check()


def test_inputs_of_a_source_must_have_as_many_rows():
    ranks = Ranks(lambda rows, weights: [tf.reduce_sum(rows), tf.reduce_sum(weights)], PAIR, rows=(0, 1), separate=True)
    ranks.check(*pairs(5)[0])
    for error in ranks.run(np.ones([6, 2]), np.ones([4])):
        assert isinstance(error, tf.errors.InvalidArgumentError)
        assert "must have as many rows. Received: source=rows, rows=[6 4]. HINT: " in str(error)


@pytest.mark.parametrize(
    "specs",
    [
        (tf.TensorSpec([4, 2]), tf.TensorSpec([3])),
        (tf.TensorSpec([None, 2]), tf.TensorSpec([])),
        (tf.TensorSpec([None, 2]), tf.TensorSpec(None)),
    ],
)
def test_inputs_without_rows_are_refused(specs: Any):
    with pytest.raises(ValueError, match=r"must have as many rows.*Received: source=rows, shapes=.*HINT: "):
        Ranks(lambda rows, weights: tf.reduce_sum(rows) + tf.reduce_sum(weights), specs, rows=(0, 1))


def test_what_does_not_depend_on_a_batch_has_happened_when_there_is_none():
    seeds = tf.Variable(0, dtype=tf.int64)

    def function(iterator: Any) -> Any:
        rows, weights = next(iterator)
        seeds.assign_add(1)
        return tf.reduce_sum(rows * weights[:, None])

    ranks = of_batches(function, pairs(7), PAIR)
    ranks.check()
    with pytest.raises(tf.errors.OutOfRangeError):
        ranks.run()
    for number in ranks.variables[0][1:]:
        assert int(number) == 2


def test_constant_shapes_are_drawn_by_rows():
    def dropped(rows: Any) -> Any:
        return tf.nn.experimental.stateless_dropout(rows, 0.5, seed=[1, 2])

    ranks = Ranks(dropped, [tf.TensorSpec([8, 6], tf.float32)])
    ranks.check(np.ones([8, 6], np.float32))
    assert ranks.partitioned.report.divided["StatelessRandomUniformV2"] == 1


def test_a_loss_does_not_hold_up_what_other_collectives_wait_for():
    def step(rows: Any) -> Any:
        loss = tf.reduce_mean(rows**2)
        centered = rows - tf.reduce_mean(rows, 0)
        return loss, tf.reduce_sum(centered**2, 0)

    ranks = Ranks(step, [tf.TensorSpec([None, 3], tf.float64)])
    ranks.check(np.arange(21.0).reshape(7, 3))
    assert len(ranks.partitioned.report.rounds) == 2


def test_the_report_tells_what_all_ranks_compute():
    def step(rows: Any) -> Any:
        return tf.linalg.matmul(rows, rows, transpose_a=True), tf.sort(rows, axis=0)

    report = Ranks(step, [tf.TensorSpec([None, 64], tf.float64)]).partitioned.report
    [place] = [each for each in report.costly if each[0].startswith("TopK")]
    assert f"{__file__.rpartition('/')[2]}:" in place[0]
    assert place[2] == "its rows were gathered"
    assert 0 < report.work_by_all < report.work / 3

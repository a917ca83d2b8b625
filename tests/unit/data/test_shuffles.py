"""Pipelines that shuffle, built again with seeds that all ranks share, and split before their maps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvkeras.data.datasets import split_batches, split_samples
from hvkeras.data.own_rows import select_before_maps, split_before_maps
from hvkeras.data.partition import Partition
from hvkeras.data.pipeline import shuffle_seeds, stage_name, stages
from hvkeras.data.shuffles import in_order_of_pass, reseeded, restarted, seeds_of_pass, seeds_of_selection
from hvkeras.errors import UsageError

Dataset = tf.data.Dataset
COUNT = 23


@pytest.fixture(autouse=True)
def unseeded() -> None:
    tf.random.set_seed(None)  # Keras's set_random_seed would fix the order of all pipelines


def fill(row: Any) -> Any:
    return tf.fill([row % 3], row)


def two(row: Any) -> Any:
    return Dataset.range(row, row + 2)


def ragged(row: Any) -> Any:
    return tf.RaggedTensor.from_row_lengths(tf.fill([2], row), [2])


PIPELINES: dict[str, Callable[[Any], Any]] = {
    "map": lambda rows: rows.map(lambda row: (row, {"a": row * 2}), num_parallel_calls=2).batch(
        4, num_parallel_calls=2).prefetch(tf.data.AUTOTUNE),
    "filter": lambda rows: rows.filter(lambda row: row % 2 == 0).enumerate().batch(3, drop_remainder=True),
    "interleave": lambda rows: rows.interleave(two, cycle_length=3, num_parallel_calls=tf.data.AUTOTUNE).shuffle(
        7, reshuffle_each_iteration=False).batch(3),
    "sample": lambda rows: Dataset.sample_from_datasets([rows, Dataset.range(50, 70)], [0.5, 0.5]).batch(3),
    "cache": lambda rows: rows.cache().repeat(2).take(40).batch(4),
    "sequential interleave": lambda rows: rows.interleave(two, cycle_length=3).skip(3).batch(3),
    "flat map": lambda rows: rows.flat_map(two).batch(3),
    "padded": lambda rows: rows.map(lambda row: (fill(row), row)).padded_batch(
        4, padded_shapes=([7], []), padding_values=(tf.constant(-1, tf.int64), None)),
    "ragged": lambda rows: rows.map(fill).ragged_batch(4),
    "ragged elements": lambda rows: rows.map(ragged).batch(3).unbatch().batch(4),
    "sparse": lambda rows: rows.map(lambda row: tf.sparse.from_dense([row, 0])).batch(3),
    "window": lambda rows: rows.window(3, shift=1, drop_remainder=True).flat_map(lambda found: found.batch(3)).batch(2),
    "zip": lambda rows: Dataset.zip({"a": rows, "b": rows.concatenate(Dataset.range(5).shuffle(5))}).batch(2),
    "others": lambda rows: rows.take_while(lambda row: row >= 0).unique().shard(2, 1).apply(
        tf.data.experimental.assert_cardinality(11)).batch(2),
    "python": lambda rows: rows.map(lambda row: tf.ensure_shape(
        tf.numpy_function(lambda value: value * 2, [row], tf.int64), [])).batch(4),
    "generator": lambda rows: Dataset.from_generator(
        lambda: iter(range(COUNT)), output_signature=tf.TensorSpec([], tf.int64)).shuffle(9).batch(4),
}
QUICK = ("map", "filter", "interleave")


def values(dataset: Any) -> list[Any]:
    """Return the contents of each element."""
    def dense(leaf: Any) -> Any:
        leaf = tf.sparse.to_dense(leaf) if isinstance(leaf, tf.sparse.SparseTensor) else leaf
        return (leaf.to_tensor() if isinstance(leaf, tf.RaggedTensor) else leaf).numpy().tolist()

    return [[dense(leaf) for leaf in tf.nest.flatten(element)] for element in dataset]


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in PIPELINES])
def test_equal_seeds_give_equal_orders_in_each_epoch(name: str) -> None:
    ranks = [PIPELINES[name](Dataset.range(COUNT).shuffle(COUNT)) for _ in range(2)]
    assert (0, 0) in shuffle_seeds(ranks[0])
    built = [reseeded(dataset, seeds_of_pass(dataset, 5)) for dataset in ranks]
    assert (0, 0) not in shuffle_seeds(built[0])
    first, second = [[values(dataset) for _ in range(2)] for dataset in built]
    assert first == second
    assert (first[0] != first[1]) == (name != "cache"), "a cache repeats the order of the first epoch"
    for one, other in zip(ranks, built, strict=True):
        assert one.element_spec == other.element_spec
        assert one.cardinality() == other.cardinality()
        assert list(map(stage_name, stages(one))) == list(map(stage_name, stages(other)))


@pytest.mark.slow
def test_files_in_random_order(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text("".join(f"{number}-{line}\n" for line in range(3)))
    both = []
    for _ in range(2):
        dataset = Dataset.list_files(f"{tmp_path}/*.txt", shuffle=True).interleave(
            tf.data.TextLineDataset, cycle_length=2).batch(4)
        both.append(values(reseeded(dataset, seeds_of_pass(dataset, 1))))
    assert both[0] == both[1]
    assert sorted(line for batch in both[0] for line in batch[0]) == sorted(
        f"{number}-{line}".encode() for number in range(6) for line in range(3))


def test_functions_are_not_traced_again() -> None:
    factor = 10
    dataset = Dataset.range(COUNT).shuffle(COUNT).map(lambda row: row * factor).batch(4)
    factor = 1
    found = values(reseeded(dataset, seeds_of_pass(dataset, 1)))
    assert sorted(row for batch in found for row in batch[0]) == [10 * row for row in range(COUNT)]


def test_orders_repeat_only_where_they_should() -> None:
    fixed = Dataset.range(COUNT).shuffle(COUNT, reshuffle_each_iteration=False).batch(4)
    built = reseeded(fixed, seeds_of_pass(fixed, 1))
    assert values(built) == values(built)
    reshuffled = Dataset.range(COUNT).shuffle(COUNT, seed=1).batch(4)
    first = values(reshuffled)
    assert values(restarted(reshuffled)) == first == values(restarted(reshuffled))
    assert values(reshuffled) != first


def test_parallel_interleaving_keeps_the_order() -> None:
    dataset = Dataset.range(COUNT).interleave(two, num_parallel_calls=2, deterministic=False).batch(4)
    for found, expected in ((dataset, b"false"), (reseeded(dataset, {}), b"true")):
        serialized = tf.raw_ops.DatasetToGraphV2(input_dataset=found._variant_tensor).numpy()
        graph = tf.compat.v1.GraphDef.FromString(serialized)
        assert [node.attr["deterministic"].s for node in graph.node if "Interleave" in node.op] == [expected]


@pytest.mark.parametrize(("pipeline", "words"), [
    (lambda rows: rows.ignore_errors().map(fill).padded_batch(8).prefetch(2),
     "hvd.shard(dataset, shuffle=100).ignore_errors(...).map(fill).padded_batch(8 // hvd.size()).prefetch(2); or"),
    (lambda rows: rows.shuffle(7).cache("/tmp/never").repeat().batch(8, drop_remainder=True),
     "hvd.shard(dataset, shuffle=7).cache(...).repeat().batch(8 // hvd.size(), drop_remainder=True); or write shuf"),
    (lambda rows: rows.batch(4).shuffle(3).ignore_errors(), "HINT: write shuffle(100, seed=1) and shuffle(3, seed=2)"),
    (lambda rows: rows.map(lambda row: (row, tf.random.uniform([]))).filter(lambda _, draw: draw > 0.5),
     "before .map"),
])
def test_what_cannot_be_proven_names_the_lines_to_write(pipeline: Callable[[Any], Any], words: str) -> None:
    dataset = pipeline(Dataset.range(COUNT).shuffle(100))
    with pytest.raises(UsageError) as error:
        reseeded(dataset, seeds_of_pass(dataset, 1))
    assert words in str(error.value)


def test_functions_that_select_elements_need_seeds() -> None:
    rows = Dataset.range(9)
    for random in (rows.filter(lambda row: tf.random.uniform([]) < 0.5),
                   rows.flat_map(lambda row: Dataset.range(row).shuffle(3))):
        with pytest.raises(UsageError, match="without a seed"):
            seeds_of_selection(random)
    seeded = rows.flat_map(lambda row: Dataset.range(row).shuffle(3, seed=4))
    found = seeds_of_selection(seeded)
    assert len(found) == 1
    assert found[0][1] == 4
    assert seeds_of_selection(reseeded(seeded.shuffle(2), {})) == found
    assert seeds_of_selection(PIPELINES["generator"](rows)) == []


def test_passes_of_elastic_jobs_have_their_own_order() -> None:
    dataset = Dataset.range(COUNT).shuffle(COUNT).map(lambda row: row * 2)
    dataset, number = reseeded(dataset, seeds_of_pass(dataset, 0)), np.zeros(1, np.int64)

    def remaining(_: Any) -> Any:
        of_pass = tf.ensure_shape(tf.numpy_function(lambda: number[0], [], tf.int64), [])
        return in_order_of_pass(dataset, 0, of_pass).skip(2)

    passes = Dataset.range(1).flat_map(remaining)
    found = []
    for number[0] in (0, 0, 1, 1):
        found.append(values(passes))
    assert found[0] == found[1] != found[2] == found[3]
    assert values(dataset)[2:] == found[0], "the first pass is the order that ranks compare"
    cached = reseeded(dataset, {}).cache()
    assert in_order_of_pass(cached, 0, tf.constant(1, tf.int64)) is cached


MAPPED: dict[str, Callable[[], Any]] = {
    "full": lambda: Dataset.range(COUNT).map(lambda row: (row, row * 2)).batch(8, drop_remainder=True).prefetch(1),
    "a smaller last batch": lambda: Dataset.range(COUNT).map(lambda row: {"a": row}).map(
        lambda row: row["a"], num_parallel_calls=2).batch(8),
    "endless": lambda: Dataset.range(COUNT).map(lambda row: row).repeat().map(lambda row: [row]).batch(8),
    "repeated": lambda: Dataset.zip((Dataset.range(COUNT), Dataset.range(COUNT))).map(lambda one, _: one).batch(
        8, drop_remainder=True).repeat(2),
}


@pytest.mark.parametrize(("name", "size", "training"), [
    pytest.param(name, size, training, marks=() if (name, size, training) == ("a smaller last batch", 2, True)
                 else pytest.mark.slow)
    for name in MAPPED for size in (2, 4) for training in (True, False)])
def test_ranks_map_their_own_rows_only(name: str, size: int, training: bool) -> None:
    dataset = MAPPED[name]()
    whole = values(dataset.take(9))
    for rank in range(size):
        partition = Partition(rank, size, training)
        share, _ = split_batches(dataset, partition, tf.nest.flatten(next(iter(dataset))))
        assert "Unbatch" in map(stage_name, stages(share))
        parts = [[array[slice(*partition.part(len(array)))] for array in batch] for batch in whole]
        assert values(share.take(9)) == [part for part in parts if part[0]]
        assert int(share.cardinality()) == (tf.data.INFINITE_CARDINALITY if name == "endless" else len(
            [part for part in parts if part[0]]))
        structure = tf.nest.map_structure(lambda spec: spec.dtype, dataset.element_spec)
        assert tf.nest.map_structure(lambda spec: spec.dtype, share.element_spec) == structure


@pytest.mark.parametrize("pipeline", [
    lambda rows: rows.map(lambda row: row + tf.random.uniform([], 0, 2, tf.int64, seed=3)).batch(8),
    lambda rows: rows.map(lambda row: tf.numpy_function(lambda value: value, [row], tf.int64)).batch(8),
    lambda rows: rows.map(fill).map(tf.size).batch(8).map(lambda batch: batch[::-1]),
    lambda rows: rows.map(fill).filter(lambda row: True).padded_batch(8),
    lambda rows: rows.batch(8),
])
def test_other_batches_are_split_after_their_maps(pipeline: Callable[[Any], Any]) -> None:
    assert split_before_maps(pipeline(Dataset.range(COUNT)), Partition(0, 2, True)) is None


@pytest.mark.parametrize("rank", [0, 2])
def test_ranks_map_their_own_samples_only(rank: int) -> None:
    def pairs(row: Any) -> Any:
        return row, tf.cast(row, tf.float32) / 2

    dataset = Dataset.range(COUNT).map(pairs).map(lambda row, half: (row * 2, half), num_parallel_calls=2).prefetch(2)
    share, coverage = split_samples(dataset, Partition(rank, 3, True))
    expected = [(2 * row, row / 2) for row in range(rank, 21, 3)]
    assert [(int(row), float(half)) for row, half in share] == expected
    assert (coverage.mine, coverage.dropped, int(share.cardinality())) == (7, 2, 7)
    assert [stage_name(stage) for stage in stages(share)][:5] == ["Prefetch", "ParallelMap", "Map", "Shard", "Take"]
    state = tf.Variable(0, dtype=tf.int64)
    counting = Dataset.range(COUNT).map(lambda row: row + state.assign_add(1))
    assert stage_name(select_before_maps(counting, lambda source: source.take(9))) == "Take"

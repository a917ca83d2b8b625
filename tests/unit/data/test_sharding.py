"""What each rank is assigned, without ranks: every sample goes to one of them, or is dropped as announced."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvkeras import compat
from hvkeras.data.consistency import differing, fingerprint
from hvkeras.data.datasets import common_sources, split_batches, split_samples
from hvkeras.data.partition import Batches, Coverage, Partition, require_options, split_arrays
from hvkeras.data.pipeline import batches_of, is_batched, is_nondeterministic, shuffle_seeds
from hvkeras.data.sequences import split_sequence, split_whole
from hvkeras.data.structure import require_arrays
from hvkeras.errors import UsageError

Dataset = tf.data.Dataset
SIZES = (2, 3, 4)
KINDS = [(size, training) for size in SIZES for training in (True, False)]


def deals(size: int, training: bool) -> list[Partition]:
    return [Partition(rank, size, training) for rank in range(size)]


def check_coverage(steps: list[list[list[int]]], coverages: list[Coverage], count: int, training: bool) -> None:
    """The ids that the ranks saw in each step: none twice, all but what is dropped, and in training in equal parts."""
    seen = sorted(identity for rank in steps for step in rank for identity in step)
    assert len(set(seen)) == len(seen), "ranks overlap"
    assert set(seen) <= set(range(count))
    sizes = [[len(step) for step in rank] for rank in steps]
    if training:
        assert all(rank == sizes[0] for rank in sizes), "ranks have different steps"
        assert all(size > 0 for size in sizes[0])
    for coverage, rank in zip(coverages, sizes, strict=True):
        if coverage.total is not None:
            assert (coverage.mine, coverage.total, coverage.dropped) == (sum(rank), count, count - len(seen))
    if not training:
        assert len(seen) == count


@pytest.mark.parametrize(("size", "training"), KINDS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_arrays_are_split_row_by_row(size: int, training: bool, shuffle: bool) -> None:
    x = np.arange(23 * 2).reshape(23, 2)
    data = (x, {"ids": tf.range(23), "ragged": tf.RaggedTensor.from_row_lengths(tf.range(46), [2] * 23)}, None)
    batches_in_rounds = [split_arrays(data, partition, shuffle) for partition in deals(size, training)]
    steps = [[share[1]["ids"].numpy().tolist()] for share, _ in batches_in_rounds]
    check_coverage(steps, [coverage for _, coverage in batches_in_rounds], 23, training)
    for share, _ in batches_in_rounds:
        ids = share[1]["ids"].numpy()
        assert share[0][:, 0].tolist() == (ids * 2).tolist() == share[1]["ragged"].to_tensor()[:, 0].numpy().tolist()
        assert share[2] is None
    assert (steps[0][0] == list(range(0, 23 - 23 % size if training else 23, size))) != shuffle
    assert sum(len(rank[0]) for rank in steps) == (23 - 23 % size if training else 23)


def test_steps_of_all_ranks_are_the_batches_of_one_process() -> None:
    shares = [split_arrays(np.arange(20), partition)[0] for partition in deals(2, True)]
    steps = [sorted(np.concatenate([share[start:start + 4] for share in shares])) for start in (0, 4, 8)]
    assert steps == [list(range(8)), list(range(8, 16)), list(range(16, 20))]


@pytest.mark.parametrize(("size", "training"), [(2, True), (3, False), (4, True)])
def test_arrays_of_every_kind_are_cut_by_their_own_rows(size: int, training: bool) -> None:
    def with_rows(count: int) -> Any:
        return Dataset.range(count).map(lambda row: {
            "id": row, "ragged": tf.RaggedTensor.from_row_lengths(tf.fill([2], row), [2]),
            "sparse": tf.sparse.from_dense(tf.reshape(row + 1, [1]))})

    whole = Dataset.zip((with_rows(20).batch(8), with_rows(60).batch(24)))
    first = tf.nest.flatten(next(iter(whole)))
    shares = [split_batches(whole, partition, first) for partition in deals(size, training)]
    for array in (0, 1):
        steps = [[element[array]["id"].numpy().tolist() for element in share] for share, _ in shares]
        seen = sorted(row for rank in steps for step in rank for row in step)
        assert seen == list(range((20, 60)[array]))
        for share, _ in shares:
            for element in share:
                ids = element[array]["id"].numpy().tolist()
                assert element[array]["ragged"].to_list() == [[[row, row]] for row in ids]
                assert tf.sparse.to_dense(element[array]["sparse"])[:, 0].numpy().tolist() == [row + 1 for row in ids]
    assert all(coverage.total == 80 and coverage.dropped == 0 for _, coverage in shares)
    with pytest.raises(UsageError, match="choose batch sizes"):
        split_batches(Dataset.zip((with_rows(9).batch(3), with_rows(9).batch(4))), Partition(0, 2, True), first)


@pytest.mark.parametrize("scipy", [False, True])
def test_batches_of_sparse_and_ragged_arrays_are_cut_and_joined(scipy: bool) -> None:
    sparse = pytest.importorskip("scipy.sparse").coo_matrix if scipy else tf.sparse.from_dense

    def dense(array: Any) -> Any:
        return array.toarray().tolist() if scipy else tf.sparse.to_dense(array).numpy().tolist()

    class Mixed(compat.batches_base(sequence(4))):  # type: ignore[misc]
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            array = np.arange(1, 9).reshape(4, 2) + 8 * index
            return {"sparse": sparse(array), "ragged": tf.RaggedTensor.from_tensor(array)}

    shares = [split_sequence(Mixed(), partition, Batches(4, 3, 0), 4)[0] for partition in deals(2, True)]
    for rank, share in enumerate(shares):
        last = share[1]
        expected = (np.arange(1, 9).reshape(4, 2) + 16)[2 * rank : 2 * rank + 2].tolist()
        assert dense(last["sparse"]) == last["ragged"].to_list() == expected
    five = [split_sequence(Mixed(), partition, Batches(4, 3, 0), 4)[0] for partition in deals(5, False)]
    found = [row for share in five for step in range(len(share)) for row in dense(share[step]["sparse"])]
    assert np.ravel(found).tolist() == list(range(1, 25)), "some ranks have parts of two batches"


def test_batches_are_dealt_again_when_their_number_changes() -> None:
    class Changing(compat.batches_base(sequence(4))):  # type: ignore[misc]
        count = 20

        def __len__(self) -> int:
            return (self.count + 3) // 4

        def __getitem__(self, index: int) -> Any:
            return np.arange(4 * index, min(4 * index + 4, self.count))

    data = Changing()
    shares = [split_sequence(data, partition, Batches(4, 5, 0), 4)[0] for partition in deals(2, True)]
    whole = [split_whole(data, partition, 5)[0] for partition in deals(2, True)]
    for count, steps in ((20, 3), (14, 2), (28, 4)):
        data.count = count
        assert [len(share) for share in shares] == [steps, steps]
        assert sorted(np.concatenate([share[step] for share in shares for step in range(steps)])) == list(range(count))
        assert [len(share) for share in whole] == [-(-count // 4) // 2] * 2
    data.count = 4
    with pytest.raises(UsageError, match="elements=1, ranks=2"):
        len(whole[0])
    data.count = 0
    with pytest.raises(UsageError, match="batches=0"):
        len(shares[0])


class Rows:
    """What can only be read in slices and in ascending order, as files of h5py can."""

    def __init__(self, values: Any) -> None:
        self.values, self.shape, self.dtype = values, values.shape, values.dtype

    def __getitem__(self, rows: Any) -> Any:
        assert isinstance(rows, slice) or (np.diff(rows) > 0).all()
        return self.values[rows]


def test_files_are_read_in_ascending_order() -> None:
    x = np.arange(11)
    for shuffle in (False, True):
        expected = split_arrays(x, Partition(1, 2, True), shuffle)[0]
        assert split_arrays(Rows(x), Partition(1, 2, True), shuffle)[0].tolist() == expected.tolist()


def test_arrays_on_disk_stay_there(tmp_path: Any) -> None:
    np.save(tmp_path / "x.npy", np.arange(10))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert np.shares_memory(split_arrays(mapped, Partition(1, 2, True))[0], mapped)
    plain = np.arange(10)
    assert not np.shares_memory(split_arrays(plain, Partition(1, 2, True))[0], plain)


@pytest.mark.parametrize(("data", "part"), [
    ([1, 2, 3], "int in a list"), (5, "int"), ((np.zeros(3), "ab"), "str in a tuple"),
    (np.float32(3), "float32"), ((number for number in range(3)), "generator"),
    (tf.sparse.from_dense(np.eye(3)), "from_tensor_slices"), ((Dataset.range(3), None), "for each"),
])
def test_what_has_no_rows_is_refused(data: Any, part: str) -> None:
    with pytest.raises(UsageError, match=part):
        require_arrays(data)


def test_arrays_must_be_as_long_as_each_other_and_as_the_ranks_are_many() -> None:
    with pytest.raises(UsageError, match=r"the same number of rows.*rows=\[3, 4\]"):
        split_arrays((np.zeros(3), np.zeros(4)), Partition(0, 2, True))
    with pytest.raises(UsageError, match="samples=3, ranks=4"):
        split_arrays(np.zeros(3), Partition(0, 4, True))
    assert [len(split_arrays(np.zeros(3), partition)[0]) for partition in deals(4, False)] == [1, 1, 1, 0]
    with pytest.raises(UsageError, match="shuffle=1000"):
        require_options(1000)


def unbatched(kind: str, count: int = 23) -> Any:
    """A dataset of the ids 0 to count - 1, of a kind."""
    known = Dataset.range(count).map(lambda number: {"id": number, "of any length": tf.range(number)})
    return known.filter(lambda row: True) if kind == "unknown" else known


@pytest.mark.parametrize(("size", "training"), KINDS)
@pytest.mark.parametrize("kind", [pytest.param("known", marks=pytest.mark.slow), "unknown"])
def test_samples_of_datasets_are_split_one_by_one(size: int, training: bool, kind: str) -> None:
    batches_in_rounds = [split_samples(unbatched(kind), partition) for partition in deals(size, training)]
    steps = [[[int(row["id"])] for row in share] for share, _ in batches_in_rounds]
    check_coverage(steps, [coverage for _, coverage in batches_in_rounds], 23, training)
    assert sum(map(len, steps)) == (23 - 23 % size if training else 23)
    for (share, coverage), rank in zip(batches_in_rounds, steps, strict=True):
        assert int(share.cardinality()) == (len(rank) if kind == "known" else tf.data.UNKNOWN_CARDINALITY)
        assert ("unknown length" in coverage.line(0)) == (kind == "unknown")


def test_endless_datasets_stay_endless() -> None:
    for partition in deals(3, True):
        samples, coverage = split_samples(Dataset.range(5).repeat(), partition)
        batches, _ = split_batches(Dataset.range(5).repeat().batch(7), partition, [])
        assert int(samples.cardinality()) == int(batches.cardinality()) == tf.data.INFINITE_CARDINALITY
        assert [int(row) for row in samples.take(3)] == [(partition.rank + 3 * turn) % 5 for turn in range(3)]
        assert all(len(batch) == 2 for batch in batches.take(3))
        assert coverage.line(3) == "shard: each of 3 ranks gets 1 of every 3 samples of an endless dataset"


def batched(kind: str, count: int) -> Any:
    """Batches of (features, id), of a kind."""
    samples = Dataset.range(count).map(lambda number: (tf.fill([2], number), number))
    return {
        "known": lambda: samples.batch(8).map(lambda x, y: (x * 1, y)).prefetch(1),
        "full": lambda: samples.batch(8, drop_remainder=True),
        "unknown": lambda: samples.filter(lambda x, y: True).batch(8),
        "sparse": lambda: samples.map(lambda x, y: (tf.sparse.from_dense(x), y)).batch(8),
        "ragged": lambda: samples.map(lambda x, y: (tf.fill([y], y), y)).ragged_batch(8),
        "padded": lambda: samples.map(lambda x, y: (tf.fill([y], y), y)).padded_batch(8),
    }[kind]()


@pytest.mark.parametrize(("size", "training"), [*KINDS[:2], *(pytest.param(*kind, marks=pytest.mark.slow)
                                                              for kind in KINDS[2:])])
@pytest.mark.parametrize(("kind", "count"), [
    ("known", 43), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("known", 41), ("full", 43),
                                                                              ("unknown", 41)))])
def test_batches_of_datasets_are_cut_in_parts(kind: str, count: int, size: int, training: bool) -> None:
    check_parts(kind, count, size, training)


@pytest.mark.parametrize("kind", ["sparse", "ragged", "padded"])
def test_batches_of_any_tensors_are_cut_in_parts(kind: str) -> None:
    check_parts(kind, 43, 3, training=True)


def check_parts(kind: str, count: int, size: int, training: bool) -> None:
    whole = batched(kind, count)
    first = tf.nest.flatten(next(iter(whole)))
    batches_in_rounds = [split_batches(whole, partition, first) for partition in deals(size, training)]
    steps = [[batch[1].numpy().tolist() for batch in share] for share, _ in batches_in_rounds]
    covered = count // 8 * 8 if kind == "full" else count
    check_coverage(steps, [coverage for _, coverage in batches_in_rounds], covered, training)
    assert all(step for rank in steps for step in rank)
    left = sum(len(step) for rank in steps for step in rank)
    assert covered - left == (covered // 8 * (8 % size) + covered % 8 % size if training else 0)
    for (share, coverage), rank in zip(batches_in_rounds, steps, strict=True):
        assert int(share.cardinality()) == (tf.data.UNKNOWN_CARDINALITY if kind == "unknown" else len(rank))
        assert ("drops none" in coverage.line(0)) == (training and size == 3)
        assert tf.nest.map_structure(lambda spec: spec.dtype, share.element_spec) == \
            tf.nest.map_structure(lambda spec: spec.dtype, whole.element_spec)


def test_structures_of_datasets_keep_their_form() -> None:
    for spec in ((1,), {"a": 1}, ({"a": 1, "b": (1, 1)}, 1), 1):
        samples = Dataset.range(8).map(lambda row, spec=spec: tf.nest.map_structure(lambda _: row, spec))
        partition = Partition(0, 2, True)
        for share, _ in (split_samples(samples, partition), split_batches(samples.batch(4), partition, []),
                         split_samples(samples.filter(lambda *row: True), partition)):
            tf.nest.assert_same_structure(share.element_spec, samples.element_spec)


def test_a_map_that_changes_the_rows_of_batches_is_noticed() -> None:
    doubled = Dataset.range(20).batch(4).map(lambda batch: tf.concat([batch, batch], 0))
    share, coverage = split_batches(doubled, Partition(0, 2, True), [next(iter(doubled))])
    assert coverage.total is None
    assert [len(batch) for batch in share] == [4] * 5


def test_batches_smaller_than_the_ranks_are_many_are_refused() -> None:
    with pytest.raises(UsageError, match="batch_size=2, ranks=3"):
        split_batches(Dataset.range(20).batch(2), Partition(0, 3, True), [])
    parts = [split_batches(Dataset.range(4).batch(2), partition, [])[0] for partition in deals(3, False)]
    assert [[len(batch) for batch in part] for part in parts] == [[0], [1, 1], [1, 1]]
    assert sorted(int(row) for part in parts for batch in part for row in batch) == [0, 1, 2, 3]


def rows(count: int = 8) -> Any:
    return Dataset.range(count).map(lambda number: tf.fill([3], number))


@pytest.mark.parametrize(("pipeline", "expected"), [
    (lambda: rows().batch(2).prefetch(1), True),
    (lambda: rows().batch(2, num_parallel_calls=2).map(lambda x: x).cache().repeat(2), True),
    (lambda: rows().padded_batch(2), True),
    (lambda: rows().batch(4).rebatch(2), True),
    (lambda: rows().batch(2).unbatch(), False),
    (lambda: rows().batch(2).unbatch().batch(3), True),
    (lambda: rows().shuffle(3).take(4), False),
    (lambda: Dataset.from_tensor_slices(np.zeros((4, 2))), False),
    (lambda: Dataset.zip((rows().batch(2), rows().batch(2))), True),
    (lambda: Dataset.zip((rows(), rows().batch(2))), None),
    (lambda: Dataset.range(4), False),
    (lambda: Dataset.from_generator(lambda: iter([[1.0]]), output_signature=tf.TensorSpec([None])), None),
    (lambda: Dataset.from_generator(lambda: iter([1.0]), output_signature=tf.TensorSpec([])), False),
    (lambda: Dataset.from_generator(lambda: iter([[1.0]]), output_signature=tf.TensorSpec([1])).batch(2), True),
    (lambda: rows().interleave(lambda row: rows()), None),
])
def test_pipelines_reveal_whether_they_are_batched(pipeline: Any, expected: bool | None) -> None:
    assert is_batched(pipeline()) is expected


def test_pipelines_reveal_the_rows_of_batches() -> None:
    assert batches_of(rows(10).batch(4).map(lambda x: x).prefetch(1)) == Batches(4, 2, 2)
    assert batches_of(rows(10).batch(4, drop_remainder=True).repeat(2)) == Batches(4, 4, 0)
    assert batches_of(rows(10).batch(4).repeat(2)) is None
    assert batches_of(rows(10).filter(lambda x: True).batch(4)) is None


def test_pipelines_reveal_what_makes_their_order_vary() -> None:
    tf.random.set_seed(None)  # Keras's set_random_seed would fix the order of all pipelines
    assert shuffle_seeds(rows().shuffle(3).map(lambda x: x).batch(2)) == [(0, 0)]
    assert (0, 0) not in shuffle_seeds(rows().shuffle(3, seed=0).batch(2))
    options = tf.data.Options()
    options.deterministic = False
    assert is_nondeterministic(rows().with_options(options).batch(2))
    assert is_nondeterministic(rows().map(lambda x: x, num_parallel_calls=2, deterministic=False).batch(2))
    assert not is_nondeterministic(rows().map(lambda x: x, num_parallel_calls=2).batch(2))


@pytest.mark.parametrize(("size", "training"), KINDS)
@pytest.mark.parametrize("count", [1, 5, 16, 17, 31, 32, 33, 47])
def test_whole_batches_are_distributed_in_rounds(count: int, size: int, training: bool) -> None:
    batches = Batches(4, count // 4, count % 4)
    ids = [list(range(count))[start:start + 4] for start in range(0, count, 4)]
    steps = []
    for partition in deals(size, training):
        whole_batches, pieces = batches.rounds(partition)
        steps.append([ids[batch] for batch in whole_batches]
                     + [[row for batch, start, stop in pieces for row in ids[batch][start:stop]]] * bool(pieces))
    seen = [row for rank in steps for step in rank for row in step]
    assert len(seen) == len(set(seen)) == (count - count % size if training else count)
    if training:
        assert len({str([len(step) for step in rank]) for rank in steps}) == 1


def sequence(count: int, batch_size: int = 4, **options: Any) -> Any:
    """A `PyDataset` or `Sequence` of (rows, ids), which notes the batches that are loaded."""
    base = getattr(tf.keras.utils, "PyDataset", None) or tf.keras.utils.Sequence

    class Numbers(base):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__(**options)
            self.loaded: list[int] = []

        def __len__(self) -> int:
            return (count + batch_size - 1) // batch_size

        def __getitem__(self, index: int) -> Any:
            self.loaded.append(index)
            ids = np.arange(index * batch_size, min(count, (index + 1) * batch_size))
            return np.stack([ids, ids], 1), {"id": ids}

    return Numbers()


@pytest.mark.parametrize(("size", "training"), KINDS)
@pytest.mark.parametrize("count", [48, 47, 33, 9])
def test_sequences_load_only_their_share(count: int, size: int, training: bool) -> None:
    steps, coverages, loaded = [], [], []
    for partition in deals(size, training):
        data = sequence(count)
        share, coverage = split_sequence(data, partition, Batches(4, count // 4, count % 4), 4)
        steps.append([share[step][1]["id"].tolist() for step in range(len(share))])
        coverages.append(coverage)
        loaded.append(data.loaded)
        with pytest.raises(IndexError):
            share[len(share)]
    check_coverage(steps, coverages, count, training)
    assert len({batch for rank in loaded for batch in rank}) == -(-count // 4) or training
    assert all(len(rank) <= -(-count // 4 // size) + 2 for rank in loaded)


def test_shuffled_sequences_keep_the_smaller_batch_last() -> None:
    share, _ = split_sequence(sequence(47), Partition(0, 2, True), Batches(4, 11, 3), 4)
    in_order = [share[step][1]["id"][0] for step in range(len(share))]
    assert share.take_over_shuffle(True) is False
    first = [share[step][1]["id"][0] for step in range(len(share))]
    share.on_epoch_end()
    second = [share[step][1]["id"][0] for step in range(len(share))]
    assert first[-1] == second[-1] == in_order[-1]
    assert sorted(first) == sorted(second) == sorted(in_order)
    assert len({str(order) for order in (in_order, first, second)}) == 3
    share.take_over_shuffle(False)
    assert [share[step][1]["id"][0] for step in range(len(share))] == in_order


def test_batches_of_other_sizes_are_refused_in_training() -> None:
    share, _ = split_sequence(sequence(16), Partition(0, 2, True), Batches(5, 4, 0), 5)
    with pytest.raises(UsageError, match="rows=4, rows_of_batch_0=5"):
        share[0]


def test_shares_are_of_the_datas_class_with_its_options() -> None:
    data = sequence(16, workers=3) if compat.loading_options(sequence(16)) else sequence(16)
    share, _ = split_sequence(data, Partition(0, 2, True), Batches(4, 4, 0), 4)
    assert isinstance(share, compat.batches_base(data))
    assert compat.loading_options(share) == compat.loading_options(data)
    assert compat.count_batches(share) == 2


def test_ranks_without_rows_evaluate_an_empty_batch() -> None:
    share, coverage = split_sequence(sequence(1), Partition(0, 2, False), Batches(1, 1, 0), 1)
    assert (len(share), len(share[0][0]), coverage.mine) == (1, 0, 0)
    with pytest.raises(UsageError, match="samples=1, ranks=2"):
        split_sequence(sequence(1), Partition(0, 2, True), Batches(1, 1, 0), 1)


def test_fingerprints_distinguish_contents_but_not_rounding() -> None:
    generator = np.random.default_rng(1)
    x = generator.normal(size=(1000, 5)).astype("float32")
    data = (x, generator.integers(0, 9, 1000), np.array(["a", "b"] * 500))
    marks = fingerprint(data)
    assert differing(marks, fingerprint((data[0] * np.float32(1 + 1e-6), data[1], tf.constant(data[2])))) == [2]
    assert differing(marks, fingerprint(tuple(each[::-1] for each in data))) == [0, 1, 2]
    assert differing(marks, fingerprint((data[0][:, ::-1], data[1], data[2]))) == [0]
    assert differing(marks, fingerprint((data[0].astype("float64"), data[1], data[2]))) == [0]
    assert pickle.loads(pickle.dumps(marks)) == marks


def test_coverage_lines() -> None:
    assert Coverage(10_000, 20_000, 0).line(2) == "shard: 2 ranks x 10,000 of 20,000 samples"
    assert Coverage(718, 1437, 1).line(2) == "shard: 2 ranks x 718 of 1,437 samples, 1 dropped"
    assert Coverage(3, 7, 1, what="element").line(2) == "shard: 2 ranks x 3 of 7 elements, 1 dropped"
    assert Coverage(719, 1437, 0).line(2) == "shard: 2 ranks share 1,437 samples, 719 of them on this rank"
    assert Coverage(None, None, 0, "1 of every 2 samples").line(2) == "shard: each of 2 ranks gets 1 of every 2 samples"
    assert "could not compare" in Coverage(718, 1437, 1).unverified().line(2)


@pytest.mark.parametrize(("pipeline", "reads_all"), [
    (lambda data: data.shuffle(10).map(lambda x, y: (x + 1, y)).batch(4).prefetch(1), True),
    (lambda data: Dataset.zip((data, data)).cache().repeat(2), True),
    (lambda data: data.batch(4).shard(2, 1), False),
    (lambda data: data.skip(3), False),
    (lambda data: data.filter(lambda x, y: y > 2), False),
    (lambda data: data.interleave(lambda x, y: Dataset.from_tensors(x)), False),
    (lambda data: Dataset.range(10), False),
    (lambda data: Dataset.from_generator(lambda: iter([1.0]), output_signature=tf.TensorSpec(())), False),
    (lambda data: np.zeros(3), False),
])
def test_the_arrays_that_every_rank_reads_are_known(pipeline: Any, reads_all: bool) -> None:
    x, y = np.arange(10.0), np.arange(10)
    found = common_sources(pipeline(Dataset.from_tensor_slices((x, y))))
    assert bool(found) == reads_all
    for array, expected in zip(found, (x, y) * 2, strict=False):
        np.testing.assert_array_equal(array, expected)

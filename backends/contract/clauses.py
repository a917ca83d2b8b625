"""Clauses on collectives: the requirements of `hvkeras.backends.interface` on a running engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras.backends.contract.ranks import ContractRanks, NotTried, check, require_shape, supported, tensor, values
from hvkeras.backends.interface import Reduction

REQUIRED = ("float32", "float64", "int32", "int64")
REDUCIBLE = (*REQUIRED, "float16", "bfloat16", "int8", "int16", "uint8", "uint16", "uint32", "uint64")
MOVABLE = (*REDUCIBLE, "bool")
CLAUSES: dict[str, Callable[[ContractRanks], None]] = {}

_COMBINE: dict[Reduction, Callable[..., Any]] = {Reduction.SUM: np.sum, Reduction.PRODUCT: np.prod,
                                                 Reduction.MIN: np.min, Reduction.MAX: np.max}


def _clause(text: str) -> Callable[[Callable[[ContractRanks], None]], Callable[[ContractRanks], None]]:
    def add(function: Callable[[ContractRanks], None]) -> Callable[[ContractRanks], None]:
        CLAUSES[text] = function
        return function

    return add


def combined(ranks: ContractRanks, reduction: Reduction, dtype: str, shape: list[int]) -> Any:
    """Return the expected result of a reduction of all ranks' `values`."""
    everyone = np.stack([values(rank, dtype, shape) for rank in ranks.all])
    return _COMBINE[reduction](everyone, axis=0).astype(everyone.dtype)


@_clause("allreduce computes sums, products, minima and maxima, in each dtype that it supports")
def allreduce(ranks: ContractRanks) -> None:
    """Check each reduction in each dtype."""
    def attempt(dtype: str) -> None:
        for reduction in Reduction:
            def reduce(key: str, mine: Any, reduction: Reduction = reduction) -> Any:
                return ranks.backend.allreduce([mine], key, reduction, ranks.all)[0]

            for way, found in ranks.both(reduce, tensor(ranks.rank, dtype, [5])):
                check(found, combined(ranks, reduction, dtype, [5]), f"{reduction.value} of {dtype} {way}")

    supported(REDUCIBLE, REQUIRED, ranks.name, attempt)


@_clause("allreduce accepts buckets of tensors, including scalars and empty tensors, and preserves their shapes")
def bucket(ranks: ContractRanks) -> None:
    """Check buckets."""
    for shapes in ([[3], [], [0, 2], [2, 2]], [[0]]):
        def reduce(key: str, *mine: Any) -> list[Any]:
            results = ranks.backend.allreduce(list(mine), key, Reduction.SUM, ranks.all)
            for result, sent in zip(results, mine, strict=True):
                require_shape(result, sent.shape)
            return results

        for way, found in ranks.both(reduce, *(tensor(ranks.rank, "float32", shape) for shape in shapes)):
            for result, shape in zip(found, shapes, strict=True):
                check(result, combined(ranks, Reduction.SUM, "float32", shape), f"a bucket {way}")


@_clause("allreduce and reducescatter apply `before` and `after`, in the dtypes that `scales` declares")
def scaling(ranks: ContractRanks) -> None:
    """Check scaling factors."""
    declared = [dtype for dtype in ("float32", "float64", "float16", "bfloat16") if dtype in ranks.backend.scales]
    if not declared:
        raise NotTried("scales is empty")
    for dtype in declared:
        def scaled(key: str, mine: Any) -> Any:
            return (ranks.backend.allreduce([mine], key, Reduction.SUM, ranks.all, 0.5, 4.0)[0],
                    ranks.backend.reducescatter(mine, key + "-scattered", ranks.all, 0.5, 4.0))

        shape = [ranks.size, 2]
        expected = combined(ranks, Reduction.SUM, dtype, shape) * 2
        for way, (summed, part) in ranks.both(scaled, tensor(ranks.rank, dtype, shape)):
            check(summed, expected, f"a scaled sum of {dtype} {way}")
            check(part, expected[ranks.rank : ranks.rank + 1], f"a scaled part of {dtype} {way}")


@_clause("sums in half precision do not overflow in intermediate results, in the dtypes that `rounds_once` declares")
def halves(ranks: ContractRanks) -> None:
    """Check that half precision accumulates in float32."""
    declared = sorted(ranks.backend.rounds_once)
    if not declared:
        raise NotTried("rounds_once is empty")
    for dtype in declared:
        large = np.full([4], 60000.0).astype(tf.as_dtype(dtype).as_numpy_dtype)

        def average(key: str, mine: Any) -> Any:
            return ranks.backend.allreduce([mine], key, Reduction.SUM, ranks.all, 1.0, 1.0 / ranks.size)[0]

        for way, found in ranks.both(average, tf.constant(large)):
            check(found, large, f"an average of {dtype} {way}")


def _rows(rank: int) -> int:
    return (2 * rank + 3) % 4  # 3, 1, 3, 1, ...


@_clause("allgather concatenates different numbers of rows in rank order, in each dtype that it supports")
def allgather(ranks: ContractRanks) -> None:
    """Check uneven rows."""
    def attempt(dtype: str) -> None:
        def gather(key: str, mine: Any) -> Any:
            return ranks.backend.allgather(mine, key, ranks.all)

        expected = np.concatenate([values(rank, dtype, [_rows(rank), 2], 0) for rank in ranks.all])
        for way, found in ranks.both(gather, tensor(ranks.rank, dtype, [_rows(ranks.rank), 2], 0)):
            check(found, expected, f"rows of {dtype} {way}")

    supported(MOVABLE, (*REQUIRED, "bool"), ranks.name, attempt)


@_clause("allgather accepts ranks without rows, one-dimensional tensors, and rows of size zero")
def allgather_of_few(ranks: ContractRanks) -> None:
    """Check empty parts."""
    def gather(key: str, mine: Any) -> Any:
        gathered = ranks.backend.allgather(mine, key, ranks.all)
        require_shape(gathered, tf.TensorShape([None]).concatenate(mine.shape[1:]))
        return gathered

    for shape in ([], [2, 0]):
        parts = [values(rank, "int64", [rank, *shape]) for rank in ranks.all]
        for way, found in ranks.both(gather, tf.constant(parts[ranks.rank])):
            check(found, np.concatenate(parts), f"rows of shape {shape} {way}")


@_clause("broadcast sends the root's value to all ranks, from each root and in each dtype that it supports")
def broadcast(ranks: ContractRanks) -> None:
    """Check each root."""
    def attempt(dtype: str) -> None:
        for root in ranks.all:
            def send(key: str, mine: Any, root: int = root) -> Any:
                return ranks.backend.broadcast(mine, root, key, ranks.all)

            for shape in ([3], []):
                for way, found in ranks.both(send, tensor(ranks.rank, dtype, shape, 0)):
                    check(found, values(root, dtype, shape, 0), f"{dtype} from {root} {way}")

    supported(MOVABLE, (*REQUIRED, "bool"), ranks.name, attempt)


@_clause("alltoall sends different numbers of rows, including none, and returns the number from each rank")
def alltoall(ranks: ContractRanks) -> None:
    """Check uneven splits."""
    def splits(rank: int) -> list[int]:
        return [(rank + 2 * other) % 3 for other in ranks.all]

    def rows(rank: int, to: int) -> Any:
        sent = np.arange(sum(splits(rank)) * 2, dtype=np.float32).reshape(-1, 2) + 100 * rank
        start = sum(splits(rank)[:to])
        return sent[start : start + splits(rank)[to]]

    def exchange(key: str, mine: Any, counts: Any) -> Any:
        return ranks.backend.alltoall(mine, counts, key, ranks.all)

    mine = np.concatenate([rows(ranks.rank, other) for other in ranks.all])
    expected = np.concatenate([rows(other, ranks.rank) for other in ranks.all])
    for way, (found, counts) in ranks.both(exchange, tf.constant(mine), tf.constant(splits(ranks.rank), tf.int64)):
        check(found, expected, f"exchanged rows {way}")
        check(counts, np.array([splits(other)[ranks.rank] for other in ranks.all]), f"numbers of rows {way}")


@_clause("reducescatter returns each rank's rows of the sum; if they are uneven, the first ranks get one more")
def reducescatter(ranks: ContractRanks) -> None:
    """Check uneven rows, and fewer rows than ranks."""
    def scatter(key: str, mine: Any) -> Any:
        return ranks.backend.reducescatter(mine, key, ranks.all)

    for rows in (2 * ranks.size + 1, ranks.size, 1):
        expected = np.array_split(combined(ranks, Reduction.SUM, "float32", [rows, 3]), ranks.size)[ranks.rank]
        for way, found in ranks.both(scatter, tensor(ranks.rank, "float32", [rows, 3])):
            check(found, expected, f"this rank's part of {rows} rows {way}")


@_clause("collectives of different process sets run concurrently, with global ranks as roots")
def subsets(ranks: ContractRanks) -> None:
    """Check process sets."""
    if ranks.size < 3:
        raise NotTried("process sets need at least three ranks")
    half = ranks.size // 2
    sets = [tuple(range(half, ranks.size)), tuple(ranks.all[::2])]
    for members in sets:
        ranks.backend.add_process_set(members)
    for members in sets:
        if ranks.rank not in members:
            ranks.key()  # so that later keys are the same on all ranks
            continue

        def both(key: str, mine: Any, members: tuple[int, ...] = members) -> Any:
            return (ranks.backend.allgather(mine, key, members),
                    ranks.backend.broadcast(mine, members[-1], key + "-sent", members))

        expected = np.concatenate([values(rank, "int32", [2]) for rank in members])
        for way, (gathered, sent) in ranks.both(both, tensor(ranks.rank, "int32", [2])):
            check(gathered, expected, f"rows of the set {members} {way}")
            check(sent, values(members[-1], "int32", [2]), f"a value within the set {members} {way}")
    for members in sets:
        ranks.backend.remove_process_set(members)


@_clause("independent collectives of a function do not deadlock, in whatever order the ranks trace them")
def any_order(ranks: ContractRanks) -> None:
    """Check more collectives in flight than TensorFlow has threads."""
    count = 40
    keys = [ranks.key(str(number)) for number in range(count)]

    @tf.function(autograph=False)
    def reduce(inputs: Any) -> list[Any]:
        order = range(count) if ranks.rank % 2 else reversed(range(count))
        found = {index: ranks.backend.allreduce([inputs + index], keys[index], Reduction.SUM, ranks.all)[0]
                 for index in order}
        return [found[index] for index in range(count)]

    for _ in range(3):
        for index, found in enumerate(reduce(tensor(ranks.rank, "float32", [2]))):
            check(found, combined(ranks, Reduction.SUM, "float32", [2]) + np.float32(index * ranks.size), "a sum")


@_clause("a rank may retrace a function when the others do not")
def retraced(ranks: ContractRanks) -> None:
    """Check that collectives are matched by their keys only."""
    key = ranks.key()

    def make() -> Any:
        return tf.function(lambda mine: ranks.backend.allreduce([mine], key, Reduction.SUM, ranks.all)[0],
                           autograph=False)

    reduce = make()
    for number in range(4):
        if number == 2 and ranks.rank == 0:
            reduce = make()
        check(reduce(tensor(ranks.rank, "float32", [3])), combined(ranks, Reduction.SUM, "float32", [3]), "a sum")


@_clause("the sizes of a function's tensors may change from one run to the next, equally on all ranks")
def changing_sizes(ranks: ContractRanks) -> None:
    """Check shapes that are unknown at trace time."""
    key = ranks.key()

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([None], tf.float32)])
    def reduce(mine: Any) -> Any:
        return ranks.backend.allreduce([mine], key, Reduction.SUM, ranks.all)[0]

    for size in (3, 1000, 1, 3):
        check(reduce(tensor(ranks.rank, "float32", [size])), combined(ranks, Reduction.SUM, "float32", [size]),
              f"a sum of {size}")


@_clause("a collective runs at each run of its function, even if its result is unused or its input a constant")
def every_run(ranks: ContractRanks) -> None:
    """Check that TensorFlow's optimizer neither prunes nor folds collectives."""
    key = ranks.key()

    @tf.function(autograph=False)
    def reduce(mine: Any) -> Any:
        sent = tf.constant([1.0, 2.0]) if ranks.rank == 0 else mine
        found = ranks.backend.allreduce([sent], key, Reduction.SUM, ranks.all)[0]
        return mine if ranks.rank == 0 else found

    for number in range(3):
        found = reduce(tf.fill([2], float(number)))
        if ranks.rank:
            check(found, np.array([1, 2], np.float32) + number * (ranks.size - 1), f"the sum of run {number}")


@_clause("a collective in a loop runs once per iteration")
def in_a_loop(ranks: ContractRanks) -> None:
    """Check `tf.while_loop`."""
    key = ranks.key()

    @tf.function(autograph=False)
    def repeat(mine: Any) -> Any:
        return tf.while_loop(
            lambda number, _: number < 3,
            lambda number, total: (number + 1, ranks.backend.allreduce([total], key, Reduction.SUM, ranks.all)[0]),
            [tf.constant(0), mine])[1]

    for _ in range(2):
        check(repeat(tf.ones([2])), np.full([2], ranks.size**3, np.float32), "a sum of sums of sums")

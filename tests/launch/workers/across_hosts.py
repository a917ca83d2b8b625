"""Collectives between two hosts with two ranks each, compared with NumPy; each check returns the differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import hvkeras as hvd
from harness import pairwise
from harness.checks import check, run_checks

DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64")
LENGTHS = (0, 1, 7, 1001, 40_003)  # the last one takes several steps, in every dtype but the smallest
LONG = 700_001  # float32 numbers in more than five segments
OPERATIONS: dict[str, Any] = {"Average": (hvd.Average, np.mean), "Sum": (hvd.Sum, np.sum), "Min": (hvd.Min, np.min),
                              "Max": (hvd.Max, np.max), "Product": (hvd.Product, np.prod)}
HALVES = {"one host": [0, 1], "the other": [2, 3], "across": [0, 2], "unequal": [1, 2, 3]}


def values(rank: int, length: int) -> Any:
    """Return a rank's numbers, which every dtype represents exactly, as well as results of four ranks."""
    return (np.arange(length) * (rank + 1)) % 3 + rank % 2


def difference(name: str, found: Any, expected: Any) -> list[str]:
    found = np.asarray(tf.cast(found, tf.float64))
    if found.shape == expected.shape and np.array_equal(found, expected):
        return []
    indices = np.flatnonzero(found != expected)[:3].tolist() if found.shape == expected.shape else []
    return [f"{name}: {found.shape}, wrong at {indices}"]


@check
def reductions() -> list[str]:
    """Every operation on every dtype, and each length from zero to several segments."""
    def everything() -> dict[str, Any]:
        mine = {length: values(hvd.rank(), length) for length in LENGTHS}
        return {f"{operation} {dtype} {length}": hvd.allreduce(tf.constant(mine[length], dtype),
                                                               op=OPERATIONS[operation][0])
                for operation, dtype, length in pairwise(tuple(OPERATIONS), DTYPES, LENGTHS)}

    wrong = []
    for name, result in tf.function(everything)().items():
        operation, dtype, length = name.split()
        expected = OPERATIONS[operation][1](np.stack([values(rank, int(length)) for rank in range(4)]), axis=0)
        wrong += difference(name, result, np.trunc(expected) if "int" in dtype else expected)
    return wrong


@check
def long_sums() -> list[str]:
    """Many segments, also of booleans, and with factors."""
    mine = tf.constant(values(hvd.rank(), LONG), tf.float32)
    total = np.sum([values(rank, LONG) for rank in range(4)], axis=0)
    any_of = np.any([values(rank, LONG) > 2 for rank in range(4)], axis=0).astype(float)
    scaled = hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    return [*difference("sum", hvd.allreduce(mine, op=hvd.Sum), total),
            *difference("factors", scaled, 2 * total),
            *difference("any", hvd.allreduce(mine > 2, op=hvd.Max), any_of)]


@check
def gathers() -> list[str]:
    """Different numbers of rows, from zero to more than one round."""
    wrong = []
    for scale in (1, 40_000):
        parts = [np.full((rank * scale, 3), rank) for rank in range(4)]
        found = hvd.allgather(tf.constant(parts[hvd.rank()], tf.int32))
        wrong += difference(f"gather {scale}", found, np.concatenate(parts).astype(float))
    return wrong


@check
def broadcasts() -> list[str]:
    """From each rank, with sizes for one message, for several parts, and for more than one round."""
    wrong = []
    for root in range(4):
        for length in (0, 3, 30_000, LONG):
            found = hvd.broadcast(tf.constant(values(hvd.rank(), length), tf.float32), root)
            wrong += difference(f"broadcast {length} from {root}", found, values(root, length).astype(float))
    return wrong


@check
def process_sets() -> list[str]:
    """Sets of ranks of one host and of both hosts."""
    wrong = []
    for name, ranks in HALVES.items():
        chosen = hvd.add_process_set(ranks)
        if not chosen.included():
            continue
        for length in (5, LONG):
            mine = tf.constant(values(hvd.rank(), length), tf.float64)
            total = np.sum([values(rank, length) for rank in ranks], axis=0).astype(float)
            wrong += difference(f"{name}, sum", hvd.allreduce(mine, op=hvd.Sum, process_set=chosen), total)
        rows = hvd.allgather(tf.fill([hvd.rank()], hvd.rank()), process_set=chosen)
        wrong += difference(f"{name}, gather", rows, np.repeat(ranks, ranks).astype(float))
        last = hvd.broadcast(tf.constant(float(hvd.rank())), ranks[-1], process_set=chosen)
        wrong += difference(f"{name}, broadcast", last, np.array(float(ranks[-1])))
    return wrong


@check
def names_in_any_order() -> list[str]:
    """Named collectives at the same time, in a different order on each rank."""
    names = [f"number {number}" for number in range(30)]
    order = np.random.default_rng(hvd.rank()).permutation(30)

    @tf.function
    def step() -> dict[str, Any]:
        return {names[number]: hvd.allreduce(tf.fill([1 + 1000 * int(number)], float(number)), op=hvd.Sum,
                                             name=names[number]) for number in order}

    wrong = []
    for _ in range(3):
        found = step()
        for number, name in enumerate(names):
            wrong += difference(name, found[name], np.full(1 + 1000 * number, 4.0 * number))
    return wrong


@check
def a_mismatch() -> str:
    """Lengths that are only known at run time and differ on the second host; afterwards the engine continues."""
    total = tf.function(lambda ones: hvd.allreduce(ones, op=hvd.Sum, name="of unknown length"),
                        input_signature=[tf.TensorSpec([None])])
    try:
        total(tf.ones([4 if hvd.rank() > 1 else 3]))
    except tf.errors.FailedPreconditionError as error:
        assert float(hvd.allreduce(1.0, op=hvd.Sum, name="after it")) == 4.0
        return error.message
    return "no error"


if __name__ == "__main__":
    run_checks(before=hvd.init, after=hvd.shutdown)

"""The collectives on any number of ranks: each check returns results, and NumPy's if they depend on inputs.

Arguments: `quick` for fewer dtypes, shorter races, and second gradients of fewer collectives; `few` also without
gradients, which are the same on every engine; `gpu` lets tfdist run as on GPUs, on TensorFlow's CPU devices.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import hvkeras as hvd
from harness.checks import check, names_of_checks, run_checks
from harness.gpus import pretend
from hvkeras.job.session import current_session

QUICK = "quick" in sys.argv
FEW = QUICK or "few" in sys.argv
EAGER = ("float32",) if FEW else ("bfloat16", "float32", "int64")  # fewer, because eager collectives run one by one
DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64")
SOME_DTYPES = ("bfloat16", "float32", "uint8", "int64")
OF_NATIVE = ("uint64", "complex64") if FEW else ("uint64", "complex64", "complex128")
LARGE = 300_001
ROUNDED = {"float16": 4e-3, "bfloat16": 4e-3, "float64": 1e-14, "complex128": 1e-14}
OF_LARGE = ("float16", "float32", "int64", "uint8")
OPERATIONS = {"Average": hvd.Average, "Sum": hvd.Sum, "Min": hvd.Min, "Max": hvd.Max, "Product": hvd.Product}


def all_dtypes() -> tuple[str, ...]:
    """Return the dtypes of this backend, except bool."""
    return (SOME_DTYPES if FEW else DTYPES) + (OF_NATIVE if os.environ["HVKERAS_BACKEND"] == "native" else ())


def value(rank: int, size: int) -> Any:
    """Return the tensor of a rank. Every dtype represents its values exactly, also sums and products."""
    return (np.arange(size) * 3 + rank) % 4


def truth(operation: str, dtype: str, size: int) -> Any:
    everything = np.stack([value(rank, size) for rank in range(hvd.size())]).astype("float64")
    reduce: Any = {"Average": np.mean, "Sum": np.sum, "Min": np.min, "Max": np.max, "Product": np.prod}[operation]
    reduced = reduce(everything, axis=0)
    return np.trunc(reduced) if "int" in dtype else reduced


def run(function: Any, graph: bool) -> Any:
    return (tf.function(function, autograph=False) if graph else function)()


def numbers(tensor: Any) -> Any:
    return np.asarray(tf.cast(tensor, tf.complex128 if tensor.dtype.is_complex else tf.float64))


def differing(found: dict[tuple[Any, ...], Any], truth_of: Any, mode: str) -> list[str]:
    """Return differences in dtype or shape, or by more than the rounding of averages in half precision."""
    wrong = []
    for case, result in found.items():
        expected = np.asarray(truth_of(*case))
        if result.dtype.name != case[0] or result.shape != expected.shape or not np.allclose(
                numbers(result), expected, rtol=ROUNDED.get(case[0], 1e-6)):
            wrong.append(f"{case} {mode}: {result.dtype.name} {result.shape} {numbers(result).ravel()[:8].tolist()}")
    return wrong


def cases_of(dtypes: tuple[str, ...], operations: tuple[str, ...], graph: bool) -> list[tuple[Any, ...]]:
    """Return every dtype with an odd size and every operation; other sizes with the first; a large one for a few."""
    cases = [(dtype, 7, operation) for dtype in dtypes for operation in operations
             if not ("complex" in dtype and operation in ("Min", "Max"))]
    cases += [(dtype, size, operations[0]) for dtype in dtypes for size in (0, 1)]
    return cases + [(dtype, LARGE, operations[0]) for dtype in dtypes if graph and dtype in OF_LARGE]


def every(function: Any, truth_of: Any, operations: tuple[str, ...] = ("none",)) -> list[str]:
    """Run `function(tensor, operation)` for every case in a graph, and for some eagerly."""
    wrong: list[str] = []
    for graph, dtypes in ((False, EAGER), (True, all_dtypes())):
        cases = cases_of(dtypes, operations, graph)

        def everything(cases: list[tuple[Any, ...]] = cases) -> dict[tuple[Any, ...], Any]:
            return {(dtype, size, operation): function(tf.cast(value(hvd.rank(), size), dtype), operation)
                    for dtype, size, operation in cases}

        wrong += differing(run(everything, graph), truth_of, "graph" if graph else "eager")
    return wrong


def of_any(function: Any, *tensors: Any) -> Any:
    """Return the numbers, or the error, of a function that is traced for tensors of unknown shape."""
    specs = [tf.TensorSpec(None, tensor.dtype) for tensor in tensors]
    try:
        return numbers(tf.function(function, input_signature=specs)(*tensors))
    except tf.errors.InvalidArgumentError as error:
        return error.message


@check
def invalid_splits() -> list[Any]:
    """Errors at run time. They come first: after errors within the first collective, TensorFlow refuses all others."""
    size = hvd.size()
    return [of_any(lambda rows, splits: hvd.alltoall(rows, splits)[0], tf.range(2.0 * size), tf.constant(splits))
            for splits in ([1] * size, [-1] * size, [2**31 - 1] * size, [2**63 - 1] * size, [2] * (size + 1))]


@check
def reductions() -> list[str]:
    """Every operation on every dtype and size; return differences from NumPy."""
    return every(lambda tensor, operation: hvd.allreduce(tensor, op=OPERATIONS[operation]),
                 lambda dtype, size, operation: truth(operation, dtype, size), tuple(OPERATIONS))


@check
def scatters() -> list[str]:
    """Reducescatter of sums and averages; return differences from NumPy."""
    def rows(dtype: str, size: int, operation: str) -> Any:
        starts = np.cumsum([0] + [size // hvd.size() + (rank < size % hvd.size()) for rank in range(hvd.size())])
        return truth(operation, dtype, size)[starts[hvd.rank()] : starts[hvd.rank() + 1]]

    return every(lambda tensor, operation: hvd.reducescatter(tensor, op=OPERATIONS[operation]), rows,
                 ("Average", "Sum"))


def splits(rank: int, rows: int) -> list[int]:
    """Return how many rows a rank sends to each: half to itself, half to the next one, and none to the others."""
    counts = [0] * hvd.size()
    counts[(rank + 1) % hvd.size()] = rows - rows // 2
    counts[rank] += rows // 2
    return counts


@check
def exchanges() -> list[str]:
    """Alltoall with equal and uneven splits; return differences from NumPy."""
    size = hvd.size()

    def received(dtype: str, rows: int, operation: str) -> Any:
        parts = []
        for rank in range(size):
            starts = np.cumsum([0, *splits(rank, rows)])
            parts.append(value(rank, rows)[starts[hvd.rank()] : starts[hvd.rank() + 1]])
        return np.concatenate(parts).astype("float64")

    wrong = every(lambda tensor, _: hvd.alltoall(tensor, splits(hvd.rank(), tensor.shape[0]))[0], received)
    table = hvd.alltoall(tf.range(2 * size) + 100 * hvd.rank())
    if table.numpy().tolist() != [100 * rank + 2 * hvd.rank() + more for rank in range(size) for more in (0, 1)]:
        wrong.append(f"equal splits: {table.numpy().tolist()}")
    sent = tf.constant([2 * hvd.rank() + index for index in range(size)], tf.int64)  # differs from the received splits
    rows, counts = hvd.alltoall(tf.fill([int(tf.reduce_sum(sent)), 2], hvd.rank()), sent)
    expected = [2 * rank + hvd.rank() for rank in range(size)]
    if counts.dtype != tf.int64 or counts.numpy().tolist() != expected:
        wrong.append(f"counts: {counts}")
    if rows.numpy().tolist() != [[rank] * 2 for rank in range(size) for _ in range(expected[rank])]:
        wrong.append(f"rows: {rows}")
    return wrong


@check
def shapes_of_any_rank() -> dict[str, Any]:
    """Collectives in graphs with tensors of unknown shape; invalid shapes raise before any rank communicates."""
    size, rank = hvd.size(), hvd.rank()

    def gradient(tensor: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(tensor)
            squares = tf.reduce_sum(hvd.allgather(tensor) ** 2)
        return tape.gradient(squares, tensor)

    mine, rows = tf.constant(float(rank)), tf.range(2.0 * size)
    return {
        "gathered scalar": of_any(hvd.allgather, mine),
        "gathered rows": of_any(hvd.allgather, tf.fill([rank + 1, 1], mine)),
        "gradient": of_any(gradient, mine),
        "exchanged": of_any(hvd.alltoall, rows),
        "scattered": of_any(lambda tensor: hvd.reducescatter(tensor, op=hvd.Sum), rows),
        "exchanged scalar": of_any(hvd.alltoall, mine),
        "scattered scalar": of_any(hvd.reducescatter, mine),
        "uneven": of_any(hvd.alltoall, tf.range(2.0 * size + 1)) if size > 1 else "the same number of rows",
    }


@check
def races() -> list[str]:
    """Collectives of several graphs at once, named, and started in a different order on each rank."""
    size, rank, count, graphs = hvd.size(), hvd.rank(), *((5, 2) if FEW else (20, 4))
    rounds = (4 if FEW else 40) if os.environ["HVKERAS_BACKEND"] == "native" else 2
    wrong: list[str] = []

    def mixed(thread: int) -> Any:
        @tf.function(autograph=False)
        def step(seed: Any) -> list[Any]:
            found: dict[int, Any] = {}
            for number in np.random.default_rng(rank).permutation(count):
                mine = tf.fill([1 + 1000 * (number % 3)], seed + tf.cast(rank + number, tf.float32))
                name = f"race {thread} {number}"
                found[number] = (hvd.allreduce(mine, op=hvd.Sum, name=name),
                                 hvd.allgather(mine, name=name),
                                 hvd.broadcast(mine, int(number) % size, name=name))[number % 3][-1]
            return [found[number] for number in range(count)]

        return step

    def expected(number: int, seed: int) -> float:
        return float((sum(range(size)) + size * (seed + number), size - 1 + seed + number,
                      number % size + seed + number)[number % 3])

    def work(thread: int) -> None:
        step = mixed(thread)
        for seed in range(rounds):
            found = [float(each) for each in step(tf.constant(float(seed)))]
            if found != [expected(number, seed) for number in range(count)]:
                wrong.append(f"graph {thread}, round {seed}: {found}")

    with ThreadPoolExecutor(graphs) as threads:
        list(threads.map(work, range(graphs)))  # raises the threads' errors
    return wrong


@check
def bits() -> dict[str, Any]:
    """Whether sums are bit-identical on repetition and in a group, and whether a broadcast preserves all bits."""
    random = np.random.default_rng(hvd.rank())
    tensors = [tf.constant(random.standard_normal(count), dtype) for dtype in ("float32", "float16")
               for count in (7, 5000, LARGE)]
    single = [hvd.allreduce(tensor, name=f"bits {index}") for index, tensor in enumerate(tensors)]
    again = [hvd.allreduce(tensor, name=f"bits {index}") for index, tensor in enumerate(tensors)]
    others = list(reversed(hvd.grouped_allreduce(tensors[::-1], name="bits together")))
    same = [[one.numpy().tobytes() == two.numpy().tobytes() for one, two in zip(single, more, strict=True)]
            for more in (again, others)]
    odd = np.array([-0.0, 0.0, np.inf, -np.inf, np.nan, 1e-40, 1e38], "float32")
    sent = hvd.broadcast(odd if hvd.rank() == 0 else np.ones_like(odd), 0).numpy().tobytes() == odd.tobytes()
    return {"backend": os.environ["HVKERAS_BACKEND"], "again": all(same[0]), "together": all(same[1]), "sent": sent}


@check
def booleans() -> dict[str, Any]:
    mine = tf.constant([hvd.rank() == 0, True, False])
    return {"any": hvd.allreduce(mine, op=hvd.Max), "all": hvd.allreduce(mine, op=hvd.Min)}


@check
def scaling() -> dict[str, Any]:
    """Sums with factors, averages with Horovod's old parameter, scalars and compression."""
    ten = tf.constant(10.0)
    return {
        "prescale": hvd.allreduce(ten, op=hvd.Sum, prescale_factor=0.5),
        "postscale": hvd.allreduce(ten, op=hvd.Sum, postscale_factor=3.0),
        "integers": hvd.allreduce(tf.constant(10), op=hvd.Sum, prescale_factor=0.25),
        "average=True": hvd.allreduce(ten, average=True),
        "average=False": hvd.allreduce(ten, average=False),
        "number": hvd.allreduce(4.0),
        "compressed": hvd.allreduce(ten, compression=hvd.Compression.fp16),
    }


@check
def functions_traced_again() -> list[Any]:
    """A sum of ones in a function that is traced for several shapes."""
    total = tf.function(lambda ones: hvd.allreduce(ones, op=hvd.Sum))
    return [total(tf.ones([length])) for length in (1, 2, 3)]


@check
def groups() -> list[Any]:
    rank = hvd.rank()
    tensors = [tf.fill([2], float(rank)), tf.fill([1, 2], rank), tf.constant(1.0, tf.float64), tf.constant(2.0)]
    found = hvd.grouped_allreduce(tensors, op=hvd.Sum)
    return [[tensor.dtype.name, tensor.shape.as_list(), tf.reduce_sum(tensor)] for tensor in found]


@check
def sparse() -> Any:
    """The dense form of the sum of slices."""
    slices = tf.IndexedSlices(tf.ones([2, 2]), tf.constant([hvd.rank(), 0]), tf.constant([hvd.size(), 2]))
    found = hvd.allreduce(slices, op=hvd.Sum)
    # lists, which TensorFlow does not convert
    lists = tf.IndexedSlices([[1.0, 1.0]] * 2, (hvd.rank(), 0), (hvd.size(), 2))
    of_lists = hvd.allreduce(lists, op=hvd.Sum)
    assert np.array_equal(tf.convert_to_tensor(of_lists), tf.convert_to_tensor(found))
    return [isinstance(found, tf.IndexedSlices), tf.convert_to_tensor(found)[:, 0]]


@check
def halves() -> dict[str, list[Any]]:
    """Results within float16's range whose intermediate sums exceed it; each case for 60000 and 1."""
    found: dict[str, list[Any]] = {}
    for dtype in ("float16", "bfloat16"):
        pair = tf.constant([60000.0, 1.0], dtype)
        variable = tf.Variable(pair)
        with tf.GradientTape(persistent=True) as tape:
            loss = tf.reduce_sum(variable * pair)
        results = {
            "average": hvd.allreduce(pair),
            "group": hvd.grouped_allreduce([pair, tf.constant([1.0])])[0],
            "graph": tf.function(hvd.allreduce, autograph=False)(pair),
            "sum": hvd.allreduce(pair, op=hvd.Sum, prescale_factor=4.0, postscale_factor=0.25 / hvd.size()),
            "maximum": hvd.allreduce(pair, op=hvd.Max, prescale_factor=2.0, postscale_factor=0.5),
            "scattered": tf.stack([hvd.reducescatter(tf.fill([hvd.size()], each))[0] for each in pair]),
            "gradient": hvd.DistributedGradientTape(tape).gradient(loss, variable),
            "predivided": hvd.DistributedGradientTape(tape, gradient_predivide_factor=0.5).gradient(loss, variable),
            "no compression": hvd.allreduce(pair, compression=hvd.Compression.fp16),
        }
        found |= {f"{name} of {dtype}": [each.dtype.name, tf.cast(each, tf.float32)] for name, each in results.items()}
    return found


@check
def mixed_group() -> list[Any]:
    """Averages of 3 + rank in a group: dense integers, slices of integers, dense and sparse floats."""
    dtypes = (tf.int32, tf.int32, tf.float32, tf.uint8, tf.float16)
    group: list[Any] = [tf.fill([1, 1], tf.cast(3 + hvd.rank(), dtype)) for dtype in dtypes]
    for index in (1, 3, 4):
        group[index] = tf.IndexedSlices(group[index], tf.constant([hvd.rank()]), tf.constant([hvd.size(), 1]))
    return [[type(each).__name__ == "IndexedSlices", each.dtype.name, tf.reshape(getattr(each, "values", each), [-1])]
            for each in hvd.grouped_allreduce(group)]


@check
def gathers() -> list[str]:
    """Gathers of different lengths (also zero) in every dtype; return differences from NumPy."""
    def rows(rank: int, size: int) -> Any:
        return value(rank, size * rank // 2 * 2).reshape(-1, 2)

    def everyone(dtype: str, size: int, operation: str) -> Any:
        return np.concatenate([rows(rank, size) for rank in range(hvd.size())])

    def gathered(tensor: Any, operation: str) -> Any:
        return hvd.allgather(tf.cast(rows(hvd.rank(), tensor.shape[0]), tensor.dtype))

    wrong = every(gathered, everyone)
    scalars = hvd.allgather(hvd.rank())
    if scalars.numpy().tolist() != list(range(hvd.size())):
        wrong.append(f"scalars: {scalars.numpy().tolist()}")
    flags = hvd.allgather(tf.constant([hvd.rank() == 0]))
    if flags.numpy().tolist() != [True] + [False] * (hvd.size() - 1):
        wrong.append(f"bool: {flags.numpy().tolist()}")
    return wrong


@check
def broadcasts() -> list[str]:
    root = hvd.size() - 1
    wrong = every(lambda tensor, _: hvd.broadcast(tensor, root), lambda dtype, size, _: value(root, size))
    flag = hvd.broadcast(tf.constant([hvd.rank() == root, False]), root)
    return wrong if flag.numpy().tolist() == [True, False] else [*wrong, f"bool: {flag.numpy().tolist()}"]


def moves(function: Any, mine: Any, weights: Any, directions: Any) -> Any:
    """Return the change of the sum of `weights * function(mine)` over all ranks when each in turn moves its input."""
    changes: list[Any] = []
    for rank in range(hvd.size()):
        direction = directions[rank]
        step = direction if rank == hvd.rank() else tf.zeros_like(direction)
        ends = [tf.reduce_sum(weights * function(mine + sign * step)) for sign in (1.0, -1.0)]
        changes.append((ends[0] - ends[1]) / 2.0)
    return hvd.allreduce(tf.stack(changes), op=hvd.Sum)


def differentiable() -> dict[str, tuple[Any, int, int]]:
    """Return collectives with their numbers of input and output elements on this rank."""
    rank, size = hvd.rank(), hvd.size()
    return {
        "sum": (lambda tensor: hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=2.0), 2, 2),
        "average": (hvd.allreduce, 2, 2),
        "group": (lambda tensor: tf.concat(hvd.grouped_allreduce([tensor, 2 * tensor], op=hvd.Sum), 0), 2, 4),
        "allgather": (hvd.allgather, rank + 1, size * (size + 1) // 2),
        "broadcast": (lambda tensor: hvd.broadcast(tensor, size - 1), 2, 2),
        "alltoall": (lambda tensor: hvd.alltoall(tensor, splits(rank, 3))[0], 3, 1 + 2 if size > 1 else 3),
        "reducescatter": (hvd.reducescatter, 2 * size, 2),
        "scattered sum": (lambda tensor: hvd.reducescatter(tensor, op=hvd.Sum, postscale_factor=0.5), 2 * size, 2),
    }


def gradient_of(function: Any, mine: Any, weights: Any) -> Any:
    """Return the gradient of the weighted sum of a collective's result on this rank."""
    with tf.GradientTape() as tape:
        tape.watch(mine)
        results = function(mine)
    return tape.gradient(results, mine, output_gradients=weights)


@check
def gradients_of_types() -> list[str]:
    """Gradients of every dtype that differ from those of float64, eagerly and in a graph."""
    wrong = []
    dtypes = ("float16", "bfloat16", "float32") + (
        ("complex64", "complex128") if os.environ["HVKERAS_BACKEND"] == "native" else ())
    for name, (function, length, out) in differentiable().items():
        weights = np.arange(out) % 3 - 1.0 + hvd.rank()

        def exact(dtypes: Any) -> Any:
            return {dtype: gradient_of(function, tf.ones([length], dtype), tf.constant(weights, dtype))  # noqa: B023
                    for dtype in dtypes}  # called in this iteration

        truth = exact(["float64"])["float64"].numpy()
        for graph in (False, True):
            found = run(lambda: exact(dtypes), graph)
            wrong += [f"{name} of {dtype}, graph={graph}: {numbers(gradient).tolist()} instead of {truth.tolist()}"
                      for dtype, gradient in found.items()
                      if gradient.dtype.name != dtype or not np.allclose(numbers(gradient), truth, rtol=4e-3)]
    return wrong


def slope_of(function: Any) -> Any:
    """Return the gradient of half the sum of squares of a collective's result, which is linear like the collective."""

    def slope(mine: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(mine)
            squares = tf.reduce_sum(function(mine) ** 2) / 2
        return tape.gradient(squares, mine)

    return slope


@check
def gradients() -> dict[str, Any]:
    """For each collective, whether its gradient predicts the change of the result, eagerly and in a graph."""
    return foretold(differentiable())


@check
def second_gradients() -> dict[str, Any]:
    """The same for the gradients of the collectives."""
    chosen = ("average", "alltoall") if FEW else tuple(differentiable())
    return foretold({name: (slope_of(function), length, length)
                     for name, (function, length, _) in differentiable().items() if name in chosen})


def foretold(functions: dict[str, tuple[Any, int, int]]) -> dict[str, Any]:
    """For each function, return whether its gradient predicts the change of the result, eagerly and in a graph."""
    rank, size = hvd.rank(), hvd.size()
    found = {}
    for name, (function, length, out) in functions.items():
        random = np.random.default_rng(rank)
        mine, weights = tf.constant(random.normal(size=length)), tf.constant(random.normal(size=out))
        directions = tf.constant(random.normal(size=(size, length)))

        def exact() -> Any:
            return gradient_of(function, mine, weights)  # noqa: B023 - called at once

        changes = tf.function(moves, autograph=False)(function, mine, weights, directions).numpy()
        found[name] = [bool(np.isclose(changes[rank], np.dot(run(exact, graph), directions[rank])))
                       for graph in (False, True)]
    return found


def penalised(rows: Any, wrap: Any, weights: Any, table: Any) -> Any:
    """Return the gradients of a loss with a gradient penalty, which has second-order gradients."""
    with tf.GradientTape() as outer:
        with tf.GradientTape() as tape:
            looked_up = tf.gather(table, tf.cast(tf.abs(rows[:, 0]) * 2, tf.int32) % 5)
            loss = tf.reduce_mean((tf.tanh(tf.linalg.matvec(rows, weights)) + looked_up**3) ** 2)
        dense, sparse = wrap(tape).gradient(loss, [weights, table])
        assert isinstance(sparse, tf.IndexedSlices)
        objective = loss + tf.reduce_sum(dense**2) + tf.reduce_sum(tf.convert_to_tensor(sparse) ** 2)
    return [tf.convert_to_tensor(each) for each in wrap(outer).gradient(objective, [weights, table])]


@check
def gradients_of_reduced_gradients() -> dict[str, float]:
    """Differences of second-order gradients through distributed tapes from those of one process on all ranks' rows."""
    everyone = np.random.default_rng(5).normal(size=(hvd.size(), 6, 3))
    weights, table = tf.Variable([0.3, -0.5, 0.8], dtype=tf.float64), tf.Variable(np.linspace(-1, 1, 5))
    whole = tf.constant(everyone.reshape(-1, 3))
    mine = tf.constant(everyone[hvd.rank()])
    truth = tf.concat(penalised(whole, lambda tape: tape, weights, table), 0)
    dense = functools.partial(hvd.DistributedGradientTape, gradient_predivide_factor=2.0)
    inside = tf.function(penalised, autograph=False)
    slices = tf.Variable(tf.ones([2], tf.float64))
    with tf.GradientTape() as tape:
        of_slices = hvd.allreduce(tf.IndexedSlices(slices * 3.0, tf.constant([0, 1])))
        total = tf.reduce_sum(of_slices.values)

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def reduced() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.linalg.matvec(mine, weights) ** 4)
        return hvd.DistributedGradientTape(tape).gradient(loss, weights)

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def traced_before() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.linalg.matvec(mine, weights) + tf.gather(table, [0, 1, 0, 2, 3, 1])) ** 4)
        dense, sparse = hvd.DistributedGradientTape(tape).gradient(loss, [weights, table])
        return tf.reduce_sum(dense**2) + tf.reduce_sum(tf.convert_to_tensor(sparse) ** 2)

    def alone_before() -> Any:
        with tf.GradientTape() as tape:
            looked_up = tf.gather(table, [0, 1, 0, 2, 3, 1] * hvd.size())
            loss = tf.reduce_mean((tf.linalg.matvec(whole, weights) + looked_up) ** 4)
        dense, sparse = tape.gradient(loss, [weights, table])
        return tf.reduce_sum(dense**2) + tf.reduce_sum(tf.convert_to_tensor(sparse) ** 2)

    def slopes(objective: Any, wrap: Any) -> Any:
        with tf.GradientTape() as outer:
            value = objective()
        return tf.concat([tf.convert_to_tensor(each) for each in wrap(outer).gradient(value, [weights, table])], 0)

    traced_before()  # outside of any tape
    with tf.GradientTape() as outer:
        squared = tf.reduce_sum(reduced() ** 2)  # the tape is outside of the function
    with tf.GradientTape() as outer_alone:
        with tf.GradientTape() as alone:
            loss = tf.reduce_mean(tf.linalg.matvec(whole, weights) ** 4)
        squared_alone = tf.reduce_sum(alone.gradient(loss, weights) ** 2)
    found = {
        "eager": tf.concat(penalised(mine, hvd.DistributedGradientTape, weights, table), 0) - truth,
        "graph": tf.concat(inside(mine, dense, weights, table), 0) - truth,
        "outside": hvd.DistributedGradientTape(outer).gradient(squared, weights)
        - outer_alone.gradient(squared_alone, weights),
        "traced before": slopes(traced_before, hvd.DistributedGradientTape) - slopes(alone_before, lambda tape: tape),
        "slices": tape.gradient(total, slices) - 3.0,
    }
    return {name: float(tf.reduce_max(tf.abs(difference))) for name, difference in found.items()}


@check
def no_gradient_of_max() -> str:
    """The error of a gradient through Max."""
    tensor = tf.constant([1.0])
    with tf.GradientTape() as tape:
        tape.watch(tensor)
        largest = hvd.allreduce(tensor, op=hvd.Max)
    try:
        tape.gradient(largest, tensor)
    except hvd.UnsupportedError as error:
        return str(error)
    return "no error"


@check
def names_in_any_order() -> list[Any]:
    """Named collectives, in a different order in each rank's graph."""
    names = ["one", "two", "three"]
    order = names[::-1] if hvd.rank() else names

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> dict[str, Any]:
        return {name: hvd.allreduce(tf.constant(float(names.index(name))), op=hvd.Sum, name=name) for name in order}

    found = step()
    return [found[name] for name in names]


@check
def where_each_likes() -> list[Any]:
    """One rank in eager mode, another in a function, a third in a function's loop, in rotation."""
    def all_kinds(mine: Any, name: str) -> Any:
        return [hvd.allreduce(mine, op=hvd.Sum, name=name), hvd.allgather(mine, name=name),
                hvd.broadcast(mine, root_rank=0, name=name), hvd.reducescatter(mine, op=hvd.Sum, name=name),
                hvd.alltoall(mine, name=name)]

    mine = tf.repeat(tf.constant(hvd.rank() + 1), hvd.size())

    def once() -> Any:
        return all_kinds(mine, "anywhere")

    def in_a_loop() -> Any:
        return tf.while_loop(lambda turn, *_: turn < 2, lambda turn, *_: (turn + 1, *once()), [0, *[mine] * 5],
                             shape_invariants=[tf.TensorShape([]), *[tf.TensorShape([None])] * 5])[1:]

    function, loop = (tf.function(each, autograph=False) for each in (once, in_a_loop))
    ways = [lambda: (once(), once())[1], lambda: (function(), function())[1], loop]
    return [[part.numpy().tolist() for part in ways[(hvd.rank() + turn) % 3]()] for turn in range(3)]


@check
def of_any_device() -> list[Any]:
    """Tensors on the first device and on a second one, as on a host with a GPU, in one function and eagerly."""
    size = hvd.size()

    def mixed(*devices: str) -> list[Any]:
        found = []
        for index, device in enumerate(devices):
            with tf.device(device):
                mine = tf.fill([size, 2], float(hvd.rank() + index))
                found += [hvd.allreduce(mine, op=hvd.Sum)[0, 0], hvd.allgather(mine)[-1, 0],
                          hvd.broadcast(mine, 0)[0, 0], hvd.alltoall(mine, splits=[1] * size)[0][-1, 0],
                          hvd.reducescatter(mine, op=hvd.Sum)[0, 0]]
        return found

    one, other = ("/CPU:0", "/CPU:1") if hvd.rank() == 0 else ("/CPU:1", "/CPU:0")
    return [run(functools.partial(mixed, *devices), graph) for graph in (True, False)
            for devices in ((one, other), (other,), (other, one))]


@check
def objects() -> dict[str, Any]:
    mine = {"rank": hvd.rank(), "data": "x" * hvd.rank()}
    return {"from the last": hvd.broadcast_object(mine, hvd.size() - 1), "of all": hvd.allgather_object(mine)}


@check
def variables() -> list[Any]:
    """Variables of several dtypes after a broadcast from the last rank."""
    fill = hvd.rank() + 1
    found = [tf.Variable(tf.cast(tf.fill(shape, fill), dtype)) for shape, dtype in
             (([2], "float32"), ([], "int64"), ([2, 2], "float32"), ([1], "bool"), ([3], "float16"))]
    hvd.broadcast_variables(found, root_rank=hvd.size() - 1)
    return [float(tf.reduce_max(tf.cast(each, tf.float32))) for each in found]


@check
def graph_of_a_function_that_is_gone() -> bool:
    """Whether there is still a reference to it."""
    function = tf.function(lambda tensor: hvd.allreduce(hvd.allgather(tensor)), autograph=False)
    tensor = tf.ones([3])
    graph = weakref.ref(function.get_concrete_function(tensor).graph)
    function(tensor)
    del function
    gc.collect()
    return graph() is not None


@check
def converted() -> list[str]:
    """hvkeras's functions that AutoGraph converts in a user's function, which calls all public functions for graphs."""
    import keras
    from tensorflow.python.autograph.impl import api

    dense = tf.Variable([[1.0], [2.0]])
    rows = tf.Variable(tf.ones([4, 2]))
    local = tf.Variable([3.0])
    normalized = hvd.SyncBatchNormalization()
    normalized.build((None, 1))
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam())
    optimizer.build([dense, rows])

    @tf.function  # type: ignore[untyped-decorator]
    def step(tensor: Any) -> Any:
        found = [hvd.allreduce(tensor), *hvd.grouped_allreduce([tensor, 2 * tensor]), hvd.allgather(tensor),
                 *hvd.grouped_allgather([tensor]), hvd.broadcast(tensor, 0),
                 hvd.alltoall(tensor, tf.ones([hvd.size()], tf.int32)),
                 hvd.reducescatter(tensor), *hvd.grouped_reducescatter([tensor]),
                 hvd.allreduce(tf.IndexedSlices(tensor, tf.range(len(tensor)), tensor.shape)).values,
                 *([hvd.allreduce(tensor, op=hvd.Adasum)] if hvd.size() in (2, 4) else []),
                 hvd.allreduce(tensor, compression=hvd.Compression.fp16), normalized(tensor, training=True)]
        everyone = hvd.global_process_set
        here = [hvd.rank(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(),
                hvd.is_initialized(), hvd.is_homogeneous(), hvd.mpi_enabled(), hvd.nccl_built(),
                hvd.gpu_available(), everyone.included(), everyone.rank(), everyone.size(),
                hvd.Compression.fp16.compress(tensor)[0]]
        indices = 0
        if hvd.rank_op() >= 0:  # a condition for AutoGraph to convert
            indices = hvd.size_op() + hvd.local_rank_op() + hvd.local_size_op() + hvd.process_set_included_op()
        hvd.broadcast_variables([dense, rows], 0)
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(tensor @ dense[:1]) + tf.reduce_sum(tf.gather(rows, [0, 1]))
        optimizer.apply_gradients(zip(tape.gradient(loss, [dense, rows]), [dense, rows], strict=True))
        with hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=[]) as partial:
            loss = tf.reduce_sum(tensor @ dense[:1] * local)
        partial.gradient(loss, [dense, local])
        return indices, found, here

    step(tf.ones([2 * hvd.size(), 1])[: hvd.size()])
    codes = list(api._TRANSPILER._cache._cache)
    ours = str(Path(hvd.__file__).parent)
    return [str(any(code.co_name == "step" for code in codes)),
            *(f"{code.co_filename}:{code.co_firstlineno} {code.co_name}" for code in codes
              if code.co_filename.startswith(ours))]


def removed_meanwhile() -> str:
    """The error of a collective in a thread when its process set is removed; only the first rank has called it."""
    first = hvd.add_process_set([0, 1])
    raised = ["nothing"]

    def late() -> None:
        try:
            hvd.allreduce(tf.ones([3]), name="late", process_set=first)
        except tf.errors.AbortedError as error:
            raised[0] = error.message

    thread = threading.Thread(target=late)
    if hvd.rank() == 0:
        thread.start()
        time.sleep(0.5)  # by now it waits for the other rank; otherwise it raises all the same
    hvd.remove_process_set(first)
    if hvd.rank() == 0:
        thread.join(60)
    return raised[0]


@check
def process_sets() -> dict[str, Any]:
    """Collectives of even and of odd ranks."""
    if hvd.size() == 1:
        return {}
    even = hvd.add_process_set(hvd.ProcessSet([rank for rank in range(hvd.size()) if rank % 2 == 0]))
    odd = hvd.add_process_set([rank for rank in range(hvd.size()) if rank % 2 == 1])
    mine, other = (odd, even) if hvd.rank() % 2 else (even, odd)
    rank = tf.constant([float(hvd.rank())])
    found = {
        "sum": hvd.allreduce(rank, op=hvd.Sum, process_set=mine)[0],
        "gather": hvd.allgather(rank, process_set=mine),
        "broadcast": hvd.broadcast(rank, mine.ranks[-1], process_set=mine)[0],
        "objects": hvd.allgather_object(hvd.rank(), process_set=mine),
        "place": [mine.rank(), mine.size(), mine.included(), other.included(), mine.process_set_id],
    }
    hvd.barrier(process_set=mine)
    try:
        hvd.allreduce(rank, process_set=other)
    except hvd.UsageError as error:
        found["foreign"] = str(error)
    if hvd.size() > 2 and os.environ["HVKERAS_BACKEND"] == "native":
        found["meanwhile"] = removed_meanwhile()
    removed = [hvd.remove_process_set(odd), hvd.remove_process_set(even), hvd.remove_process_set(even)]
    hvd.barrier()
    return {**found, "removed": removed}


@check
def xla() -> str:
    try:
        tf.function(lambda: hvd.allreduce(tf.constant(1.0)), jit_compile=True)()
    except hvd.UnsupportedError as error:
        return str(error)
    return "no error"


def start() -> None:
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0],
                                               [tf.config.LogicalDeviceConfiguration()] * 2)
    if "gpu" in sys.argv:
        pretend(4)
    hvd.init()
    if "gpu" in sys.argv:
        assert current_session().backend.transport == "NCCL"
        current_session().backend._cluster.device = "/CPU:0"


if __name__ == "__main__":
    slow = {"gradients", "gradients_of_types", "second_gradients", "gradients_of_reduced_gradients", "converted"}
    without = slow if "few" in sys.argv else set()
    if "gpu" in sys.argv:
        without |= {"races", "names_in_any_order"}  # over NCCL, all ranks must use one order
    run_checks(before=start, after=hvd.shutdown, chosen=set(names_of_checks(Path(__file__))) - without)

"""The collectives on any number of ranks: each check returns results, and NumPy's where they need inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import hvkeras as hvd
from harness.checks import check, run_checks

EAGER = ("bfloat16", "float32", "int64", "bool")  # eager collectives run one by one, so take a few
DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool")
OPERATIONS = {"Average": hvd.Average, "Sum": hvd.Sum, "Min": hvd.Min, "Max": hvd.Max, "Product": hvd.Product}


def value(rank: int) -> Any:
    """The tensor of a rank, in numbers that every dtype holds exactly."""
    return np.array([[rank + 1, 2, 0], [1, rank % 2, 3]])


def truth(operation: str, size: int) -> Any:
    everything = np.stack([value(rank) for rank in range(size)]).astype("float64")
    reduce: Any = {"Average": np.mean, "Sum": np.sum, "Min": np.min, "Max": np.max, "Product": np.prod}[operation]
    return reduce(everything, axis=0)


def run(function: Any, graph: bool) -> Any:
    return (tf.function(function) if graph else function)()


@check
def reductions() -> list[str]:
    """Every operation on every dtype, eager and in a graph; returns what differs from NumPy."""
    wrong = []
    for graph, dtypes in ((False, EAGER), (True, DTYPES)):
        def everything(dtypes: tuple[str, ...] = dtypes) -> dict[str, Any]:
            mine = {dtype: tf.constant(value(hvd.rank()), dtype) for dtype in dtypes if dtype != "bool"}
            return {f"{operation} {dtype}": hvd.allreduce(tensor, op=number) for operation, number in OPERATIONS.items()
                    for dtype, tensor in mine.items()}

        for name, result in run(everything, graph).items():
            operation, dtype = name.split()
            expected = truth(operation, hvd.size())
            if "int" in dtype:
                expected = np.trunc(expected)
            if result.dtype.name != dtype or not np.allclose(tf.cast(result, tf.float64), expected, rtol=4e-3):
                wrong.append(f"{name} {'graph' if graph else 'eager'}: {np.asarray(result).tolist()}")
    return wrong


@check
def booleans() -> dict[str, Any]:
    """Any and all of booleans."""
    mine = tf.constant([hvd.rank() == 0, True, False])
    return {"any": hvd.allreduce(mine, op=hvd.Max), "all": hvd.allreduce(mine, op=hvd.Min)}


@check
def scaling() -> dict[str, Any]:
    """Sums with factors, averages by Horovod's old parameter, scalars and compression."""
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
    """A sum of ones in a function that is traced for one shape after the other."""
    total = tf.function(lambda ones: hvd.allreduce(ones, op=hvd.Sum))
    return [total(tf.ones([length])) for length in (1, 2, 3)]


@check
def groups() -> list[Any]:
    """A group of three dtypes and shapes, summed."""
    rank = hvd.rank()
    tensors = [tf.fill([2], float(rank)), tf.fill([1, 2], rank), tf.constant(1.0, tf.float64), tf.constant(2.0)]
    found = hvd.grouped_allreduce(tensors, op=hvd.Sum)
    return [[tensor.dtype.name, tensor.shape.as_list(), tf.reduce_sum(tensor)] for tensor in found]


@check
def sparse() -> Any:
    """The dense form of the sum of slices."""
    slices = tf.IndexedSlices(tf.ones([2, 2]), tf.constant([hvd.rank(), 0]), tf.constant([hvd.size(), 2]))
    found = hvd.allreduce(slices, op=hvd.Sum)
    return [isinstance(found, tf.IndexedSlices), tf.convert_to_tensor(found)[:, 0]]


@check
def gathers() -> list[str]:
    """Gathers of different lengths (also none) in every dtype; returns what differs from NumPy."""
    wrong = []
    parts = [np.full((rank, 2), rank) for rank in range(hvd.size())]
    expected = np.concatenate(parts)
    for graph, dtypes in ((False, EAGER), (True, DTYPES)):
        def everything(dtypes: tuple[str, ...] = dtypes) -> dict[str, Any]:
            return {dtype: hvd.allgather(tf.cast(parts[hvd.rank()], dtype)) for dtype in dtypes}

        for dtype, result in run(everything, graph).items():
            if result.dtype.name != dtype or not np.array_equal(tf.cast(result, tf.int32), expected.astype(
                    "bool" if dtype == "bool" else "int32").astype("int32")):
                wrong.append(f"{dtype} {'graph' if graph else 'eager'}: {np.asarray(result).tolist()}")
    scalars = hvd.allgather(hvd.rank())
    if scalars.numpy().tolist() != list(range(hvd.size())):
        wrong.append(f"scalars: {scalars.numpy().tolist()}")
    return wrong


@check
def broadcasts() -> list[str]:
    """Broadcasts from the last rank in every dtype; returns what is not its value."""
    wrong = []
    root = hvd.size() - 1
    for graph, dtypes in ((False, EAGER), (True, DTYPES)):
        def everything(dtypes: tuple[str, ...] = dtypes) -> dict[str, Any]:
            return {dtype: hvd.broadcast(tf.cast(value(hvd.rank()), dtype), root) for dtype in dtypes}

        for dtype, result in run(everything, graph).items():
            if result.dtype.name != dtype or not np.array_equal(result, tf.cast(value(root), dtype)):
                wrong.append(f"{dtype} {'graph' if graph else 'eager'}: {np.asarray(result).tolist()}")
    return wrong


def moves(function: Any, mine: Any, weights: Any, directions: Any) -> Any:
    """How the sum over all ranks of `weights * function(mine)` changes as one rank after the other moves its input."""
    changes: list[Any] = []
    for rank in range(hvd.size()):
        direction = directions[rank]
        step = direction if rank == hvd.rank() else tf.zeros_like(direction)
        ends = [tf.reduce_sum(weights * function(mine + sign * step)) for sign in (1.0, -1.0)]
        changes.append((ends[0] - ends[1]) / 2.0)
    return hvd.allreduce(tf.stack(changes), op=hvd.Sum)


@check
def gradients() -> dict[str, Any]:
    """For each collective whether its gradient foretells how the result changes, eager and in a graph."""
    rank, size = hvd.rank(), hvd.size()
    found = {}
    functions = {
        "sum": (lambda tensor: hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=2.0), 2, 2),
        "average": (hvd.allreduce, 2, 2),
        "group": (lambda tensor: tf.concat(hvd.grouped_allreduce([tensor, 2.0 * tensor], op=hvd.Sum), 0), 2, 4),
        "allgather": (hvd.allgather, rank + 1, size * (size + 1) // 2),
        "broadcast": (lambda tensor: hvd.broadcast(tensor, size - 1), 2, 2),
    }
    for name, (function, length, out) in functions.items():
        random = np.random.default_rng(rank)
        mine, weights = tf.constant(random.normal(size=length)), tf.constant(random.normal(size=out))
        directions = tf.constant(random.normal(size=(size, length)))

        def exact(function: Any = function, mine: Any = mine, weights: Any = weights) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(mine)
                total = tf.reduce_sum(weights * function(mine))
            return tape.gradient(total, mine)

        changes = tf.function(moves, autograph=False)(function, mine, weights, directions).numpy()
        found[name] = [bool(np.isclose(changes[rank], np.dot(run(exact, graph), directions[rank])))
                       for graph in (False, True)]
    return found


@check
def no_gradient_of_max() -> str:
    """The error when one asks for it."""
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
    """Named collectives that each rank puts into its graph in another order."""
    names = ["one", "two", "three"]
    order = names[::-1] if hvd.rank() else names

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> dict[str, Any]:
        return {name: hvd.allreduce(tf.constant(float(names.index(name))), op=hvd.Sum, name=name) for name in order}

    found = step()
    return [found[name] for name in names]


@check
def objects() -> dict[str, Any]:
    """Python objects of different sizes."""
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
def process_sets() -> dict[str, Any]:
    """Even and odd ranks among themselves."""
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
    removed = [hvd.remove_process_set(odd), hvd.remove_process_set(even), hvd.remove_process_set(even)]
    hvd.barrier()
    return {**found, "removed": removed}


@check
def xla() -> str:
    """The error inside a compiled function."""
    try:
        tf.function(lambda: hvd.allreduce(tf.constant(1.0)), jit_compile=True)()
    except hvd.UnsupportedError as error:
        return str(error)
    return "no error"


if __name__ == "__main__":
    run_checks(before=hvd.init, after=hvd.shutdown)

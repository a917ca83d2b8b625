"""Collectives and training in functions compiled by XLA; each check returns values that the tests compare.

Arguments: `--few` for only one way of training.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import hvkeras as hvd
from harness.checks import check, run_checks

keras: Any = tf.keras
DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64")
SHAPES = ((0,), (1,), (3, 7), (), (70_001,))
OPERATIONS = {"Average": hvd.Average, "Sum": hvd.Sum, "Min": hvd.Min, "Max": hvd.Max, "Product": hvd.Product}
BATCH = 4


def value(rank: int, shape: tuple[int, ...]) -> Any:
    """Return the tensor of a rank, whose values every dtype represents exactly."""
    return (np.arange(np.prod(shape, dtype=int)) % 5 + rank + 1).reshape(shape)


def compiled(function: Callable[[], Any]) -> Any:
    return tf.function(function, jit_compile=True)()


@check
def reductions() -> list[str]:
    """Every operation on every dtype, in groups of several shapes; return differences from NumPy."""
    wrong = []
    reduce = {"Average": np.mean, "Sum": np.sum, "Min": np.min, "Max": np.max, "Product": np.prod}
    for name, number in OPERATIONS.items():
        def groups(number: int = number) -> dict[str, Any]:
            return {dtype: hvd.grouped_allreduce([tf.constant(value(hvd.rank(), shape), dtype) for shape in SHAPES],
                                                 op=number) for dtype in DTYPES}

        for dtype, results in compiled(groups).items():
            for shape, found in zip(SHAPES, results, strict=True):
                everything = np.stack([value(rank, shape) for rank in range(hvd.size())])
                expected = reduce[name](everything, axis=0)
                expected = np.trunc(expected) if "int" in dtype else expected
                if found.dtype.name != dtype or not np.array_equal(tf.cast(found, tf.float64), expected):
                    wrong.append(f"{name} {dtype} {shape}: {np.asarray(found).tolist()[:5]}")
    return wrong


@check
def many_at_once() -> list[float]:
    return compiled(lambda: [hvd.allreduce(tf.constant(float(hvd.rank() + each)), op=hvd.Sum) for each in range(20)])


@check
def others() -> dict[str, Any]:
    """The other collectives, scaled and compressed sums, booleans, slices and transposed tensors."""
    mine = tf.constant(value(hvd.rank(), (2, 3)), tf.float32)
    slices = tf.IndexedSlices(tf.ones([2, 2]), tf.constant([hvd.rank(), 0]), tf.constant([2, 2]))
    return compiled(lambda: {
        "broadcast": [hvd.broadcast(tf.cast(mine, dtype), 1) for dtype in ("float32", "int64", "bfloat16", "bool")],
        "gathered": hvd.allgather(mine), "scalars": hvd.allgather(tf.constant(hvd.rank())),
        "scaled": hvd.allreduce(mine[0, 0], op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0),
        "compressed": hvd.allreduce(mine[0], compression=hvd.Compression.bf16),
        "any": hvd.allreduce(tf.constant([hvd.rank() == 0, True, False]), op=hvd.Max),
        "slices": tf.convert_to_tensor(hvd.allreduce(slices, op=hvd.Sum)),
        "transposed": hvd.allreduce(tf.transpose(mine), op=hvd.Sum),
        "exchanged": hvd.alltoall(tf.constant([1, 2]) + 10 * hvd.rank()),
        "split": list(hvd.alltoall(tf.constant([1, 2]) + 10 * hvd.rank(), [1, 1])),
        "scattered": hvd.reducescatter(tf.range(3) + hvd.rank(), op=hvd.Sum),
    })


@check
def gradients() -> dict[str, list[Any]]:
    """Gradients in a compiled function and in eager mode."""
    x = tf.constant(value(hvd.rank(), (2, 2)), tf.float32)
    functions: dict[str, Callable[[Any], Any]] = {
        "sum": lambda x: hvd.allreduce(x**2, op=hvd.Sum),
        "average": lambda x: hvd.allreduce(x**2),
        "group": lambda x: hvd.grouped_allreduce([x**2, x[0] ** 3], op=hvd.Sum)[1],
        "broadcast": lambda x: hvd.broadcast(x**2, 0),
        "gather": lambda x: hvd.allgather(x**2) * (1.0 + hvd.rank()),
    }

    def of(function: Callable[[Any], Any]) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            result = function(x)
        return tape.gradient(result, x)

    both = compiled(lambda: {name: of(function) for name, function in functions.items()})
    return {name: [both[name], of(function)] for name, function in functions.items()}


@check
def control_flow() -> list[Any]:
    """Sums in a loop, in a branch and in a nested function, with independent ones before and after."""
    nested = tf.function(lambda x: hvd.allreduce(x, op=hvd.Sum))

    def steps() -> list[Any]:
        first = hvd.allreduce(tf.constant(1.0), op=hvd.Sum)
        looped = tf.constant(1.0)
        for _ in tf.range(3):
            looped = hvd.allreduce(looped, op=hvd.Sum)
        branched = tf.cond(first > 0.0, lambda: hvd.allreduce(tf.constant(2.0), op=hvd.Sum), lambda: first)
        return [first, looped, branched, nested(tf.constant(3.0)), hvd.allreduce(tf.constant(4.0), op=hvd.Sum)]

    return [float(found) for found in compiled(steps)]


@check
def unknown_shape() -> str:
    """The error of a function traced without the length of its argument."""
    spec = tf.TensorSpec([None], tf.float32)
    try:
        tf.function(hvd.allreduce, jit_compile=True, input_signature=[spec])(tf.ones([2]))
    except hvd.UnsupportedError as error:
        return str(error)
    return "no error"


@check
def entries() -> list[int]:
    """Increase of the entry count of a plan, which rank 0's server reads, by two runs of a compiled function."""
    from hvkeras.job.session import current_session

    def counted() -> int:
        counts = current_session().entries.snapshot().values()
        return sum(count for count, plan in counts if "counted" in plan.label)

    sums = tf.function(lambda: hvd.allreduce(tf.ones([2]), name="counted"), jit_compile=True)
    found = []
    for _ in range(2):
        sums()
        found.append(counted())
    return found


def shard(data: Any) -> Any:
    return data.reshape(-1, hvd.size(), BATCH, *data.shape[1:])[:, hvd.rank()].reshape(-1, *data.shape[1:])


random = np.random.default_rng(0)
INPUTS, TARGETS = (random.normal(size=(48, width)).astype("float32") for width in (6, 1))
WORDS = random.integers(0, 10, (48, 6))
OVERFLOWING = INPUTS.copy()
OVERFLOWING[BATCH] = np.inf  # in the second rank's part of the first batch


def dense() -> list[Any]:
    return [keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1, dtype="float32")]


def synchronized() -> list[Any]:
    return [keras.Input((6,)), keras.layers.Dense(4), keras.layers.BatchNormalization(synchronized=True, momentum=0.5),
            keras.layers.Dense(1)]


def embedding() -> list[Any]:
    return [keras.Input((6,), dtype="int32"), keras.layers.Embedding(10, 4), keras.layers.Flatten(),
            keras.layers.Dense(1)]


def trained(jit: bool, layers: Callable[[], list[Any]] = dense, data: Any = INPUTS, optimizer: str = "Adam",
            steps: int = 1, policy: str = "float32", **options: Any) -> Any:
    """Return the weights after two epochs, and a metric of both; uncompiled training runs eagerly."""
    keras.utils.set_random_seed(1)
    keras.mixed_precision.set_global_policy(policy)
    model = keras.Sequential(layers())
    keras.mixed_precision.set_global_policy("float32")
    model.compile(hvd.DistributedOptimizer(getattr(keras.optimizers, optimizer)(0.02), **options), "mse",
                  metrics=["mae"], jit_compile=jit, run_eagerly=not jit, steps_per_execution=steps)
    history = model.fit(shard(data), shard(TARGETS), batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    return [weights(model), np.nan_to_num(history.history["mae"], nan=-1.0)]


def weights(model: Any) -> Any:
    return np.concatenate([each.ravel() for each in model.get_weights()])


CASES: dict[str, dict[str, Any]] = {
    "plain": {}, "compressed": {"compression": hvd.Compression.fp16, "optimizer": "SGD"},
    "two passes": {"backward_passes_per_step": 2, "average_aggregated_gradients": True},
    "mixed precision": {"policy": "mixed_float16", "data": OVERFLOWING, "optimizer": "SGD"},
    "synchronized normalization": {"layers": synchronized, "optimizer": "SGD"},
    "sparse gradients": {"layers": embedding, "data": WORDS},
    "sparse as dense": {"layers": embedding, "data": WORDS, "sparse_as_dense": True},
}


@check
def training() -> dict[str, list[Any]]:
    """Weights and logs after uncompiled and compiled training; uncompiled also with three steps per execution."""
    cases = {"plain": {}} if "--few" in sys.argv else CASES
    found = {name: [trained(False, **case), trained(True, **case)] for name, case in cases.items()}
    found["plain"].append(trained(True, steps=3))
    return found


@check
def one_process() -> list[Any]:
    """The weights of one process after the same global batches, in a loop without collectives."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(dense())
    optimizer, loss = keras.optimizers.Adam(0.02), keras.losses.MeanSquaredError()
    for start in list(range(0, len(INPUTS), BATCH * hvd.size())) * 2:
        part = slice(start, start + BATCH * hvd.size())
        with tf.GradientTape() as tape:
            error = loss(TARGETS[part], model(INPUTS[part], training=True))
        found = tape.gradient(error, model.trainable_variables)
        optimizer.apply_gradients(zip(found, model.trainable_variables, strict=True))
    return weights(model)


if __name__ == "__main__":
    run_checks(before=hvd.init, after=hvd.shutdown)

"""One way of training on GPUs beside one process on the same GPU. Arguments: the way; `--share` as in `on_gpus.py`."""

from __future__ import annotations

import os
import sys
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvkeras as hvd
from harness.checks import check, run_checks
from harness.gpus import said_when_crossed
from harness.launchers import announced_rank
from parallel.workers.same_training import apart

BATCH, STEPS, PIXELS, CLASSES = 16, 6, (12, 12, 3), 5
WAY = sys.argv[1]
POLICIES = {"mixed_float16", "mixed_bfloat16"}
OPTIONS: dict[str, dict[str, Any]] = {
    "compression": {"compression": hvd.Compression.fp16}, "shard_update": {"shard_update": True},
    "compile_update": {"compile_update": True}}


def network() -> Any:
    keras.utils.set_random_seed(5)
    layers = keras.layers
    return keras.Sequential([keras.Input(PIXELS), layers.Conv2D(8, 3, activation="relu"), layers.MaxPooling2D(),
                             layers.Conv2D(16, 3, activation="tanh"), layers.Flatten(),
                             layers.Dense(CLASSES, dtype="float32")])


def data() -> tuple[Any, Any]:
    random = np.random.default_rng(4)
    return (random.normal(size=(BATCH * STEPS, *PIXELS)).astype("float32"), random.integers(0, CLASSES, BATCH * STEPS))


def trained(optimizer: Any, rank: int, size: int) -> Any:
    """The model after training on rows `rank`, `rank + size`, ... of each batch."""
    net, loss = network(), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x, y = (array[rank::size] for array in data())
    if WAY not in ("tape", "gradients_by_xla"):
        net.compile(optimizer, loss)
        net.fit(x, y, batch_size=BATCH // size, shuffle=False, verbose=0)
        return net
    optimizer.build(net.trainable_variables)

    def gradients(inputs: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            value = loss(labels, net(inputs, training=True))
        if WAY == "tape" and size > 1:
            tape = hvd.DistributedGradientTape(tape)
        return tape.gradient(value, net.trainable_variables)

    compute = tf.function(gradients, jit_compile=True) if WAY == "gradients_by_xla" else gradients

    @tf.function
    def steps(inputs: Any, labels: Any) -> None:
        for number in tf.range(STEPS):
            optimizer.apply_gradients(zip(compute(inputs[number], labels[number]), net.trainable_variables,
                                          strict=True))

    steps(x.reshape(STEPS, -1, *PIXELS), y.reshape(STEPS, -1))
    return net


@check
def difference() -> list[float]:
    """How far from one process, how far from the start, and a number equal on ranks with equal weights."""
    keras.mixed_precision.set_dtype_policy(WAY if WAY in POLICIES else "float32")
    plain = keras.optimizers.Adam(0.01, epsilon=1e-3)  # with a small one, noise of small gradients would count
    with hvd.alone():
        alone = trained(plain, 0, 1).get_weights() if hvd.rank() == 0 else None
    truth = hvd.broadcast_object(alone, 0)
    optimizer = keras.optimizers.Adam(0.01, epsilon=1e-3)
    if WAY != "tape":
        optimizer = hvd.DistributedOptimizer(optimizer, **OPTIONS.get(WAY, {}))
    net = trained(optimizer, hvd.rank(), hvd.size())
    weights = net.get_weights()
    if WAY == "shard_update":  # which other ranks then have parts of
        hvd.gather_optimizer(optimizer)
    return [apart(weights, truth), apart(truth, network().get_weights()), float(sum(np.sum(one) for one in weights))]


@check
def large_and_odd() -> list[str]:
    """What is not what NumPy says: a sum of 64 MiB, and other kinds of numbers."""
    wrong = []
    whole = hvd.allreduce(tf.fill([2**24], hvd.rank() + 1.0), op=hvd.Sum)
    if not bool(tf.reduce_all(whole == hvd.size() * (hvd.size() + 1) / 2)):
        wrong.append("64 MiB")
    flags = tf.constant([hvd.rank() == 0, True])
    if not np.array_equal(hvd.allgather(flags), [True, True, False, True]):
        wrong.append("gathered bool")
    if not np.array_equal(hvd.broadcast(flags, 1), [False, True]):
        wrong.append("broadcast bool")
    made = [tf.Variable(tf.cast(tf.fill([100, 7], hvd.rank()), dtype)) for dtype in ("float32", "int64", "float16")]
    hvd.broadcast_variables(made, 1)
    return wrong + [f"variable of {each.dtype}" for each in made if not np.all(each.numpy() == 1)]


@check
def compiled() -> str:
    """What a step with `jit_compile=True` says."""
    net = network()
    net.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", jit_compile=True)
    try:
        net.fit(np.zeros((4, *PIXELS), "float32"), np.zeros((4, CLASSES), "float32"), verbose=0)
    except hvd.UnsupportedError as error:
        return str(error)
    return "no error"


@check
def crossed() -> dict[str, list[str]]:
    """What collectives say that NCCL, which combines whatever comes next, has combined with others."""
    return said_when_crossed(hvd.rank())


def start() -> None:
    if "--share" in sys.argv:
        os.environ["NCCL_HOSTID"] = f"rank{announced_rank(os.environ) or 0}"
    hvd.init()


if __name__ == "__main__":
    run_checks(before=start, after=hvd.shutdown,
               chosen={"others": {"large_and_odd", "compiled"}, "crossed": {"crossed"}}.get(WAY, {"difference"}))

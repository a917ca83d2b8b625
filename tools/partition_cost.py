"""How long it takes to partition the training function of Keras, beside the time to trace it, and what a step sends.

    python tools/partition_cost.py [--times 5] [mlp cnn transformer lstm resnet50]

Prints medians of processor time in seconds, and the range of the ratios of traces and partitions made in turns. Rounds
and bytes are those of a step; the rounds of `lstm`, which runs four steps at once, include those that end its loop.
"""

from __future__ import annotations

import argparse
import collections
import inspect
import os
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from hvkeras.partition.collectives import Lanes
from hvkeras.partition.partitioning import Partitioned
from hvkeras.partition.rules import RULES

ROWS = 32


class Nothing:
    """Collectives of a rank that is alone: only the creation of graphs is measured."""

    are_compiled = True

    def reduce(self, _reduction: str, tensors: Sequence[Lanes]) -> list[Lanes]:
        """Return the tensors."""
        return list(tensors)

    def gather(self, tensors: Sequence[Lanes]) -> list[Lanes]:
        """Return the tensors."""
        return list(tensors)

    def of_first(self, tensors: Sequence[Lanes]) -> list[Lanes]:
        """Return the tensors."""
        return list(tensors)


def transformer(inputs: Any) -> Any:
    """Two blocks of attention."""
    hidden = layers.Dense(64)(inputs)
    for _ in range(2):
        attention = layers.MultiHeadAttention(4, 16, dropout=0.1)(hidden, hidden)
        hidden = layers.LayerNormalization()(hidden + attention)
        wide = layers.Dense(64)(layers.Dense(256, "gelu")(hidden))
        hidden = layers.LayerNormalization()(hidden + layers.Dropout(0.1)(wide))
    return layers.GlobalAveragePooling1D()(hidden)


def convolutions(inputs: Any) -> Any:
    """Two convolutions, each with BatchNormalization."""
    for filters in (16, 32):
        inputs = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(filters, 3)(inputs)))
    return layers.GlobalAveragePooling2D()(inputs)


def resnet50(inputs: Any) -> Any:
    """The model of Keras's applications."""
    return keras.applications.ResNet50(weights=None, include_top=False, pooling="avg", input_shape=(32, 32, 3))(inputs)


# The shape of a row, the layers, and the steps of an execution.
CASES: dict[str, tuple[tuple[int, ...], Callable[[Any], Any], int]] = {
    "mlp": ((64,), lambda inputs: layers.Dropout(0.2)(layers.Dense(256, "relu")(layers.Dense(256, "relu")(inputs))), 1),
    "cnn": ((16, 16, 3), convolutions, 1),
    "transformer": ((16, 32), transformer, 1),
    "lstm": ((12, 8), lambda inputs: layers.LSTM(32)(layers.Bidirectional(layers.LSTM(32, return_sequences=True))(
        inputs)), 4),
    "resnet50": ((32, 32, 3), resnet50, 1),
}


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Return the processor time of a function in seconds, and its result."""
    began = time.process_time()
    result = function()
    return time.process_time() - began, result


def measure(name: str, times: int) -> None:
    """Print the line of a case."""
    shape, build, steps = CASES[name]
    keras.utils.set_random_seed(0)
    inputs = keras.Input(shape)
    model = keras.Model(inputs, layers.Dense(1)(build(inputs)))
    model.compile("adam", "mse", metrics=["mae"], steps_per_execution=steps)
    rows = np.random.default_rng(0).random((ROWS, *shape), np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((rows, rows.reshape(ROWS, -1).sum(1))).batch(ROWS).repeat()
    model.fit(dataset, steps_per_epoch=steps, verbose=0)
    iterator, traced, partitioned = iter(dataset), [], []
    for _ in range(times + 1):  # the first is slower
        model.make_train_function(force=True)
        whole = inspect.getclosurevars(model.train_function).nonlocals["multi_step_on_iterator"]
        seconds, function = timed(lambda whole=whole: whole.get_concrete_function(iterator))
        traced.append(seconds)
        seconds, made = timed(lambda graph=function.graph: partition(graph))
        partitioned.append(seconds)
    report = made.report
    gradients = sum(int(np.prod(weight.shape)) * 4 for weight in model.trainable_weights)
    ratios = sorted(two / one for one, two in zip(traced[1:], partitioned[1:], strict=True))
    print(f"{name:12} trace {median(traced[1:]):5.2f} s, partition {median(partitioned[1:]):5.2f} s, "
          f"ratio {median(ratios):4.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}); "
          f"{sum(report.divided.values())} operations divided, {len(report.gathered)} gathered; {len(report.rounds)} "
          f"rounds; {report.nbytes(collections.defaultdict(lambda: ROWS)) / gradients:.3f} of the gradients' bytes",
          flush=True)


def partition(graph: Any) -> Partitioned:
    """Partition a graph, and create the function of a rank."""
    partitioned = Partitioned(graph, {}, RULES)
    tf.function(lambda *inputs: partitioned.create([[tensor] for tensor in inputs], [0], 2, Nothing()), autograph=False,
                ).get_concrete_function(*(tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in graph.inputs))
    return partitioned


def main() -> None:
    """Measure the cases that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("cases", nargs="*", default=list(CASES))
    arguments = parser.parse_args()
    for name in arguments.cases:
        measure(name, arguments.times)


if __name__ == "__main__":
    main()

"""Mean and variance of all ranks' rows in one round, and fused batch normalization with them.

Each rank computes mean and squared deviation from it, of its own rows; of both, and the numbers of rows, follow those
of all rows, without differences of large numbers: Chan, Golub, LeVeque: Updating formulae and a pairwise algorithm for
computing sample variances (1979).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvkeras.partition.decisions import Call, Decision, Value
from hvkeras.partition.layouts import REPLICATED, Divided, Layout, Partial
from hvkeras.partition.rule_table import rule
from hvkeras.partition.sizes import Shape, product


def _axes(call: Call) -> tuple[list[int], list[int]]:
    """Return the axes that moments are taken over, and the shape of a value of each channel beside the operand."""
    rank = call.rank(0) or 0
    channel = 1 if call.attribute("data_format").startswith("NC") else rank - 1
    return [axis for axis in range(rank) if axis != channel], [-1 if axis == channel else 1 for axis in range(rank)]


def _rows_of_images(call: Call, operands: Sequence[int]) -> Divided | None:
    """Return the layout of operands that are all divided along images."""
    layout = call.operands[operands[0]].layout
    others = {call.operands[number].layout for number in range(len(call.operands)) if number not in operands}
    if not isinstance(layout, Divided) or layout.axis != 0 or others - {REPLICATED}:
        return None
    return layout if all(call.operands[number].layout == layout for number in operands) else None


def _moments(emission: Any, tensors: Sequence[tf.Tensor], axes: Sequence[int], layout: Divided, shape: Shape,
             keep_axes: bool = False) -> list[list[tf.Tensor]]:
    """Return mean and variance of all ranks' elements, for each of the ranks whose functions are created.

    Args:
        emission: The emission.
        tensors: Each rank's part.
        axes: The axes to take moments over, the divided one among them.
        layout: The layout.
        shape: Shape of the whole.
        keep_axes: Whether results have these axes, of size 1.
    """
    of_unit = product(shape[axis] for axis in axes if axis != layout.axis) * layout.outer * layout.each  # type: ignore[misc]
    counts = [units.counted(layout.division) * units.number(of_unit, tf.int64) for units in emission.units]
    sent = [emission.call(_own_moments, [own, count, tf.constant(units.rank), tf.constant(units.size)], tuple(axes))
            for own, count, units in zip(tensors, counts, emission.units, strict=True)]
    return [emission.call(_joined_moments, [gathered], tuple(axes) if keep_axes else ())
            for gathered in emission.exchange("sum", [sent])[0]]  # to gather, ranks would first exchange sizes


def _own_moments(own: tf.Tensor, count: tf.Tensor, rank: tf.Tensor, size: tf.Tensor, axes: Sequence[int]) -> tf.Tensor:
    """Return mean, squared deviation from it, and number, of a rank's elements, beside zeros for the other ranks."""
    mean = tf.reduce_mean(own, axes, keepdims=True)
    deviation = tf.reduce_sum(tf.math.squared_difference(own, mean), axes)
    of_rank = tf.stack([tf.squeeze(mean, axes), deviation, tf.fill(tf.shape(deviation), tf.cast(count, own.dtype))])
    others = tf.zeros([of_rank.shape.rank, 2], tf.int32)
    return tf.pad(of_rank[None], tf.concat([[[rank, size - 1 - rank]], others], 0))


def _joined_moments(gathered: tf.Tensor, axes: Sequence[int]) -> list[tf.Tensor]:
    means, deviations, counts = tf.unstack(gathered, 3, axis=1)
    total = tf.reduce_sum(counts, 0)
    mean = tf.reduce_sum(means * counts, 0) / total
    counted = tf.where(counts > 0, deviations, tf.zeros_like(deviations))
    between = counts * tf.math.squared_difference(means, mean[None])
    variance = (tf.reduce_sum(counted, 0) + tf.reduce_sum(between, 0)) / total
    return [_with_axes(mean, axes), _with_axes(variance, axes)]


@rule("Moments")
def moments(call: Call) -> Decision | None:
    """Mean and variance along axes."""
    value, dimensions = call.operands[0], call.rank(0)
    axes = None if dimensions is None else call.numbers(1)
    if axes is None or dimensions is None or value.shape is None:
        return Decision((REPLICATED, REPLICATED), (Value(), Value()), create=_create_moments)
    reduced = sorted({int(axis) % dimensions for axis in axes.ravel()})
    shape = tuple(1 if axis in reduced else size for axis, size in enumerate(value.shape))
    layout: Any = value.layout
    if not isinstance(layout, Divided) or layout.axis not in reduced:
        kept = layout if isinstance(layout, Divided) else REPLICATED
        return Decision((kept, REPLICATED), (Value(kept, shape),) * 2, dict(call.vectors), _create_moments)
    if any(value.shape[axis] is None for axis in reduced):
        return Decision((REPLICATED, REPLICATED), (Value(REPLICATED, shape),) * 2, create=_create_moments)

    def create_together(emission: Any, _operation: Any, given: Sequence[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
        found = _moments(emission, given[0], reduced, layout, value.shape or (), keep_axes=True)
        return [list(lanes) for lanes in zip(*found, strict=True)]

    return Decision((layout, REPLICATED), (Value(REPLICATED, shape),) * 2, create_together=create_together,
                    communicates=True)


def _create_moments(operation: Any, operands: Sequence[tf.Tensor], _sizes: Any) -> list[tf.Tensor]:
    return list(operation.create(operands))


def _with_axes(tensor: tf.Tensor, axes: Sequence[int]) -> tf.Tensor:
    """Return a tensor with new axes of size 1."""
    for axis in axes:
        tensor = tf.expand_dims(tensor, axis)
    return tensor


@rule("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3")
def normalize(call: Call) -> Decision | None:
    """Results: the normalized images, mean and variance (updated), and what the gradient needs: mean and variance."""
    layout, shape = _rows_of_images(call, [0]), call.shape(0)
    if layout is None or shape is None or None in shape:
        return None
    channels = call.shape(1)
    results = (Value(layout, shape), *(Value(REPLICATED, channels) for _ in range(4)), *(
        [Value(REPLICATED, (0,))] if call.type == "FusedBatchNormV3" else []))
    operands: tuple[Layout, ...] = (layout, *(REPLICATED for _ in call.operands[1:]))
    if not call.attribute("is_training"):
        return Decision(operands, (*results[:5], *(Value(REPLICATED, (None,)) for _ in results[5:])))
    axes, beside = _axes(call)
    factor, epsilon = call.attribute("exponential_avg_factor"), call.attribute("epsilon")
    count = product(size for axis in axes if (size := shape[axis]) is not None)

    def create_together(emission: Any, _operation: Any, given: Sequence[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
        kind = given[1][0].dtype
        images = [tf.cast(lane, kind) for lane in given[0]]
        lanes: list[list[tf.Tensor]] = []
        for place, (mean, variance) in enumerate(_moments(emission, images, axes, layout, shape)):
            total = emission.units[place].number(count, tf.int64)
            result, *new = emission.call(_normalized, [images[place], mean, variance, total, *(
                operand[place] for operand in given[1:])], tuple(beside), factor, epsilon)
            made = [tf.cast(result, given[0][place].dtype), *new, mean, variance, tf.zeros([0], kind)]
            lanes.append(made[:len(results)])
        return [list(tensors) for tensors in zip(*lanes, strict=True)]

    return Decision(operands, results, create_together=create_together, communicates=True)


def _normalized(images: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor, total: tf.Tensor, scale: tf.Tensor,
                offset: tf.Tensor, *rest: Any) -> list[tf.Tensor]:
    """Return the normalized images, and the new moving mean and variance."""
    old_mean, old_variance, beside, factor, epsilon = rest
    scale = tf.reshape(tf.math.rsqrt(variance + epsilon) * scale, beside)
    result = (images - tf.reshape(mean, beside)) * scale + tf.reshape(offset, beside)
    count = tf.cast(total, variance.dtype)
    unbiased = variance * count / tf.maximum(count - 1, 1)
    if factor == 1.0:
        return [result, mean, unbiased]
    return [result, old_mean * (1 - factor) + mean * factor, old_variance * (1 - factor) + unbiased * factor]


def _sums_of_gradients(gradients: tf.Tensor, images: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor, *rest: Any
                       ) -> tf.Tensor:
    """Return the sums over a rank's images of gradients, and of gradients times normalized images."""
    axes, beside, epsilon = rest
    normalized = (images - tf.reshape(mean, beside)) * tf.reshape(tf.math.rsqrt(variance + epsilon), beside)
    return tf.stack([tf.reduce_sum(gradients, axes), tf.reduce_sum(gradients * normalized, axes)])


def _gradient_of_images(gradients: tf.Tensor, images: tf.Tensor, sums: tf.Tensor, total: tf.Tensor, *rest: Any
                        ) -> list[tf.Tensor]:
    """Return the gradients of images, scale and offset."""
    scale, mean, variance, beside, epsilon = rest
    of_offset, of_scale = tf.unstack(sums, 2)
    count, inverse = tf.cast(total, scale.dtype), tf.math.rsqrt(variance + epsilon)
    normalized = (images - tf.reshape(mean, beside)) * tf.reshape(inverse, beside)
    result = tf.reshape(scale * inverse, beside) * (
        gradients - tf.reshape(of_offset / count, beside) - normalized * tf.reshape(of_scale / count, beside))
    return [result, of_scale, of_offset]


@rule("FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3")
def gradient(call: Call) -> Decision | None:
    """Results: the gradients of images, scale and offset, and two that are not used."""
    layout, shape = _rows_of_images(call, [0, 1]), call.shape(0)
    if layout is None or shape is None or None in shape:
        return None
    channels = call.shape(2)
    operands: tuple[Layout, ...] = (layout, layout, *(REPLICATED for _ in call.operands[2:]))
    if not call.attribute("is_training"):
        own_sum = Value(Partial("sum", layout.division), channels)
        return Decision(operands, (Value(layout, shape), own_sum, own_sum, *(Value() for _ in range(2))))
    axes, beside = _axes(call)
    epsilon = call.attribute("epsilon")
    count = product(size for axis in axes if (size := shape[axis]) is not None)

    def create_together(emission: Any, _operation: Any, given: Sequence[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
        kind = given[2][0].dtype
        gradients, images = ([tf.cast(lane, kind) for lane in lanes] for lanes in given[:2])
        sent = [units.masked(emission.call(_sums_of_gradients, [*own, *given_], tuple(axes), tuple(beside), epsilon),
                             layout.division)
                for units, own, given_ in zip(emission.units, zip(gradients, images, strict=True), zip(
                    given[3], given[4], strict=True), strict=True)]
        lanes: list[list[tf.Tensor]] = []
        for place, (units, sums) in enumerate(zip(emission.units, emission.exchange("sum", [sent])[0], strict=True)):
            result, *of_channels = emission.call(_gradient_of_images, [
                gradients[place], images[place], sums, units.number(count, tf.int64), *(
                    operand[place] for operand in given[2:5])], tuple(beside), epsilon)
            lanes.append([tf.cast(result, given[0][place].dtype), *of_channels, *(tf.zeros([0], kind),) * 2])
        return [list(tensors) for tensors in zip(*lanes, strict=True)]

    of_channels, nothing = Value(REPLICATED, channels), Value(REPLICATED, (0,))
    return Decision(operands, (Value(layout, shape), of_channels, of_channels, nothing, nothing),
                    create_together=create_together, communicates=True)

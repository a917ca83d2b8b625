"""Mean and variance of all ranks' rows in one round, and fused batch normalization with them."""

from __future__ import annotations

import tensorflow as tf

from unit.partition.brute_force import B, Case, Operand, above_zero, gradients, operation, real

_VERSIONS = ("", "V2", "V3")


def _fused(version: str, **attributes):
    results = slice(0, 3 if attributes.get("is_training", True) else 1)
    return lambda *tensors: operation(f"FusedBatchNorm{version}", epsilon=0.5, **attributes)(*tensors)[results]


def _gradient(version: str, **attributes):
    """Return a function of the operands of the gradient, without a reserved one that only GPUs use."""
    more = {"reserve_space_3": tf.zeros([0]).numpy()} if version == "V3" else {}
    return lambda *tensors: operation(f"FusedBatchNormGrad{version}", epsilon=0.5, **more, **attributes)(*tensors)[:3]


def _operands(*shape, channels: int = 2) -> list[Operand]:
    each = (channels,)
    return [
        real(*shape, dtype="float32"),
        above_zero(*each, dtype="float32"),
        real(*each, dtype="float32"),
        real(*each, dtype="float32"),
        above_zero(*each, dtype="float32"),
    ]


def _gradient_operands(*shape, channels: int = 2) -> list[Operand]:
    each = (channels,)
    return [
        real(*shape, dtype="float32"),
        real(*shape, dtype="float32"),
        above_zero(*each, dtype="float32"),
        real(*each, dtype="float32"),
        above_zero(*each, dtype="float32"),
    ]


CASES = {
    "moments of rows and an axis": Case(lambda a: list(tf.nn.moments(a, [0, 1])), [real(B, 3, 2)]),
    "moments of blocks of rows": Case(lambda a: list(tf.nn.moments(a, [0])), [real(2 * B, 2)]),
    "moments of columns": Case(lambda a: list(tf.nn.moments(a, [1])), [real(B, 3, B)]),
    "moments of everything": Case(lambda a: list(tf.nn.moments(a, [0, 1, 2], keepdims=True)), [real(B, 2, 2 * B)]),
    "moments of a sum": Case(lambda a: list(tf.nn.moments(tf.reduce_sum(a, 0), [0])), [real(B, 3, 2)]),
    "moments of half precision": Case(
        lambda a: list(tf.nn.moments(a, [0])), [real(B, 2, dtype="float16")], tolerance=1e-2
    ),
    "gradient of moments": Case(gradients(lambda a: list(tf.nn.moments(a, [0]))), [real(B, 3)]),
    "gradient of a normalization": Case(
        gradients(lambda a: (a - tf.nn.moments(a, [0])[0]) * tf.math.rsqrt(tf.nn.moments(a, [0])[1] + 0.5)),
        [real(B, 3)],
    ),
    **{
        f"FusedBatchNorm{version}{'' if training else ' that does not train'}": Case(
            _fused(version, is_training=training, exponential_avg_factor=0.75), _operands(B, 2, 3, 2), tolerance=1e-5
        )
        for version in _VERSIONS
        for training in (True, False)
    },
    "FusedBatchNormV3 that does not average": Case(_fused("V3"), _operands(B, 2, 3, 2), tolerance=1e-5),
    "FusedBatchNormV3, channels first": Case(_fused("V3", data_format="NCHW"), _operands(B, 2, 3, 2), tolerance=1e-5),
    "FusedBatchNormV3 of images of rows": Case(_fused("V3"), _operands(B, B, 2, 2), tolerance=1e-5),
    "FusedBatchNormV3 of half precision": Case(
        _fused("V3"), [real(B, 2, 3, 2, dtype="float16"), *_operands(1)[1:]], tolerance=1e-2
    ),
    **{
        f"FusedBatchNormGrad{version}{'' if training else ' that does not train'}": Case(
            _gradient(version, is_training=training), _gradient_operands(B, 2, 3, 2), tolerance=1e-5
        )
        for version in _VERSIONS
        for training in (True, False)
    },
    "FusedBatchNormGradV3, channels first": Case(
        _gradient("V3", data_format="NCHW"), _gradient_operands(B, 2, 3, 2), tolerance=1e-5
    ),
    "gradient of a fused normalization": Case(
        gradients(lambda x, scale, offset: tf.compat.v1.nn.fused_batch_norm(x, scale, offset, epsilon=0.5)[0]),
        _operands(B, 2, 3, 2)[:3],
        tolerance=1e-5,
    ),
}

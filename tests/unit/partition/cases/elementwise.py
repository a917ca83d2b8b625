"""Operations that compute each element of their results from one element of each operand."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from unit.partition.brute_force import (
    B,
    Case,
    Operand,
    above_zero,
    between,
    eighths,
    gradients,
    indices,
    integers,
    operation,
    real,
    truths,
)

R = tf.raw_ops

CASES: dict[str, Case] = {}


def _add(types: str, operands: list[Operand], tolerance: float | None = None) -> None:
    CASES.update({type_: Case(operation(type_), operands, tolerance=tolerance) for type_ in types.split()})


def _with_infinities(generator, shape):
    return np.select(
        [generator.integers(0, 9, shape) == 0, generator.integers(0, 9, shape) == 0],
        [np.inf, np.nan],
        eighths(generator, shape),
    )


_SHAPE = (B, 3, 2 * B)
_add(
    "Abs Asinh Atan BesselI0e BesselI1e Ceil Cos Elu Erf Erfc Exp Expm1 Floor LeakyRelu Neg OnesLike"
    " PreventGradient Relu Relu6 Rint Round Selu Sigmoid Sign Sin Sinh Cosh Snapshot Softplus Softsign Square"
    " StopGradient"
    " Tan"
    " Tanh ZerosLike",
    [real(*_SHAPE)],
)
_add("Acos Asin Atanh Erfinv", [between(-0.875, 0.875, *_SHAPE)])
_add("IsFinite IsInf IsNan", [Operand(_SHAPE, _with_infinities, partial=True)])
_add("Ndtri", [between(0.125, 0.875, *_SHAPE)])
_add("Acosh", [between(1, 4, *_SHAPE)])
_add("Digamma Inv Lgamma Log Log1p Reciprocal Rsqrt Sqrt", [above_zero(*_SHAPE)])
CASES["CheckNumerics"] = Case(lambda a: tf.debugging.check_numerics(a, "no number"), [real(*_SHAPE)])
CASES["CheckNumericsV2"] = Case(lambda a: R.CheckNumericsV2(tensor=a, message="no number"), [real(*_SHAPE)])
_add("BesselI0 BesselI1 BesselJ0 BesselJ1 Dawsn FresnelCos FresnelSin", [real(*_SHAPE)])
_add("BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 Expint Spence", [above_zero(*_SHAPE)])
_add("Invert PopulationCount", [integers(*_SHAPE)])
_add("Betainc", [above_zero(*_SHAPE), above_zero(*_SHAPE), between(0.125, 0.875, *_SHAPE)])
_add("IgammaGradA RandomGammaGrad", [above_zero(*_SHAPE), above_zero(*_SHAPE)], tolerance=1e-9)
_add("ApproximateEqual", [real(*_SHAPE), real(*_SHAPE)])
_add("FakeQuantWithMinMaxArgs", [real(*_SHAPE, dtype="float32")])
_add("FakeQuantWithMinMaxArgsGradient", [real(*_SHAPE, dtype="float32")] * 2)
_add(
    "FakeQuantWithMinMaxVarsPerChannel",
    [real(*_SHAPE, 3, dtype="float32"), between(-2, -1, 3, dtype="float32"), between(1, 2, 3, dtype="float32")],
)
CASES["FakeQuantWithMinMaxVars"] = Case(
    lambda a: R.FakeQuantWithMinMaxVars(inputs=a, min=-1.5, max=1.0), [real(*_SHAPE, dtype="float32")]
)
_add("LogicalNot", [truths(*_SHAPE)])

_add(
    "EluGrad LeakyReluGrad Relu6Grad ReluGrad SeluGrad SoftplusGrad SoftsignGrad TanhGrad InvGrad ReciprocalGrad"
    " SigmoidGrad",
    [real(B, 2 * B), real(B, 2 * B)],
)
_add("RsqrtGrad SqrtGrad", [above_zero(B, 2 * B), real(B, 2 * B)])

_ONE, _OTHER = (B, 1, 2 * B), (B, 3, 1)
_add("NextAfter", [real(*_ONE), real(*_OTHER)], 0)
_add(
    "AddV2 Add Sub Mul Maximum Minimum SquaredDifference Equal NotEqual Greater GreaterEqual Less LessEqual Atan2"
    " MulNoNan DivNoNan FloorDiv",
    [real(*_ONE), real(*_OTHER)],
)
_add("RealDiv Div FloorMod TruncateMod Mod", [real(*_ONE), above_zero(*_OTHER)])
_add("Xdivy Xlog1py Xlogy", [real(B, 2 * B), above_zero(B, 2 * B)])
_add("Pow Igamma Igammac", [above_zero(*_ONE), above_zero(*_OTHER)])
_add("Zeta", [between(1.5, 4, *_ONE), above_zero(*_OTHER)], 1e-9)
_add("Polygamma", [indices(3, *_ONE, dtype="float64"), above_zero(*_OTHER)], 1e-9)
_add("BitwiseAnd BitwiseOr BitwiseXor", [integers(*_ONE), integers(*_OTHER)])
_add(
    "TruncateDiv",
    [integers(*_ONE), Operand(_OTHER, lambda generator, sizes: indices(5, *_OTHER).make(generator, sizes) + 1)],
)
_add("LeftShift RightShift", [indices(100, *_ONE), indices(4, *_OTHER)])
_add("LogicalAnd LogicalOr", [truths(*_ONE), truths(*_OTHER)])

CASES |= {
    "sum of a vector and a matrix": Case(tf.add, [real(B, 4), real(4)]),
    "difference of pairs of rows": Case(lambda a, b: a[:, None] - b[None], [real(B), real(B)], gathers=True),
    "product of a matrix of rows and rows": Case(tf.multiply, [real(B, B), real(B)], gathers=True),
    "product with a scalar": Case(tf.multiply, [real(B, 3), real()]),
    "numbers of rows may be one": Case(tf.add, [real(B, 3), real(1, 3)]),
    "sum of a sum": Case(lambda a, b: tf.reduce_sum(a, 0) + b, [real(B, 3), real(3)]),
    "product of sums": Case(lambda a: tf.reduce_sum(a, 0) * tf.reduce_sum(a * a, 0), [real(B, 3)]),
    "quotient of sums": Case(lambda a: tf.reduce_sum(a, 0) / tf.reduce_sum(a * a + 1, 0), [real(B, 3)]),
    "sum used twice": Case(lambda a: [tf.reduce_sum(a, 0) * 2, tf.reduce_sum(a, 0)[:2]], [real(B, 3)]),
    "integers": Case(lambda a, b: [a + b, a * b, a // (b * b + 1), a % (b * b + 1), -a], [integers(B, 2), integers(2)]),
    "half precision": Case(
        lambda a, b: a * b + a, [real(B, 2 * B, dtype="float16"), real(2 * B, dtype="float16")], gathers=True
    ),
    "single precision": Case(
        lambda a, b: tf.exp(a) * b, [real(B, 2 * B, dtype="float32"), real(2 * B, dtype="float32")], gathers=True
    ),
    "leaky relu with a slope": Case(operation("LeakyRelu", alpha=0.25), [real(B, 2 * B)]),
    "infinite and no numbers": Case(
        lambda a: [tf.math.is_inf(1 / a), tf.math.is_nan(a / a), tf.math.is_finite(1 / a)], [real(B, 2 * B)]
    ),
    "ClipByValue": Case(operation("ClipByValue"), [real(B, 2 * B), real(B, 2 * B), real(B, 2 * B)]),
    "Pow of a sum": Case(lambda a: tf.pow(tf.reduce_sum(a, 0), 2.0), [real(B, 3)]),
    "clipping by scalars": Case(tf.clip_by_value, [real(B, 2 * B), real(), real()]),
    "Identity": Case(tf.identity, [real(B, 3, 2 * B)]),
    "IdentityN": Case(lambda a, b: tf.identity_n([a, b]), [real(B, 3), real(2 * B)]),
    "AddN": Case(lambda a, b, c: tf.add_n([a, b, c]), [real(B, B), real(B, B), real(B, B)]),
    "AddN of sums": Case(
        lambda a, b: tf.add_n([tf.reduce_sum(a, 0), tf.reduce_sum(b, 0), a[0]]), [real(B, 3), real(B, 3)], gathers=True
    ),
    "Conj": Case(lambda a: R.Conj(input=a), [real(B, 2 * B, dtype="complex128")]),
    "Real": Case(lambda a: R.Real(input=a, Tout=tf.float64), [real(B, 2 * B, dtype="complex128")]),
    "Imag": Case(
        lambda a: R.Imag(input=a * tf.constant(1j, tf.complex128), Tout=tf.float64),
        [real(B, 2 * B, dtype="complex128")],
    ),
    "Bitcast to the same size": Case(lambda a: tf.bitcast(a, tf.int32), [real(B, 2 * B, dtype="float32")]),
    "Bitcast to a smaller type": Case(lambda a: tf.bitcast(a, tf.int32), [real(B, 2 * B)]),
    "Bitcast to a larger type": Case(lambda a: tf.bitcast(a, tf.int64), [indices(9, B, 3, 2)]),
    **{
        f"Cast of {source} to {target}": Case(lambda a, target=target: tf.cast(a, target), [operand])
        for source, operand in {
            "double": real(B, 2 * B),
            "float": real(B, 2 * B, dtype="float32"),
            "half": real(B, 2 * B, dtype="float16"),
            "int": integers(B, 2 * B),
            "bool": truths(B, 2 * B),
        }.items()
        for target in ("float64", "float32", "float16", "int32", "int64", "bool")
    },
    "Cast of a sum to an integer": Case(lambda a: tf.cast(tf.reduce_sum(a, 0), tf.int32), [real(B, 3)]),
    "Select of elements": Case(operation("Select"), [truths(B, B), real(B, B), real(B, B)]),
    "Select of rows": Case(operation("Select"), [truths(B), real(B, 2 * B), real(B, 2 * B)]),
    "Select by a scalar": Case(operation("Select"), [truths(), real(B, 2 * B), real(B, 2 * B)]),
    "SelectV2": Case(operation("SelectV2"), [truths(B, 1), real(B, 2 * B), real(2 * B)], gathers=True),
    "SelectV2 of a matrix of rows": Case(operation("SelectV2"), [truths(B, 1), real(B, B), real(B)], gathers=True),
    "gradient of a weighted mean": Case(
        lambda a, b: tf.gradients(tf.reduce_mean((a * b) ** 2), [a, b]), [real(B, 3), real(3)]
    ),
    "gradient of what is broadcast": Case(
        lambda a, b: tf.gradients(tf.reduce_sum(a * b * b), [a, b]), [real(B, 3), real(B, 1)]
    ),
    "gradient of rows that may be one": Case(gradients(tf.multiply), [real(B, 3), real(1, 3)]),
    "gradient of a choice": Case(
        gradients(lambda a, b: tf.where(a > b, a, b * 2)), [real(B, 2 * B), real(2 * B)], gathers=True
    ),
    "second gradient": Case(
        lambda a, b: tf.gradients(
            tf.add_n([tf.reduce_sum(gradient**2) for gradient in tf.gradients(tf.reduce_sum((a * b) ** 2), [a, b])]),
            [a, b],
        ),
        [real(B, 3), real(3)],
    ),
    "division by the number of rows": Case(lambda a: a / tf.cast(tf.shape(a)[0], tf.float64), [real(B, 2)]),
}

"""Random numbers: those that one process would draw."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from unit.partition.brute_force import B, Case, above_zero, operation, real

R = tf.raw_ops
_SEEDED = {"seed": 5, "seed2": 7}
_STATELESS = {"seed": [1, 2]}
_KEYED = {"key": [3], "counter": [1, 0], "alg": 1}

_TYPES = {
    **{
        type_: {**_SEEDED, "dtype": tf.float64}
        for type_ in ("RandomStandardNormal", "RandomUniform", "TruncatedNormal")
    },
    "RandomUniformInt": {**_SEEDED, "minval": 3, "maxval": 99},
    **{f"StatelessRandom{kind}": {**_STATELESS, "dtype": tf.float64} for kind in ("Normal", "Uniform")},
    "StatelessTruncatedNormal": {**_STATELESS, "dtype": tf.float64},
    "StatelessRandomUniformInt": {**_STATELESS, "minval": 3, "maxval": 99},
    "StatelessRandomUniformFullInt": {**_STATELESS, "dtype": tf.int32},
    **{f"StatelessRandom{kind}V2": {**_KEYED, "dtype": tf.float64} for kind in ("Normal", "Uniform")},
    "StatelessTruncatedNormalV2": {**_KEYED, "dtype": tf.float64},
    "StatelessRandomUniformIntV2": {**_KEYED, "minval": 3, "maxval": 99},
    "StatelessRandomUniformFullIntV2": {**_KEYED, "dtype": tf.int32},
}

_SHAPES = {
    "a row each": tf.shape,
    "two numbers a row": lambda a: [tf.shape(a)[0] * 2],
    "rows behind": lambda a: [2, tf.shape(a)[0]],
    "rows by rows": lambda a: [tf.shape(a)[0], tf.shape(a)[0]],
    "no rows": lambda a: [3],
    "one number": lambda a: tf.constant([], tf.int32),
}


def _drawn(shape, type_, **attributes):
    return lambda a: operation(type_, **attributes)(shape(a))


def _noisy(rows: tf.Tensor, type_: str) -> tf.Tensor:
    return rows * operation(type_, **_TYPES[type_])(tf.shape(rows))


CASES = {
    **{
        f"{type_}, for rows behind rows": Case(lambda a, type_=type_: _noisy(tf.concat([a, a], 0), type_), [real(B, 3)])
        for type_ in ("RandomUniform", "StatelessRandomNormalV2")
    },
    "RandomUniform, for what is whole": Case(
        lambda a: tf.concat([a, a], 0) * _noisy(tf.ones([tf.shape(a)[0] * 2, 3], tf.float64), "RandomUniform"),
        [real(B, 3)],
    ),
    **{
        type_: Case(lambda a, type_=type_: operation(type_, **_TYPES[type_])(tf.shape(a)), [real(B, 3)])
        for type_ in _TYPES
    },
    **{
        f"{type_}, {name}": Case(
            lambda a, type_=type_, shape=shape: operation(type_, **_TYPES[type_])(shape(a)), [real(B, 3)]
        )
        for type_ in ("RandomUniform", "StatelessRandomNormalV2")
        for name, shape in _SHAPES.items()
    },
    "RandomShuffle": Case(lambda a: R.RandomShuffle(value=a, **_SEEDED), [real(B, 3)], gathers=True),
    "SampleDistortedBoundingBoxV2": Case(
        lambda a: list(
            R.SampleDistortedBoundingBoxV2(
                image_size=tf.shape(a) * 50,
                bounding_boxes=tf.zeros([1, 0, 4]),
                min_object_covered=0.5,
                use_image_if_no_bounding_boxes=True,
                **_SEEDED,
            )
        ),
        [real(B, 4, 3)],
    ),
    "NonDeterministicInts": Case(
        lambda a: tf.zeros_like(R.NonDeterministicInts(shape=tf.shape(a, tf.int64), dtype=tf.int64)), [real(B, 4)]
    ),
    "Timestamp": Case(lambda a: a * tf.cast(tf.timestamp() > 1.0, a.dtype), [real(B, 4)]),
    "RandomGamma": Case(
        lambda a, b: tf.random.gamma([tf.shape(b)[0]], a, dtype=tf.float64, seed=1),
        [above_zero(B), real(B)],
        gathers=True,
    ),
    "RandomPoissonV2": Case(
        lambda a: R.RandomPoissonV2(shape=[tf.shape(a)[0]], rate=tf.fill([2], 3.0), seed=1), [real(B)]
    ),
    "Multinomial": Case(lambda a: R.Multinomial(logits=a, num_samples=3, seed=1), [real(B, 4)], gathers=True),
    "StatelessMultinomial": Case(
        lambda a: tf.random.stateless_categorical(a, 3, [1, 2]) * 2, [real(B, 4)], gathers=True
    ),
    "StatelessRandomGammaV2": Case(
        lambda a: R.StatelessRandomGammaV2(shape=tf.shape(a), seed=[1, 2], alpha=a), [above_zero(B, 2)], gathers=True
    ),
    "StatelessRandomGammaV3": Case(
        lambda a: R.StatelessRandomGammaV3(shape=tf.shape(a), alpha=tf.constant(2.0), **_KEYED), [real(B, 2)]
    ),
    "StatelessRandomBinomial": Case(
        lambda a: R.StatelessRandomBinomial(shape=tf.shape(a), seed=[1, 2], counts=[9.0, 5.0], probs=[0.5, 0.25]),
        [real(B, 2)],
    ),
    "StatelessRandomPoisson": Case(
        lambda a: R.StatelessRandomPoisson(shape=tf.shape(a), seed=[1, 2], lam=3.0, dtype=tf.float32), [real(B, 2)]
    ),
    "ParameterizedTruncatedNormal": Case(
        lambda a: R.ParameterizedTruncatedNormal(
            shape=tf.shape(a), means=0.0, stdevs=2.0, minvals=-1.0, maxvals=1.0, **_SEEDED
        ),
        [real(B, 2)],
    ),
    "StatelessParameterizedTruncatedNormal": Case(
        lambda a: R.StatelessParameterizedTruncatedNormal(
            shape=tf.shape(a), means=0.0, stddevs=2.0, minvals=-1.0, maxvals=1.0, **_STATELESS
        ),
        [real(B, 2)],
    ),
    **{
        f"{type_} of {dtype}, {name}": Case(
            _drawn(shape, type_, **{**_KEYED, "counter": counter, **attributes}), [real(B, 3)]
        )
        for name, shape in _SHAPES.items()
        for dtype in ("float32", "float64", "int32", "int64", "half", "bfloat16")
        for counter in (np.array([1, 0], np.uint64), np.array([2**64 - 2, 5], np.uint64))
        for type_, attributes in (
            {
                "StatelessRandomUniformFullIntV2": {"dtype": dtype},
                "StatelessRandomUniformIntV2": {"minval": tf.constant(3, dtype), "maxval": tf.constant(99, dtype)},
            }
            if dtype.startswith("int")
            else {"StatelessRandomNormalV2": {"dtype": dtype}, "StatelessRandomUniformV2": {"dtype": dtype}}
        ).items()
    },
    "compiled noise": Case(
        tf.function(lambda a: a + tf.random.stateless_uniform(tf.shape(a), [1, 2], dtype=a.dtype), jit_compile=True),
        [real(B, 3)],
    ),
    "compiled noise that meets rows": Case(
        tf.function(
            lambda a: a + tf.reduce_sum(a, 0) * tf.random.stateless_uniform(tf.shape(a), [1, 2], dtype=a.dtype),
            jit_compile=True,
        ),
        [real(B, 3)],
    ),
    "noise": Case(lambda a: a + tf.random.stateless_normal(tf.shape(a), [1, 2], dtype=a.dtype), [real(B, 3)]),
    "dropout": Case(lambda a: tf.nn.experimental.stateless_dropout(a, 0.5, [1, 2]), [real(B, 3)]),
    "noise of rows of another": Case(
        lambda a, b: a * tf.random.stateless_uniform([tf.shape(b)[0], 1], [1, 2], dtype=a.dtype),
        [real(B, 3), real(B, 2)],
    ),
}

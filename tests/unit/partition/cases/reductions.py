"""Sums, means, extrema and other reductions along axes."""

from __future__ import annotations

import tensorflow as tf

from unit.partition.brute_force import B, Case, gradients, integers, operation, real, truths

_OPERANDS = {"All": truths, "Any": truths}

CASES = {
    **{
        f"{type_} over {axes}{', kept' if keeps else ''}": Case(
            operation(type_, axis=axes, keep_dims=keeps),
            [_OPERANDS.get(type_, real)(B, 2, B)],
            gathers=type_ in ("Prod", "EuclideanNorm") and axes != [1],
        )
        for type_ in ("Sum", "Mean", "Max", "Min", "All", "Any", "Prod", "EuclideanNorm")
        for axes, keeps in (([0], False), ([0, -1], True), ([1], True), (-3, True), ([0, 1, 2], False))
    },
    **{
        f"{type_} over no axis": Case(operation(type_, axis=tf.constant([], tf.int32).numpy()), [real(B, 2)])
        for type_ in ("Sum", "Mean", "Max")
    },
    **{
        f"{type_} over blocks of rows": Case(operation(type_, axis=[0]), [real(2 * B, 2)])
        for type_ in ("Sum", "Mean", "Max")
    },
    **{f"{type_} of integers": Case(operation(type_, axis=[0]), [integers(B, 2)]) for type_ in ("Sum", "Max", "Min")},
    "mean of a mean": Case(lambda a: tf.reduce_mean(tf.reduce_mean(a, 0)), [real(B, 4)]),
    "mean of everything": Case(tf.reduce_mean, [real(B, 4)]),
    "mean of half precision": Case(tf.reduce_mean, [real(B, 4, dtype="float16")]),
    "extremum of a sum": Case(lambda a: tf.reduce_max(tf.reduce_sum(a, 0)), [real(B, 4)]),
    "sum of an extremum": Case(lambda a: tf.reduce_sum(tf.reduce_max(a, 0)), [real(B, 4)]),
    "difference of extrema": Case(lambda a: tf.reduce_max(a, 0) - tf.reduce_min(a, 0), [real(B, 4)]),
    "L2Loss": Case(tf.nn.l2_loss, [real(B, 3, 2 * B)]),
    **{
        f"gradient of {name}": Case(
            gradients(lambda a, reduce=reduce: reduce(a, 0)), [real(B, 2)], gathers=name == "a product"
        )
        for name, reduce in {
            "a sum": tf.reduce_sum,
            "a mean": tf.reduce_mean,
            "a maximum": tf.reduce_max,
            "a product": tf.reduce_prod,
        }.items()
    },
    "gradient of a mean over columns": Case(gradients(lambda a: tf.reduce_mean(a, 1)), [real(B, 2 * B)]),
    "gradient of a variance": Case(gradients(lambda a: tf.math.reduce_variance(a, 0)), [real(B, 2)]),
    "logarithm of a sum of exponentials": Case(lambda a: tf.reduce_logsumexp(a, 0), [real(B, 2)]),
}

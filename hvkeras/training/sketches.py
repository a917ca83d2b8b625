"""Sketches of variables: a few numbers per variable, with which ranks compare their values.

A sketch consists of a few sums of the elements under fixed pseudo-random signs. The difference of two sketches
estimates the norm of any difference of the variables (Alon, Matias, Szegedy: "The space complexity of approximating the
frequency moments", 1996). Sums without signs would miss differences in the bias of a softmax layer, whose gradients add
up to zero.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras import compat
from hvkeras.collectives.operations import Max
from hvkeras.collectives.reductions import allreduce
from hvkeras.job.process_sets import ProcessSet

SKETCHES = 4  # sums per variable
WIDTH = 4096  # elements per row; every row uses the same column signs
_NOT_FINITE = 3e38  # replaces infinity and NaN, so that they show as a difference if only some ranks have them

_signs = np.random.default_rng(0)
_COLUMNS = _signs.choice([-1.0, 1.0], (WIDTH, SKETCHES)).astype(np.float32)


def tolerance(steps: int) -> float:
    """Return the tolerance for differences of weights, relative to their norm.

    Ranks apply the same gradients, so weights differ at most by rounding on different processors. Rounding errors
    accumulate like a random walk.

    Args:
        steps: Steps since the start.
    """
    return 1e-5 + 2e-7 * math.sqrt(steps)


def sketch(variable: Any, columns: Any = _COLUMNS) -> Any:
    """Compute the sketch of a variable.

    Args:
        variable: A floating-point variable or tensor.
        columns: The signs of the elements in a row.

    Returns:
        A float32 tensor of shape `[SKETCHES + 1]`: the signed sums and the norm.
    """
    values = _flat(variable)
    rows, rest = divmod(values.shape[0], WIDTH)
    sums = tf.matmul(values[tf.newaxis, rows * WIDTH :], columns[:rest])
    if rows:
        signs = np.random.default_rng(1).choice([-1.0, 1.0], (rows, 1)).astype(np.float32)
        matrix = tf.matmul(tf.reshape(values[: rows * WIDTH], [rows, WIDTH]), columns)
        sums += tf.reduce_sum(matrix * signs, 0, keepdims=True)
    return _finite(sums, values[tf.newaxis])[0]


def _sketch_all(variables: Sequence[Any]) -> Any:
    """Sketch variables; short ones of equal length together, as tracing takes milliseconds per operation."""
    columns = tf.constant(_COLUMNS)
    indices: dict[int, list[int]] = {}
    for index, variable in enumerate(variables):
        indices.setdefault(variable.shape.num_elements(), []).append(index)
    sketched = []
    for length, group in indices.items():
        if length > WIDTH:
            sketched += [sketch(variables[index], columns)[tf.newaxis] for index in group]
        else:
            values = tf.stack([_flat(variables[index]) for index in group])
            sketched.append(_finite(tf.matmul(values, columns[:length]), values))
    return tf.gather(tf.concat(sketched, 0), np.argsort([index for group in indices.values() for index in group]))


def _flat(variable: Any) -> Any:
    return tf.cast(variable if len(variable.shape) == 1 else tf.reshape(variable, [-1]), tf.float32)


def _finite(sums: Any, values: Any) -> Any:
    """Return rows of sketches: the sums, and the norms of the summed values."""
    result = tf.concat([sums, tf.norm(values, axis=1, keepdims=True)], 1)
    return tf.where(tf.math.is_finite(result), result, _NOT_FINITE)


# For each model and purpose: the keys of variables, and the traced function, as tracing takes longer than running.
_functions: weakref.WeakKeyDictionary[Any, dict[str, tuple[list[Any], Any]]] = weakref.WeakKeyDictionary()


def sketches(model: Any, purpose: str, variables: Sequence[Any]) -> Any:
    """Sketch variables, with a function that is retraced if the variables change.

    Args:
        purpose: The key of the traced function.

    Returns:
        A float32 tensor of shape `[variables, SKETCHES + 1]`.
    """
    natives = [compat.as_tf_variable(variable) for variable in variables]
    keys = [compat.variable_key(variable) for variable in variables]
    if not natives:
        return tf.zeros([0, SKETCHES + 1])

    functions = _functions.setdefault(model, {})
    if purpose not in functions or functions[purpose][0] != keys:
        # Keep the concrete function: TensorFlow would warn about many tf.functions where many models are trained.
        functions[purpose] = (keys, tf.function(lambda: _sketch_all(natives), autograph=False).get_concrete_function())
    return functions[purpose][1]()


def spread(mine: Any, name: str, process_set: ProcessSet, more: Sequence[float] = ()) -> tuple[Any, Any, Any]:
    """Return the maximum and minimum of the ranks' sketches, and the maxima of more numbers."""
    flat, count = tf.reshape(mine, [-1]), len(more)
    values = tf.concat([tf.constant(more, tf.float32, [count]), flat, -flat], 0)
    largest = allreduce(values, op=Max, name=name, process_set=process_set).numpy()
    high, low = largest[count : count + len(flat)], -largest[count + len(flat) :]
    return high.reshape(mine.shape), low.reshape(mine.shape), largest[:count]


def all_diverged(high: Any, low: Any, steps: int) -> list[int]:
    """Return the indices of the variables whose sketches differ by more than the tolerance.

    Args:
        high: The maximum of the ranks' sketches, of shape `[variables, SKETCHES + 1]`.
        low: The minimum, of the same shape.
        steps: Steps since the start.
    """
    difference = (high.astype(np.float64) - low)[:, :-1].max(1, initial=0.0)
    allowed = tolerance(steps) * high[:, -1].astype(np.float64)
    return [int(index) for index in np.flatnonzero(difference > allowed)]

"""Shapes that are known only when a graph runs: ranks compare them before the collective.

Static shapes are part of a collective's plan (`hvkeras.plans`). Some engines compare the run-time shapes
themselves (`Backend.compares_shapes`); for all others, each rank gathers the shapes of all ranks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras.collectives import mismatch
from hvkeras.compat import graphs
from hvkeras.job.session import Session
from hvkeras.plans import Call, Plan

_ROWS_ARE_FREE = ("allgather", "alltoall")  # the first dimension may differ between ranks
_MOST_DIMENSIONS = 8


def compared(session: Session, plan: Plan, calls: Sequence[Call],
             names: Sequence[str] | None = None) -> Sequence[Call]:
    """Adds a check to a graph that fails, before the plan's calls, if the ranks' shapes do not match.

    Args:
        session: The session.
        plan: The plan.
        calls: Its calls.
        names: The names of the calls' tensors; by default those of the plan, which must then be in the same order.

    Returns:
        The calls, on tensors that have been compared.
    """
    if tf.executing_eagerly() or session.backend.compares_shapes or all(map(_is_known, calls)):
        return calls
    rows = [_row(tensor, call.operation in _ROWS_ARE_FREE) for call in calls for tensor in call.tensors]
    key = f"{plan.key} shapes"
    table = session.backend.allgather(tf.concat(rows, 0)[None], key, plan.ranks)
    raises = mismatch.operations()
    inputs = [tensor for call in calls for tensor in call.tensors]
    differ = functools.partial(_difference, plan, names or plan.names,
                               [tensor.dtype.name for tensor in inputs], [int(row.shape[0]) for row in rows])
    compare = functools.partial(mismatch.refuse_in_graph if raises else mismatch.refuse_immediately, key, differ)
    agreed = tf.numpy_function(compare, [table], tf.bool)
    graphs.run_independently(agreed.op)
    with tf.control_dependencies([agreed]):
        checked = iter(raises.hvkeras_check_mismatch(inputs=inputs, key=key) if raises else map(tf.identity, inputs))
    return [call.on([next(checked) for _ in call.tensors]) for call in calls]


def _is_known(call: Call) -> bool:
    first = int(call.operation in _ROWS_ARE_FREE)
    return all(tensor.shape.rank is not None and tensor.shape[first:].is_fully_defined() for tensor in call.tensors)


def _row(tensor: Any, rows_are_free: bool) -> Any:
    """Returns the number of dimensions, then the dimensions; -1 for those that may differ or do not exist."""
    shape = tf.shape(tensor, tf.int64)
    if rows_are_free:
        shape = tf.concat([[-1], shape[1:]], 0)
    known = tensor.shape.rank
    row = tf.concat([tf.cast(tf.rank(tensor), tf.int64)[None], shape], 0)
    if known is None:
        row = tf.pad(row, [[0, 1 + _MOST_DIMENSIONS - tf.size(row)]], constant_values=-1)
    return tf.ensure_shape(row, [1 + (_MOST_DIMENSIONS if known is None else known)])


def _difference(plan: Plan, names: Sequence[str], dtypes: Sequence[str], lengths: Sequence[int], table: Any) -> str:
    """Describes the first difference in the table of all ranks' shapes; "" if there is none."""
    starts = np.cumsum([0, *lengths])
    for place, (start, end) in enumerate(itertools.pairwise(starts)):
        other = next((row for row in range(1, len(table)) if (table[row, start:end] != table[0, start:end]).any()), 0)
        if other:
            one, two = (f"{names[place]} {dtypes[place]}{_in_words(table[row, start:end])} on rank"
                        f" {plan.ranks[row]}" for row in (0, other))
            return (f"ranks {plan.ranks[0]} and {plan.ranks[other]} communicate different things: in {plan.label},"
                    f" tensor {place + 1} is {one} and {two}")
    return ""


def _in_words(row: Any) -> str:
    return str([None if size < 0 else int(size) for size in row[1 : 1 + int(row[0])]])

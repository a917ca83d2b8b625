"""Sums, means, extrema and other reductions along axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvkeras.partition.decisions import Call, Decision, by_pattern
from hvkeras.partition.layouts import Partial
from hvkeras.partition.patterns import Pattern
from hvkeras.partition.rule_table import fitted, pattern, rule
from hvkeras.partition.sizes import product

_REDUCTIONS = {"Sum": "sum", "Max": "max", "Min": "min", "All": "min", "Any": "max", "Prod": None,
               "EuclideanNorm": None}
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def reduced(call: Call, reduction: str | None, linear: str | tuple[int, ...] = ()) -> Pattern | None:
    """Return the pattern of a reduction whose second operand has the axes."""
    axes, dimensions = call.numbers(1), call.rank(0)
    if axes is None or dimensions is None or dimensions > len(_LETTERS):
        return None
    removed = {int(axis) % dimensions for axis in axes.ravel()} if dimensions else set()
    letters = _LETTERS[:dimensions]
    if reduction is None:
        letters = "".join(letter.upper() if axis in removed else letter for axis, letter in enumerate(letters))
    kept = "." if call.attribute("keep_dims") else ""
    found = fitted(call, f"{letters},#->" + "".join(
        kept if axis in removed else letter for axis, letter in enumerate(letters)), reduction, linear)
    if found is not None and kept:
        found.sizes.update({f".0.{axis}": 1 for axis in removed})
    return found


@rule(*_REDUCTIONS)
def reduction(call: Call) -> Pattern | None:
    """Of a product, the ranks' parts could be multiplied, which no collective does."""
    kind = _REDUCTIONS[call.type]
    return reduced(call, kind, (0,) if kind == "sum" else ())


@rule("Mean")
def mean(call: Call) -> Pattern | Decision | None:
    """Each rank sums its elements, and divides by the number of elements of all ranks."""
    found = reduced(call, "sum", (0,))
    shape, axes = call.shape(0), call.numbers(1)
    if found is None or shape is None or axes is None:
        return None
    decision = by_pattern(call, found)
    layout = decision.results[0].layout
    if not isinstance(layout, Partial) or isinstance(call.operands[0].layout, Partial):
        return decision
    sizes = [shape[int(axis) % len(shape)] for axis in axes.ravel()]
    if None in sizes:
        return None
    count = product(size for size in sizes if size is not None)
    keep = call.attribute("keep_dims")

    def create(_operation: Any, operands: Sequence[tf.Tensor], sizes: Any) -> list[tf.Tensor]:
        total = tf.raw_ops.Sum(input=operands[0], axis=operands[1], keep_dims=keep)
        return [total / tf.cast(sizes.number(count, tf.int64), total.dtype)]

    return Decision(decision.operands, decision.results, decision.vectors, create)


pattern("L2Loss", "*->", "sum")

"""Planned collectives with gradients of any order, on which the public functions are based."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvkeras.collectives.adasum import adasum_raw
from hvkeras.collectives.dispatch import allgather_raw, allreduce_raw, derived
from hvkeras.collectives.operations import (
    NAMES,
    REDUCTIONS,
    Adasum,
    Average,
    Scaling,
    Sum,
    gradient_divisor,
    of_tensors,
    reducing_engine,
)
from hvkeras.compat import graphs
from hvkeras.errors import UnsupportedError, explain
from hvkeras.job.session import current_session


def gathered(value: Any, ranks: tuple[int, ...], name: str | None) -> Any:
    """Gather rows, with a gradient that is itself differentiable."""

    @graphs.custom_gradient
    def gather(rows: Any) -> tuple[Any, Callable[[Any], Any]]:
        return allgather_raw(rows, ranks, name), lambda upstream: gathering_gradient(rows, upstream, ranks, name)

    return gather(value)


def gathering_gradient(rows: Any, upstream: Any, ranks: tuple[int, ...], name: str | None) -> Any:
    """Return the gradient of this rank's rows from the gradient of all gathered rows."""
    mine = ranks.index(current_session().topology.rank)
    summed = summed_for_gradient(upstream, ranks, name)
    if graphs.compiled_by_xla():  # XLA shapes are static, so all ranks gather the same number of rows
        return tf.split(summed, len(ranks))[mine]
    counts = allgather_raw(tf.shape(rows)[:1], ranks, derived(name, "counts"))
    start = tf.reduce_sum(counts[:mine])
    return summed[start : start + counts[mine]]


def summed_for_gradient(upstream: Any, ranks: tuple[int, ...], name: str | None) -> Any:
    """Sum the ranks' gradients of a gathered or broadcast tensor, and divide the sum by `gradient_divisor`."""
    [summed] = combined([upstream], Scaling(Sum), ranks, derived(name, "gradient"), "allreduce")
    divisor = gradient_divisor(ranks)
    return summed if divisor == 1 else summed / tf.cast(divisor, summed.dtype)


def combined(values: Sequence[Any], scaled: Scaling, ranks: tuple[int, ...], name: str | None,
              operation: str) -> list[Any]:
    """Combine tensors, with a gradient that is the same operation and itself differentiable."""

    @graphs.custom_gradient
    def reduce(*inputs: Any) -> tuple[list[Any], Callable[..., list[Any]]]:
        def gradient(*upstream: Any) -> list[Any]:
            if scaled.op not in (Average, Sum, Adasum):
                raise UnsupportedError(explain(f"allreduce with op=hvd.{NAMES[scaled.op]} has no gradient",
                                               "use hvd.Average or hvd.Sum, or tf.stop_gradient"))
            return combined(upstream, scaled, ranks, derived(name, "gradient"), operation)

        return _combine(inputs, scaled, ranks, name, operation), gradient

    results: list[Any] = reduce(*values)
    return results if isinstance(results, (list, tuple)) else [results]


def combined_slices(slices: Any, scaled: Scaling, ranks: tuple[int, ...], name: str | None) -> Any:
    """Gather and scale sparse tensors, with a gradient that is itself differentiable."""
    slices = of_tensors(slices)
    sent = scaled.sent(slices.values, len(ranks))
    values = gathered(sent.tensor, ranks, derived(name, "values"))
    indices = allgather_raw(slices.indices, ranks, derived(name, "indices"))
    if scaled.op == Average and values.dtype.is_integer:
        values = tf.truediv(values, len(ranks))  # as in Horovod, which truncates averages of dense integers only
        scaled = dataclasses.replace(scaled, op=Sum)
    return tf.IndexedSlices(scaled.received(values, sent, len(ranks)), indices, slices.dense_shape)


def _combine(inputs: Sequence[Any], scaled: Scaling, ranks: tuple[int, ...], name: str | None,
             operation: str) -> list[Any]:
    if scaled.op == Adasum:
        sent = [scaled.sent(tensor, len(ranks)) for tensor in inputs]
        received = adasum_raw([each.tensor for each in sent], ranks, name)
    else:
        engine = reducing_engine(ranks)
        sent = [scaled.sent(tensor, len(ranks), engine) for tensor in inputs]
        received = allreduce_raw([each.tensor for each in sent], REDUCTIONS[scaled.op], ranks, name, operation,
                                 scaled.text, [each.factors for each in sent], [each.spec for each in sent])
    return [scaled.received(*pair, len(ranks)) for pair in zip(received, sent, strict=True)]

"""Buckets: gradients fused into few collectives, in an order that is fixed when the step is traced."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

from hvkeras import compat
from hvkeras.backends.interface import Reduction
from hvkeras.collectives.adasum import adasum_raw
from hvkeras.collectives.compression import Compression
from hvkeras.collectives.differentiable import combined, combined_slices, gathering_gradient, of_tensors
from hvkeras.collectives.mismatch import raise_if_refused
from hvkeras.collectives.operations import (
    Adasum,
    Max,
    Scaling,
    Sent,
    Sum,
    number_in_graph,
    on_device,
    require_kernels,
    scale,
    shaped,
)
from hvkeras.collectives.reductions import grouped_allreduce
from hvkeras.collectives.run_time_shapes import compared
from hvkeras.compat import graphs
from hvkeras.errors import UnsupportedError, explain
from hvkeras.gradients import sparse_rows
from hvkeras.gradients.exchange import Exchange
from hvkeras.gradients.packing import by_dtype, pack
from hvkeras.gradients.step_parts import StepParts
from hvkeras.gradients.weighting import joining
from hvkeras.job.state import current_job
from hvkeras.plans.plan import Call, Plan
from hvkeras.profiling import recorder, spans


@graphs.unconverted
def reduce_gradients(
    gradients: Sequence[Any], variables: Sequence[Any], exchange: Exchange, local: Collection[Any] = (),
    all_ranks_skip: bool = False, differentiable: bool = False, parts: StepParts | None = None,
) -> list[Any]:
    """Reduces gradients over the ranks; of new values of variables (`compat.is_overwritten`), takes the largest.

    Args:
        gradients: Tensors, `tf.IndexedSlices` or None, one for each variable.
        variables: The variables.
        exchange: How to reduce.
        local: Keys of the variables whose gradients stay on this rank.
        all_ranks_skip: Whether a non-finite gradient of a local variable on one rank must be visible to all ranks.
        differentiable: Whether the reduced gradients are themselves differentiable. If a tape records them, they are
            not fused into buckets.
        parts: If given, only this rank's parts of the gradients are reduced for it, and noted there.

    Returns:
        The reduced gradients, in order; None stays None, and sparse gradients stay sparse. A rank outside the
        process set gets its own gradients back unchanged. With `parts`, this rank's parts; None for a gradient of
        which it has none.

    Raises:
        NotInitializedError: The job is not running.
        UsageError: The process set is not registered.
        UnsupportedError: XLA compiles the step, but cannot compile the backend's collectives.
    """
    ranks = exchange.process_set.members()
    recorder.recording().step(gradients, variables, local)
    if len(ranks) == 1 or not exchange.process_set.included() or not current_job().backend.has_ranks:
        return list(gradients)
    require_kernels(current_job().backend)
    gradients = [of_tensors(gradient) for gradient in gradients]
    overwritten = [place for place, (gradient, variable) in enumerate(zip(gradients, variables, strict=True))
                   if gradient is not None and compat.is_overwritten(variable)]
    if joining.active:
        gradients = joining.apply_weights(gradients, exchange.op, exchange.process_set, overwritten)
    results = [
        gradient if gradient is None or (isinstance(gradient, tf.IndexedSlices) and not exchange.sparse_as_dense)
        else tf.convert_to_tensor(gradient) for gradient in gradients
    ]
    kept = [place for place, variable in enumerate(variables)
            if results[place] is not None and local and compat.variable_key(variable) in local]
    names = [compat.variable_name(variable) for variable in variables]
    nan_flag = _nan_flag([results[place] for place in kept]) if kept and all_ranks_skip else None
    apart = {*kept, *overwritten}
    shared = [None if place in apart else gradient for place, gradient in enumerate(results)]
    if nan_flag is not None:
        shared, names, variables = [*shared, nan_flag], [*names, "local gradients are finite"], [*variables, None]
    if differentiable and graphs.under_tape():
        reduced = _reduce_differentiably(shared, names, exchange, ranks)
    else:  # a tape outside of a traced function, if there is one, differentiates it only after tracing
        reduced = _reduce_all(shared, variables, names, exchange, ranks, differentiable and not tf.executing_eagerly(),
                              parts)
    for place in kept:
        mine = results[place]
        factor = 1.0 / len(ranks) if exchange.scale_local_gradients and place not in overwritten else 1.0
        reduced[place] = _with_values(mine, lambda values: _add_flag(scale(values, factor),  # noqa: B023  # called at once
                                                                     reduced[-1] if nan_flag is not None else None))
    if largest := [place for place in overwritten if place not in kept]:
        with on_device(exchange.device_dense):
            values = grouped_allreduce([tf.stop_gradient(results[place]) for place in largest], op=Max,
                                       process_set=exchange.process_set, name=f"the new values of {exchange.name}")
        for place, value in zip(largest, values, strict=True):
            reduced[place] = value
    return reduced[: len(gradients)]


def _nan_flag(gradients: Sequence[Any]) -> Any:
    """Returns 0 if all gradients are finite, else NaN, which a sum over the ranks propagates."""
    finite = [tf.reduce_all(tf.math.is_finite(getattr(gradient, "values", gradient))) for gradient in gradients]
    return tf.where(tf.reduce_all(tf.stack(finite)), tf.constant(0.0), tf.constant(float("nan")))


def _add_flag(tensor: Any, nan_flag: Any) -> Any:
    return tensor if nan_flag is None else tensor + tf.cast(nan_flag, tensor.dtype)


def _with_values(gradient: Any, change: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(change(gradient.values), gradient.indices, gradient.dense_shape)
    return change(gradient)


def _reduce_differentiably(gradients: Sequence[Any], names: Sequence[str], exchange: Exchange,
                           ranks: tuple[int, ...]) -> list[Any]:
    """Reduces gradients by the public, differentiable collectives; differentiable buckets would slow every step."""
    results, name = list(gradients), f"the gradients of {exchange.name}"
    sparse = _sparse_places(gradients, names, exchange)
    dense = [place for place, gradient in enumerate(gradients) if gradient is not None and place not in sparse]
    if dense:
        with on_device(exchange.device_dense):
            reduced = combined([gradients[place] for place in dense], exchange.scaling, ranks, name, "allreduce")
        for place, tensor in zip(dense, reduced, strict=True):
            results[place] = tensor
    with on_device(exchange.device_sparse):
        for place in sparse:
            slices = combined_slices(gradients[place], exchange.scaling, ranks, f"{name}.{place}")
            results[place] = sparse_rows.combine_duplicate_rows(slices, gradients[place].indices)
    return results


def _sparse_places(gradients: Sequence[Any], names: Sequence[str], exchange: Exchange) -> list[int]:
    places = [place for place, gradient in enumerate(gradients) if isinstance(gradient, tf.IndexedSlices)]
    if places and exchange.op == Adasum:
        raise UnsupportedError(explain("Adasum combines dense gradients", "pass sparse_as_dense=True",
                                       sparse=[names[place] for place in places]))
    return places


def _reduce_all(gradients: Sequence[Any], variables: Sequence[Any], names: Sequence[str], exchange: Exchange,
                ranks: tuple[int, ...], differentiable: bool = False, parts: StepParts | None = None) -> list[Any]:
    job = current_job()
    results = list(gradients)
    sparse = _sparse_places(gradients, names, exchange)
    scaling = exchange.scaling
    sent = {place: scaling.sent(getattr(gradient, "values", gradient), len(ranks),
                                None if place in sparse or exchange.op == Adasum else job.backend)
            for place, gradient in enumerate(gradients) if gradient is not None}
    if not sent:
        return results
    dense = [place for place in sent if place not in sparse]
    buckets = _buckets(dense, sent, variables, exchange.groups, job.settings.bucket_size, parts)
    plan = _plan([sent.get(place) for place in range(len(gradients))], sparse, names, buckets, exchange, ranks, parts)

    def reduction(number: int, bucket: Sequence[int]) -> Call:
        tensors, factors = [sent[place].tensor for place in bucket], sent[bucket[0]].factors
        key = f"{plan.key}.{number}"
        if parts is not None and exchange.op != Adasum and (bounds := parts.bounds_for(bucket, job.backend)):
            return Call("reduce_parts", tensors, key, ranks, bounds, *(factors or ()))
        return Call("allreduce", tensors, key, Reduction.SUM, ranks, *(factors or ()))

    calls = [reduction(*each) for each in enumerate(buckets)]
    gathers = [(Call("allgather", sent[place].tensor, f"{plan.key}.{place}.values", ranks),
                Call("allgather", gradients[place].indices, f"{plan.key}.{place}.indices", ranks)) for place in sparse]
    # Adasum's collectives have their own plans, and Adasum does not support sparse gradients.
    made = [] if exchange.op == Adasum else [*calls, *itertools.chain(*gathers)]
    order = [names[place] for place in [*itertools.chain(*buckets), *(place for place in sparse for _ in range(2))]]
    with job.entries.entering(plan, made, after=graphs.first_of(getattr(gradients[place], "values", gradients[place])
                                                                for place in sent)):
        if made:
            checked = iter(compared(job, plan, made, order))
            calls, gathers = [next(checked) for _ in calls], [(next(checked), next(checked)) for _ in gathers]
        with spans.store().in_step():
            engine = spans.store().timed(job.backend, plan)
        run = _run_differentiably if differentiable else Call.run
        with on_device(exchange.device_dense):
            for number, (bucket, call) in enumerate(zip(buckets, calls, strict=True)):
                back = (adasum_raw(call.data, ranks, f"{exchange.name}, bucket {number}") if exchange.op == Adasum
                        else run(call, engine))
                for place, tensor in zip(bucket, back, strict=True):
                    part = tensor if parts is None else parts.take(place, shaped(tensor, sent[place].tensor),
                                                                   gradients[place])
                    finished = None if part is None else scaling.received(part, sent[place], len(ranks))
                    results[place] = finished if parts is not None else shaped(finished, gradients[place])
        with on_device(exchange.device_sparse):
            for place, (of_values, of_indices) in zip(sparse, gathers, strict=True):
                values = scaling.received(run(of_values, engine), sent[place], len(ranks))
                slices = tf.IndexedSlices(values, of_indices.run(engine), gradients[place].dense_shape)
                rows = sparse_rows.combine_duplicate_rows(slices, gradients[place].indices)
                results[place] = rows if parts is None else parts.take(place, rows, None)
    if tf.executing_eagerly():  # training graphs end the job instead, which avoids an operation for each gradient
        raise_if_refused(plan)
    return results


def _run_differentiably(call: Call, engine: Any) -> Any:
    """Makes a bucket's collective in a graph, with the gradient of the corresponding public collective."""
    name = "the gradients of a tape's gradients"

    @graphs.custom_gradient
    def make(*tensors: Any) -> tuple[Any, Any]:
        results = call.on(list(tensors)).run(engine)
        if call.operation == "allgather":
            _, ranks = call.arguments
            return results, lambda upstream: gathering_gradient(tensors[0], upstream, ranks, name)
        _, _, ranks, *factors = call.arguments
        return results, lambda *upstream: combined(upstream, Scaling(Sum, Compression.none, *factors), ranks, name,
                                                   "allreduce")

    back = make(*call.tensors)
    return [back] if isinstance(call.data, list) and not isinstance(back, (list, tuple)) else back


def _plan(sent: Sequence[Sent | None], sparse: Collection[int], names: Sequence[str], buckets: Sequence[Sequence[int]],
          exchange: Exchange, ranks: tuple[int, ...], parts: StepParts | None) -> Plan:
    """Describes all gradients in one plan; ranks that fuse them differently have different plans."""
    dtypes: list[str] = []
    shapes: list[tuple[int | None, ...] | None] = []
    for place, one in enumerate(sent):
        if one is None:
            dtypes.append("no gradient")
            shapes.append(None)
            continue
        shape = None if one.spec.shape.rank is None else tuple(one.spec.shape.as_list())
        is_sparse = place in sparse
        dtypes.append(f"sparse {one.spec.dtype.name}" if is_sparse else one.spec.dtype.name)
        # The number of rows of a sparse gradient may differ between ranks.
        shapes.append((None, *shape[1:]) if is_sparse and shape else shape)
    operation = f"gradients {exchange.scaling.text}" + (f", {exchange.update}" if exchange.update else "")
    name = f"{exchange.name} in buckets {buckets}" + ("" if parts is None else f" in parts {parts.text}")
    plan = Plan(operation, tuple(names), tuple(dtypes), tuple(shapes), ranks, f"the gradients of {exchange.name}",
                f"{name}#0")
    return number_in_graph(plan, name)


def _buckets(dense: Sequence[int], sent: Mapping[int, Sent], variables: Sequence[Any], groups: Any,
             limit: int, parts: StepParts | None) -> list[list[int]]:
    """Returns the places of the dense gradients in each bucket."""
    order = list(reversed(dense))  # the backward pass produces the last layer's gradients first
    kinds = {place: f"{sent[place].tensor.dtype.name} {sent[place].factors}"
             + ("" if parts is None else f" {parts.is_dealt(place)}") for place in order}
    if isinstance(groups, int) and groups:
        length = -(-len(order) // groups)
        chunks = [order[start : start + length] for start in range(0, len(order), length)] if order else []
        return [part for chunk in chunks for part in by_dtype(chunk, kinds)]
    whole: list[list[int]] = []
    for group in groups or ():
        chunk = [place for place in order
                 if variables[place] is not None and compat.variable_key(variables[place]) in group]
        whole += by_dtype(chunk, kinds)
        order = [place for place in order if place not in chunk]
    sizes = {place: _bytes_of(sent[place].tensor) for place in order}
    return whole + pack(order, kinds, sizes, limit)


def _bytes_of(tensor: Any) -> int | None:
    count = tensor.shape.num_elements()
    return None if count is None else count * int(tensor.dtype.size)

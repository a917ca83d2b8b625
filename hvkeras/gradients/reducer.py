"""Gradient reduction in buckets: gradients are fused into few collectives, in an order fixed at trace time.

`HVKERAS_BUCKET_SIZE` limits the size of a bucket; see `hvkeras.settings`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol

import tensorflow as tf

from hvkeras import compat
from hvkeras.backends.capabilities import CompressesBetweenHosts, StartsEarly
from hvkeras.backends.interface import Backend, Reduction
from hvkeras.collectives.adasum import adasum_raw
from hvkeras.collectives.buckets import FIRST_BUCKET, bucket_size, by_dtype, pack
from hvkeras.collectives.compression import Compression
from hvkeras.collectives.differentiable import combined, combined_slices, gathering_gradient
from hvkeras.collectives.mismatch import compared, raise_if_refused
from hvkeras.collectives.operations import (
    Adasum,
    Max,
    Scaling,
    Sent,
    Sum,
    number_in_graph,
    of_tensors,
    on_device,
    require_kernels,
    scale,
    shaped,
)
from hvkeras.collectives.reductions import grouped_allreduce
from hvkeras.compat import graphs
from hvkeras.control.heartbeat import GRADIENTS
from hvkeras.diagnostics import recorder, spans
from hvkeras.errors import UnsupportedError, explain
from hvkeras.gradients import sparse_rows
from hvkeras.gradients.options import ReductionOptions
from hvkeras.gradients.rounding_errors import RoundingErrors
from hvkeras.gradients.weighting import joining
from hvkeras.job.plans import Call, Plan
from hvkeras.job.session import current_session

MIN_COMPRESSED = 4096  # elements of a gradient that Compression.int8 compresses


class ShardAssignment(Protocol):
    """This rank's parts of the gradients, for a sharded update."""

    @property
    def text(self) -> str:
        """Description of the assignment, which must be equal on all ranks, for a plan."""
        ...

    def is_shared(self, index: int) -> bool:
        """Return whether the variable of a gradient is sharded, not local."""
        ...

    def bounds_for(self, indices: Sequence[int], backend: Backend) -> tuple[tuple[int, ...], ...]:
        """Return the bounds of the gradients of a bucket; empty if the bucket is to be reduced entirely."""
        ...

    def take(self, index: int, tensor: Any, gradient: Any) -> Any:
        """Return this rank's part of a reduced gradient; None if it has none."""
        ...


@dataclass(frozen=True)
class GradientReducer:
    """Reduction of gradients over the ranks. Overwrites of variables (`compat.is_overwritten`) reduce to the maximum.

    Attributes:
        local: Keys of the local variables, whose gradients are not reduced.
        all_ranks_skip: Whether a non-finite gradient of a local variable on one rank must be visible to all ranks.
        differentiable: Whether the reduced gradients are themselves differentiable. If a tape records them, they are
            not fused into buckets.
        update: Description of the update, which must be equal on all ranks; "" for none.
        shares: This rank's parts of the gradients, if the update is sharded; only these are returned.
        optimizer: The optimizer with which the rounding errors of compressed gradients end; None for a tape.
    """

    exchange: ReductionOptions
    local: Collection[Any] = ()
    all_ranks_skip: bool = False
    differentiable: bool = False
    update: str = ""
    shares: ShardAssignment | None = None
    optimizer: Any = None

    @graphs.without_autograph
    def reduce(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Reduce the gradients of a step.

        Args:
            gradients: Tensors, `tf.IndexedSlices` or None, one for each variable.

        Returns:
            The reduced gradients, in order; None stays None, and sparse gradients stay sparse. On ranks outside the
            process set, the gradients are unchanged. With `shares`, this rank's parts, or None for a gradient without
            one.

        Raises:
            NotInitializedError: The job is not running.
            UsageError: The process set is not registered.
            UnsupportedError: XLA compiles the step, but cannot compile the backend's collectives.
        """
        exchange, ranks = self.exchange, self.exchange.process_set.members()
        recorder.recording().step(gradients, variables, self.local)
        if len(ranks) == 1 or not exchange.process_set.included() or not current_session().backend.has_ranks:
            return list(gradients)
        require_kernels(current_session().backend)
        self._require_compression()
        gradients = [of_tensors(gradient) for gradient in gradients]
        overwritten = [index for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True))
                       if gradient is not None and compat.is_overwritten(variable)]
        if joining().active:
            gradients = joining().apply_weights(gradients, exchange.op, exchange.process_set, overwritten)
        results = [
            gradient if gradient is None or (isinstance(gradient, tf.IndexedSlices) and not exchange.sparse_as_dense)
            else tf.convert_to_tensor(gradient) for gradient in gradients
        ]
        local = [index for index, variable in enumerate(variables)
                 if results[index] is not None and self.local and compat.variable_key(variable) in self.local]
        names = [compat.variable_name(variable) for variable in variables]
        nan_flag = _nan_flag([results[index] for index in local]) if local and self.all_ranks_skip else None
        excluded = {*local, *overwritten}
        summed = [None if index in excluded else gradient for index, gradient in enumerate(results)]
        if nan_flag is not None:
            summed, names = [*summed, nan_flag], [*names, "local gradients are finite"]
            variables = [*variables, None]
        if self.differentiable and graphs.under_tape():
            reduced = self._reduce_one_by_one(summed, names, ranks)
        else:  # a tape outside of a traced function, if there is one, differentiates it only after tracing
            reduced = self._reduce_in_buckets(summed, variables, names, ranks)
        for index in local:
            factor = 1.0 / len(ranks) if exchange.scale_local_gradients and index not in overwritten else 1.0
            reduced[index] = _scaled(results[index], factor, None if nan_flag is None else reduced[-1])
        if maxima := [index for index in overwritten if index not in local]:
            with on_device(exchange.device_dense):
                values = grouped_allreduce([tf.stop_gradient(results[index]) for index in maxima], op=Max,
                                           process_set=exchange.process_set, name=f"the new values of {exchange.name}")
            for index, value in zip(maxima, values, strict=True):
                reduced[index] = value
        return reduced[: len(gradients)]

    def _require_compression(self) -> None:
        """Raise UnsupportedError if the gradients cannot be compressed as requested."""
        if self.exchange.compression is not Compression.int8:
            return
        backend = current_session().backend
        if not isinstance(backend, CompressesBetweenHosts):
            raise UnsupportedError(explain("Compression.int8 is a feature of the backend native",
                                           "use that backend, or Compression.fp16", backend=backend.name))
        if self.differentiable and graphs.under_tape():
            _refuse_second_gradients()

    @graphs.without_autograph
    def reduce_scaled(self, gradients: Sequence[Any], variables: Sequence[Any],
                      loss_scale: Callable[[], Any]) -> list[Any]:
        """Reduce the gradients of a scaled loss; those that are compressed without the scale, which may change.

        If the gradients of any rank are not finite, all ranks will skip the step. Compressed gradients are then not a
        number on all ranks, for which the engine keeps the rounding errors, which the next steps add.

        Args:
            loss_scale: Returns the scale.
        """
        indices = [index for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True))
                   if gradient is not None and not isinstance(gradient, tf.IndexedSlices)
                   and self._is_compressed(gradient) and not compat.is_overwritten(variable)
                   and compat.variable_key(variable) not in self.local]
        if not indices or current_session().topology.is_one_host or not self.exchange.process_set.included():
            return self.reduce(gradients, variables)
        floating = [gradient for gradient in gradients if gradient is not None and gradient.dtype.is_floating]
        flag = grouped_allreduce([_nan_flag(floating)], op=Sum, process_set=self.exchange.process_set,
                                 name=f"whether the gradients of {self.exchange.name} are finite")[0]
        scale, sent = tf.cast(loss_scale(), tf.float32), list(gradients)
        for index in indices:
            sent[index] = gradients[index] / scale + flag
        reduced = self.reduce(sent, variables)
        for index in indices:
            reduced[index] = reduced[index] * scale
        return reduced

    def _is_compressed(self, tensor: Any) -> bool:
        """Return whether the engine compresses a dense gradient between hosts."""
        count = tensor.shape.num_elements()
        return (self.exchange.compression is Compression.int8 and tensor.dtype == tf.float32
                and count is not None and count >= MIN_COMPRESSED)

    @property
    def _scaling(self) -> Scaling:
        """Processing of each gradient before and after the sum."""
        factor = self.exchange.gradient_predivide_factor
        return Scaling(self.exchange.op, self.exchange.compression, 1.0 / factor, factor)

    def _reduce_one_by_one(self, gradients: Sequence[Any], names: Sequence[str], ranks: tuple[int, ...]) -> list[Any]:
        """Reduce gradients with the public collectives, because differentiable buckets would slow down every step."""
        results, name = list(gradients), f"the gradients of {self.exchange.name}"
        sparse = self._sparse_indices(gradients, names)
        dense = [index for index, gradient in enumerate(gradients) if gradient is not None and index not in sparse]
        if dense:
            with on_device(self.exchange.device_dense):
                reduced = combined([gradients[index] for index in dense], self._scaling, ranks, name, "allreduce")
            for index, tensor in zip(dense, reduced, strict=True):
                results[index] = tensor
        with on_device(self.exchange.device_sparse):
            for index in sparse:
                slices = combined_slices(gradients[index], self._scaling, ranks, f"{name}.{index}")
                results[index] = sparse_rows.combine_duplicate_rows(slices, gradients[index].indices)
        return results

    def _sparse_indices(self, gradients: Sequence[Any], names: Sequence[str]) -> list[int]:
        indices = [index for index, gradient in enumerate(gradients) if isinstance(gradient, tf.IndexedSlices)]
        if indices and self.exchange.op == Adasum:
            raise UnsupportedError(explain("Adasum combines dense gradients", "pass sparse_as_dense=True",
                                           sparse=[names[index] for index in indices]))
        return indices

    def _reduce_in_buckets(self, gradients: Sequence[Any], variables: Sequence[Any], names: Sequence[str],
                           ranks: tuple[int, ...]) -> list[Any]:
        job, exchange, scaling, shares = current_session(), self.exchange, self._scaling, self.shares
        results = list(gradients)
        sparse = self._sparse_indices(gradients, names)
        sent = {index: scaling.sent(getattr(gradient, "values", gradient), len(ranks),
                                    None if index in sparse or exchange.op == Adasum else job.backend)
                for index, gradient in enumerate(gradients) if gradient is not None}
        if not sent:
            return results
        dense = [index for index in sent if index not in sparse]
        buckets = self._buckets(dense, sent, variables, self._bucket_size(ranks))
        plan = self._plan([sent.get(index) for index in range(len(gradients))], sparse, names, buckets, ranks,
                          [variables[index] for index in dense if self._is_compressed(sent[index].tensor)])

        def reduction(number: int, bucket: Sequence[int]) -> Call:
            tensors, factors = [sent[index].tensor for index in bucket], sent[bucket[0]].factors
            key = f"{plan.key}.{number}"
            if self._is_compressed(sent[bucket[0]].tensor):
                return self._compressed(Call("compressed_allreduce", tensors, key, ranks, *(factors or ())),
                                        [variables[index] for index in bucket])
            if shares is not None and exchange.op != Adasum and (bounds := shares.bounds_for(bucket, job.backend)):
                return Call("reduce_parts", tensors, key, ranks, bounds, *(factors or ()))
            return Call("allreduce", tensors, key, Reduction.SUM, ranks, *(factors or ()))

        calls = [reduction(*each) for each in enumerate(buckets)]
        gathers = [(Call("allgather", sent[index].tensor, f"{plan.key}.{index}.values", ranks),
                    Call("allgather", gradients[index].indices, f"{plan.key}.{index}.indices", ranks))
                   for index in sparse]
        # Adasum's collectives have their own plans, and Adasum does not support sparse gradients.
        planned = [] if exchange.op == Adasum else [*calls, *itertools.chain(*gathers)]
        order = [names[index] for index in [*itertools.chain(*buckets), *(index for index in sparse for _ in range(2))]]
        first = graphs.first_of(getattr(gradients[index], "values", gradients[index]) for index in sent)
        with job.entries.entering(plan, planned, after=first):
            if planned:
                checked = iter(compared(job, plan, planned, order))
                calls, gathers = [next(checked) for _ in calls], [(next(checked), next(checked)) for _ in gathers]
            with spans.store().in_step():
                engine = spans.store().timed(job.backend, plan)
            run = _run_differentiably if self.differentiable and not tf.executing_eagerly() else Call.run
            starts: list[Any] = []
            with on_device(exchange.device_dense):
                for number, (bucket, call) in enumerate(zip(buckets, calls, strict=True)):
                    outputs = (adasum_raw(call.data, ranks, f"{exchange.name}, bucket {number}")
                               if exchange.op == Adasum else run(call, engine))
                    starts += _start_of(job.backend, outputs)
                    for index, tensor in zip(bucket, outputs, strict=True):
                        own = tensor if shares is None else shares.take(index, shaped(tensor, sent[index].tensor),
                                                                        gradients[index])
                        finished = None if own is None else scaling.received(own, sent[index], len(ranks))
                        results[index] = finished if shares is not None else shaped(finished, gradients[index])
            graphs.run_in_stages(starts)
            with on_device(exchange.device_sparse):
                for index, (of_values, of_indices) in zip(sparse, gathers, strict=True):
                    values = scaling.received(run(of_values, engine), sent[index], len(ranks))
                    slices = tf.IndexedSlices(values, of_indices.run(engine), gradients[index].dense_shape)
                    rows = sparse_rows.combine_duplicate_rows(slices, gradients[index].indices)
                    results[index] = rows if shares is None else shares.take(index, rows, None)
        if tf.executing_eagerly():  # graphs fail the job instead, which avoids an operation for each gradient
            raise_if_refused(plan)
        return results

    def _compressed(self, call: Call, variables: Sequence[Any]) -> Call:
        """Register the variables of a compressed bucket, to which its rounding errors belong, and return the call."""
        key, ranks, *_ = call.arguments
        counts = [tensor.shape.num_elements() for tensor in call.tensors]
        current_session().part(RoundingErrors).register(key, ranks, variables, counts, self.optimizer)
        return call

    def _bucket_size(self, ranks: tuple[int, ...]) -> int:
        """Return the size limit of a bucket in bytes: the setting, or what suits the network."""
        session = current_session()
        suggested = None
        # The assignment of a sharded update's parts does not know the network, and balances them in each bucket.
        if session.settings.bucket_size is None and self.shares is None and isinstance(session.backend, StartsEarly):
            suggested = session.backend.bucket_size(ranks)
            if suggested is not None and self.exchange.compression is Compression.int8:
                suggested *= 4
        return bucket_size(session.settings) if suggested is None else suggested

    def _plan(self, sent: Sequence[Sent | None], sparse: Collection[int], names: Sequence[str],
              buckets: Sequence[Sequence[int]], ranks: tuple[int, ...], compressed: Sequence[Any]) -> Plan:
        """Return one plan for all gradients. Ranks that fuse them differently have different plans.

        Args:
            compressed: The variables whose gradients have rounding errors, which equal models must not share.
        """
        dtypes: list[str] = []
        shapes: list[tuple[int | None, ...] | None] = []
        for index, gradient in enumerate(sent):
            if gradient is None:
                dtypes.append("no gradient")
                shapes.append(None)
                continue
            shape = None if gradient.spec.shape.rank is None else tuple(gradient.spec.shape.as_list())
            is_sparse = index in sparse
            dtypes.append(f"sparse {gradient.spec.dtype.name}" if is_sparse else gradient.spec.dtype.name)
            # The number of rows of a sparse gradient may differ between ranks.
            shapes.append((None, *shape[1:]) if is_sparse and shape else shape)
        name = (f"{self.exchange.name} in buckets {buckets}"
                + ("" if self.shares is None else f" in parts {self.shares.text}"))
        plan = Plan(GRADIENTS, tuple(names), tuple(dtypes), tuple(shapes), ranks,
                    f"the gradients of {self.exchange.name}", f"{name}#0",
                    self._scaling.text + (f", {self.update}" if self.update else ""), is_of_model=True)
        if compressed and (number := current_session().part(RoundingErrors).number(plan.key, compressed)):
            name = f"{name} of model {number}"
            plan = replace(plan, identity=f"{name}#0")
        return number_in_graph(plan, name)

    def _buckets(self, dense: Sequence[int], sent: Mapping[int, Sent], variables: Sequence[Any],
                 limit: int) -> list[list[int]]:
        """Return the indices of the dense gradients in each bucket."""
        groups, shares = self.exchange.groups, self.shares
        order = list(reversed(dense))  # the backward pass produces the last layer's gradients first
        compressed = [index for index in order if self._is_compressed(sent[index].tensor)]
        kinds = {index: f"{sent[index].tensor.dtype.name} {sent[index].factors} {index in compressed}"
                 + ("" if shares is None else f" {shares.is_shared(index)}") for index in order}
        if isinstance(groups, int) and groups:
            length = -(-len(order) // groups)
            chunks = [order[start : start + length] for start in range(0, len(order), length)] if order else []
            return [bucket for chunk in chunks for bucket in by_dtype(chunk, kinds)]
        buckets: list[list[int]] = []
        for group in groups or ():
            chunk = [index for index in order
                     if variables[index] is not None and compat.variable_key(variables[index]) in group]
            buckets += by_dtype(chunk, kinds)
            order = [index for index in order if index not in chunk]
        sizes = {index: _bytes_of(sent[index].tensor) for index in order}
        return buckets + pack(order, kinds, sizes, limit, FIRST_BUCKET)


def _start_of(backend: Backend, outputs: Sequence[Any]) -> list[Any]:
    """Return the operation that starts a bucket's reduction in the graph under construction, if there is one."""
    if tf.executing_eagerly() or not isinstance(backend, StartsEarly):
        return []
    start = backend.start_of(outputs)
    return [] if start is None else [start]


def _nan_flag(gradients: Sequence[Any]) -> Any:
    """Return 0 if all gradients are finite, otherwise NaN, which a sum over the ranks propagates."""
    finite = [tf.reduce_all(tf.math.is_finite(getattr(gradient, "values", gradient))) for gradient in gradients]
    return tf.where(tf.reduce_all(tf.stack(finite)), tf.constant(0.0), tf.constant(float("nan")))


def _scaled(gradient: Any, factor: float, nan_flag: Any) -> Any:
    """Scale a local gradient, and make it NaN if the flag is NaN."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(_scaled(gradient.values, factor, nan_flag), gradient.indices, gradient.dense_shape)
    scaled = scale(gradient, factor)
    return scaled if nan_flag is None else scaled + tf.cast(nan_flag, scaled.dtype)


def _refuse_second_gradients(*_: Any) -> NoReturn:
    raise UnsupportedError(explain("Gradients that are compressed to 8 bits have no gradients themselves",
                                   "pass compression=hvd.Compression.none to DistributedGradientTape"))


def _run_differentiably(call: Call, engine: Any) -> Any:
    """Run a bucket's collective in a graph, with the gradient of the corresponding public collective."""
    name = "the gradients of a tape's gradients"

    @graphs.custom_gradient
    def run(*tensors: Any) -> tuple[Any, Any]:
        results = call.on(list(tensors)).run(engine)
        if call.operation == "compressed_allreduce":
            return results, _refuse_second_gradients
        if call.operation == "allgather":
            _, ranks = call.arguments
            return results, lambda upstream: gathering_gradient(tensors[0], upstream, ranks, name)
        _, _, ranks, *factors = call.arguments
        return results, lambda *upstream: combined(upstream, Scaling(Sum, Compression.none, *factors), ranks, name,
                                                   "allreduce")

    outputs = run(*call.tensors)
    return [outputs] if isinstance(call.data, list) and not isinstance(outputs, (list, tuple)) else outputs


def _bytes_of(tensor: Any) -> int | None:
    count = tensor.shape.num_elements()
    return None if count is None else count * int(tensor.dtype.size)

"""Sharded update: each rank reduces and updates its parts of the variables, and all ranks gather the results."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from hvkeras import compat
from hvkeras.backends.capabilities import ReducesParts
from hvkeras.backends.interface import Backend
from hvkeras.collectives.buckets import FIRST_BUCKET, bucket_size, pack
from hvkeras.collectives.operations import Sum, number_in_graph, shaped
from hvkeras.collectives.reductions import allreduce
from hvkeras.compat import graphs
from hvkeras.diagnostics import spans
from hvkeras.diagnostics.record import GATHER
from hvkeras.errors import UsageError, explain
from hvkeras.gradients.compiled_update import UpdateCompiler
from hvkeras.gradients.options import ReductionOptions
from hvkeras.gradients.plain_update import PlainUpdate
from hvkeras.gradients.shards import Bounds, Shards
from hvkeras.job.plans import Call, Plan
from hvkeras.job.session import current_session

Gathered = Callable[[Any], list[tuple[int, Any]]]  # takes a collective's results; returns new values by number


class StepShares:
    """This rank's parts of the gradients of one step, and memory that can be reused after their reduction.

    Args:
        shards: The variables and this rank's parts.
        numbers: The numbers of the step's variables in `shards`; the gradients are in the same order.

    Attributes:
        memory: Tensors whose values are no longer needed, by the numbers of the variables whose shape they have.
        reduced: The numbers of the variables whose gradients were reduced, in the order of the buckets.
    """

    def __init__(self, shards: Shards, numbers: Sequence[int]) -> None:
        self._shards, self._numbers = shards, list(numbers)
        self.memory: dict[int, Any] = {}
        self.reduced: list[int] = []

    @property
    def text(self) -> str:
        """Hash of the assignment, which must be equal on all ranks, for a plan."""
        bounds = str([self._shards.bounds[number] for number in self._numbers])
        return hashlib.sha256(bounds.encode()).hexdigest()[:8]

    def is_shared(self, index: int) -> bool:
        """Return whether the variable of a gradient is sharded, not local."""
        return index < len(self._numbers) and self._shards.bounds[self._numbers[index]] is not None

    def bounds_for(self, indices: Sequence[int], backend: Backend) -> tuple[Bounds, ...]:
        """Return the bounds of the gradients of a bucket; empty if the bucket is to be reduced entirely."""
        found = tuple(self._shards.bounds[self._numbers[index]] or () for index in indices if self.is_shared(index))
        return found if found and isinstance(backend, ReducesParts) else ()

    def take(self, index: int, tensor: Any, gradient: Any) -> Any:
        """Return this rank's part of a reduced gradient.

        Args:
            index: The gradient's index.
            tensor: The reduced gradient, of which at least this rank's part is defined; or `tf.IndexedSlices`.
            gradient: The gradient before the reduction, if it is dense.

        Returns:
            The part; None if this rank has none.
        """
        if not self.is_shared(index):
            return tensor
        number = self._numbers[index]
        self.reduced.append(number)
        if gradient is not None:
            self.memory[number] = tensor if tensor.dtype == gradient.dtype else gradient
        return self._shards.cut(number, tensor) if self._shards.has_part(number) else None


class ShardedUpdate:
    """Update that applies this rank's parts of reduced gradients, and gathers the variables from all ranks.

    Args:
        plain: Keras's own update, of the complete variables.
        shards: The variables that the optimizer was built for, and this rank's parts of them.
        compiler: Compiles the update of the parts, if that pays.
        gradients: This rank's gradients, not reduced yet.
        gathers: Whether the variables are gathered; False to time the update separately.

    Raises:
        UsageError: The optimizer was built for other variables.
    """

    text = ""

    def __init__(self, plain: PlainUpdate, shards: Shards, compiler: UpdateCompiler, gradients: Sequence[Any],
                 gathers: bool = True) -> None:
        self._plain, self._shards, self._compiler = plain, shards, compiler
        self._gradients, self._gathers = list(gradients), gathers
        self._numbers = _require_numbers(shards, plain.variables)
        shards.refresh_parts(self._numbers)
        self.shares: StepShares = StepShares(shards, self._numbers)

    def take(self, gradients: Sequence[Any]) -> list[Any]:
        """Return this rank's parts of gradients that were already reduced entirely; None where it has none."""
        return [None if gradient is None else self.shares.take(index, gradient, None)
                for index, gradient in enumerate(gradients)]

    @graphs.without_autograph
    def apply(self, reduced: Sequence[Any]) -> Any:
        """Apply this rank's parts of reduced gradients, and gather the new values of all variables."""
        plain, shards = self._plain, self._shards
        own = [(number, result)
               for number, gradient, result in zip(self._numbers, self._gradients, reduced, strict=True)
               if result is not None or gradient is None]
        given, over = [result for _, result in own], [shards.parts[number] for number, _ in own]
        is_clipped = False
        clip: Callable[[list[Any]], list[Any]] | None = None

        def updated() -> list[int]:  # the indices of the gradients that Keras clips and applies, not of overwrites
            return [index for index, result in enumerate(given)
                    if result is not None and not compat.is_overwritten(over[index])]

        if any(gradient is not None for gradient in self._gradients):
            if plain.is_scaled or not updated():
                dtype = compat.as_tf_variable(shards.placeholder).dtype
                flag = tf.cast(_unless_finite(plain.options.exchange, given), dtype) if plain.is_scaled else 0
                given, over = [*given, tf.zeros([1], dtype) + flag], [*over, shards.placeholder]
            indices = updated()
            clipped_parts = [over[index] for index in indices]
            if _clips_by_norm(plain.optimizer):
                is_clipped = not plain.is_scaled and not _clips_later(plain.optimizer)
                clip = list if is_clipped else functools.partial(self._clip, parts=clipped_parts)
            if is_clipped:
                clipped = self._clip([given[index] for index in indices], clipped_parts)
                for index, result in zip(indices, clipped, strict=True):
                    given[index] = result
        update = replace(plain, variables=over, finish=lambda results: plain.finish(results, over),
                         clip=clip, is_clipped=is_clipped)
        result = (self._compiler.compiled(update, given) or update).apply(given)
        if self._gathers:
            numbers = shards.shared_numbers() if _overwrites(plain.optimizer) else self.shares.reduced
            gather(plain.options.exchange, shards, numbers, self.shares.memory)
        return result

    def _clip(self, gradients: Sequence[Any], parts: Sequence[Any]) -> list[Any]:
        """Clip parts of gradients by the norms of complete gradients, or by the global norm, like Keras without parts.

        Args:
            gradients: This rank's parts of reduced gradients, without None.
        """
        shards, optimizer, exchange = self._shards, self._plain.optimizer, self._plain.options.exchange
        values = [getattr(gradient, "values", gradient) for gradient in gradients]
        dtype = tf.float64 if any(value.dtype == tf.float64 for value in values) else tf.float32
        squares = [tf.reduce_sum(tf.square(tf.cast(value, dtype))) for value in values]
        numbers = [shards.number_of(part) for part in parts]
        shared = [number is None or shards.bounds[number] is not None for number in numbers]

        def over_ranks(own: Any) -> Any:
            return allreduce(own, op=Sum, name=f"{exchange.name}, norms of gradients",
                             process_set=exchange.process_set)

        if optimizer.clipnorm:
            across = [number for number in range(len(shards.parts)) if _is_across(shards, number)]
            totals: dict[Any, Any] = {}
            if across:
                by_number = dict(zip(numbers, squares, strict=True))
                summed = over_ranks(tf.stack([by_number.get(number, tf.zeros([], dtype)) for number in across]))
                totals = {number: summed[index] for index, number in enumerate(across)}
            norms = [tf.sqrt(totals.get(number, square)) for number, square in zip(numbers, squares, strict=True)]
            limit = tf.constant(optimizer.clipnorm, dtype)
            factors = [limit / tf.maximum(norm, limit) for norm in norms]
        else:
            own = [square for square, is_shared in zip(squares, shared, strict=True) if is_shared]
            total = over_ranks(tf.add_n(own) if own else tf.zeros([], dtype))
            local = [square for square, is_shared in zip(squares, shared, strict=True) if not is_shared]
            norm, limit = tf.sqrt(tf.add_n([total, *local])), tf.constant(optimizer.global_clipnorm, dtype)
            # NaN if the norm is not finite, so that wrong gradients do not go unnoticed.
            factors = [limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)] * len(gradients)

        def scaled(gradient: Any, factor: Any) -> Any:
            if isinstance(gradient, tf.IndexedSlices) and keeps_rows:
                return tf.IndexedSlices(gradient.values * tf.cast(factor, gradient.dtype), gradient.indices,
                                        gradient.dense_shape)
            return tf.convert_to_tensor(gradient) * tf.cast(factor, gradient.dtype)

        # Keras 3 makes gradients dense when it clips them by their global norm.
        keeps_rows = bool(optimizer.clipnorm) or self._plain.options.family != compat.KERAS

        return [scaled(*each) for each in zip(gradients, factors, strict=True)]


def _require_numbers(shards: Shards, variables: Sequence[Any]) -> list[int]:
    numbers = shards.numbers_of(variables)
    if numbers is None:
        built = {compat.variable_key(variable) for variable in shards.variables}
        other = next(variable for variable in variables if compat.variable_key(variable) not in built)
        raise UsageError(explain("An optimizer with shard_update=True must be built for all variables that it updates",
                                 "compile the model with a new optimizer, or call build() with all variables that it"
                                 " will train", variable=compat.variable_name(other)))
    return numbers


def _overwrites(optimizer: Any) -> bool:  # all variables with averages, also those without gradients
    return bool(getattr(optimizer, "use_ema", False) and getattr(optimizer, "ema_overwrite_frequency", None))


def gather(exchange: ReductionOptions, shards: Shards, numbers: Sequence[int], memory: dict[int, Any]) -> None:
    """Gather sharded variables on all ranks.

    Args:
        exchange: The options of the optimizer's reductions.
        numbers: The numbers of the variables to gather.
        memory: Tensors whose memory the new values may reuse, by the number of the variable.
    """
    session = current_session()
    variables = {number: compat.as_tf_variable(shards.variables[number]) for number in numbers}
    kinds = {number: f"{variable.dtype.name} {variable.device}" for number, variable in variables.items()}
    sizes: dict[int, int | None] = {number: variable.shape.num_elements() * variable.dtype.size
                                    for number, variable in variables.items()}
    buckets = pack(numbers, kinds, sizes, bucket_size(session.settings), FIRST_BUCKET)
    order = [number for bucket in buckets for number in bucket]
    name = f"the weights of {exchange.name}"
    text = f"{[[shards.bounds[number] for number in bucket] for bucket in buckets]}"
    plan = number_in_graph(Plan(
        GATHER, tuple(compat.variable_name(shards.variables[number]) for number in order),
        tuple(variables[number].dtype.name for number in order),
        tuple(tuple(variables[number].shape.as_list()) for number in order), shards.ranks, name, f"{text}#0"), text)
    gather_one = _gather_without_copies if isinstance(session.backend, ReducesParts) else _gather_packed
    calls = [gather_one(shards, bucket, variables, memory, f"{plan.key}.{number}")
             for number, bucket in enumerate(buckets)]
    with session.entries.entering(plan, [call for call, _ in calls]):
        with spans.store().in_step():
            engine = spans.store().timed(session.backend, plan)
        for call, results in calls:
            for number, value in results(call.run(engine)):
                variables[number].assign(shaped(value, variables[number]), read_value=False)
                if shards.has_part(number):
                    compat.as_tf_variable(shards.parts[number]).assign(shards.cut(number, value), read_value=False)


def _gather_without_copies(shards: Shards, bucket: Sequence[int], variables: dict[int, Any], memory: dict[int, Any],
                           key: str) -> tuple[Call, Gathered]:
    incomplete = [number for number in bucket if not shards.has_all(number)]
    buffers = [memory[number] if number in memory and memory[number].dtype == variables[number].dtype
               else variables[number].read_value() for number in incomplete]
    own = [compat.as_tf_variable(shards.parts[number]).read_value() for number in bucket if _has_elements(shards,
                                                                                                          number)]
    bounds: tuple[Bounds, ...] = tuple(shards.bounds[number] or () for number in bucket)
    return (Call("gather_parts", [*buffers, *own], key, shards.ranks, bounds, len(incomplete)),
            lambda results: list(zip(incomplete, results, strict=True)))


def _gather_packed(shards: Shards, bucket: Sequence[int], variables: dict[int, Any],
                   memory: dict[int, Any],  # noqa: ARG001 - the signature of _gather_without_copies
                   key: str) -> tuple[Call, Gathered]:
    own = [tf.reshape(compat.as_tf_variable(shards.parts[number]).read_value(), [-1]) for number in bucket
           if _has_elements(shards, number)]
    packed = tf.concat(own, 0) if own else tf.zeros([0], variables[bucket[0]].dtype)

    def unpack(gathered: Any) -> list[tuple[int, Any]]:
        parts: dict[int, list[Any]] = {number: [] for number in bucket}
        start = 0
        for rank in range(len(shards.ranks)):
            for number in bucket:
                bounds = shards.bounds[number] or ()
                count = bounds[rank + 1] - bounds[rank]
                if count:
                    parts[number].append(gathered[start : start + count])
                start += count
        return [(number, tf.reshape(parts[number][0] if len(parts[number]) == 1 else tf.concat(parts[number], 0),
                                    variables[number].shape))
                for number in bucket if parts[number] and not shards.has_all(number)]

    return Call("allgather", packed, key, shards.ranks), unpack


def _has_elements(shards: Shards, number: int) -> bool:
    start, stop = shards.range_of(number)
    return start < stop


def _unless_finite(exchange: ReductionOptions, given: Sequence[Any]) -> Any:
    """Return 0, or NaN on all ranks if any rank's part of the gradients contains an infinity or NaN.

    Each rank adds it to the gradient of its placeholder, so that all `LossScaleOptimizer`s skip the same steps.
    """
    flags = [tf.reduce_all(tf.math.is_finite(getattr(result, "values", result))) for result in given
             if result is not None]
    mine = tf.where(tf.reduce_all(tf.stack([True, *flags])), tf.constant(0.0), tf.constant(float("nan")))
    return allreduce(mine, op=Sum, name=f"{exchange.name}, gradients are finite",
                     process_set=exchange.process_set)


def _clips_by_norm(optimizer: Any) -> bool:
    return any(getattr(optimizer, name, None) for name in compat.CLIPS_BY_NORM)


def _clips_later(optimizer: Any) -> bool:
    # These optimizers change gradients before they clip them, so the clipping cannot be done in advance.
    return any(getattr(optimizer, name, None) for name in ("loss_scale_factor", "gradient_accumulation_steps"))


def _is_across(shards: Shards, number: int) -> bool:  # several ranks have parts of the variable
    bounds = shards.bounds[number]
    return bounds is not None and sum(start < stop for start, stop in itertools.pairwise(bounds)) > 1

"""A step whose update the ranks share: each reduces and updates its parts of the variables, and all get the results."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hvkeras import compat
from hvkeras.backends.capabilities import ReducesParts
from hvkeras.collectives.operations import Sum, number_in_graph, shaped
from hvkeras.collectives.reductions import allreduce
from hvkeras.compat import graphs
from hvkeras.errors import UsageError, explain
from hvkeras.gradients.packing import pack
from hvkeras.gradients.parts import Bounds
from hvkeras.gradients.shards import Shards
from hvkeras.gradients.step_parts import StepParts
from hvkeras.job.state import current_job
from hvkeras.plans.plan import Call, Plan
from hvkeras.profiling import spans
from hvkeras.records.record import GATHER

if TYPE_CHECKING:
    from hvkeras.gradients.distributed import Distributed

Apply = Callable[..., Any]  # applies gradients to the variables that it was made for, or to `over`
APART = "_hvkeras_apart"  # the attribute of an optimizer that makes only its own part of a step
CLIPS = ("clipnorm", "global_clipnorm")  # attributes of optimizers whose clipping needs all parts of a variable


def require_known(shards: Shards, variables: Sequence[Any]) -> list[int]:
    """Returns the numbers of a step's variables.

    Raises:
        UsageError: The optimizer was built for other variables.
    """
    numbers = shards.places_of(variables)
    if numbers is None:
        known = {compat.variable_key(variable) for variable in shards.variables}
        other = next(one for one in variables if compat.variable_key(one) not in known)
        raise UsageError(explain("An optimizer with shard_update=True updates the variables that it was built for",
                                 "compile the model with a new optimizer, or build it for all variables that it is to"
                                 " train",
                                 variable=compat.variable_name(other)))
    return numbers


def update_parts(part: Distributed, step: StepParts, apply: Apply, optimizer: Any, gradients: Sequence[Any],
                 reduced: Sequence[Any], numbers: Sequence[int]) -> Any:
    """Applies this rank's parts of reduced gradients, and gathers what all ranks have updated.

    Args:
        part: The distributed optimizer.
        step: What was reduced.
        apply: Applies gradients.
        optimizer: The outermost optimizer: that one, or the `LossScaleOptimizer` around it.
        gradients: The gradients before they were reduced.
        reduced: This rank's parts of them; None where it has none.
        numbers: The numbers of their variables.

    Returns:
        What `apply` returns.
    """
    shards = step.shards
    own = [(number, result) for number, gradient, result in zip(numbers, gradients, reduced, strict=True)
           if result is not None or gradient is None]
    given, over = [result for _, result in own], [shards.parts[number] for number, _ in own]

    def updated() -> list[int]:
        """The places of gradients that Keras clips and applies, instead of assigning them."""
        return [place for place, result in enumerate(given)
                if result is not None and not compat.is_overwritten(over[place])]

    if any(gradient is not None for gradient in gradients):
        is_scaled = compat.inner_optimizer(optimizer) is not None
        if is_scaled or not updated():
            dtype = compat.native(shards.stand_in).dtype
            given = [*given, tf.zeros([1], dtype) + (tf.cast(_unless_finite(part, given), dtype) if is_scaled else 0)]
            over = [*over, shards.stand_in]
        if not is_scaled and clips_by_norm(part) and not _clips_later(part):
            places = updated()
            clipped = clip(part, [given[place] for place in places], [over[place] for place in places])
            for place, result in zip(places, clipped, strict=True):
                given[place] = result
            unclipped: Any = _without_clipping(part)
        else:
            unclipped = contextlib.nullcontext()
    else:
        unclipped = contextlib.nullcontext()
    with unclipped, compat.attribute(part, "_hvkeras_over", [over[place] for place in updated()]):
        def apply_own(results: list[Any]) -> Any:
            return apply(results, over)

        compiled = part._hvkeras_compiled_update().prepare(part, optimizer, apply_own, given, over)
        with spans.store().update(part._hvkeras_exchange.name, given, over), compat.summed(part):
            result = (compiled or apply_own)(given)
    if APART not in part.__dict__:
        gather(part, shards, [number for number in range(len(shards.parts)) if shards.bounds[number] is not None]
               if _overwrites(part) else step.reduced, step.memory)
    return result


def _overwrites(part: Any) -> bool:
    """Whether the update changes variables without gradients as well: by averages of all."""
    return bool(getattr(part, "use_ema", False) and getattr(part, "ema_overwrite_frequency", None))


def gather(part: Distributed, shards: Shards, numbers: Sequence[int], memory: dict[int, Any]) -> None:
    """Gives all ranks the variables that each has updated a part of.

    Args:
        part: The distributed optimizer.
        shards: Its variables.
        numbers: The numbers of the variables.
        memory: Tensors whose memory the new values may take, by number.
    """
    job, exchange = current_job(), part._hvkeras_exchange
    variables = {number: compat.native(shards.variables[number]) for number in numbers}
    kinds = {number: f"{variable.dtype.name} {variable.device}" for number, variable in variables.items()}
    sizes: dict[int, int | None] = {number: variable.shape.num_elements() * variable.dtype.size
                                    for number, variable in variables.items()}
    buckets = pack(numbers, kinds, sizes, job.settings.bucket_size)
    order = [number for bucket in buckets for number in bucket]
    name = f"the weights of {exchange.name}"
    text = f"{[[shards.bounds[number] for number in bucket] for bucket in buckets]}"
    plan = number_in_graph(Plan(
        GATHER, tuple(compat.variable_name(shards.variables[number]) for number in order),
        tuple(variables[number].dtype.name for number in order),
        tuple(tuple(variables[number].shape.as_list()) for number in order), shards.ranks, name, f"{text}#0"), text)
    gather_one = _gather_without_copies if isinstance(job.backend, ReducesParts) else _gather_packed
    calls = [gather_one(shards, bucket, variables, memory, f"{plan.key}.{number}")
             for number, bucket in enumerate(buckets)]
    with job.entries.entering(plan, [call for call, _ in calls]):
        with spans.store().in_step():
            engine = spans.store().timed(job.backend, plan)
        for call, results in calls:
            for number, value in results(call.run(engine)):
                variables[number].assign(shaped(value, variables[number]), read_value=False)
                if shards.is_mine(number):
                    compat.native(shards.parts[number]).assign(shards.cut(number, value), read_value=False)


def _gather_without_copies(shards: Shards, bucket: Sequence[int], variables: dict[int, Any], memory: dict[int, Any],
                           key: str) -> tuple[Call, Callable[[Any], list[tuple[int, Any]]]]:
    wanted = [number for number in bucket if not shards.is_all_mine(number)]
    room = [memory[number] if number in memory and memory[number].dtype == variables[number].dtype
            else variables[number].read_value() for number in wanted]
    own = [compat.native(shards.parts[number]).read_value() for number in bucket if _has_elements(shards, number)]
    bounds: tuple[Bounds, ...] = tuple(shards.bounds[number] or () for number in bucket)
    return (Call("gather_parts", [*room, *own], key, shards.ranks, bounds, len(wanted)),
            lambda results: list(zip(wanted, results, strict=True)))


def _gather_packed(shards: Shards, bucket: Sequence[int], variables: dict[int, Any],
                   memory: dict[int, Any],  # noqa: ARG001 - for engines that can use it
                   key: str) -> tuple[Call, Callable[[Any], list[tuple[int, Any]]]]:
    own = [tf.reshape(compat.native(shards.parts[number]).read_value(), [-1]) for number in bucket
           if _has_elements(shards, number)]
    packed = tf.concat(own, 0) if own else tf.zeros([0], variables[bucket[0]].dtype)

    def unpack(gathered: Any) -> list[tuple[int, Any]]:
        pieces: dict[int, list[Any]] = {number: [] for number in bucket}
        start = 0
        for rank in range(len(shards.ranks)):
            for number in bucket:
                bounds = shards.bounds[number] or ()
                count = bounds[rank + 1] - bounds[rank]
                if count:
                    pieces[number].append(gathered[start : start + count])
                start += count
        return [(number, tf.reshape(pieces[number][0] if len(pieces[number]) == 1 else tf.concat(pieces[number], 0),
                                    variables[number].shape))
                for number in bucket if pieces[number] and not shards.is_all_mine(number)]

    return Call("allgather", packed, key, shards.ranks), unpack


def _has_elements(shards: Shards, number: int) -> bool:
    start, stop = shards.range_of(number)
    return start < stop


def _unless_finite(part: Distributed, given: Sequence[Any]) -> Any:
    """Returns 0, or NaN on all ranks if any rank's part of the gradients has an infinity or NaN.

    With that in the gradient of its stand-in, each rank's `LossScaleOptimizer` skips the same steps.
    """
    flags = [tf.reduce_all(tf.math.is_finite(getattr(result, "values", result))) for result in given
             if result is not None]
    mine = tf.where(tf.reduce_all(tf.stack([True, *flags])), tf.constant(0.0), tf.constant(float("nan")))
    return allreduce(mine, op=Sum, name=f"{part._hvkeras_exchange.name}, gradients are finite",
                     process_set=part._hvkeras_exchange.process_set)


# Clipping by norms.


def clips_by_norm(part: Any) -> bool:
    """Whether an optimizer clips gradients by norms, for which it needs all parts of them."""
    return any(getattr(part, name, None) for name in CLIPS)


def _clips_later(part: Any) -> bool:
    """Whether the optimizer changes gradients before it clips them, so that it has to clip them itself."""
    return bool(getattr(part, "loss_scale_factor", None) or getattr(part, "gradient_accumulation_steps", None))


@contextlib.contextmanager
def _without_clipping(part: Any) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name in CLIPS:
            stack.enter_context(compat.attribute(part, name, None))
        yield


def clip(part: Any, gradients: Sequence[Any], parts: Sequence[Any]) -> list[Any]:
    """Clips parts of gradients by the norms of whole ones, or of all, as Keras does without parts.

    Args:
        part: The distributed optimizer.
        gradients: This rank's parts of reduced gradients, none of them None.
        parts: The parts of variables.
    """
    shards: Shards = part._hvkeras_shards
    values = [getattr(gradient, "values", gradient) for gradient in gradients]
    dtype = tf.float64 if any(value.dtype == tf.float64 for value in values) else tf.float32
    squares = [tf.reduce_sum(tf.square(tf.cast(value, dtype))) for value in values]
    numbers = [shards.number_of(one) for one in parts]
    shared = [number is None or shards.bounds[number] is not None for number in numbers]

    def over_ranks(own: Any) -> Any:
        return allreduce(own, op=Sum, name=f"{part._hvkeras_exchange.name}, norms of gradients",
                         process_set=part._hvkeras_exchange.process_set)

    if part.clipnorm:
        across = [number for number in range(len(shards.parts)) if _is_across(shards, number)]
        totals: dict[Any, Any] = {}
        if across:
            by_number = dict(zip(numbers, squares, strict=True))
            summed = over_ranks(tf.stack([by_number.get(number, tf.zeros([], dtype)) for number in across]))
            totals = {number: summed[place] for place, number in enumerate(across)}
        norms = [tf.sqrt(totals.get(number, square)) for number, square in zip(numbers, squares, strict=True)]
        limit = tf.constant(part.clipnorm, dtype)
        factors = [limit / tf.maximum(norm, limit) for norm in norms]
    else:
        own = [square for square, is_shared in zip(squares, shared, strict=True) if is_shared]
        total = over_ranks(tf.add_n(own) if own else tf.zeros([], dtype))
        kept = [square for square, is_shared in zip(squares, shared, strict=True) if not is_shared]
        norm, limit = tf.sqrt(tf.add_n([total, *kept])), tf.constant(part.global_clipnorm, dtype)
        # NaN if the norm is not finite, so that no wrong gradient is applied in silence.
        factors = [limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)] * len(gradients)

    def scaled(gradient: Any, factor: Any) -> Any:
        if isinstance(gradient, tf.IndexedSlices) and keeps_rows:
            return tf.IndexedSlices(gradient.values * tf.cast(factor, gradient.dtype), gradient.indices,
                                    gradient.dense_shape)
        return tf.convert_to_tensor(gradient) * tf.cast(factor, gradient.dtype)

    # Keras 3 makes gradients dense when it clips them by their global norm.
    keeps_rows = bool(part.clipnorm) or compat.family_of(part) != compat.KERAS

    return [scaled(*each) for each in zip(gradients, factors, strict=True)]


def _is_across(shards: Shards, number: int) -> bool:
    """Whether several ranks have a part of a variable."""
    bounds = shards.bounds[number]
    return bounds is not None and sum(start < stop for start, stop in itertools.pairwise(bounds)) > 1


@graphs.unconverted
def reduce_and_update(part: Distributed, shards: Shards, apply: Apply, optimizer: Any, gradients: Sequence[Any],
                      variables: Sequence[Any]) -> Any:
    """Makes a whole step.

    Args:
        part: The distributed optimizer.
        shards: Its variables.
        apply: Applies gradients.
        optimizer: The outermost optimizer.
        gradients: This rank's gradients.
        variables: Their variables.

    Returns:
        What `apply` returns.
    """
    numbers = require_known(shards, variables)
    shards.follow(numbers)
    step = StepParts(shards, numbers)
    reduced = part._hvkeras_over_ranks(optimizer, variables, parts=step)(gradients)
    return update_parts(part, step, apply, optimizer, gradients, reduced, numbers)


@graphs.unconverted
def update_reduced(part: Distributed, shards: Shards, apply: Apply, optimizer: Any, gradients: Sequence[Any],
                   variables: Sequence[Any]) -> Any:
    """Makes a step with gradients that all ranks have reduced already; the arguments are those of a whole step."""
    numbers = require_known(shards, variables)
    shards.follow(numbers)
    step = StepParts(shards, numbers)
    reduced = [None if gradient is None else step.take(place, gradient, None)
               for place, gradient in enumerate(gradients)]
    return update_parts(part, step, apply, optimizer, gradients, reduced, numbers)

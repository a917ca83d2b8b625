"""Random numbers: those that one process would draw.

Each rank draws its own rows where the generator's counter can be advanced to them; else all ranks draw alike, and each
keeps its own rows. So what follows from them is divided, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import tensorflow as tf

from hvkeras.partition import tensorflow_graphs
from hvkeras.partition.decisions import Call, Decision, Own, Rule, Value, computed_by_all, own_shape
from hvkeras.partition.layouts import REPLICATED, Divided, Division, Replicated
from hvkeras.partition.rule_table import rule
from hvkeras.partition.rules.state import on_first
from hvkeras.partition.sizes import Polynomial, Shape, Size, product, quotient, rows


def division_of(size: Size | None, like: Any = None) -> Divided | None:
    """Return the division of a first dimension that is made of rows.

    The elements of a row may be neighbours, or in blocks: as in the tensor whose shape it is, if there is one.
    """
    if isinstance(like, Divided) and like.axis == 0 and like.size == size:
        return like
    if not isinstance(size, Polynomial) or len(size.symbols) != 1:
        return None
    symbol = next(iter(size.symbols))
    each = quotient(size, rows(symbol))
    if each is None or (each != 1 and isinstance(like, Replicated)):
        return None
    return Divided(Division(symbol, rows(symbol)), 0, 1, each)


def drawn(decided: Callable[[Call], Decision | None]) -> Rule:
    """Let rank 0 draw what all ranks must have, if there is no seed: each would draw other numbers."""
    @wraps(decided)
    def found(call: Call) -> Decision:
        decision, attributes = decided(call) or computed_by_all(call), call.operation.node_def.attr
        has_seed = not call.operation.op_def.is_stateful or any(attributes[name].i for name in ("seed", "seed2"))
        if has_seed or not isinstance(decision.results[0].layout, Replicated):
            return decision
        return on_first(call, [value.shape for value in decision.results])
    return found


@rule("NonDeterministicInts", "RandomShuffle", "SampleDistortedBoundingBoxV2", "Timestamp")
@drawn
def others(call: Call) -> Decision:
    """All ranks draw alike."""
    return computed_by_all(call)


def divided_at_once(call: Call, whole: Shape) -> Decision:
    """Return the decision that all ranks compute the whole of one result, of whose rows each keeps its own."""
    layout = division_of(whole[0], call.operands[0].sizes_of) if whole else None
    if layout is None and call.wanted is not None and call.wanted.axis == 0 and call.wanted.size == whole[0]:
        layout = call.wanted
    if layout is None:
        return computed_by_all(call, [whole])
    result = Value(layout, whole)

    def create(operation: Any, operands: Sequence[tf.Tensor], sizes: Any) -> list[tf.Tensor]:
        return [sizes.take(tensorflow_graphs.copied(operation, operands).outputs[0], result, layout.division)]

    return Decision((REPLICATED,) * len(call.operands), (result,), dict(call.vectors), create)


@rule("RandomStandardNormal", "RandomUniform", "RandomUniformInt", "TruncatedNormal",
      "StatelessRandomNormal", "StatelessRandomUniform", "StatelessRandomUniformFullInt", "StatelessRandomUniformInt",
      "StatelessTruncatedNormal",
      "StatelessRandomNormalV2", "StatelessRandomUniformFullIntV2", "StatelessRandomUniformIntV2",
      "StatelessRandomUniformV2", "StatelessTruncatedNormalV2",
      "ParameterizedTruncatedNormal", "StatelessParameterizedTruncatedNormal",
      "StatelessRandomBinomial", "StatelessRandomGammaV2", "StatelessRandomGammaV3", "StatelessRandomPoisson")
@drawn
def random_numbers(call: Call) -> Decision | None:
    """The first operand is the shape."""
    shape = call.sizes(0)
    if shape is None or shape.ndim != 1:
        return None
    found = divided_at_once(call, tuple(shape.tolist()))
    algorithm = call.numbers(3) if call.type in _ADVANCED and isinstance(found.results[0].layout, Divided) else None
    return found if algorithm not in (_PHILOX, _PHILOX_HERE) else replace(found, create=partial(_draw, found.create))


_ADVANCED = ("StatelessRandomNormalV2", "StatelessRandomUniformFullIntV2", "StatelessRandomUniformIntV2",
             "StatelessRandomUniformV2")
_PHILOX, _PHILOX_HERE = 1, 3  # by name, and as what TensorFlow chooses if XLA does not compile


def _draw(draw_whole: Any, operation: Any, operands: Sequence[tf.Tensor], sizes: Any) -> list[tf.Tensor]:
    """Draw only a rank's rows, with an advanced counter.

    Philox makes 128 bits at a time: four numbers, or two of 64 bits. The counter has as many, the lower half first.
    """
    result, dtype = sizes.results[0], operation.outputs[0].dtype
    if sizes.is_compiled or result.layout.outer != 1:
        return list(draw_whole(operation, operands, sizes))
    at_a_time, of_unit = 2 if dtype.size == 8 else 4, product((result.layout.each, *result.shape[1:]))
    first = sizes.first(result.layout.division) * sizes.number(of_unit, tf.int64)
    number = sizes.number(Own(result.layout.division, of_unit), tf.int64)
    lower, upper = operands[2][0], operands[2][1]
    advanced = lower + tf.cast(first // at_a_time, lower.dtype)
    counter = tf.stack([advanced, upper + tf.cast(advanced < lower, lower.dtype)])
    shape = tf.cast(first % at_a_time + number, operands[0].dtype)[None]
    drawn = tensorflow_graphs.copied(operation, [shape, operands[1], counter, *operands[3:]]).outputs[0]
    return [tf.reshape(drawn[first % at_a_time:], sizes.vector(own_shape(result)))]


@rule("RandomGamma", "RandomPoissonV2")
@drawn
def numbers_of_parameters(call: Call) -> Decision | None:
    """So many numbers for each parameter."""
    shape, parameters = call.sizes(0), call.shape(1)
    return None if shape is None or parameters is None else divided_at_once(call, (*shape.tolist(), *parameters))


@rule("Multinomial", "StatelessMultinomial")
@drawn
def categories(call: Call) -> Decision | None:
    """So many draws for each row of logits."""
    shape, number = call.shape(0), call.sizes(1)
    return None if shape is None else divided_at_once(call, (shape[0], None if number is None else number.item()))

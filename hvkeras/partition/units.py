"""Numbers of units at run time: how many rows there are, and which of them a rank has."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from hvkeras.partition.decisions import Own, Value, Vector
from hvkeras.partition.integers import Integers
from hvkeras.partition.layouts import Division
from hvkeras.partition.sizes import Polynomial, Shape, Size


def common_number(tensors: Sequence[tf.Tensor], message: str) -> tf.Tensor:
    """Return how many rows tensors have, as an int64 scalar; where they do not have as many, the graph fails.

    Args:
        tensors: The tensors, whose first dimensions are rows.
        message: What the error says; `{}` stands for the numbers of rows.
    """
    numbers = tf.stack([tf.shape(tensor, out_type=tf.int64)[0] for tensor in tensors])
    first, static = numbers[0], {tensor.shape[0] for tensor in tensors}
    if len(tensors) == 1 or (len(static) == 1 and None not in static):
        return first
    check = tf.raw_ops.Assert(condition=tf.reduce_all(numbers == first), data=[tf.strings.format(message, numbers)])
    with tf.control_dependencies([check]):
        return tf.identity(first)


class Units:
    """The units of one rank.

    Of `total` units and `size` ranks, each rank has `total // size` units, and the first `total % size` ranks one more.
    A rank for which there is none computes with the last unit, so that no operation meets a tensor without elements;
    what it computes does not count. Only where there is no unit at all, all ranks compute with none.

    Args:
        rank: The rank.
        size: Number of ranks.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank: int = rank
        self.size: int = size
        self._totals: dict[str, tf.Tensor] = {}  # by symbol
        self._created: dict[Any, tf.Tensor] = {}  # by graph

    def set_total(self, symbol: str, total: tf.Tensor) -> None:
        """Say how many units there are.

        Args:
            symbol: Symbol of this number.
            total: The number, an int64 scalar.
        """
        self._totals[symbol] = total

    def number(self, size: Size | Own, dtype: tf.DType = tf.int32) -> tf.Tensor:
        """Return a size as a scalar.

        Args:
            size: The size; that of a rank's part is this rank's.
            dtype: Type of the scalar.
        """
        return self._once((size, dtype), _symbols([size]), lambda: self._number(size, dtype))

    def _number(self, size: Size | Own, dtype: tf.DType) -> tf.Tensor:
        if isinstance(size, int):
            return tf.constant(size, dtype)
        if isinstance(size, Own):
            own = tf.cast(self.own(size.division), dtype)
            return own if size.times == 1 else own * self.number(size.times, dtype)
        products = [self._product(monomial, factor, dtype) for monomial, factor in size.terms]
        return products[0] if len(products) == 1 else tf.add_n(products)

    def _product(self, monomial: Any, factor: int, dtype: tf.DType) -> tf.Tensor:
        result = None if factor == 1 and monomial else tf.constant(factor, dtype)
        for symbol, power in monomial:
            for _ in range(power):
                total = tf.cast(self._totals[symbol], dtype)
                result = total if result is None else result * total
        return result

    def _once(self, key: Any, symbols: Collection[str], create: Callable[[], tf.Tensor]) -> tf.Tensor:
        """Return what is created once, outside of loops if the numbers that it depends on are.

        Args:
            key: What identifies it.
            symbols: Symbols of the numbers.
            create: Creates it.
        """
        graph = current = tf.compat.v1.get_default_graph()
        totals = [self._totals[symbol] for symbol in symbols]
        of_totals = {total.graph for total in totals if tf.is_symbolic_tensor(total)}
        while graph is not None and graph not in of_totals:
            graph = getattr(graph, "outer_graph", None)
        graph = graph or current
        if (graph, key) not in self._created:
            outside = contextlib.nullcontext() if graph is current else graph.as_default()
            with outside, tf.control_dependencies(None):
                self._created[graph, key] = create()
        return self._created[graph, key]

    def vector(self, entries: Vector, dtype: tf.DType = tf.int32, is_scalar: bool = False,
               operand: Any = None) -> tf.Tensor:
        """Return sizes as a vector.

        Args:
            entries: The sizes; None: as in the operand, or, without one, -1: what is left in a reshape.
            dtype: Type of the vector.
            is_scalar: Whether the result is a scalar, the only size.
            operand: The operand that the vector stands for.
        """
        if is_scalar:
            return operand if entries[0] is None else self.number(entries[0], dtype)
        if (operand is not None and None in entries) or any(isinstance(entry, tf.Tensor) for entry in entries):
            return tf.stack([entry if isinstance(entry, tf.Tensor) else operand[place] if entry is None else
                             self.number(entry, dtype) for place, entry in enumerate(entries)])
        known = tuple(-1 if entry is None else entry for entry in entries)
        return self._once((known, dtype), _symbols(known), lambda: self._vector(known, dtype))

    def _vector(self, entries: Sequence[Size | Own], dtype: tf.DType) -> tf.Tensor:
        if all(isinstance(entry, int) for entry in entries):
            return tf.constant(list(entries), dtype, shape=[len(entries)])
        return tf.stack([self.number(entry, dtype) for entry in entries])

    def tensor(self, integers: Integers, dtype: tf.DType) -> tf.Tensor:
        """Return known integers as a tensor."""
        if dtype.is_bool or integers.numbers is not None:
            return tf.constant(integers.numbers, dtype)
        entries = [entry for entry in integers.entries if entry is not None]
        vector = self.vector(tuple(entries), dtype)
        return vector if integers.shape == (len(entries),) else tf.reshape(vector, integers.shape)

    def own(self, division: Division) -> tf.Tensor:
        """Return how many units this rank computes with, as an int64 scalar."""
        if self._has_units(division):
            return self.counted(division)
        return self._once(("own", division), _symbols([division.total]), lambda: tf.maximum(
            self.counted(division), tf.minimum(self.number(division.total, tf.int64), 1)))

    def counted(self, division: Division) -> tf.Tensor:
        """Return how many units of this rank count."""
        def create() -> tf.Tensor:
            total = self.number(division.total, tf.int64)
            return total // self.size + tf.cast(total % self.size > self.rank, tf.int64)

        return self._once(("counted", division), _symbols([division.total]), create)

    def first(self, division: Division) -> tf.Tensor:
        """Return the first unit of this rank."""
        def create() -> tf.Tensor:
            total = self.number(division.total, tf.int64)
            first = total // self.size * self.rank + tf.minimum(total % self.size, self.rank)
            return first if self._has_units(division) else tf.minimum(first, tf.maximum(total - 1, 0))

        return self._once(("first", division), _symbols([division.total]), create)

    def _has_units(self, division: Division) -> bool:
        return self.rank == 0 or (isinstance(division.total, int) and division.total > self.rank)

    def masked(self, tensor: tf.Tensor, division: Division | None) -> tf.Tensor:
        """Return a part of a sum; zeros on a rank without units."""
        if division is None or self._has_units(division):
            return tensor
        return tf.where(self.counted(division) > 0, tensor, tf.zeros_like(tensor))

    def take(self, tensor: tf.Tensor, value: Value, division: Division, copies: bool = False) -> tf.Tensor:
        """Return this rank's part of a whole tensor.

        Args:
            tensor: The tensor.
            value: What is known of the part: shape and layout.
            division: The units.
            copies: Copy the part even where it could be a view.
        """
        layout: Any = value.layout
        assert value.shape is not None
        shape, axis = list(value.shape), layout.axis
        if layout.outer != 1:
            shape = _sizes(tensor, value.shape)
            blocks = self.vector((*shape[:axis], layout.outer, division.total * layout.each, *shape[axis + 1:]))
            tensor, axis = tf.reshape(tensor, blocks), axis + 1
        first, number = (units * self.number(layout.each, tf.int64) for units in (self.first(division),
                                                                                  self.own(division)))
        if copies:
            part = tf.gather(tensor, first + tf.range(number), axis=axis)
        else:
            begin, size = (tf.one_hot(axis, tensor.shape.rank, on_value=here, off_value=tf.constant(other, tf.int64))
                           for here, other in ((first, 0), (number, -1)))
            part = tf.slice(tensor, begin, size)
        if layout.outer != 1:
            part = tf.reshape(part, self.vector((*shape[:axis - 1], Own(division, layout.outer * layout.each),
                                                 *shape[axis:])))
        return part

    def padded(self, tensor: tf.Tensor, value: Value) -> tf.Tensor:
        """Return this rank's part of a divided tensor, units first, with zeros for the units of other ranks."""
        layout: Any = value.layout
        part = self.masked(self._units_first(tensor, value), layout.division)
        first, own, total = (units * self.number(layout.each, tf.int64) for units in (
            self.first(layout.division), self.own(layout.division), self.number(layout.division.total, tf.int64)))
        others = tf.zeros([part.shape.rank - 1, 2], tf.int64)
        return tf.pad(part, tf.concat([[[first, total - first - own]], others], 0))

    def to_gather(self, tensor: tf.Tensor, value: Value) -> tf.Tensor:
        """Return this rank's part of a divided tensor, units first, without those that do not count."""
        layout: Any = value.layout
        tensor = self._units_first(tensor, value)
        if self._has_units(layout.division):
            return tensor
        return tensor[:self.counted(layout.division) * self.number(layout.each, tf.int64)]

    def _units_first(self, tensor: tf.Tensor, value: Value) -> tf.Tensor:
        layout: Any = value.layout
        tensor, axis = self._blocks(tensor, value.shape, layout, Own(layout.division, layout.each))
        if axis:
            rank = tensor.shape.rank
            tensor = tf.transpose(tensor, [axis, *(other for other in range(rank) if other != axis)])
        return tensor

    def gathered(self, tensor: tf.Tensor, value: Value) -> tf.Tensor:
        """Return a whole tensor of what was gathered."""
        layout: Any = value.layout
        axis = layout.axis + (layout.outer != 1)
        if axis:
            rank = tensor.shape.rank
            tensor = tf.transpose(tensor, [*range(1, axis + 1), 0, *range(axis + 1, rank)])
        if layout.outer != 1:
            assert value.shape is not None
            tensor = tf.reshape(tensor, self.vector(tuple(_sizes(tensor, value.shape, layout.axis))))
        return tensor

    def _blocks(self, tensor: tf.Tensor, shape: Any, layout: Any, own: Own) -> tuple[tf.Tensor, int]:
        if layout.outer == 1:
            return tensor, layout.axis
        assert shape is not None
        shape = _sizes(tensor, shape)
        blocks: Sequence[Any] = (*shape[:layout.axis], layout.outer, own, *shape[layout.axis + 1:])
        return tf.reshape(tensor, self.vector(tuple(blocks))), layout.axis + 1


def _symbols(sizes: Sequence[Size | Own]) -> set[str]:
    """Return the symbols on which sizes depend."""
    numbers = [*sizes, *(part for size in sizes if isinstance(size, Own) for part in (size.division.total, size.times))]
    return set[str]().union(*(number.symbols for number in numbers if isinstance(number, Polynomial)))


def _sizes(tensor: tf.Tensor, shape: Shape, blocks: int | None = None) -> list[Any]:
    """Return a shape in which sizes that are not known are those of a tensor, in which one axis may be two."""
    return [tf.shape(tensor)[axis + (blocks is not None and axis > blocks)] if size is None else size
            for axis, size in enumerate(shape)]

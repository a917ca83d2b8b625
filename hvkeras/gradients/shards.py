"""The variables of an optimizer that ranks share, and this rank's parts of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvkeras import compat
from hvkeras.compat import graphs
from hvkeras.gradients.parts import Bounds, Extent


class Shards:
    """The variables that an optimizer updates, and for each what this rank updates of it.

    The part of a variable that this rank has all of is the variable itself. Of one that lies across a cut, the part is
    a variable of its own, whose value shares the memory of the whole one but for the time between the update and the
    gathering that follows it. The parts of other ranks' variables are empty.

    Args:
        variables: The model's variables.
        bounds: The bounds of each; None for one that each rank keeps and updates for itself.
        ranks: The ranks that share the update.
        place: This rank's place among them.
    """

    def __init__(self, variables: Sequence[Any], bounds: Sequence[Bounds | None], ranks: Sequence[int],
                 place: int) -> None:
        self.variables: list[Any] = list(variables)
        self.bounds: list[Bounds | None] = list(bounds)
        self.ranks: tuple[int, ...] = tuple(ranks)
        self._me = place
        self._places = {compat.variable_key(variable): number for number, variable in enumerate(variables)}
        self.parts: list[Any] = [self._part(number) for number in range(len(self.variables))]
        self._of_parts = {compat.variable_key(part): number for number, part in enumerate(self.parts)}
        # What a rank gives the optimizer that has no part of any gradient of a step.
        self.stand_in: Any = compat.variable_like(self.variables[0], (1,), "hvkeras_stand_in")

    def is_for(self, ranks: int, rank: int) -> bool:
        """Whether they are dealt to all ranks of a job of this size, in which this process has this rank."""
        return self.ranks == tuple(range(ranks)) and self._me == rank

    def places_of(self, variables: Sequence[Any]) -> list[int] | None:
        """The numbers of variables of the model; None if there are others among them."""
        found = [self._places.get(compat.variable_key(variable)) for variable in variables]
        return None if None in found else [number for number in found if number is not None]

    def variable_of(self, part: Any) -> Any:
        """The variable of the model that a part belongs to; anything else is returned as it is."""
        number = self._of_parts.get(compat.variable_key(part))
        return part if number is None else self.variables[number]

    def number_of(self, part: Any) -> int | None:
        """The number of the variable that a part belongs to."""
        return self._of_parts.get(compat.variable_key(part))

    def range_of(self, number: int) -> tuple[int, int]:
        """The elements of a variable that this rank updates: the first one, and the one after the last."""
        bounds = self.bounds[number]
        return (0, _count(self.variables[number])) if bounds is None else (bounds[self._me], bounds[self._me + 1])

    def is_mine(self, number: int) -> bool:
        """Whether this rank updates at least an element of a variable."""
        start, stop = self.range_of(number)
        return start < stop or self.bounds[number] is None

    def is_all_mine(self, number: int) -> bool:
        """Whether it updates all of it."""
        return self.parts[number] is self.variables[number]

    def rows_of(self, number: int) -> tuple[int, int] | None:
        """The rows that this rank updates; None if the variable is cut within rows."""
        row = _row(self.variables[number])
        start, stop = self.range_of(number)
        is_by_rows = row and all(cut % row == 0 for cut in self.bounds[number] or ())
        return (start // row, stop // row) if is_by_rows else None

    def part_shape(self, number: int) -> tuple[int, ...]:
        """The shape of this rank's part."""
        shape, (start, stop) = tuple(self.variables[number].shape), self.range_of(number)
        if stop - start == _count(self.variables[number]):
            return shape
        rows = self.rows_of(number)
        return (stop - start,) if rows is None or not shape else (rows[1] - rows[0], *shape[1:])

    def cut(self, number: int, tensor: Any) -> Any:
        """This rank's part of a tensor of a variable's shape, or of `tf.IndexedSlices`; it shares the memory."""
        if self.is_all_mine(number):
            return tensor
        rows = self.rows_of(number)
        if isinstance(tensor, tf.IndexedSlices):
            if rows is not None:
                inside = (tensor.indices >= rows[0]) & (tensor.indices < rows[1])
                return tf.IndexedSlices(
                    tf.boolean_mask(tensor.values, inside),
                    tf.boolean_mask(tensor.indices, inside) - rows[0],
                    tf.constant(self.part_shape(number), tf.as_dtype(tensor.indices.dtype)))
            tensor = tf.convert_to_tensor(tensor)
        return self._within(number, tensor)

    def follow(self, numbers: Sequence[int]) -> None:
        """Gives the parts of variables that lie across cuts the values that these have now."""
        for number in numbers:
            if self.is_mine(number) and not self.is_all_mine(number):
                whole = compat.native(self.variables[number])
                compat.native(self.parts[number]).assign(self.cut(number, whole.read_value()), read_value=False)

    def _part(self, number: int) -> Any:
        variable, (start, stop) = self.variables[number], self.range_of(number)
        if self.bounds[number] is None or stop - start == _count(variable):
            return variable
        shape = (0, *tuple(variable.shape)[1:]) if start == stop else self.part_shape(number)
        part = compat.variable_like(variable, shape)
        if start < stop:
            with graphs.eagerly():
                compat.native(part).assign(self._within(number, compat.native(variable).read_value()))
        return part

    def _within(self, number: int, whole: Any) -> Any:
        """This rank's part of a dense tensor, of which it has neither all nor nothing."""
        rows = self.rows_of(number)
        start, stop = self.range_of(number) if rows is None else rows
        return (tf.reshape(whole, [-1]) if rows is None else whole)[start:stop]


def extent_of(variable: Any, may_be_cut: bool) -> Extent:
    """What of a variable matters for dealing it.

    Args:
        variable: A variable of the model.
        may_be_cut: Whether the optimizer treats each of its elements by itself.
    """
    dtype = tf.as_dtype(variable.dtype)
    is_constrained = getattr(variable, "constraint", None) is not None
    return Extent(tuple(int(size) for size in variable.shape), dtype.name, int(dtype.size),
                  may_be_cut and not is_constrained)


def _count(variable: Any) -> int:
    return int(compat.native(variable).shape.num_elements())


def _row(variable: Any) -> int:
    shape = tuple(variable.shape)
    return _count(variable) // int(shape[0]) if shape and shape[0] else 0

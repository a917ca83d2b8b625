"""Integers that operations compute from shapes, as sizes that hold for all numbers of rows.

Shapes, axes and sizes are small tensors of integers. Where a graph computes them from shapes, their entries are numbers
and polynomials in the numbers of rows, or not known. Only what is true for all numbers of rows is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from hvkeras.partition import tensorflow_graphs
from hvkeras.partition.sizes import Shape, Size, is_at_least, product, quotient

MOST = 256  # entries of a tensor whose integers are followed


@dataclass(frozen=True)
class Integers:
    """What is known of the elements of a tensor of integers or truth values.

    Args:
        shape: Shape of the tensor.
        entries: The elements, the last axis fastest; None for those that are not known.
    """

    shape: tuple[int, ...]
    entries: tuple[Size | None, ...]

    @classmethod
    def of(cls, elements: Any) -> Integers:
        """Return what is known of an array."""
        array = np.asarray(elements, dtype=object)
        return cls(array.shape, tuple(int(entry) if isinstance(entry, int | np.integer | np.bool_) else entry
                                      for entry in array.ravel().tolist()))

    @property
    def array(self) -> np.ndarray:
        """The elements as an array of objects."""
        array = np.empty(len(self.entries), dtype=object)
        array[:] = self.entries
        return array.reshape(self.shape)

    @property
    def is_known(self) -> bool:
        """Whether all elements are known."""
        return None not in self.entries

    @property
    def numbers(self) -> np.ndarray | None:
        """The elements as an array of integers; None where one of them is not known, or depends on rows."""
        if any(not isinstance(entry, int) for entry in self.entries):
            return None
        return np.array(self.entries, np.int64).reshape(self.shape)


Evaluation: TypeAlias = Callable[..., Any]
_EVALUATIONS: dict[str, Evaluation] = {}
_MOST_OF = {"bool": 1, "int32": 2 ** 31 - 1, "int64": 2 ** 63 - 1}  # types of sizes; others are not followed


def evaluate(operation: Any, operands: Sequence[Integers | None], shapes: Sequence[Shape | None]
             ) -> list[Integers | None]:
    """Return what is known of the integers that an operation computes.

    Args:
        operation: The operation.
        operands: What is known of the elements of its operands.
        shapes: Shapes of its operands, of all ranks together.

    Returns:
        What is known of the elements of each result; None: nothing, not even how many there are.
    """
    nothing: list[Integers | None] = [None] * len(operation.outputs)
    evaluation = _EVALUATIONS.get(operation.type)
    if evaluation is None or not all(output.dtype.name in _MOST_OF for output in operation.outputs):
        return nothing
    try:
        results = evaluation(operation, [
            _unknown(tensor) if operand is None else operand
            for operand, tensor in zip(operands, operation.inputs, strict=True)], shapes)
    except _UnknownError:
        return nothing
    found = [None if result is None or np.size(result) > MOST else Integers.of(result) for result in results]
    fits = all(_fits(integers, output.dtype.name) for output, integers in zip(operation.outputs, found, strict=True))
    return found if fits else nothing


def _fits(integers: Integers | None, dtype: str) -> bool:
    """Return whether numbers are not too large for their type, which would cut them off."""
    return integers is None or all(not isinstance(entry, int) or abs(entry) <= _MOST_OF[dtype]
                                   for entry in integers.entries)


def _unknown(tensor: Any) -> Integers | None:
    """Return the elements of a tensor of known size, none of which is known."""
    if (not tensor.dtype.is_integer and not tensor.dtype.is_bool) or not tensor.shape.is_fully_defined():
        return None
    size = tensor.shape.num_elements()
    return Integers(tuple(tensor.shape.as_list()), (None,) * size) if size <= MOST else None


class _UnknownError(Exception):
    """What an evaluation needs is not known."""


def _evaluates(*types: str) -> Callable[[Evaluation], Evaluation]:
    def register(evaluation: Evaluation) -> Evaluation:
        for type_ in types:
            _EVALUATIONS[type_] = evaluation
        return evaluation
    return register


def _array(operand: Integers | None) -> np.ndarray:
    if operand is None:
        raise _UnknownError
    return operand.array


def _numbers(operand: Integers | None) -> np.ndarray:
    numbers = None if operand is None else operand.numbers
    if numbers is None:
        raise _UnknownError
    return numbers


def _elementwise(function: Callable[..., Size | bool | None]) -> Evaluation:
    def evaluation(_operation: Any, operands: Sequence[Integers | None], _shapes: Any) -> list[np.ndarray]:
        arrays = np.broadcast_arrays(*(_array(operand) for operand in operands))
        result = np.empty(arrays[0].shape, dtype=object)
        for place in np.ndindex(result.shape):
            entries = [array[place] for array in arrays]
            result[place] = None if None in entries else function(*entries)
        return [result]
    return evaluation


def _floor_quotient(dividend: Size, divisor: Size) -> Size | None:
    if isinstance(dividend, int) and isinstance(divisor, int):
        return dividend // divisor if divisor else None
    return quotient(dividend, divisor)


def _truncated_quotient(dividend: Size, divisor: Size) -> Size | None:
    if isinstance(dividend, int) and isinstance(divisor, int):
        return None if divisor == 0 else abs(dividend) // abs(divisor) * (1 if dividend * divisor >= 0 else -1)
    return quotient(dividend, divisor)


def _remainder(dividend: Size, divisor: Size) -> Size | None:
    floor = _floor_quotient(dividend, divisor)
    return None if floor is None else dividend - floor * divisor


def _larger(size: Size, other: Size) -> Size | None:
    return size if is_at_least(size, other) else other if is_at_least(other, size) else None


def _smaller(size: Size, other: Size) -> Size | None:
    return other if is_at_least(size, other) else size if is_at_least(other, size) else None


def _greater(size: Size, other: Size) -> bool | None:
    return True if is_at_least(size, other + 1) else False if is_at_least(other, size) else None


def _greater_or_equal(size: Size, other: Size) -> bool | None:
    return True if is_at_least(size, other) else False if is_at_least(other, size + 1) else None


def _equal(size: Size, other: Size) -> bool | None:
    if size == other:
        return True
    return False if is_at_least(size, other + 1) or is_at_least(other, size + 1) else None


def _not(truth: bool | None) -> bool | None:
    return None if truth is None else not truth


_ELEMENTWISE: dict[tuple[str, ...], Callable[..., Size | bool | None]] = {
    ("Add", "AddV2"): lambda a, b: a + b,
    ("Sub",): lambda a, b: a - b,
    ("Mul",): lambda a, b: a * b,
    ("Neg",): lambda a: -a,
    ("FloorDiv",): _floor_quotient,
    ("TruncateDiv", "Div", "RealDiv"): _truncated_quotient,
    ("FloorMod",): _remainder,
    ("Maximum",): _larger,
    ("Minimum",): _smaller,
    ("Greater",): _greater,
    ("GreaterEqual",): _greater_or_equal,
    ("Less",): lambda a, b: _greater(b, a),
    ("LessEqual",): lambda a, b: _greater_or_equal(b, a),
    ("Equal",): _equal,
    ("NotEqual",): lambda a, b: _not(_equal(a, b)),
    ("LogicalNot",): lambda a: int(not a),
    ("LogicalAnd",): lambda a, b: int(bool(a) and bool(b)),
    ("LogicalOr",): lambda a, b: int(bool(a) or bool(b)),
    ("Identity", "StopGradient", "PreventGradient", "EnsureShape", "Snapshot"): lambda a: a,
    ("ZerosLike",): lambda _: 0,
    ("OnesLike",): lambda _: 1,
}
for _types, _function in _ELEMENTWISE.items():
    _evaluates(*_types)(_elementwise(_function))


@_evaluates("Const")
def _constant(operation: Any, _operands: Any, _shapes: Any) -> list[np.ndarray | None]:
    shape = operation.outputs[0].shape
    if shape.num_elements() > MOST:
        return [None]
    return [tensorflow_graphs.constant(operation).astype(object)]


@_evaluates("Shape", "ShapeN")
def _shape(_operation: Any, _operands: Any, shapes: Sequence[Shape | None]) -> list[np.ndarray | None]:
    return [None if shape is None else _vector(shape) for shape in shapes]


@_evaluates("VariableShape")
def _variable_shape(operation: Any, _operands: Any, _shapes: Any) -> list[np.ndarray | None]:
    known = tensorflow_graphs.handle(operation.inputs[0])
    if known is None or known[1].rank is None:
        return [None]
    return [_vector(known[1].as_list())]


@_evaluates("Size")
def _size(_operation: Any, _operands: Any, shapes: Sequence[Shape | None]) -> list[np.ndarray]:
    shape = shapes[0]
    if shape is None or None in shape:
        return [np.array(None, dtype=object)]
    return [_scalar(product(size for size in shape if size is not None))]


@_evaluates("Rank")
def _rank(_operation: Any, _operands: Any, shapes: Sequence[Shape | None]) -> list[np.ndarray]:
    return [_scalar(None if shapes[0] is None else len(shapes[0]))]


@_evaluates("Cast")
def _cast(operation: Any, operands: Sequence[Integers | None], _shapes: Any) -> list[np.ndarray]:
    source, target = operation.inputs[0].dtype, operation.outputs[0].dtype
    if not source.is_integer or (target.size < source.size and target != "int32"):
        raise _UnknownError  # a truth value, or a number that may not fit
    return [_array(operands[0])]


@_evaluates("Pack")
def _pack(operation: Any, operands: Sequence[Integers | None], _shapes: Any) -> list[np.ndarray]:
    return [np.stack([_array(operand) for operand in operands], operation.get_attr("axis"))]


@_evaluates("Unpack")
def _unpack(operation: Any, operands: Sequence[Integers | None], _shapes: Any) -> list[np.ndarray]:
    return list(np.moveaxis(_array(operands[0]), operation.get_attr("axis"), 0))


@_evaluates("ConcatV2")
def _concatenate(_operation: Any, operands: Sequence[Integers | None], _shapes: Any) -> list[np.ndarray]:
    return [np.concatenate([_array(operand) for operand in operands[:-1]], int(_numbers(operands[-1])))]


@_evaluates("ConcatOffset")
def _concatenation_offsets(_operation: Any, operands: Sequence[Integers | None], _shapes: Any) -> list[np.ndarray]:
    axis, results = int(_numbers(operands[0])), []
    offset: Size | None = 0
    for operand in operands[1:]:
        result = np.zeros(len(_array(operand)), dtype=object)
        result[axis] = offset
        results.append(result)
        size = _array(operand)[axis]
        offset = None if offset is None or size is None else offset + size
    return results


@_evaluates("Split")
def _split(operation: Any, operands: Sequence[Integers | None], _shapes: Any) -> list[np.ndarray]:
    return np.split(_array(operands[1]), operation.get_attr("num_split"), int(_numbers(operands[0])))


@_evaluates("SplitV")
def _split_at(_operation: Any, operands: Sequence[Integers | None], _shapes: Any) -> list[np.ndarray]:
    array, sizes, axis = _array(operands[0]), _numbers(operands[1]), int(_numbers(operands[2]))
    rest = array.shape[axis] - int(sizes[sizes >= 0].sum())
    return np.split(array, np.cumsum(np.where(sizes < 0, rest, sizes))[:-1], axis)


@_evaluates("Slice")
def _slice(_operation: Any, operands: Sequence[Integers | None], _shapes: Any) -> list[np.ndarray]:
    array, begin, size = _array(operands[0]), _numbers(operands[1]), _numbers(operands[2])
    return [array[tuple(slice(first, None if number < 0 else first + number)
                        for first, number in zip(begin.tolist(), size.tolist(), strict=True))]]


@_evaluates("StridedSlice")
def _strided_slice(operation: Any, operands: Sequence[Integers | None], _shapes: Any) -> list[np.ndarray]:
    begin, end, strides = (_numbers(operand).tolist() for operand in operands[1:])
    masks = {name: operation.get_attr(f"{name}_mask")
             for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    places: list[Any] = []
    for number, (first, last, stride) in enumerate(zip(begin, end, strides, strict=True)):
        chosen = {name for name, mask in masks.items() if mask >> number & 1}
        if "ellipsis" in chosen:
            places.append(Ellipsis)
        elif "new_axis" in chosen:
            places.append(np.newaxis)
        elif "shrink_axis" in chosen:
            places.append(first)
        else:
            places.append(slice(None if "begin" in chosen else first, None if "end" in chosen else last, stride))
    result = np.empty((), dtype=object)
    taken = _array(operands[0])[tuple(places)]
    if isinstance(taken, np.ndarray):
        return [taken]
    result[()] = taken
    return [result]


@_evaluates("GatherV2")
def _gather(operation: Any, operands: Sequence[Integers | None], _shapes: Any) -> list[np.ndarray]:
    if operation.get_attr("batch_dims"):
        raise _UnknownError
    return [np.take(_array(operands[0]), _numbers(operands[1]), int(_numbers(operands[2])))]


@_evaluates("Reshape")
def _reshape(_operation: Any, operands: Sequence[Integers | None], _shapes: Any) -> list[np.ndarray]:
    return [_array(operands[0]).reshape(_numbers(operands[1]).tolist())]


@_evaluates("ExpandDims")
def _expand_dimensions(_operation: Any, operands: Sequence[Integers | None], _shapes: Any) -> list[np.ndarray]:
    return [np.expand_dims(_array(operands[0]), int(_numbers(operands[1]).ravel()[0]))]


@_evaluates("Squeeze")
def _squeeze(operation: Any, operands: Sequence[Integers | None], _shapes: Any) -> list[np.ndarray]:
    return [np.squeeze(_array(operands[0]), tuple(operation.get_attr("squeeze_dims")) or None)]


@_evaluates("Transpose")
def _transpose(_operation: Any, operands: Sequence[Integers | None], _shapes: Any) -> list[np.ndarray]:
    return [np.transpose(_array(operands[0]), _numbers(operands[1]).tolist())]


@_evaluates("ReverseV2")
def _reverse(_operation: Any, operands: Sequence[Integers | None], _shapes: Any) -> list[np.ndarray]:
    return [np.flip(_array(operands[0]), tuple(_numbers(operands[1]).tolist()))]


@_evaluates("Range")
def _range(_operation: Any, operands: Sequence[Integers | None], _shapes: Any) -> list[np.ndarray]:
    numbers = np.arange(*(int(_numbers(operand)) for operand in operands))
    if len(numbers) > MOST:
        raise _UnknownError
    return [numbers]


@_evaluates("Fill")
def _fill(_operation: Any, operands: Sequence[Integers | None], _shapes: Any) -> list[np.ndarray]:
    shape = _numbers(operands[0]).tolist()
    if np.prod(shape) > MOST:
        raise _UnknownError
    return [np.full(shape, _array(operands[1])[()], dtype=object)]


@_evaluates("BroadcastTo")
def _broadcast(_operation: Any, operands: Sequence[Integers | None], _shapes: Any) -> list[np.ndarray]:
    shape = _numbers(operands[1]).tolist()
    if np.prod(shape) > MOST:
        raise _UnknownError
    return [np.broadcast_to(_array(operands[0]), shape)]


@_evaluates("Tile")
def _tile(_operation: Any, operands: Sequence[Integers | None], _shapes: Any) -> list[np.ndarray]:
    times = _numbers(operands[1]).tolist()
    if np.prod(times) > MOST:
        raise _UnknownError
    return [np.tile(_array(operands[0]), times)]


@_evaluates("Sum", "Prod", "Max", "Min", "All", "Any")
def _reduce(operation: Any, operands: Sequence[Integers | None], _shapes: Any) -> list[np.ndarray]:
    array, axes = _array(operands[0]), tuple(axis % _array(operands[0]).ndim for axis in _numbers(operands[1]).ravel())
    kept = [axis for axis in range(array.ndim) if axis not in axes]
    shape = [array.shape[axis] for axis in kept]
    rows = np.transpose(array, [*kept, *axes]).reshape(int(np.prod(shape)), -1)
    result = np.empty(len(rows), dtype=object)
    result[:] = [_reduced(operation.type, row.tolist()) for row in rows]
    if operation.get_attr("keep_dims"):
        shape = [1 if axis in axes else size for axis, size in enumerate(array.shape)]
    return [result.reshape(shape)]


def _reduced(type_: str, entries: list[Size | None]) -> Size | None:
    if type_ == "Prod" and 0 in entries:
        return 0
    if None in entries or (not entries and type_ in ("Max", "Min")):
        return None
    known = [entry for entry in entries if entry is not None]
    if type_ == "Sum":
        return sum(known, 0)
    if type_ == "Prod":
        return product(known)
    if type_ in ("All", "Any"):
        return int((all if type_ == "All" else any)(known))
    result: Size | None = known[0]
    for entry in known[1:]:
        result = None if result is None else (_larger if type_ == "Max" else _smaller)(result, entry)
    return result


@_evaluates("Select", "SelectV2")
def _select(_operation: Any, operands: Sequence[Integers | None], _shapes: Any) -> list[np.ndarray]:
    condition, then, other = np.broadcast_arrays(*(_array(operand) for operand in operands))
    result = np.empty(condition.shape, dtype=object)
    for place in np.ndindex(result.shape):
        if condition[place] is None:
            result[place] = then[place] if then[place] == other[place] else None
        else:
            result[place] = then[place] if condition[place] else other[place]
    return [result]


@_evaluates("DynamicStitch")
def _stitch(_operation: Any, operands: Sequence[Integers | None], _shapes: Any) -> list[np.ndarray]:
    half = len(operands) // 2
    indices = [_numbers(operand) for operand in operands[:half]]
    size = max((int(places.max()) + 1 for places in indices if places.size), default=0)
    result = np.empty(size, dtype=object)
    for places, operand in zip(indices, operands[half:], strict=True):
        array = _array(operand)
        if array.ndim != places.ndim:
            raise _UnknownError
        for place in np.ndindex(places.shape):
            result[places[place]] = array[place]
    return [result]


@_evaluates("InvertPermutation")
def _invert_permutation(_operation: Any, operands: Sequence[Integers | None], _shapes: Any) -> list[np.ndarray]:
    return [np.argsort(_numbers(operands[0]))]


@_evaluates("BroadcastArgs")
def _broadcast_shapes(_operation: Any, operands: Sequence[Integers | None], _shapes: Any) -> list[np.ndarray]:
    one, other = _aligned(operands)
    result = np.empty(len(one), dtype=object)
    for axis, (size, its_size) in enumerate(zip(one, other, strict=True)):
        result[axis] = size if its_size in (1, size) else its_size if size == 1 else None
    return [result]


@_evaluates("BroadcastGradientArgs")
def _broadcast_axes(_operation: Any, operands: Sequence[Integers | None], _shapes: Any) -> list[np.ndarray]:
    """Return the axes along which each operand of an operation was broadcast; of size 1 in both: neither matters."""
    one, other = _aligned(operands)
    reduced: tuple[list[int], list[int]] = ([], [])
    for axis, (size, its_size) in enumerate(zip(one, other, strict=True)):
        if size == its_size and size is not None:
            continue
        if size is None or its_size is None or 1 not in (size, its_size):
            raise _UnknownError
        reduced[0 if size == 1 else 1].append(axis)
    return [np.array(axes, dtype=object) for axes in reduced]


def _aligned(operands: Sequence[Integers | None]) -> tuple[list[Size | None], list[Size | None]]:
    one, other = (_array(operand).tolist() for operand in operands)
    length = max(len(one), len(other))
    return [1] * (length - len(one)) + one, [1] * (length - len(other)) + other


def _vector(entries: Sequence[Any]) -> np.ndarray:
    result = np.empty(len(entries), dtype=object)
    result[:] = list(entries)
    return result


def _scalar(entry: Any) -> np.ndarray:
    result = np.empty((), dtype=object)
    result[()] = entry
    return result

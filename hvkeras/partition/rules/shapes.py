"""Operations that change shapes, or join, cut and repeat tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from hvkeras.partition.decisions import Call, Decision, Own, Value, Vector, by_pattern, computed_by_all
from hvkeras.partition.layouts import REPLICATED, Divided, Layout, ListOf, Partial, Replicated, reshaped
from hvkeras.partition.patterns import SHAPE, WHOLE, Pattern
from hvkeras.partition.rule_table import fitted, pattern, rule
from hvkeras.partition.sizes import Polynomial, Shape, Size, is_at_least, product, quotient

_LETTERS = "abcdefghijklmnopqrstuvwxyz"

pattern("PlaceholderWithDefault", "*->*", linear="each")


def letters_of(dimensions: int | None, whole: Sequence[int] = ()) -> str | None:
    """Return a letter for each dimension, capitals for those that must be whole; None for too many dimensions."""
    if dimensions is None or dimensions > len(_LETTERS):
        return None
    return "".join(letter.upper() if axis in whole else letter for axis, letter in enumerate(_LETTERS[:dimensions]))


@rule("Shape", "ShapeN")
def shape(call: Call) -> Decision | None:
    """Shapes are those of whole tensors. They are made of the number of rows; others are not divided."""
    if any(value.shape is None for value in call.operands):
        return None

    def create(operation: Any, operands: Sequence[tf.Tensor], sizes: Any) -> list[tf.Tensor]:
        return [sizes.vector(tuple(value.shape or ()), output.dtype, False,
                             tf.shape(operand, out_type=output.dtype) if None in (value.shape or ()) else None)
                for value, operand, output in zip(call.operands, operands, operation.outputs, strict=True)]

    return Decision(tuple(value.layout for value in call.operands),
                    tuple(Value(REPLICATED, (len(value.shape or ()),)) for value in call.operands), create=create,
                    takes_operands=any(None in (value.shape or ()) for value in call.operands))


@rule("Size")
def number_of_elements(call: Call) -> Decision | None:
    """Of dimensions that are not known, each rank has the whole, but for the divided one."""
    value, layout = call.operands[0], call.operands[0].layout
    if value.shape is None or isinstance(layout, ListOf):
        return None

    def create(operation: Any, operands: Sequence[tf.Tensor], sizes: Any) -> list[tf.Tensor]:
        dtype = operation.outputs[0].dtype
        size = tf.shape(operands[0], out_type=dtype)
        entries = tuple(layout.size if isinstance(layout, Divided) and layout.axis == axis else None
                        for axis in range(len(value.shape or ())))
        return [tf.reduce_prod(sizes.vector(entries, dtype, False, size))]

    return Decision((layout,), (Value(REPLICATED, ()),), create=create)


@rule("ZerosLike", "OnesLike")
def filled_like(call: Call) -> Pattern | Decision | None:
    """Of a partial sum, only the shape matters; a list of zeros has the layout of the other one."""
    if isinstance(call.operands[0].layout, ListOf):
        return Decision((call.operands[0].layout,), (replace(call.operands[0], integers=None),))
    if isinstance(call.operands[0].layout, Partial):
        return Decision((call.operands[0].layout,), (Value(REPLICATED, call.shape(0)),))
    return fitted(call, "*->*")


@rule("EnsureShape")
def ensure_shape(call: Call) -> Decision | None:
    """How many rows a rank has is not what is checked."""
    layout, rank = call.operands[0].layout, call.rank(0)
    shape = tf.TensorShape(call.attribute("shape"))
    if not isinstance(layout, Divided):
        return None
    if shape.rank is not None and (shape.rank != rank or shape[layout.axis] not in (None, layout.size)):
        return None
    sizes = None if shape.rank is None else [None if axis == layout.axis else size for axis, size in enumerate(shape)]
    return Decision((layout,), (Value(layout, call.shape(0)),),
                    create=lambda _operation, operands, _sizes: [tf.ensure_shape(operands[0], sizes)])


@rule("Reshape")
def reshape(call: Call) -> Decision | None:
    """Rows stay in one axis, which may have further dimensions before and behind them in it."""
    value, shape = call.operands[0], _reshaped_shape(call)
    if isinstance(value.layout, Replicated):
        return Decision((REPLICATED, REPLICATED), (Value(REPLICATED, shape),), _of_shape(shape))
    if isinstance(value.layout, Partial):
        return Decision((value.layout, REPLICATED), (Value(value.layout, shape),), _of_shape(shape))
    if not isinstance(value.layout, Divided) or value.shape is None or shape is None:
        return None
    layout = reshaped(value.layout, value.shape, shape)
    if layout is None:
        return None
    own = tuple(Own(layout.division, layout.outer * layout.each) if axis == layout.axis else size
                for axis, size in enumerate(shape))
    return Decision((value.layout, REPLICATED), (Value(layout, shape),), {1: own})


def _of_shape(shape: Shape | None) -> dict[int, Vector]:
    return {} if shape is None or None in shape else {1: tuple(shape)}


def _reshaped_shape(call: Call) -> Shape | None:
    wanted, shape = call.entries(1), call.shape(0)
    call.vectors.pop(1, None)
    if wanted is None:
        return None
    sizes: list[Any] = [None if isinstance(size, int) and size < 0 else size for size in wanted.tolist()]
    rest = [size for size in sizes if size is not None]
    if len(rest) == len(sizes) - 1 and shape is not None and None not in shape:
        whole = product(size for size in shape if size is not None)
        sizes[sizes.index(None)] = quotient(whole, product(rest))
    return tuple(sizes)


@rule("ExpandDims")
def expand_dimensions(call: Call) -> Pattern | None:
    """A new dimension has size 1."""
    letters = letters_of(call.rank(0))
    axis = None if letters is None else call.axis(1, len(letters) + 1)
    if letters is None or axis is None:
        return None
    return fitted(call, f"{letters},#->{letters[:axis]}.{letters[axis:]}", linear=(0,))


@rule("Squeeze")
def squeeze(call: Call) -> Pattern | Decision | None:
    """Which dimensions go is decided by the shape of the whole; one of rows goes if there is one row."""
    shape, letters = call.shape(0), letters_of(call.rank(0))
    if shape is None or letters is None:
        return None
    axes = [axis % len(shape) for axis in call.attribute("squeeze_dims")]
    if not axes and not all(isinstance(size, int) for size in shape):
        return None
    axes = axes or [axis for axis, size in enumerate(shape) if size == 1]
    if any(isinstance(shape[axis], Polynomial) for axis in axes):
        return None
    found = fitted(call, f"{letters}->" + "".join(
        letter for axis, letter in enumerate(letters) if axis not in axes), linear=(0,))
    return None if found is None else replace(by_pattern(call, found), create=lambda _operation, operands, _sizes: [
        tf.squeeze(operands[0], axes) if axes else tf.identity(operands[0])])


@rule("Transpose")
def transpose(call: Call) -> Pattern | None:
    """Dimensions change their places."""
    permutation, letters = call.numbers(1), letters_of(call.rank(0))
    if permutation is None or letters is None:
        return None
    return fitted(call, f"{letters},#->" + "".join(letters[axis] for axis in permutation), linear=(0,))


@rule("ConcatV2")
def concatenate(call: Call) -> Pattern | Decision | None:
    """Along rows, blocks of all rows follow one another, if each part is made of such blocks."""
    axis = None if call.rank(0) is None else call.axis(len(call.operands) - 1, call.rank(0) or 1)
    letters = None if axis is None else letters_of(call.rank(0), [axis])
    if axis is None or letters is None:
        return None
    parts = call.operands[:-1]
    found = _concatenation(call, letters, axis)
    for value in parts:
        if isinstance(value.layout, Divided) and value.layout.axis == axis:
            blocks = _in_blocks(parts, value.layout)
            if blocks is not None:
                result = replace(value.layout, outer=sum((block.outer for block in blocks), 0))
                return Decision((*blocks, REPLICATED), (Value(result, found.shape_of(0)),), dict(call.vectors))
    return found


def _concatenation(call: Call, letters: str, axis: int) -> Pattern:
    sizes: dict[str, Size | None] = {}
    total: Size | None = 0
    for value in call.operands[:-1]:
        for letter, size in zip(letters, value.shape or (None,) * len(letters), strict=True):
            sizes[letter] = size if sizes.get(letter) is None else sizes[letter]
        part = None if value.shape is None else value.shape[axis]
        total = None if total is None or part is None else total + part
    sizes[letters[axis]] = total
    parts = len(call.operands) - 1
    return Pattern((*[tuple(letters)] * parts, WHOLE), (tuple(letters),), sizes, None, tuple(range(parts)))


def _in_blocks(parts: Sequence[Value], layout: Divided) -> list[Divided] | None:
    """Return the layouts of parts, each of which is made of blocks of all units along an axis; None if one is not."""
    blocks: list[Divided] = []
    for value in parts:
        size = None if value.shape is None else value.shape[layout.axis]
        outer = None if size is None else quotient(size, layout.division.total * layout.each)
        if outer is None:
            return None
        blocks.append(replace(layout, outer=outer))
    return blocks


@rule("Pack")
def pack(call: Call) -> Pattern | None:
    """The operands lie behind one another along a new dimension."""
    letters = letters_of(call.rank(0))
    if letters is None:
        return None
    axis = call.attribute("axis") % (len(letters) + 1)
    return fitted(call, f"{letters}->{letters[:axis]}.{letters[axis:]}", linear="jointly")


@rule("Unpack")
def unpack(call: Call) -> Pattern | None:
    """A dimension is cut into results."""
    dimensions = call.rank(0)
    axis = call.attribute("axis") % (dimensions or 1)
    letters = letters_of(dimensions, [axis])
    return None if not letters else fitted(call, f"{letters}->{letters[:axis]}{letters[axis + 1:]}", linear=(0,))


@rule("Split", "SplitV")
def split(call: Call) -> Pattern | Decision | None:
    """Along rows, blocks of all rows may be divided among the results."""
    data, where = (1, 0) if call.type == "Split" else (0, 2)
    dimensions = call.rank(data)
    axis = None if not dimensions else call.axis(where, dimensions)
    letters = None if axis is None else letters_of(dimensions, [axis])
    if letters is None or axis is None:
        return None
    layout, number = call.operands[data].layout, len(call.operation.outputs)
    shape = list(call.shape(data) or ())
    size = shape[axis] if call.type == "Split" else None
    shape[axis] = None if size is None else quotient(size, number)
    if isinstance(layout, Divided) and layout.axis == axis and call.type == "Split":
        outer = quotient(layout.outer, number)
        if outer is not None:
            result = Value(replace(layout, outer=outer), tuple(shape))
            return Decision((REPLICATED, layout), (result,) * number, dict(call.vectors))
    result_letters = letters.replace(letters[axis], ".")
    operands = f"#,{letters}" if data else f"{letters},#,#"
    found = fitted(call, f"{operands}->{result_letters}", linear=(data,))
    if found is not None and call.type == "Split":
        found.sizes.update({f".{result}.{axis}": shape[axis] for result in range(number)})
    return found


@rule("Pad", "PadV2", "MirrorPad", "MirrorPadGrad")
def pad(call: Call) -> Pattern | None:
    """Dimensions that are not padded may be divided."""
    paddings, dimensions = call.numbers(1), call.rank(0)
    if paddings is None or dimensions is None:
        return None
    padded = [axis for axis in range(dimensions) if paddings[axis].any()]
    letters = letters_of(dimensions, padded)
    if letters is None:
        return None
    found = fitted(call, f"{letters}," + ",".join("#" * (len(call.operands) - 1)) + "->" + "".join(
        "." if axis in padded else letter for axis, letter in enumerate(letters)),
        linear=(0,) if call.type != "PadV2" else ())
    if found is not None:
        sign = -1 if call.type == "MirrorPadGrad" else 1
        for axis in padded:
            size = (call.shape(0) or ())[axis]
            found.sizes[f".0.{axis}"] = None if size is None else size + sign * int(paddings[axis].sum())
    return found


@rule("Tile")
def tile(call: Call) -> Pattern | Decision | None:
    """Copies of all rows are further blocks of them."""
    times, value = call.sizes(1), call.operands[0]
    letters = letters_of(call.rank(0))
    if times is None or letters is None or value.shape is None:
        return None
    shape = tuple(None if size is None else size * number for size, number in zip(value.shape, times, strict=True))
    layout = value.layout
    if isinstance(layout, Divided) and times[layout.axis] != 1:
        return Decision((layout, REPLICATED), (Value(replace(layout, outer=layout.outer * times[layout.axis]), shape),),
                        dict(call.vectors))
    repeated = [axis for axis, number in enumerate(times) if number != 1]
    letters = letters_of(len(letters), repeated) or ""
    found = fitted(call, f"{letters},#->" + "".join("." if axis in repeated else letter
                                                   for axis, letter in enumerate(letters)), linear=(0,))
    if found is not None:
        found.sizes.update({f".0.{axis}": shape[axis] for axis in repeated})
    return found


@rule("LinSpace")
def equal_distances(call: Call) -> Decision:
    """The number of elements may depend on rows."""
    number = call.sizes(2)
    return computed_by_all(call, [None if number is None else (number.item(),)])


@rule("Fill")
def fill(call: Call) -> Pattern | None:
    """A tensor of one value is made where it is used."""
    shape = call.entries(0)
    letters = None if shape is None else letters_of(len(shape))
    if shape is None or letters is None:
        return None
    return Pattern((SHAPE, WHOLE), (tuple(letters),), dict(zip(letters, shape.tolist(), strict=True)))


@rule("Range")
def numbers(call: Call) -> Decision | None:
    """A range of whole numbers has a size that may depend on rows."""
    start, limit, step = (call.sizes(number) for number in range(3))
    call.vectors.clear()
    if start is None or limit is None or step is None:
        return None
    size = quotient(limit.item() - start.item(), step.item())
    known = size is not None and is_at_least(size, 0)
    return computed_by_all(call, [(size,)] if known else None)


@rule("BroadcastTo")
def broadcast(call: Call) -> Pattern | None:
    """Dimensions that are not repeated may be divided, and the result where it is used."""
    shape, wanted = call.shape(0), call.sizes(1)
    letters = None if wanted is None else letters_of(len(wanted))
    if shape is None or wanted is None or letters is None:
        return None
    mine = letters[len(letters) - len(shape):]
    sizes = dict(zip(letters, wanted.tolist(), strict=True))
    if any(size is None or size not in (1, sizes[letter]) for letter, size in zip(mine, shape, strict=True)):
        return None
    operand = tuple(letter if size == sizes[letter] else None for letter, size in zip(mine, shape, strict=True))
    return Pattern((operand, SHAPE), (tuple(letters),), sizes, None, (0,))


@rule("Slice")
def cut(call: Call) -> Pattern | Decision | None:
    """Axes that are kept whole may be divided; along rows, whole blocks of them may be cut out."""
    shape, begin, wanted = call.shape(0), call.entries(1), call.entries(2)
    if shape is None or begin is None or wanted is None:
        return None
    sizes = [size if number != -1 else _difference(size_, first) for size, size_, number, first in zip(
        wanted, shape, wanted, begin, strict=True)]
    of_blocks = _cut_blocks(call.operands[0].layout, begin, wanted, sizes)
    if of_blocks is not None:
        return of_blocks
    whole = [axis for axis, size in enumerate(shape) if begin[axis] == 0 and size is not None and sizes[axis] == size]
    letters = letters_of(len(shape), [axis for axis in range(len(shape)) if axis not in whole])
    found = None if letters is None else fitted(call, f"{letters},#,#->" + "".join(
        letter if axis in whole else "." for axis, letter in enumerate(letters)), linear=(0,))
    if found is None:
        return None
    found.sizes.update({f".0.{axis}": sizes[axis] for axis in range(len(shape)) if axis not in whole})
    return replace(found, own=_own_entry(2, wanted, {axis: axis for axis in whole}))


def _cut_blocks(layout: Layout, begin: Any, wanted: Any, sizes: Sequence[Size | None]) -> Decision | None:
    """Return the decision to cut out whole blocks of all rows; None if others are cut out."""
    if not isinstance(layout, Divided):
        return None
    block, axis = layout.division.total * layout.each, layout.axis
    before = None if begin[axis] is None else quotient(begin[axis], block)
    size = sizes[axis]
    inside = None if size is None else quotient(size, block)
    if before is None or inside is None or inside == 0:
        return None
    vectors = {number: tuple(Own(layout.division, blocks * layout.each) if place == axis else entry
                             for place, entry in enumerate(entries))
               for number, entries, blocks in ((1, begin, before), (2, wanted, inside))}
    return Decision((layout, REPLICATED, REPLICATED), (Value(replace(layout, outer=inside), tuple(sizes)),), vectors)


def _difference(size: Size | None, other: Size | None) -> Size | None:
    return None if size is None or other is None else size - other


def _own_entry(operand: int, entries: Any, places: Mapping[int, int]) -> Callable[[str, Divided], Mapping[int, Vector]]:
    """Return a function that gives the rank's size in place of an entry of an operand, for the axis of a letter."""
    def own(letter: str, layout: Divided) -> Mapping[int, Vector]:
        place = places[_LETTERS.index(letter)]
        mine = Own(layout.division, layout.outer * layout.each)
        return {operand: tuple(mine if number == place else entry for number, entry in enumerate(entries))}
    return own


@rule("StridedSlice")
def strided_slice(call: Call) -> Pattern | None:
    """Axes that are kept whole may be divided."""
    shape = call.shape(0)
    cuts = None if shape is None else _cuts(call, shape, 1)
    return None if cuts is None or shape is None else _sliced(call, shape, cuts, gradient=False)


@rule("StridedSliceGrad")
def strided_slice_gradient(call: Call) -> Pattern | None:
    """The gradient has zeros where nothing was taken."""
    shape = call.sizes(0)
    cuts = None if shape is None else _cuts(call, tuple(shape), 1)
    return None if cuts is None or shape is None else _sliced(call, tuple(shape), cuts, gradient=True)


_Cut = tuple[str, int, int, "Size | None"]  # kind, axis, place in begin and end (or -1), size of the result


def _cuts(call: Call, shape: Shape, first: int) -> list[_Cut] | None:
    """Return what a strided slice does with each axis: "whole", "part", "taken" (one element), or "new"."""
    begin, end, strides = (call.entries(number) for number in range(first, first + 3))
    if begin is None or end is None or strides is None or None in strides.tolist():
        return None
    masks = {name: call.attribute(f"{name}_mask") for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")}
    kinds = [{name for name, mask in masks.items() if mask >> place & 1} for place in range(len(begin))]
    skipped = len(shape) - sum(1 for kind in kinds if not kind & {"ellipsis", "new_axis"})
    cuts: list[_Cut] = []
    axis = 0
    for place, kind in enumerate(kinds):
        if "ellipsis" in kind:
            cuts += [("whole", axis + number, -1, shape[axis + number]) for number in range(skipped)]
            axis += skipped
        elif "new_axis" in kind:
            cuts.append(("new", -1, place, 1))
        else:
            cuts.append(_cut(shape[axis], axis, place, kind, (begin[place], end[place], strides[place])))
            axis += 1
    return cuts + [("whole", rest, -1, shape[rest]) for rest in range(axis, len(shape))]


def _cut(size: Size | None, axis: int, place: int, kind: set[str], bounds: tuple[Any, Any, Any]) -> _Cut:
    begin, end, stride = bounds
    if "shrink_axis" in kind:
        return "taken", axis, place, None
    if size is None or stride != 1:
        return "part", axis, place, size if stride == -1 and {"begin", "end"} <= kind else None
    first = 0 if "begin" in kind else _bound(begin, size)
    last = size if "end" in kind else _bound(end, size)
    if first == 0 and last == size:
        return "whole", axis, -1 if "end" in kind else place, size
    known = first is not None and last is not None and is_at_least(last, first)
    return "part", axis, place, last - first if known and first is not None and last is not None else None


def _bound(bound: Size | None, size: Size) -> Size | None:
    """Return where a slice begins or ends, if this is the same for all numbers of rows."""
    if bound is None:
        return None
    if isinstance(bound, int) and bound < 0:
        return size + bound if is_at_least(size, -bound) else None
    return bound if is_at_least(size, bound) else size if is_at_least(bound, size) else None


def _sliced(call: Call, shape: Shape, cuts: Sequence[_Cut], gradient: bool) -> Pattern | None:
    whole = {axis: place for kind, axis, place, _ in cuts if kind == "whole"}
    letters = letters_of(len(shape), [axis for axis in range(len(shape)) if axis not in whole])
    if letters is None:
        return None
    sizes: dict[str, Size | None] = dict(zip(letters, shape, strict=True))
    result: list[str] = []
    for number, (kind, axis, _, size) in enumerate(cuts):
        if kind == "whole":
            result.append(letters[axis])
        elif kind != "taken":
            result.append(f".{number}")
            sizes[f".{number}"] = size

    def own(letter: str, layout: Divided) -> Mapping[int, Vector]:
        place = whole[_LETTERS.index(letter)]
        vectors: dict[int, Vector] = {}
        if place >= 0:
            vectors |= _own_entry(2, call.vectors[2], {_LETTERS.index(letter): place})(letter, layout)
        if gradient:
            vectors |= _own_entry(0, shape, {_LETTERS.index(letter): _LETTERS.index(letter)})(letter, layout)
        return vectors

    if gradient:
        return Pattern((WHOLE, WHOLE, WHOLE, WHOLE, tuple(result)), (tuple(letters),), sizes, None, (4,), own)
    return Pattern((tuple(letters), WHOLE, WHOLE, WHOLE), (tuple(result),), sizes, None, (0,), own)

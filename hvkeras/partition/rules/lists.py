"""Lists of tensors, in which loops collect what each of their rounds computes.

All elements of a list have one layout. Of a list, shape and integers are those of each element; so are those of a list
of lists, which the gradient of a loop in a loop makes, of the elements of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from hvkeras.partition import tensorflow_graphs
from hvkeras.partition.decisions import Call, Decision, Value, own_shape
from hvkeras.partition.integers import Integers
from hvkeras.partition.layouts import REPLICATED, Divided, Layout, ListOf, Replicated, innermost, joined, whole
from hvkeras.partition.rule_table import rule
from hvkeras.partition.sizes import Shape


def either(value: Value, other: Value) -> Value:
    """Return what is known of a tensor, or of the elements of a list, that is one of two.

    Its layout is one that both get without a collective; if there is none, it is whole.
    """
    element_type = value.element_type or other.element_type
    if ListOf() in (value.layout, other.layout):
        return replace(other if value.layout == ListOf() else value, element_type=element_type)
    layout = joined(value.layout, other.layout)
    if layout is not None and not (_may_be(value, layout) and _may_be(other, layout)):
        layout = None
    return Value(whole(value.layout) if layout is None else layout, common_shape(value.shape, other.shape),
                 common_integers(value.integers, other.integers), element_type=element_type)


def _may_be(value: Value, layout: Layout) -> bool:
    """Return whether a tensor can be in a layout: one that is divided has as many units as that layout has."""
    elements = innermost(layout)
    return value.layout in (layout, ListOf()) or not isinstance(elements, Divided) or (
        value.shape is not None and len(value.shape) > elements.axis and value.shape[elements.axis] == elements.size)


def common_shape(shape: Shape | None, other: Shape | None) -> Shape | None:
    """Return what is known of a shape that is one of two."""
    if shape is None or other is None or len(shape) != len(other):
        return None
    return tuple(size if size == its_size else None for size, its_size in zip(shape, other, strict=True))


def common_integers(integers: Integers | None, other: Integers | None) -> Integers | None:
    """Return what is known of integers that are one of two."""
    if integers is None or other is None or integers.shape != other.shape:
        return None
    return Integers(integers.shape, tuple(entry if entry == its else None for entry, its in zip(
        integers.entries, other.entries, strict=True)))


@rule("EmptyTensorList", "TensorListReserve")
def new_list(call: Call) -> Decision:
    """The shape of elements is said where they are taken out."""
    def create(operation: Any, operands: Sequence[tf.Tensor], _sizes: Any) -> list[tf.Tensor]:
        unknown = tf.constant(-1, operands[0].dtype)
        return list(tensorflow_graphs.copied(operation, [unknown, operands[1]]).outputs)

    result = Value(ListOf(), element_type=call.attribute("element_dtype"))
    return Decision((REPLICATED, REPLICATED), (result,), create=create)


@rule("TensorListPushBack", "TensorListSetItem")
def add_element(call: Call) -> Decision | None:
    """All elements get a common layout."""
    place = 1 if call.type == "TensorListPushBack" else 2
    values, element = call.operands[0], call.operands[place]
    if not isinstance(values.layout, ListOf):
        return None
    type_ = element.element_type or call.attribute("element_dtype")
    result = replace(either(values, replace(element, layout=ListOf(element.layout))), element_type=type_)
    if call.type == "TensorListSetItem":
        result = replace(result, integers=None)  # other elements are zeros
    operands: list[Layout] = [REPLICATED] * len(call.operands)
    assert isinstance(result.layout, ListOf)
    operands[0], operands[place] = result.layout, result.layout.elements or REPLICATED
    return Decision(tuple(operands), (result,))


@rule("TensorListGetItem", "TensorListPopBack")
def take_element(call: Call) -> Decision | None:
    """An element has the layout of all."""
    result = _element(call)
    if result is None:
        return None
    place = 1 if call.type == "TensorListPopBack" else 2
    operands: tuple[Layout, ...] = (call.operands[0].layout, *(REPLICATED for _ in call.operands[1:]))
    results = (result,) if place == 2 else (call.operands[0], result)
    return Decision(operands, results, create=_with_element_shape(place, result))


@rule("TensorListStack")
def stack(call: Call) -> Decision | None:
    """The elements lie behind one another along a first dimension."""
    element = _element(call)
    if element is None:
        return None
    number = call.attribute("num_elements")
    static = call.operation.outputs[0].shape
    first = number if number >= 0 else static[0] if static.rank else None
    layout: Any = element.layout
    result = Value(layout.at(layout.axis + 1) if isinstance(layout, Divided) else layout,
                   None if element.shape is None else (first, *element.shape))
    return Decision((call.operands[0].layout, REPLICATED), (result,), create=_with_element_shape(1, element))


@rule("TensorListFromTensor")
def from_tensor(call: Call) -> Decision | None:
    """The elements are what lies behind one another along the first dimension, which each rank has whole."""
    value = call.operands[0]
    layout: Any = value.layout
    if isinstance(layout, ListOf) or value.shape is None:
        return None
    if isinstance(layout, Divided):
        layout = layout.at(layout.axis - 1) if layout.axis else REPLICATED
    needed = REPLICATED if isinstance(value.layout, Divided) and not value.layout.axis else value.layout

    def create(operation: Any, operands: Sequence[tf.Tensor], _sizes: Any) -> list[tf.Tensor]:
        return list(tensorflow_graphs.copied(operation, [operands[0], tf.constant(-1, operands[1].dtype)]).outputs)

    result = Value(ListOf(layout), value.shape[1:], element_type=call.attribute("element_dtype"))
    return Decision((needed, REPLICATED), (result,), create=create)


@rule("TensorListResize")
def resize(call: Call) -> Decision | None:
    """Elements that are new are zeros when they are taken out."""
    values = call.operands[0]
    if not isinstance(values.layout, ListOf):
        return None
    return Decision((values.layout, REPLICATED), (replace(values, integers=None),))


@rule("TensorListLength")
def length(call: Call) -> Decision:
    """All ranks' lists are equally long."""
    return Decision((call.operands[0].layout,), (Value(REPLICATED, ()),))


@rule("TensorListElementShape")
def element_shape(call: Call) -> Decision | None:
    """The shape of elements, as far as it is known."""
    value = call.operands[0]
    if value.shape is None or (isinstance(value.layout, ListOf) and isinstance(value.layout.elements, ListOf)):
        return None
    entries = tuple(-1 if size is None else size for size in value.shape)

    def create(operation: Any, _operands: Any, sizes: Any) -> list[tf.Tensor]:
        return [sizes.vector(entries, operation.outputs[0].dtype)]

    return Decision((value.layout,), (Value(REPLICATED, (len(entries),)),), create=create)


def _element(call: Call) -> Value | None:
    """Return what is known of an element that an operation takes out of a list."""
    values = call.operands[0]
    if not isinstance(values.layout, ListOf):
        return None
    place = {"TensorListGetItem": 2, "TensorListPopBack": 1, "TensorListStack": 1}[call.type]
    wanted = call.entries(place)
    call.vectors.pop(place, None)
    said: Shape | None = None
    if wanted is not None and wanted.ndim == 1:
        said = tuple(None if isinstance(size, int) and size < 0 else size for size in wanted.tolist())
    if call.type != "TensorListStack":
        output = call.operation.outputs[-1].shape
        static = None if output.rank is None else tuple(output.as_list())
        said = _both(said, static)
    layout: Layout = values.layout.elements or REPLICATED
    if isinstance(layout, ListOf):
        return replace(values, layout=layout)
    return Value(layout, _both(values.shape, said), values.integers)


def _both(shape: Shape | None, other: Shape | None) -> Shape | None:
    if shape is None or other is None or len(shape) != len(other):
        return other if shape is None else shape
    return tuple(its if size is None else size for size, its in zip(shape, other, strict=True))


def _with_element_shape(place: int, element: Value) -> Callable[..., list[tf.Tensor]]:
    """Return a function that creates an operation for which the shape of an element is that of a rank's part."""
    def create(operation: Any, operands: Sequence[tf.Tensor], sizes: Any) -> list[tf.Tensor]:
        given = list(operands)
        own = None if isinstance(element.layout, ListOf) else own_shape(element)
        if own is not None:
            given[place] = sizes.vector(own, operands[place].dtype)
        elif not isinstance(element.layout, Replicated):
            given[place] = tf.constant(-1, operands[place].dtype)
        return list(tensorflow_graphs.copied(operation, given).outputs)
    return create

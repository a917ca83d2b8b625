"""Describes what ranks are about to communicate, so that a difference is an error and never a hang.

A `Plan` describes what one collective (or one bucket of gradients) consists of. Its key is a hash of that content, so
data of different plans can never mix.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import tensorflow as tf

from hvkeras.backends.interface import Reduction


@dataclass(frozen=True)
class Plan:
    """The content of one collective.

    Attributes:
        operation: `allreduce`, `allgather` or `broadcast`, with its qualifiers (`allreduce sum`).
        names: The tensors' names, in the order in which they are fused; only for messages, since Keras numbers the
            names of equal models differently (`dense`, `dense_1`).
        dtypes: The names of their dtypes.
        shapes: Their static shapes; an unknown dimension is None, and so is an unknown shape.
        ranks: The global ranks that participate, ascending.
        label: Its name in messages: `gradients of Adam`, `allreduce "loss"`.
        identity: Distinguishes it from collectives with the same content: the name that the user gave it, or its
            number among the equal collectives of a graph.
    """

    operation: str
    names: tuple[str, ...] = field(compare=False)
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int | None, ...] | None, ...]
    ranks: tuple[int, ...]
    label: str = field(compare=False)
    identity: str = ""

    @classmethod
    def of(
        cls, operation: str, tensors: Sequence[Any], ranks: Sequence[int], label: str,
        names: Sequence[str] | None = None, identity: str = "",
    ) -> Plan:
        """Describes tensors that are about to be communicated.

        Args:
            operation: The collective with its qualifiers.
            tensors: `tf.Tensor`s, eager or symbolic.
            ranks: The global ranks that participate.
            label: Its name in messages.
            names: The tensors' names; `label` alone for a single unnamed tensor.
            identity: Distinguishes it from collectives with the same content.
        """
        return cls(
            operation,
            tuple(names if names is not None else [label] * len(tensors)),
            tuple(tensor.dtype.name for tensor in tensors),
            tuple(None if tensor.shape.rank is None else tuple(tensor.shape.as_list()) for tensor in tensors),
            tuple(ranks),
            label,
            identity,
        )

    @cached_property
    def key(self) -> str:
        """A hash of the content: equal on all ranks exactly when their plans are."""
        content = json.dumps([self.operation, self.identity, self.dtypes, self.shapes, self.ranks])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def describe(self) -> dict[str, Any]:
        """The plan as plain data for the control channel; `kinds` holds what must be equal about the tensors."""
        kinds = [f"{dtype}{'[?]' if shape is None else list(shape)}"
                 for dtype, shape in zip(self.dtypes, self.shapes, strict=True)]
        return {"operation": self.operation, "label": self.label, "ranks": list(self.ranks), "names": list(self.names),
                "kinds": kinds, "dtypes": list(self.dtypes), "identity": self.identity,
                "shapes": [None if shape is None else list(shape) for shape in self.shapes]}

    @classmethod
    def described(cls, text: Mapping[str, Any]) -> Plan:
        """Creates a plan from another rank's description.

        Args:
            text: What `describe` returned there.
        """
        return cls(text["operation"], tuple(text["names"]), tuple(text["dtypes"]),
                   tuple(None if shape is None else tuple(shape) for shape in text["shapes"]), tuple(text["ranks"]),
                   text["label"], text["identity"])


class Call:
    """One of the backend calls that a plan consists of; it can be described to another rank.

    Args:
        operation: The name of a method of `hvkeras.backends.interface.Backend`.
        data: Its first argument: a tensor, or a list of them.
        *arguments: Its other arguments.
    """

    def __init__(self, operation: str, data: Any, *arguments: Any) -> None:
        self.operation, self.data, self.arguments = operation, data, arguments

    def run(self, engine: Any) -> Any:
        """Makes the call.

        Args:
            engine: The backend.
        """
        return getattr(engine, self.operation)(self.data, *self.arguments)

    @property
    def tensors(self) -> list[Any]:
        """The tensors that are communicated."""
        return self.data if isinstance(self.data, list) else [self.data]

    def on(self, tensors: list[Any]) -> Call:
        """The same call on other tensors.

        Args:
            tensors: The same number of tensors.
        """
        return Call(self.operation, tensors if isinstance(self.data, list) else tensors[0], *self.arguments)

    def describe(self) -> dict[str, Any]:
        """The call as plain data; a tensor is represented by its dtype and static shape."""
        return {"operation": self.operation, "eager": tf.executing_eagerly(),
                "arguments": [_plain(argument) for argument in self.arguments],
                "data": [_plain(tensor) for tensor in self.data] if isinstance(self.data, list) else _plain(self.data)}


def _plain(argument: Any) -> Any:
    if isinstance(argument, Reduction):
        return {"reduction": argument.value}
    if hasattr(argument, "dtype"):
        shape = None if argument.shape.rank is None else argument.shape.as_list()
        return {"dtype": argument.dtype.name, "shape": shape}
    return list(argument) if isinstance(argument, tuple) else argument

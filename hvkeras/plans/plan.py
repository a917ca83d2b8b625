"""What the ranks are about to communicate, described so that a difference is an error and never a hang.

A `Plan` says what one collective (or one bucket of gradients) consists of; its key is a hash of that content, so data
of different plans can never mix.
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
        operation: `allreduce`, `allgather` or `broadcast`, with what qualifies it (`allreduce sum`).
        names: The tensors' names, in the order in which they are fused; for messages alone, since
            Keras numbers the names of equal models differently (`dense`, `dense_1`).
        dtypes: Their dtypes' names.
        shapes: Their static shapes; an unknown dimension is None, and so is an unknown shape.
        ranks: The global ranks that take part, ascending.
        label: How messages call it: `gradients of Adam`, `allreduce "loss"`.
        identity: What tells it from collectives of the same content: the name that the user gave
            it, or its number among the equal ones of a graph.
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
            operation: The collective with what qualifies it.
            tensors: `tf.Tensor`s, eager or symbolic.
            ranks: The global ranks that take part.
            label: How messages call it.
            names: The tensors' names; `label` alone for a single unnamed tensor.
            identity: What tells it from collectives of the same content.
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
        """The plan as plain data, for the control channel; `kinds` is what of the tensors must be equal."""
        kinds = [f"{dtype}{'[?]' if shape is None else list(shape)}"
                 for dtype, shape in zip(self.dtypes, self.shapes, strict=True)]
        return {"operation": self.operation, "label": self.label, "ranks": list(self.ranks), "names": list(self.names),
                "kinds": kinds, "dtypes": list(self.dtypes), "identity": self.identity,
                "shapes": [None if shape is None else list(shape) for shape in self.shapes]}

    @classmethod
    def described(cls, text: Mapping[str, Any]) -> Plan:
        """Makes the plan that another rank has described.

        Args:
            text: What `describe` returned there.
        """
        return cls(text["operation"], tuple(text["names"]), tuple(text["dtypes"]),
                   tuple(None if shape is None else tuple(shape) for shape in text["shapes"]), tuple(text["ranks"]),
                   text["label"], text["identity"])


class Call:
    """One of the calls of a backend that a plan consists of, which can be described to another rank.

    Args:
        operation: The method of `hvkeras.backends.interface.Backend`.
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
        """What is communicated."""
        return self.data if isinstance(self.data, list) else [self.data]

    def on(self, tensors: list[Any]) -> Call:
        """The same call on other tensors.

        Args:
            tensors: As many.
        """
        return Call(self.operation, tensors if isinstance(self.data, list) else tensors[0], *self.arguments)

    def describe(self) -> dict[str, Any]:
        """The call as plain data; a tensor is its dtype and static shape."""
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

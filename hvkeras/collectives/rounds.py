"""Collectives of functions that `hvkeras.partition` has made for the ranks of a job."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvkeras.backends.capabilities import objection_to_xla
from hvkeras.backends.interface import Reduction
from hvkeras.collectives.dispatch import allgather_raw, allreduce_raw, broadcast_raw
from hvkeras.job.session import current_session

_REDUCTIONS = {"sum": Reduction.SUM, "max": Reduction.MAX, "min": Reduction.MIN}
_functions = itertools.count()  # all ranks make the same functions, in the same order


class Rounds:
    """Collectives of one function, of which each rank makes its own: see `hvkeras.partition.collectives.Collectives`.

    All ranks create the same collectives in the same order, by which their names are equal.
    """

    def __init__(self) -> None:
        self._ranks = tuple(range(current_session().topology.size))
        self._function, self._collectives = next(_functions), itertools.count()

    @property
    def are_compiled(self) -> bool:
        """Whether XLA can compile sums, and what rank 0 sends."""
        return not objection_to_xla(current_session().backend)

    def reduce(self, reduction: str, tensors: Sequence[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
        """Return the sums, maxima or minima over all ranks, in a collective for each dtype."""
        sent = [_as_real(tensor) for tensor, in tensors]
        kind = _REDUCTIONS[reduction]
        received = allreduce_raw(sent, kind, self._ranks, self._name(), "partitioned round")
        return [[_as_complex(tensor, original.dtype)] for tensor, (original,) in zip(received, tensors, strict=True)]

    def gather(self, tensors: Sequence[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
        """Return the concatenations over all ranks."""
        return [[gathered(tensor, self._ranks, self._name())] for tensor, in tensors]

    def of_first(self, tensors: Sequence[list[tf.Tensor]]) -> list[list[tf.Tensor]]:
        """Return the tensors of rank 0."""
        return [[tensor] for tensor in broadcast_raw([tensor for tensor, in tensors], 0, self._ranks, self._name())]

    def _name(self) -> str:
        return f"partitioned.{self._function}.{next(self._collectives)}"


def gathered(tensor: tf.Tensor, ranks: Sequence[int], name: str) -> tf.Tensor:
    """Return the concatenation of the tensors of ranks, which may be strings: their bytes and lengths are gathered."""
    if tensor.dtype != tf.string:
        return _as_complex(allgather_raw(_as_real(tensor), ranks, name), tensor.dtype)
    content = tf.io.decode_raw(tf.strings.reduce_join(tf.reshape(tensor, [-1])), tf.uint8)
    content = allgather_raw(tf.cast(content, tf.int32), ranks, f"{name}.bytes")
    lengths = allgather_raw(tf.strings.length(tensor), ranks, f"{name}.lengths")
    joined = tf.strings.reduce_join(tf.gather(tf.constant([bytes([byte]) for byte in range(256)]), content))
    flat = tf.reshape(lengths, [-1])
    return tf.reshape(tf.strings.substr(joined, tf.cumsum(flat, exclusive=True), flat), tf.shape(lengths))


def _as_real(tensor: tf.Tensor) -> tf.Tensor:
    return tf.stack([tf.math.real(tensor), tf.math.imag(tensor)], -1) if tensor.dtype.is_complex else tensor


def _as_complex(tensor: tf.Tensor, dtype: Any) -> tf.Tensor:
    return tf.complex(tensor[..., 0], tensor[..., 1]) if dtype.is_complex else tensor

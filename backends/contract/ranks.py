"""Fixtures of the clauses: the backend, the ranks, keys, input values, and comparison of results."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import hvkeras as hvd
from hvkeras.backends.interface import Backend
from hvkeras.errors import UnsupportedError
from hvkeras.job.session import current_session

Array = np.ndarray[Any, Any]

EAGERLY, TRACED = "eagerly", "in a function"


class NotTried(Exception):  # noqa: N818 - it is no error
    """A clause does not apply; the message is the reason."""


class ContractRanks:
    """This rank and all ranks of a contract job.

    Attributes:
        all: All ranks.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.rank: int = hvd.rank()
        self.size: int = hvd.size()
        self.all: tuple[int, ...] = tuple(range(self.size))
        self._clause = self._way = ""
        self._keys = itertools.count()

    @property
    def backend(self) -> Backend:
        """The job's backend."""
        return current_session().backend

    def begin(self, clause: str) -> None:
        """Restart the keys for a clause, whose name is the same on all ranks."""
        self._clause, self._keys, self._way = clause, itertools.count(), ""

    def key(self, text: str = "") -> str:
        """Return a unique key. It is the same on all ranks if they call this method in the same order."""
        return f"contract-{self._clause}-{text}-{next(self._keys)}"

    def both(self, function: Callable[..., Any], *tensors: Any) -> Iterator[tuple[str, Any]]:
        """Call `function(key, *tensors)` eagerly, and twice as a `tf.function`; yield descriptions and results."""
        key = self.key()
        traced = tf.function(lambda *inputs: function(key + "-traced", *inputs), autograph=False)
        found = []
        for self._way, call in ((EAGERLY, functools.partial(function, key)), (TRACED, traced),
                                (TRACED + ", again", traced)):
            found.append((self._way, call(*tensors)))
        self._way = ""
        yield from found  # after all calls: a rank that raises for a wrong result makes no more, and others would hang

    def while_doing(self) -> str:
        """Return the mode, eager or traced, in which the running clause is calling a collective; "" outside `both`."""
        return f" ({self._way})" if self._way else ""


def values(rank: int, dtype: str, shape: Sequence[int], least: int = 1) -> Array:
    """Return a rank's input: small integers that differ between ranks and elements, exact in every dtype."""
    count = int(np.prod(shape, dtype=int))
    numbers = (np.arange(count) + rank) % 2 + least
    return numbers.reshape(shape).astype(tf.as_dtype(dtype).as_numpy_dtype)


def tensor(rank: int, dtype: str, shape: Sequence[int], least: int = 1) -> Any:
    """Return `values` as a tensor."""
    return tf.constant(values(rank, dtype, shape, least))


def check(found: Any, expected: Any, what: str) -> None:
    """Require a result to equal NumPy's exactly, including shape and dtype."""
    expected = np.asarray(expected)
    if tuple(found.shape) != expected.shape:
        raise AssertionError(f"{what}: the shape must be {expected.shape}. Received: shape={tuple(found.shape)}.")
    array = found.numpy()
    if array.dtype != expected.dtype:
        raise AssertionError(f"{what}: the dtype must be {expected.dtype}. Received: dtype={array.dtype}.")
    if not np.array_equal(array, expected):
        raise AssertionError(f"{what}: the result must be {expected.tolist()}. Received: {array.tolist()}.")


def require_shape(result: Any, shape: Any) -> None:
    """Require a result's static shape to be compatible with `shape`, and fully defined if `shape` is."""
    if result.shape.rank is None or not shape.is_compatible_with(result.shape) or (
            shape.is_fully_defined() and not result.shape.is_fully_defined()):
        raise AssertionError(f"the result's static shape must be {shape}. Received: shape={result.shape}. HINT: call"
                             " result.set_shape(...).")


def supported(dtypes: Sequence[str], required: Sequence[str], backend: str, attempt: Callable[[str], None]) -> None:
    """Run `attempt` for each dtype. It may raise `UnsupportedError` for a dtype that is not required.

    Args:
        dtypes: All dtypes.
        required: Those that every backend supports.
        backend: The backend's name, which the error must contain, as well as the dtype's.
        attempt: Function of a dtype's name.
    """
    for dtype in dtypes:
        try:
            attempt(dtype)
        except UnsupportedError as error:
            if dtype in required:
                raise AssertionError(f"every backend must support {dtype}. Received: {error}") from None
            if dtype not in str(error) or backend not in str(error):
                raise AssertionError(f"the UnsupportedError for {dtype} must name the dtype and the backend {backend}."
                                     f" Received: {error}") from None

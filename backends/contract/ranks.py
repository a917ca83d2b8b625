"""What the clauses of the contract work with: the backend, this rank's place, keys, and expected values."""

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
    """A clause does not apply, for the reason given."""


class ContractRanks:
    """This rank among all of a job.

    Args:
        name: The backend's name.

    Attributes:
        rank: This rank.
        size: The number of ranks.
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
        """Starts the keys of a clause, which are the same on all ranks."""
        self._clause, self._keys, self._way = clause, itertools.count(), ""

    def key(self, text: str = "") -> str:
        """A key that no other collective has; the same on all ranks, which ask for them in the same order."""
        return f"contract-{self._clause}-{text}-{next(self._keys)}"

    def both(self, function: Callable[..., Any], *tensors: Any) -> Iterator[tuple[str, Any]]:
        """Calls a function of a key and tensors eagerly, and twice while traced; yields the ways and the results."""
        key = self.key()
        traced = tf.function(lambda *inputs: function(key + "-traced", *inputs), autograph=False)
        found = []
        for self._way, call in ((EAGERLY, functools.partial(function, key)), (TRACED, traced),
                                (TRACED + ", again", traced)):
            found.append((self._way, call(*tensors)))
        self._way = ""
        yield from found  # only now, since a rank that finds a wrong result makes no further calls

    def while_doing(self) -> str:
        """Says in which way the running clause calls collectives, if it does so in several."""
        return f" ({self._way})" if self._way else ""


def values(rank: int, dtype: str, shape: Sequence[int], least: int = 1) -> Array:
    """What a rank sends: small whole numbers that differ between ranks and elements, exact in every dtype."""
    count = int(np.prod(shape, dtype=int))
    numbers = (np.arange(count) + rank) % 2 + least
    return numbers.reshape(shape).astype(tf.as_dtype(dtype).as_numpy_dtype)


def tensor(rank: int, dtype: str, shape: Sequence[int], least: int = 1) -> Any:
    """The same as a tensor on the CPU."""
    return tf.constant(values(rank, dtype, shape, least))


def check(found: Any, expected: Any, what: str) -> None:
    """Requires a result to be what NumPy computes, bit for bit."""
    expected = np.asarray(expected)
    if tuple(found.shape) != expected.shape:
        raise AssertionError(f"{what}: the shape must be {expected.shape}. Received: shape={tuple(found.shape)}.")
    array = found.numpy()
    if array.dtype != expected.dtype:
        raise AssertionError(f"{what}: the dtype must be {expected.dtype}. Received: dtype={array.dtype}.")
    if not np.array_equal(array, expected):
        raise AssertionError(f"{what}: the result must be {expected.tolist()}. Received: {array.tolist()}.")


def require_shape(result: Any, shape: Any) -> None:
    """Requires a result's static shape to be known as far as the caller knows it."""
    if result.shape.rank is None or not shape.is_compatible_with(result.shape) or (
            shape.is_fully_defined() and not result.shape.is_fully_defined()):
        raise AssertionError(f"the result's static shape must be {shape}. Received: shape={result.shape}. HINT: call"
                             " result.set_shape(...).")


def supported(dtypes: Sequence[str], required: Sequence[str], backend: str, attempt: Callable[[str], None]) -> None:
    """Tries each dtype; one that is not required may be refused by an `UnsupportedError` that names the dtype.

    Args:
        dtypes: All dtypes.
        required: Those that every backend serves.
        backend: The backend's name, which the refusal must contain.
        attempt: Tries one.
    """
    for dtype in dtypes:
        try:
            attempt(dtype)
        except UnsupportedError as error:
            if dtype in required:
                raise AssertionError(f"every backend must serve {dtype}. Received: {error}") from None
            if dtype not in str(error) or backend not in str(error):
                raise AssertionError(f"the refusal of {dtype} must name the dtype and the backend {backend}."
                                     f" Received: {error}") from None

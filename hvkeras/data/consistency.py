"""Verification that all ranks hold the same data, from facts that they exchange before sharding."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras.collectives.broadcasts import gather_objects
from hvkeras.data.structure import leaves, take_slice
from hvkeras.errors import PeerError, UsageError, explain
from hvkeras.job.process_sets import ProcessSet
from hvkeras.job.session import current_session

SAMPLED_ROWS = 64
# Relative: equal data may differ in the last digits between processors; different rows differ in the first ones.
TOLERANCE = 1e-4


def exchange(name: str, work: Callable[[], Any], process_set: ProcessSet, hint: str = "") -> list[Any]:
    """Exchange the results of all ranks' work; a failure on one rank fails on all.

    Args:
        name: The name of the exchange across ranks and in messages.
        work: The function that each rank runs before.
        hint: The hint for a rank that waits alone by mistake.

    Returns:
        The results in rank order.

    Raises:
        Exception: Any exception of this rank's work.
        PeerError: The work of another rank raised an exception.
    """
    failure: BaseException | None = None
    result = None
    try:
        result = work()
    except Exception as error:  # noqa: BLE001 - raised below, after the exchange
        failure = error
    failure_text = "" if failure is None else f"{type(failure).__name__}: {failure}"
    gathered = gather_objects((failure_text, result), process_set, name, hint)
    if failure is not None:
        raise failure
    for rank, (text, _) in zip(process_set.ranks, gathered, strict=True):
        if text:
            raise PeerError(explain(f"{name} must succeed on every rank", "fix what that rank reports",
                                    **{f"rank_{rank}": text}))
    return [value for _, value in gathered]


def fingerprint(data: Any) -> list[Any]:
    """Return a fingerprint of arrays: one mark per array, from up to 64 evenly spaced rows."""
    return [None if leaf is None else _fingerprint_of(leaf) for leaf in leaves(data)]


def _fingerprint_of(leaf: Any) -> Any:
    """Return the dtype, the shape of a row, and a digest of the sampled rows."""
    if isinstance(leaf, tf.sparse.SparseTensor):
        rows = [np.asarray(leaf.indices), np.asarray(leaf.values)]
    else:
        count = int(leaf.shape[0]) if getattr(leaf, "shape", None) else len(leaf)
        indices: Any = np.unique(np.linspace(0, count - 1, min(count, SAMPLED_ROWS)).astype(int)) if count else []
        rows = [_as_array(take_slice(leaf, slice(int(index), int(index) + 1))) for index in indices]
    kind = str(getattr(rows[0], "dtype", "")) if rows else ""
    if rows and all(np.issubdtype(row.dtype, np.inexact) for row in rows):
        return [kind, list(rows[0].shape[1:]), [_sketch(row) for row in rows]]
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr(row.tolist()).encode() if row.dtype == object else row.tobytes())
    return [kind, list(rows[0].shape[1:]) if rows else [], digest.hexdigest()]


def _as_array(row: Any) -> Any:
    if isinstance(row, tf.RaggedTensor):
        return np.asarray(row.flat_values)
    return np.asarray(row.toarray() if hasattr(row, "toarray") else row)


def _sketch(row: Any) -> float:
    """Reduce a row to a number that depends on values and order; equal up to rounding for equal rows."""
    values = np.nan_to_num(np.abs(row) if np.iscomplexobj(row) else row).astype(np.float64).ravel()
    return float(values @ np.cos(np.arange(1, values.size + 1)))


def differing(first: Sequence[Any], second: Sequence[Any]) -> list[int]:
    """Return the indices of arrays with different marks."""
    if len(first) != len(second):
        return list(range(max(len(first), len(second))))
    return [index for index, (one, other) in enumerate(zip(first, second, strict=True)) if not _are_alike(one, other)]


def _are_alike(one: Any, other: Any) -> bool:
    if one is None or other is None or one[:2] != other[:2] or isinstance(one[2], str) or isinstance(other[2], str):
        return bool(one == other)
    scale = max((abs(value) for value in one[2]), default=0.0)
    return len(one[2]) == len(other[2]) and np.allclose(one[2], other[2], rtol=TOLERANCE, atol=TOLERANCE * scale)


@dataclass(frozen=True)
class DataFacts:
    """Facts about a rank's data that are compared before sharding; all but `marks` are readable text.

    Attributes:
        call: The kind of data and the arguments of the call.
        order: The origin of the order of the data, such as the seeds of shuffles.
        marks: The `fingerprint` of some of the contents.
    """

    call: str
    amount: str
    order: str
    marks: list[Any]


@dataclass(frozen=True)
class Hints:
    """Hints in messages if ranks differ in one of the `DataFacts`, or if one rank waits alone."""

    call: str
    amount: str
    order: str
    contents: str
    alone: str = ""


def require_same_data(name: str, describe: Callable[[], DataFacts], read: Callable[[], Any], hints: Hints,
                      process_set: ProcessSet) -> bool:
    """Check that all ranks hold the same data in the same order.

    Contents that differ between two readings on one rank, such as randomly augmented images, are not compared.

    Args:
        name: The name of the exchange across ranks.
        describe: Returns this rank's facts.
        read: Returns the contents, to be compared a second time.

    Returns:
        True if contents could be compared; False if all of them are random at every reading.

    Raises:
        UsageError: Ranks differ; the message contains the first two that do.
    """
    if current_session().launch.rendezvous.kind == "standby":
        describe()
        return True  # the running ranks have already compared their data
    facts: list[DataFacts] = exchange(name, describe, process_set, hints.alone)
    ranks = process_set.ranks
    require_equal("All ranks must call hvkeras in the same way", hints.call, [fact.call for fact in facts], ranks)
    require_equal("All ranks must pass the same data, and all of it", hints.amount, [fact.amount for fact in facts],
                  ranks)
    require_equal("All ranks must read the same data in the same order", hints.order, [fact.order for fact in facts],
                  ranks)
    marks = [fact.marks for fact in facts]
    if not any(differing(marks[0], other) for other in marks):
        return True
    second_read = exchange(f"{name} again", lambda: fingerprint(read()), process_set)
    random_indices = {index for one, other in zip(marks, second_read, strict=True) for index in differing(one, other)}
    for rank, other in zip(ranks, marks, strict=True):
        differing_indices = [index for index in differing(marks[0], other) if index not in random_indices]
        if differing_indices:
            raise UsageError(explain("All ranks must pass the same data in the same order", hints.contents, **{
                f"rank_{ranks[0]}": _format_mark(marks[0], differing_indices[0]),
                f"rank_{rank}": _format_mark(other, differing_indices[0])}))
    return len(random_indices) < len(marks[0])


def require_equal(must_hold: str, hint: str, values: Sequence[Any], ranks: Sequence[int]) -> None:
    """Check that a value is equal on all ranks.

    Args:
        values: One readable value per rank.

    Raises:
        UsageError: Ranks differ; the message contains the first two that do.
    """
    for rank, value in zip(ranks, values, strict=True):
        if value != values[0]:
            raise UsageError(explain(must_hold, hint, **{f"rank_{ranks[0]}": values[0], f"rank_{rank}": value}))


def _format_mark(marks: Sequence[Any], index: int) -> str:
    """Format a mark for messages: `float32 rows of shape [8], contents 3f2a`."""
    if index >= len(marks) or marks[index] is None:
        return f"{len(marks)} arrays" if index >= len(marks) else "None"
    kind, shape, contents = marks[index]
    digest = hashlib.sha256(repr(contents).encode()).hexdigest()[:8]
    return f"array {index}: {kind} rows of shape {shape}, contents {digest}"


def format_marks(data: Any) -> str:
    """Format the numbers of rows and the fingerprint of arrays for messages."""
    if data is None:
        return "none"
    lengths, marks = data
    return "; ".join(f"{length} {_format_mark(marks, index).partition(': ')[2]}"
                     for index, length in enumerate(lengths))


@contextlib.contextmanager
def common_randomness(seed: int) -> Iterator[None]:
    """Enter a scope in which the global random numbers of NumPy and Python are equal on all ranks."""
    numpy_state, python_state = np.random.get_state(), random.getstate()
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(numpy_state)
        random.setstate(python_state)

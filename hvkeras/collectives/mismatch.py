"""Mismatched collectives, for which each rank raises `MismatchError`.

The control server detects the mismatch (`hvkeras.control.deadlocks`), refuses the plan of each rank, and has all ranks
participate in each other's collectives, so that no engine keeps waiting (`hvkeras.control.join`). Then every rank
raises: this module in eager mode, an operation of the C++ library in a graph. A rank raises only after it has
participated in the other ranks' collectives, as a handler of the exception may exit or enter them itself.

Static shapes are part of a plan. Shapes that are known only at run time are compared by some engines
(`Backend.compares_shapes`); for all others, each rank gathers the shapes of all ranks before the collective.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from hvkeras.backends import cpp_library
from hvkeras.compat import graphs
from hvkeras.compat.tensorflow_errors import MismatchError
from hvkeras.errors import MachineError
from hvkeras.host.console import prints_at, say
from hvkeras.job.plans import OUTSTANDING_WITHIN, Call, Plan
from hvkeras.job.session import Session, current_session

if TYPE_CHECKING:
    from hvkeras.job.plans import EntryCounts, Plan

class Refusals:
    """Refused plans of a session in which this rank waits."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._texts: dict[str, str] = {}  # plan key -> description of the mismatch

    def refuse(self, key: str, text: str) -> None:
        """Have this rank raise in a plan in which it waits.

        Args:
            text: Description of the mismatch.
        """
        self._texts[key] = text
        library = cpp_library.loaded()
        if library is not None:  # graphs may raise
            entries = self._session.entries
            if not entries.settled(0):
                library.hold_mismatches(1)
                threading.Thread(target=_release_refusals, args=(library, entries), name="hvkeras-settle",
                                 daemon=True).start()
            library.set_mismatch(key, text)

    def taken(self, key: str) -> str | None:
        """Return the description of a mismatch that was not raised yet, and remove it; None if there is none."""
        text, library = self._texts.pop(key, None), cpp_library.loaded()
        if text is not None and library is not None and not library.clear_mismatch(key):
            return None  # a graph has raised the error already
        return text


def _release_refusals(library: cpp_library.Library, entries: EntryCounts) -> None:
    # Graphs may raise once this rank has participated in the collectives that others wait for.
    entries.settled(OUTSTANDING_WITHIN)
    library.hold_mismatches(-1)


def refusable(session: Session, plan: Plan, results: Any) -> Any:
    """Raise if a plan has been refused: now in eager mode, else whenever the graph under construction runs.

    Args:
        results: A nested structure of the resulting tensors.

    Returns:
        The results. In a graph, evaluating them fails if the plan is refused.

    Raises:
        MismatchError: Other ranks have entered different collectives (eager mode only).
    """
    if tf.executing_eagerly():
        raise_if_refused(plan)
        return results
    if session.control is None or graphs.compiled_by_xla() or not session.backend.outlives_errors_in_graphs:
        return results
    available = operations()
    if available is None:
        return results
    session.entries.set_refusable(plan.key)
    return tf.nest.pack_sequence_as(results, available.hvkeras_check_mismatch(inputs=tf.nest.flatten(results),
                                                                              key=plan.key))


def raise_if_refused(plan: Plan) -> None:
    """Raise in eager mode if a plan has been refused.

    Raises:
        MismatchError: Other ranks have entered different collectives.
    """
    session = current_session()
    if (text := session.part(Refusals).taken(plan.key)) is not None:
        session.entries.settled(OUTSTANDING_WITHIN)
        raise MismatchError(text)


def refuse_in_graph(key: str, difference: Callable[[Any], str], found: Any) -> bool:
    """Let the operation `hvkeras_check_mismatch` of a key fail in the running graph if `difference` finds one.

    Args:
        difference: Returns a description of the difference; "" if there is none.
        found: The argument of `difference`.
    """
    text, library = difference(found), cpp_library.loaded()
    if text and library is not None:
        library.set_mismatch(key, text)
    return not text


def refuse_immediately(key: str, difference: Callable[[Any], str], found: Any) -> bool:  # noqa: ARG001 - same signature
    """Replace `refuse_in_graph` if the operation is missing; the graph then fails with TensorFlow's UnknownError.

    Raises:
        MismatchError: There is a difference.
    """
    if text := difference(found):
        raise MismatchError(text)
    return True


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # AutoGraph follows user functions here
def operations() -> Any:
    """Return the operations of the C++ library; None if the library is missing."""
    library = _library()
    return library and library.operations


@functools.cache
def _library() -> cpp_library.Library | None:
    """Load the C++ library if it was built; warn once if it cannot be loaded."""
    if cpp_library.objection():
        return None
    try:
        return cpp_library.library()
    except MachineError as error:
        if prints_at(current_session().settings, "WARNING"):
            say(f"mismatched collectives in graphs will end the job instead of raising: {error}")
        return None


_VARIABLE_ROWS = ("allgather", "alltoall")  # the first dimension may differ between ranks
_MAX_DIMENSIONS = 8


def compared(session: Session, plan: Plan, calls: Sequence[Call],
             names: Sequence[str] | None = None) -> Sequence[Call]:
    """Add a check to a graph that fails before the plan's calls if the ranks' shapes do not match.

    Args:
        names: The names of the calls' tensors; by default those of the plan, in the same order.

    Returns:
        The calls with checked tensors.
    """
    if tf.executing_eagerly() or session.backend.compares_shapes or all(map(_is_known, calls)):
        return calls
    rows = [_row(tensor, call.operation in _VARIABLE_ROWS) for call in calls for tensor in call.tensors]
    key = f"{plan.key} shapes"
    table = session.backend.allgather(tf.concat(rows, 0)[None], key, plan.ranks)
    raises = operations()
    inputs = [tensor for call in calls for tensor in call.tensors]
    differ = functools.partial(_difference, plan, names or plan.names,
                               [tensor.dtype.name for tensor in inputs], [int(row.shape[0]) for row in rows])
    compare = functools.partial(refuse_in_graph if raises else refuse_immediately, key, differ)
    agreed = tf.numpy_function(compare, [table], tf.bool)
    graphs.run_independently(agreed.op)
    with tf.control_dependencies([agreed]):
        checked = iter(raises.hvkeras_check_mismatch(inputs=inputs, key=key) if raises else map(tf.identity, inputs))
    return [call.on([next(checked) for _ in call.tensors]) for call in calls]


def _is_known(call: Call) -> bool:
    first = int(call.operation in _VARIABLE_ROWS)
    return all(tensor.shape.rank is not None and tensor.shape[first:].is_fully_defined() for tensor in call.tensors)


def _row(tensor: Any, rows_are_free: bool) -> Any:
    """Return a row of the rank and the dimensions; -1 for dimensions that may differ or do not exist."""
    shape = tf.shape(tensor, tf.int64)
    if rows_are_free:
        shape = tf.concat([[-1], shape[1:]], 0)
    known = tensor.shape.rank
    row = tf.concat([tf.cast(tf.rank(tensor), tf.int64)[None], shape], 0)
    if known is None:
        row = tf.pad(row, [[0, 1 + _MAX_DIMENSIONS - tf.size(row)]], constant_values=-1)
    return tf.ensure_shape(row, [1 + (_MAX_DIMENSIONS if known is None else known)])


def _difference(plan: Plan, names: Sequence[str], dtypes: Sequence[str], lengths: Sequence[int], table: Any) -> str:
    """Describe the first difference in the table of all ranks' shapes; "" if there is none."""
    starts = np.cumsum([0, *lengths])
    for index, (start, end) in enumerate(itertools.pairwise(starts)):
        other = next((row for row in range(1, len(table)) if (table[row, start:end] != table[0, start:end]).any()), 0)
        if other:
            one, two = (f"{names[index]} {dtypes[index]}{_shape_text(table[row, start:end])} on rank"
                        f" {plan.ranks[row]}" for row in (0, other))
            return (f"ranks {plan.ranks[0]} and {plan.ranks[other]} communicate different things: in {plan.label},"
                    f" tensor {index + 1} is {one} and {two}")
    return ""


def _shape_text(row: Any) -> str:
    return str([None if size < 0 else int(size) for size in row[1 : 1 + int(row[0])]])

"""Mismatched collectives: how each rank raises `MismatchError`.

The control server detects the mismatch, tells each rank that its plan is refused, and has all ranks participate in
each other's collectives so that no engine is left waiting (`hvkeras.control.join`). Then every rank raises: in eager
mode, this module raises; in a graph, an operation of the C++ library raises after the collectives. It raises only after
it has participated for the others: what catches the exception may end the process, or enter their collectives itself.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hvkeras.compat import graphs
from hvkeras.compat.tensorflow_errors import MismatchError
from hvkeras.cpp_library import loading
from hvkeras.errors import MachineError
from hvkeras.host.console import prints_at, say
from hvkeras.job.state import Job, current_job
from hvkeras.plans.entry_counts import OWED_WITHIN

if TYPE_CHECKING:
    from hvkeras.plans.entry_counts import EntryCounts
    from hvkeras.plans.plan import Plan


_refused: dict[str, str] = {}  # plan key -> what differs, for the plans in which this rank waits
_in_graphs: loading.Library | None = None  # set as soon as graphs can raise


def refuse(key: str, text: str) -> None:
    """Makes this rank raise in a plan in which it waits.

    Args:
        key: The plan's key.
        text: What differs.
    """
    _refused[key] = text
    if _in_graphs is not None:
        entries = current_job().entries
        if not entries.settled(0):
            _in_graphs.hold_refusals(1)
            threading.Thread(target=_release, args=(_in_graphs, entries), name="hvkeras-settle", daemon=True).start()
        _in_graphs.refuse(key, text)


def _release(library: loading.Library, entries: EntryCounts) -> None:
    """Lets graphs raise once this rank has participated in what it owes to others."""
    entries.settled(OWED_WITHIN)
    library.hold_refusals(-1)


def refusable(job: Job, plan: Plan, results: Any) -> Any:
    """Raises if a plan has been refused: now in eager mode, else whenever the graph under construction runs.

    Args:
        job: The running job.
        plan: The plan of the collectives.
        results: A nested structure of the resulting tensors.

    Returns:
        The results. In a graph, evaluating them fails if the plan is refused.

    Raises:
        MismatchError: Other ranks make different collectives (eager mode only).
    """
    if tf.executing_eagerly():
        raise_if_refused(plan)
        return results
    if job.control is None or graphs.compiled_by_xla() or not job.backend.outlives_errors_in_graphs:
        return results
    available = operations()
    if available is None:
        return results
    job.entries.set_refusable(plan.key)
    return tf.nest.pack_sequence_as(results, available.hvkeras_refusable(inputs=tf.nest.flatten(results),
                                                                          key=plan.key))


def raise_if_refused(plan: Plan) -> None:
    """Raises in eager mode if a plan has been refused.

    Args:
        plan: The plan of the collectives.

    Raises:
        MismatchError: Other ranks make different collectives.
    """
    if (text := _taken(plan.key)) is not None:
        current_job().entries.settled(OWED_WITHIN)
        raise MismatchError(text)


def _taken(key: str) -> str | None:
    text = _refused.pop(key, None)
    if text is not None and _in_graphs is not None and not _in_graphs.take_refusal(key):
        return None  # a graph has raised the error already
    return text


def refuse_in_graph(key: str, difference: Callable[[Any], str], found: Any) -> bool:
    """Makes the operation `hvkeras_refusable` of a key fail in the running graph if `difference` finds one.

    Args:
        key: The operation's key.
        difference: Returns a description of the difference, or "" if there is none.
        found: The argument of `difference`.
    """
    text = difference(found)
    if text and _in_graphs is not None:
        _in_graphs.refuse(key, text)
    return not text


def refuse_immediately(key: str, difference: Callable[[Any], str], found: Any) -> bool:  # noqa: ARG001 - same signature
    """Replaces `refuse_in_graph` where that operation is missing: the graph then ends in TensorFlow's UnknownError.

    Raises:
        MismatchError: There is a difference.
    """
    if text := difference(found):
        raise MismatchError(text)
    return True


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # AutoGraph follows user functions here
def operations() -> Any:
    """The operations of the C++ library; None if the library is missing."""
    global _in_graphs  # noqa: PLW0603 - a process has one library
    _in_graphs = _in_graphs or _loaded()
    return _in_graphs and _in_graphs.operations


@functools.cache
def _loaded() -> loading.Library | None:
    """Loads the C++ library if it was built; warns once if it cannot be loaded."""
    if loading.objection():
        return None
    try:
        return loading.library()
    except MachineError as error:
        if prints_at(current_job().settings, "WARNING"):
            say(f"mismatched collectives in graphs will end the job instead of raising: {error}")
        return None

"""Mismatched collectives: how each rank raises `MismatchError`.

The control server detects the mismatch (`hvkeras.control.deadlocks`), tells each rank that its plan is refused, and
has all ranks participate in each other's collectives so that no engine is left waiting (`hvkeras.control.join`). Then
every rank raises: in eager mode, this module raises; in a graph, an operation of the C++ library raises after the
collectives. It raises only after it has participated for the others: what catches the exception may end the process,
or enter their collectives itself.
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
from hvkeras.job.session import Session, current_session
from hvkeras.plans import OWED_WITHIN

if TYPE_CHECKING:
    from hvkeras.plans import EntryCounts, Plan


class Refusals:
    """The plans of a session in which this rank waits, and that are refused."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._texts: dict[str, str] = {}  # plan key -> what differs

    def refuse(self, key: str, text: str) -> None:
        """Makes this rank raise in a plan in which it waits.

        Args:
            key: The plan's key.
            text: What differs.
        """
        self._texts[key] = text
        library = loading.loaded()
        if library is not None:  # graphs may raise
            entries = self._session.entries
            if not entries.settled(0):
                library.hold_refusals(1)
                threading.Thread(target=_release, args=(library, entries), name="hvkeras-settle", daemon=True).start()
            library.refuse(key, text)

    def taken(self, key: str) -> str | None:
        """Returns what differs if a plan has been refused and nobody has raised that error yet."""
        text, library = self._texts.pop(key, None), loading.loaded()
        if text is not None and library is not None and not library.take_refusal(key):
            return None  # a graph has raised the error already
        return text


def _release(library: loading.Library, entries: EntryCounts) -> None:
    """Lets graphs raise once this rank has participated in what it owes to others."""
    entries.settled(OWED_WITHIN)
    library.hold_refusals(-1)


def refusable(session: Session, plan: Plan, results: Any) -> Any:
    """Raises if a plan has been refused: now in eager mode, else whenever the graph under construction runs.

    Args:
        session: The session.
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
    if session.control is None or graphs.compiled_by_xla() or not session.backend.outlives_errors_in_graphs:
        return results
    available = operations()
    if available is None:
        return results
    session.entries.set_refusable(plan.key)
    return tf.nest.pack_sequence_as(results, available.hvkeras_check_mismatch(inputs=tf.nest.flatten(results),
                                                                              key=plan.key))


def raise_if_refused(plan: Plan) -> None:
    """Raises in eager mode if a plan has been refused.

    Args:
        plan: The plan of the collectives.

    Raises:
        MismatchError: Other ranks make different collectives.
    """
    session = current_session()
    if (text := session.part(Refusals).taken(plan.key)) is not None:
        session.entries.settled(OWED_WITHIN)
        raise MismatchError(text)


def refuse_in_graph(key: str, difference: Callable[[Any], str], found: Any) -> bool:
    """Makes the operation `hvkeras_check_mismatch` of a key fail in the running graph if `difference` finds one.

    Args:
        key: The operation's key.
        difference: Returns a description of the difference, or "" if there is none.
        found: The argument of `difference`.
    """
    text, library = difference(found), loading.loaded()
    if text and library is not None:
        library.refuse(key, text)
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
    library = _library()
    return library and library.operations


@functools.cache
def _library() -> loading.Library | None:
    """Loads the C++ library if it was built; warns once if it cannot be loaded."""
    if loading.objection():
        return None
    try:
        return loading.library()
    except MachineError as error:
        if prints_at(current_session().settings, "WARNING"):
            say(f"mismatched collectives in graphs will end the job instead of raising: {error}")
        return None

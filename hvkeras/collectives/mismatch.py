"""The ranks make collectives that do not fit together: how each of them comes to raise `MismatchError`.

The control server finds the mismatch, tells each rank that its plan is refused, and has all take part in what the
others do, so that no engine is left waiting (`hvkeras.control.join`). Then every rank raises: in eager mode here, in
a graph by an operation of the native library behind the collectives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hvkeras.backends.native.loading import Library, availability, library
from hvkeras.compat import graphs
from hvkeras.compat.tensorflow_errors import MismatchError
from hvkeras.errors import MachineError
from hvkeras.host.console import prints_at, say
from hvkeras.job.state import current_job

if TYPE_CHECKING:
    from hvkeras.job.state import Job
    from hvkeras.plans.plan import Plan


_refused: dict[str, str] = {}  # what differs, by the key of the plan that this rank waits in
_in_graphs: Library | None = None  # set once a graph can raise


def refuse(key: str, text: str) -> None:
    """Has this rank raise in a plan that it waits in.

    Args:
        key: The plan's key.
        text: What differs.
    """
    _refused[key] = text
    if _in_graphs is not None:
        _in_graphs.refuse(key, text)


def refusable(job: Job, plan: Plan, results: Any) -> Any:
    """Raises if a plan has been refused, now or whenever the graph under construction runs.

    Args:
        job: The running job.
        plan: What was communicated.
        results: A structure of the tensors that came out.

    Returns:
        The results, of which those of a graph end in an error if the plan is refused.

    Raises:
        MismatchError: Other ranks do something else; in eager mode.
    """
    if tf.executing_eagerly():
        raise_if_refused(plan)
        return results
    if job.control is None or graphs.compiled_by_xla() or not job.backend.outlives_errors_in_graphs:
        return results
    native = operations()
    if native is None:
        return results
    job.entries.set_refusable(plan.key)
    return tf.nest.pack_sequence_as(results, native.hvkeras_refusable(inputs=tf.nest.flatten(results),
                                                                          key=plan.key))


def raise_if_refused(plan: Plan) -> None:
    """Raises in eager mode if a plan has been refused.

    Args:
        plan: What was communicated.

    Raises:
        MismatchError: Other ranks do something else.
    """
    if (text := _taken(plan.key)) is not None:
        raise MismatchError(text)


def _taken(key: str) -> str | None:
    text = _refused.pop(key, None)
    if text is not None and _in_graphs is not None and not _in_graphs.take_refusal(key):
        return None  # a graph has raised it
    return text


def refuse_in_graph(key: str, difference: Callable[[Any], str], found: Any) -> bool:
    """Has the operation `hvkeras_refusable` of a key fail in the graph that runs, if something differs; see below.

    Args:
        key: The operation's key.
        difference: Says what differs, "" if nothing does.
        found: What it takes.
    """
    text = difference(found)
    if text and _in_graphs is not None:
        _in_graphs.refuse(key, text)
    return not text


def refuse_at_once(key: str, difference: Callable[[Any], str], found: Any) -> bool:  # noqa: ARG001 - as above
    """Does the same where there is no such operation: the graph then ends in an unknown error of TensorFlow's.

    Raises:
        MismatchError: Something differs.
    """
    if text := difference(found):
        raise MismatchError(text)
    return True


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # AutoGraph follows user's functions here
def operations() -> Any:
    """The operations of the native library; None where there is none."""
    global _in_graphs  # noqa: PLW0603 - a process has one library
    _in_graphs = _in_graphs or _loaded()
    return _in_graphs and _in_graphs.operations


@functools.cache
def _loaded() -> Library | None:
    """The native library, where it was built; that it cannot be loaded is said once."""
    if not availability().ok:
        return None
    try:
        return library()
    except MachineError as error:
        if prints_at(current_job().settings, "WARNING"):
            say(f"collectives of graphs that do not fit together will end the job instead of raising: {error}")
        return None

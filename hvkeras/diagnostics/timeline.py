"""Horovod's timeline: a Chrome trace of all collectives of a rank, between calls of two functions.

With HVKERAS_TIMELINE it starts in `init()`, and includes all collectives.
"""

from __future__ import annotations

from hvkeras.diagnostics.recorder import recording
from hvkeras.errors import MachineError, UsageError, explain
from hvkeras.job.session import current_session, is_initialized


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:  # noqa: ARG001 - Horovod's parameter
    """Start a timeline: a Chrome trace of collectives and steps, for ui.perfetto.dev or chrome://tracing.

    It has the format of `hvkeras run --trace-steps`, but covers the time until `stop_timeline()`, and includes
    collectives outside of steps. Only rank 0 writes a timeline, unless the path contains `{rank}`: then every rank
    writes its own. The file is rewritten about once a second, less often when it is long, and is valid after each
    write. Functions traced earlier, such as those of a running `fit`, are not timed; each call of `fit` retraces.

    Example:
        hvd.start_timeline("timeline.{rank}.json")
        model.fit(x, y, steps_per_epoch=20)
        hvd.stop_timeline()

    Args:
        file_path: Path of the file; an existing one is replaced.
        mark_cycles: Accepted for compatibility with Horovod and ignored, as there are no negotiation cycles.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: A timeline is already running.
        MachineError: The file cannot be written.
    """
    session, recorded = current_session(), recording()
    if (running := recorded.timeline) is not None:
        raise UsageError(explain("One timeline can run at a time", "call hvd.stop_timeline() first",
                                 running=str(running.path), file_path=file_path))
    if session.topology.rank and "{rank}" not in file_path:
        return
    path = file_path.replace("{rank}", str(session.topology.rank))
    try:
        recorded.start_timeline(session, path)
    except OSError as error:
        raise MachineError(explain(f"The timeline's file must be writable ({error.strerror})",
                                   "choose another folder", file_path=path)) from None


def stop_timeline() -> None:
    """Stop the timeline, if one is running, and write its remaining spans."""
    if is_initialized():
        recording().stop_timeline()


def is_on() -> bool:
    """Return whether this rank's collectives are being timed."""
    return recording().timeline is not None

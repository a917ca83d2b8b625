"""A single progress bar and a single writer of files for the job."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hvkeras.job.session import current_session
from hvkeras.typing import CallbackT


def verbose() -> int:
    """Return a value for Keras's `verbose`, so that only rank 0 prints progress.

    Example:
        model.fit(x, y, verbose=hvd.verbose())

    Returns:
        1 on rank 0 with a terminal, 2 on rank 0 without one, 0 on every other rank.
    """
    if current_session().topology.rank != 0:
        return 0
    return 1 if sys.stdout.isatty() else 2


def rank0_callbacks(callbacks: Sequence[CallbackT]) -> list[CallbackT]:
    """Return callbacks that write files or print on rank 0 only, so that no two ranks write the same file.

    The callbacks must not communicate, since the other ranks do not run them.

    Example:
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        callbacks += hvd.rank0_callbacks([keras.callbacks.ModelCheckpoint("best.keras")])

    Args:
        callbacks: Keras callbacks.

    Returns:
        The same callbacks on rank 0; an empty list on the others.
    """
    return list(callbacks) if current_session().topology.rank == 0 else []

"""Batches of all ranks: whether every rank gets the same batches, of which it computes its part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvkeras.collectives.broadcasts import gather_objects
from hvkeras.errors import UsageError, explain
from hvkeras.job.process_sets import global_process_set
from hvkeras.job.session import current_session, this_process

_TOLERANCE = 1e-4  # of what is known of a batch: equal data may differ in the last digits between processors
_MEMORY = 0.99  # how much of that is left when the next one has come


class GlobalBatch:
    """Whether all ranks get the same batches, and a summary of those so far.

    Attributes:
        started: Whether they do (`hvkeras.global_batch`).
        require_whole: Raises an error if the user has said otherwise.
    """

    def __init__(self) -> None:
        self.started: bool = False
        self.require_whole: Callable[[], None] = lambda: None
        self._marks: Any = None

    def start(self) -> None:
        """Start: from now on, all ranks get the same batches."""
        self.started = True
        self._marks = tf.Variable(0.0, trainable=False, dtype=tf.float64, name="hvkeras_marks")

    def note(self, mark: Any) -> None:
        """Note a batch, when it runs.

        Args:
            mark: A number that is the same on all ranks if their batches are, and its largest magnitude: float64.
        """
        self._marks.assign(_MEMORY * self._marks + tf.math.divide_no_nan(mark[0], mark[1]), read_value=False)

    def require_same_batches(self) -> None:
        """Check that all ranks have had the same batches so far; all ranks call this together.

        Raises:
            UsageError: The batches of a rank differ from those of rank 0.
        """
        if self._marks is None:
            return
        everyone = gather_objects(float(self._marks.numpy()), global_process_set, "the marks of batches")
        differing = [rank for rank, mark in enumerate(everyone) if not abs(mark - everyone[0]) <= _TOLERANCE]
        if differing:
            self._marks.assign(0.0)
            raise UsageError(explain(
                "All ranks must get the same batches, since each computes a part of them", "seed what makes them:"
                " an unseeded numpy.random.default_rng() and other entropy of the operating system differ between"
                " processes; and remove deterministic=False from tf.data", ranks=differing))


def global_batch() -> GlobalBatch:
    """Return this process's `GlobalBatch`."""
    return this_process().part(GlobalBatch)


def require_own_batches(function: str) -> None:
    """Check that a function of hvkeras is not used on the batches of all ranks.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: All ranks get the same batches.
    """
    current_session()
    if global_batch().started:
        raise UsageError(explain("A script under --data-parallel or hvd.data_parallel() must be written for one process"
                                 ", and not distribute itself", "remove its lines of hvkeras or Horovod, or run it"
                                 " without --data-parallel", call=f"hvd.{function}"))

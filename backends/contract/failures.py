"""The clauses on failure: a collective for which no other rank comes ends when the engine is aborted."""

from __future__ import annotations

import threading
import time
from typing import Any

import tensorflow as tf

from hvkeras.backends.contract.ranks import Ranks
from hvkeras.backends.interface import Reduction
from hvkeras.job.session import current_session

EAGER = "abort() fails an eager collective in flight, with an error that is_peer_failure() knows"
GRAPH = "abort() fails a function's collective in flight, with an error that is_peer_failure() knows"
REASON = "rank 9 has left (the contract says so)"
_BEFORE, _WITHIN = 1.0, 20.0  # seconds until the abort, and until the collective must have failed


def abort_eagerly(ranks: Ranks) -> None:
    """Aborts while this rank waits in an eager collective."""
    key = f"contract-only-{ranks.rank}"
    _aborted(ranks, lambda: ranks.backend.allreduce([tf.ones([3])], key, Reduction.SUM, ranks.all))


def abort_in_a_function(ranks: Ranks) -> None:
    """Aborts while this rank waits in a function."""
    key = f"contract-only-{ranks.rank}"
    _aborted(ranks, tf.function(lambda: ranks.backend.allreduce([tf.ones([3])], key, Reduction.SUM, ranks.all)[0],
                                autograph=False))


def _aborted(ranks: Ranks, collective: Any) -> None:
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            collective()
        except BaseException as error:  # noqa: BLE001 - whatever the engine raises
            errors.append(error)

    control = current_session().control
    assert control is not None
    control.gather("contract abort", None, _WITHIN)
    waiting = threading.Thread(target=wait, name="hvkeras-contract", daemon=True)
    waiting.start()
    waiting.join(_BEFORE)
    if not waiting.is_alive() and not errors:
        raise AssertionError("a collective must wait for the other ranks. Received: a result.")
    began = time.monotonic()
    ranks.backend.abort(REASON)  # another rank's may have ended the collective already
    took = time.monotonic() - began
    if took > _BEFORE:
        raise AssertionError(f"abort() must return within {_BEFORE:g} s. Received: {took:.1f} s.")
    waiting.join(_WITHIN)
    if waiting.is_alive():
        raise AssertionError(f"the collective must fail within {_WITHIN:g} s after abort()")
    if not errors:
        raise AssertionError("the collective must fail after abort(). Received: a result.")
    text = f"{type(errors[0]).__name__}: {errors[0]}"
    if not ranks.backend.is_peer_failure(errors[0]):
        raise AssertionError(f"is_peer_failure() must know the error. Received: {text}")

"""Collectives that do not fit together, in eager mode: each check returns the exception, and goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

import hvkeras as hvd
from harness.checks import check, run_checks


def refusal(collective: Callable[[], Any]) -> Any:
    """What a collective raises, and the sum of ones that the ranks can still make."""
    try:
        raised = f"no exception: {collective()}"
    except tf.errors.FailedPreconditionError as error:
        raised = f"{type(error).__name__}: {error}"
    return [raised, float(hvd.allreduce(1.0, op=hvd.Sum, name="fine"))]


@check
def shape() -> Any:
    return refusal(lambda: hvd.allreduce(tf.ones([17 + hvd.rank()] * 2)))


@check
def dtype() -> Any:
    return refusal(lambda: hvd.allgather(tf.ones([3], tf.int32 if hvd.rank() % 2 else tf.float32), name="x"))


@check
def operation() -> Any:
    return refusal(lambda: hvd.allreduce(tf.ones([3]), name="x", op=hvd.Sum if hvd.rank() else hvd.Average))


@check
def root() -> Any:
    return refusal(lambda: hvd.broadcast(tf.ones([3]), hvd.rank(), name="x"))


@check
def kind() -> Any:
    return refusal(lambda: hvd.allgather(tf.ones([3])) if hvd.rank() else hvd.allreduce(tf.ones([3])))


@check
def of_a_group() -> Any:
    return refusal(lambda: hvd.grouped_allreduce([tf.ones([2]), tf.ones([2 + hvd.rank()])], name="x"))


@check
def rows() -> Any:
    return refusal(lambda: hvd.alltoall(tf.ones([hvd.size(), 1 + hvd.rank()]), name="x"))


@check
def operation_again() -> Any:
    """The same plans as before, of which some ranks have only taken part in."""
    return operation()


if __name__ == "__main__":
    run_checks(hvd.init, hvd.shutdown)

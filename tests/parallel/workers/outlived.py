"""Mismatched collectives: each check returns the exception, and the job continues."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import hvkeras as hvd
from harness.checks import check, run_checks

TFDIST = os.environ["HVKERAS_BACKEND"] == "tfdist"  # there, an error in a graph aborts all collectives


def refusal(collective: Callable[[], Any]) -> Any:
    """Return the error of a collective, and the sum of ones that the ranks compute afterwards."""
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
def order() -> Any:
    def first() -> None:
        hvd.allreduce(tf.ones([3]), name="p")

    def second() -> None:
        hvd.allreduce(tf.ones([3]), name="q")

    return refusal(lambda: [turn() for turn in ([second, first] if hvd.rank() else [first, second])])


@check
def operation_again() -> Any:
    """The same plans as before; some ranks have participated in only one of them."""
    return operation()


@check
def in_a_function() -> Any:
    """Like `shape`, on backends whose graphs can raise."""
    return TFDIST or refusal(lambda: tf.function(hvd.allreduce)(tf.ones([3 + hvd.rank()]), name="y"))


@check
def in_a_function_for_any_shape() -> Any:
    """Like `in_a_function`, with shapes known only at run time; and matching collectives afterwards."""
    total = tf.function(lambda tensor: hvd.allreduce(tensor, op=hvd.Sum, name="any"), input_signature=[
        tf.TensorSpec([None, 2])])
    gather = tf.function(lambda tensor: hvd.allgather(tensor, name="any"), input_signature=[tf.TensorSpec(None)])
    raised = [refusal(lambda: total(tf.ones([3 + hvd.rank(), 2])))[0],
              refusal(lambda: gather(tf.ones([1 + hvd.rank(), 3 + hvd.rank()])))[0]]
    return [raised, float(tf.reduce_mean(total(tf.ones([4, 2])))), gather(tf.ones([1 + hvd.rank(), 2])).shape.as_list()]


@check
def gradients_for_any_shape() -> Any:
    """Like `in_a_function_for_any_shape`, for the gradients of a tape."""

    @tf.function(input_signature=[tf.TensorSpec([None, 2])])  # type: ignore[untyped-decorator]
    def gradient(tensor: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(tensor)
            loss = tf.reduce_sum(tensor**2)
        return hvd.DistributedGradientTape(tape).gradient(loss, tensor)

    [raised, total] = refusal(lambda: gradient(tf.ones([3 + hvd.rank(), 2])))
    return [raised, total, float(tf.reduce_mean(gradient(tf.ones([4, 2]))))]


@check
def of_a_group_in_a_function() -> Any:
    mixed = [tf.ones([2], tf.int32), tf.ones([2 + hvd.rank()])]
    return TFDIST or refusal(lambda: tf.function(hvd.grouped_allreduce)(mixed, name="y"))


@check
def half_in_functions() -> Any:
    allgather = tf.function(hvd.allgather) if hvd.rank() else hvd.allgather
    return TFDIST or refusal(lambda: allgather(tf.ones([1, 2 + hvd.rank()]), name="z"))


@check
def in_a_session() -> Any:
    def run() -> Any:
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            return session.run(hvd.reducescatter(tf.ones([hvd.size() * (1 + hvd.rank())]), name="s"))

    return TFDIST or refusal(run)


@check
def the_same_function_afterwards() -> Any:
    """The result of a function that first raised, when all ranks call it with matching arguments."""
    double = tf.function(lambda tensor: hvd.allreduce(tensor, op=hvd.Sum, name="again"))
    if TFDIST:
        return True
    raised = refusal(lambda: double(tf.ones([3 + hvd.rank()])))[0]
    return [raised, float(tf.reduce_mean(double(tf.ones([3]))))]


@check
def one_after_the_other_in_a_function() -> Any:
    """A second collective depends on the first, which only some ranks run."""

    @tf.function  # type: ignore[untyped-decorator]
    def run(both: Any) -> Any:
        tensor = tf.ones([2])
        if both:
            tensor = hvd.allreduce(tensor, name="first")
        return hvd.allreduce(tensor[None], name="second")

    return TFDIST or refusal(lambda: run(tf.constant(hvd.rank() == 0)))


@check
def what_another_rank_ran() -> Any:
    """A graph that raised on another rank, run as soon as this rank is notified."""
    runs = [tf.function(lambda: hvd.allreduce(tf.constant(1.0), op=hvd.Sum, name="of 0")),
            tf.function(lambda: hvd.allreduce(tf.constant(1.0), op=hvd.Sum, name="of others"))]
    if TFDIST:
        return True
    try:
        raised = f"no exception: {runs[min(1, hvd.rank())]()}"
    except tf.errors.FailedPreconditionError as error:
        raised = f"{type(error).__name__}: {error}"
    return [raised, *(float(run()) for run in runs * 2)]


@check
def in_a_circle() -> Any:
    """Three ranks that wait for each other in a cycle."""
    pairs = [(0, 1), (1, 2), (0, 2)]
    if hvd.size() < 3:
        return None
    sets = [hvd.add_process_set(pair) for pair in pairs]
    return refusal(lambda: hvd.allreduce(tf.ones([2]), name="x", process_set=sets[hvd.rank()]))


def end_at_once() -> None:
    """The script ends on the first rank that raises."""
    if not TFDIST:
        with contextlib.suppress(tf.errors.FailedPreconditionError):
            tf.function(hvd.allreduce)(tf.ones([5 + hvd.rank()]), name="last")


if __name__ == "__main__":
    run_checks(hvd.init, end_at_once)

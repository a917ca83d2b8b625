"""Keras 3's optimizers under strategies: gradients are summed over the replicas before anything inspects them.

Keras 3.15 sums them last. It clips the gradients of each replica separately, and checks only one replica for finite
gradients: an infinity on another replica results in NaN weights or, between workers, in some workers that skip the
step while the others wait for them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from hvkeras.compat import graphs
from hvkeras.compat.strategies import mentions

_STATE = "_hvkeras"  # where an optimizer's `__dict__` holds its `OptimizerState`


class OptimizerState:
    """What hvkeras keeps about an optimizer, out of sight of Keras and of `tf.train.Checkpoint`.

    Attributes:
        applying: What is applying gradients that are summed over the replicas already, by the number of the replica.
    """

    def __init__(self) -> None:
        self.applying: dict[int, Any] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> OptimizerState:
        """A copied optimizer applies nothing yet."""
        return OptimizerState()

    def __reduce__(self) -> Any:
        return OptimizerState, ()

    @property
    def current(self) -> Any:
        """What is applying gradients on this replica; None if nothing is."""
        return self.applying.get(number_of_replica()) if self.applying else None


def sum_last(original: Callable[..., Any], self: Any, pairs: Any) -> Any:
    """Leaves gradients alone that are already summed."""
    return list(pairs) if is_summed(self) else original(self, pairs)


def apply_sums(original: Callable[..., Any], self: Any, grads: Any, trainable_variables: Any = None) -> Any:
    """Applies gradients that are summed before they are clipped."""
    steps = (original, *(getattr(type(self), name, None) for name in ("_backend_apply_gradients", "_clip_gradients")))
    if is_summed(self) or not _clips(self) or not _has_replicas() or any(map(_sums, steps)):
        return original(self, grads, trainable_variables)
    with summed(self):
        return original(self, sum_over_replicas(list(grads)), trainable_variables)


def apply_scaled_sums(original: Callable[..., Any], self: Any, grads: Any, trainable_variables: Any = None) -> Any:
    """Has a `LossScaleOptimizer` apply gradients that are summed before it looks for infinities."""
    inner = self.inner_optimizer
    if is_summed(inner) or not _has_replicas() or _sums(original) or _sums(getattr(self, "_tf_apply", None)):
        return original(self, grads, trainable_variables)
    whole = list(grads) if is_summed(self) else sum_over_replicas(list(grads))
    with summed(inner):
        return original(self, whole, trainable_variables)


def sums_once(optimizer: Any) -> bool:
    """Whether an optimizer can be kept from summing already summed gradients over the replicas again."""
    return hasattr(getattr(type(optimizer), "_all_reduce_sum_gradients", None), "__wrapped__")


@contextlib.contextmanager
def summed(optimizer: Any, update: Any = None) -> Iterator[None]:
    """A scope in which this replica applies gradients that are already summed; other replicas have their own scopes.

    Args:
        optimizer: The optimizer.
        update: What applies them, for those parts of Keras's update that ask for it.
    """
    state: OptimizerState = optimizer.__dict__.setdefault(_STATE, OptimizerState())
    applying, replica, nothing = state.applying, number_of_replica(), object()
    before = applying.get(replica, nothing)
    applying[replica] = update
    try:
        yield
    finally:
        if before is nothing:
            del applying[replica]
        else:
            applying[replica] = before


def is_summed(optimizer: Any) -> bool:
    """Whether this replica is applying gradients that are already summed."""
    state: OptimizerState | None = optimizer.__dict__.get(_STATE)
    return state is not None and bool(state.applying) and number_of_replica() in state.applying


def number_of_replica() -> int:
    """Returns the number of the replica that runs this code; 0 without a strategy."""
    replica = tf.distribute.get_replica_context()
    number = getattr(replica, "_replica_id_in_sync_group", 0)
    return number if isinstance(number, int) else 0


def sum_over_replicas(gradients: Sequence[Any]) -> list[Any]:
    """Sums gradients over the replicas, with the result on each replica; None stays None."""
    places = [place for place, gradient in enumerate(gradients) if gradient is not None]
    result = list(gradients)
    replica = tf.distribute.get_replica_context()
    if places:
        reduced = replica.all_reduce(tf.distribute.ReduceOp.SUM, [gradients[place] for place in places])
        for place, one in zip(places, reduced, strict=True):
            result[place] = one
    return result


def _has_replicas() -> bool:
    """Whether one of several replicas runs this code, in a Keras whose losses account for them (not in 3.3)."""
    return (hasattr(sys.modules.get("keras.src.losses.loss"), "scale_loss_for_distribution")
            and tf.distribute.get_replica_context() is not None and graphs.reducing_strategy() is not None)


def _clips(optimizer: Any) -> bool:
    return any(getattr(optimizer, name, None) is not None for name in ("clipnorm", "global_clipnorm", "clipvalue"))


def _sums(function: Any) -> bool:
    """Whether a function of Keras itself sums over the replicas."""
    return mentions(function, "all_reduce")

"""Support for optimizers, graphs and sessions of TensorFlow 1."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hvkeras import compat
from hvkeras.collectives.broadcasts import broadcast_global_variables
from hvkeras.errors import UnsupportedError, UsageError, explain
from hvkeras.gradients.distributed_part import Reducing, part_of
from hvkeras.gradients.options import Options, ReductionOptions
from hvkeras.gradients.reducer import GradientReducer
from hvkeras.job.session import current_session
from hvkeras.typing import Operation, OptimizerT


def distribute_of_tensorflow_1(optimizer: OptimizerT, exchange: ReductionOptions, passes: int = 1) -> OptimizerT:
    """Make a `tf.compat.v1.train.Optimizer` reduce the gradients that it computes.

    Args:
        optimizer: The optimizer; its class is changed in place.
        passes: Horovod's `backward_passes_per_step`; only 1 is supported.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: The optimizer is already distributed.
        UnsupportedError: `passes` is not 1.
    """
    current_session()
    if isinstance(optimizer, _Distributed):
        raise UsageError(explain("An optimizer can be distributed only once", "remove one DistributedOptimizer() call",
                                 optimizer=type(optimizer).__name__))
    if passes != 1:
        raise UnsupportedError(explain("Optimizers of TensorFlow 1 must reduce at every pass", "use a Keras optimizer",
                                       backward_passes_per_step=passes))
    cls = compat.subclass_like(type(optimizer), _Distributed, {"_hvkeras": Options(exchange, type(optimizer))})
    compat.adopt_class(optimizer, cls)
    return optimizer


class _Distributed(Reducing):
    """Mixin that adds gradient reduction to a subclass of the class of a TensorFlow 1 optimizer."""

    @property
    def _optimizer(self) -> Any:
        """The original optimizer, without reduction, under Horovod's name. It shares all state with this optimizer."""
        plain: Any = object.__new__(part_of(self).options.plain)
        plain.__dict__ = self.__dict__
        return plain

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Compute gradients like the optimizer, and reduce them over the ranks.

        Args:
            *args: As for `tf.compat.v1.train.Optimizer.compute_gradients`.
            **kwargs: As for `tf.compat.v1.train.Optimizer.compute_gradients`.
        """
        pairs = super().compute_gradients(*args, **kwargs)  # type: ignore[misc]  # the optimizer's
        variables = [variable for _, variable in pairs]
        part = part_of(self)
        reducer = GradientReducer(part.exchange, part.local_keys())
        reduced = reducer.reduce([gradient for gradient, _ in pairs], variables)
        return list(zip(reduced, variables, strict=True))


_SessionRunHook: Any = tf.compat.v1.train.SessionRunHook


class BroadcastGlobalVariablesHook(_SessionRunHook):  # type: ignore[misc]  # TensorFlow has no types
    """Hook that broadcasts the global variables from the root to every rank when a TensorFlow 1 session begins.

    Example:
        hooks = [hvd.BroadcastGlobalVariablesHook(0)]
        with tf.compat.v1.train.MonitoredTrainingSession(hooks=hooks) as session:
            ...

    Args:
        root_rank: The global rank whose values are broadcast.
        device: The device for the broadcasts; chosen by TensorFlow by default.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank: int = root_rank
        self.device: str = device
        self.bcast_op: Operation | None = None
        self._graph: Any = None

    def begin(self) -> None:
        """Add the broadcasts to the graph, once per graph."""
        graph = tf.compat.v1.get_default_graph()
        if self._graph is not graph:
            with tf.device(self.device or None):
                self.bcast_op = broadcast_global_variables(self.root_rank)
            self._graph = graph

    def after_create_session(self, session: Any, coord: Any) -> None:  # noqa: ARG002 - TensorFlow's parameter
        """Run the broadcasts after the variables have been initialized."""
        session.run(self.bcast_op)

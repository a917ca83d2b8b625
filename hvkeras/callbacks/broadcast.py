"""`BroadcastGlobalVariablesCallback`: start all ranks with the state of the root."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable

from hvkeras import compat
from hvkeras.callbacks.base import KerasCallback
from hvkeras.collectives.broadcasts import broadcast_variables
from hvkeras.collectives.operations import Min, require_root
from hvkeras.collectives.reductions import allreduce
from hvkeras.compat import graphs
from hvkeras.gradients.optimizer_classes import distributed_part
from hvkeras.job.session import current_session
from hvkeras.training.learned_state import broadcast_learned
from hvkeras.typing import Logs, VariableLike


class BroadcastGlobalVariablesCallback(KerasCallback):
    """Callback that broadcasts the model and optimizer of the root to all ranks.

    Weights, statistics of BatchNormalization and the optimizer's state (iterations, learning rate, slots, loss scale)
    are broadcast before the first step. If the model has no input shape, `fit` builds it from the shapes of its data.
    If that is impossible (the model's call needs values), `fit` warns, and the variables are broadcast after the first
    step. The learned state of layers (vocabularies, means and variances, bin boundaries) is always broadcast before the
    first step. Metrics and random seeds are not broadcast: ranks with different seeds keep drawing different dropout
    masks.

    Example:
        model.fit(dataset, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

    Args:
        root_rank: The rank to broadcast from.
        device: Accepted for compatibility with Horovod.
        local_variables: Variables that are local to each rank.
    """

    def __init__(self, root_rank: int, device: str = "", local_variables: Iterable[VariableLike] | None = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self.device = device
        self.broadcast_done: bool = False
        self.local_keys: set[Hashable] = {compat.variable_key(variable) for variable in local_variables or ()}

    def register_local_var(self, var: VariableLike) -> None:
        """Exclude a variable from the broadcast.

        Args:
            var: A variable of the model.
        """
        self.local_keys.add(compat.variable_key(var))

    def on_train_begin(self, logs: Logs | None = None) -> None:  # noqa: ARG002 - Keras's signature
        """Broadcast if the model has its weights on every rank."""
        session = current_session()
        size = session.topology.size
        require_root(self.root_rank, range(size))
        self.broadcast_done = False
        optimizer = getattr(self.model, "optimizer", None)
        is_checked = session.settings.guard  # fit then raises DivergenceError after its first step
        if not is_checked and size > 1 and optimizer is not None and compat.steps_by_itself(self.model) and (
            distributed_part(optimizer) is None and not graphs.spans_workers(graphs.reducing_strategy(self.model))
        ):
            warnings.warn("the model's optimizer is not distributed: each rank trains on its own gradients."
                          " HINT: compile with hvkeras.DistributedOptimizer(optimizer)", stacklevel=2)
        with graphs.eagerly():
            built = int(allreduce(int(bool(self.model.built) or compat.is_built(self.model)), op=Min,
                                  name="the model is built"))
        if built:
            self._broadcast()
        else:
            broadcast_learned(self.model, self.root_rank, self.local_keys)

    def on_batch_end(self, batch: int, logs: Logs | None = None) -> None:  # noqa: ARG002 - Keras's signature
        """Broadcast after the first step if it was not possible before."""
        if not self.broadcast_done:
            self._broadcast()

    def _broadcast(self) -> None:
        broadcast_learned(self.model, self.root_rank, self.local_keys)
        untrained = [one.variable for one in compat.kept_variables(self.model)]
        by_key = {compat.variable_key(one): one for one in [*compat.model_weights(self.model), *untrained]}
        variables = list(by_key.values())
        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is not None:
            compat.build_optimizer(optimizer, self.model.trainable_variables)
            variables += compat.optimizer_variables(optimizer)
        shared = [variable for variable in variables if compat.variable_key(variable) not in self.local_keys]
        compat.run_in_session(lambda: broadcast_variables(shared, self.root_rank))
        self.broadcast_done = True

"""One step of a distributed optimizer, which reduces gradients over all ranks, and applies the results.

`choose_update` selects the kind of update: plain, compiled or sharded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvkeras import compat
from hvkeras.collectives.global_batch import global_batch
from hvkeras.collectives.operations import of_tensors
from hvkeras.compat import graphs
from hvkeras.gradients import replicas
from hvkeras.gradients.accumulation import where_due
from hvkeras.gradients.distributed_part import DistributedPart
from hvkeras.gradients.marks import marks
from hvkeras.gradients.plain_update import Apply, PlainUpdate, Update
from hvkeras.gradients.reducer import GradientReducer
from hvkeras.gradients.sharded_update import ShardedUpdate


@dataclass(frozen=True)
class GradientStep:
    """One step: gradients on this rank, which are reduced over all ranks and then applied.

    Attributes:
        part: The state of the distributed optimizer.
        outer: The outermost optimizer: the distributed one, or the `LossScaleOptimizer` around it.
        variables: Their variables.
        finish: Applies reduced gradients to the variables, or to those in its second argument.
        is_local: True to run only this rank's update, without communication: the gradients are already reduced, and
            sharded variables are not gathered. `hvkeras bench` times updates in this way.
    """

    part: DistributedPart
    outer: Any
    gradients: Sequence[Any]
    variables: Sequence[Any]
    finish: Apply
    is_local: bool = False

    def run(self) -> Any:
        """Run the step, eagerly or in the function under construction; return the optimizer's result."""
        if global_batch().started and tf.executing_eagerly():
            return self.finish(list(self.gradients))  # those of the whole batch
        within = None
        if graphs.reducing_strategy() is not None:
            within = replicas.strategy_within_rank()
            if within is None:
                return self.finish(list(self.gradients))  # the strategy already reduces over all ranks
        ahead = self.part.ahead.take(self.variables)
        if ahead is not None:
            return self._when_due(ahead.due)
        gradients = [of_tensors(gradient) for gradient in self.gradients]
        if self.part.options.passes == 1:
            return self._update(gradients, within)
        compat.build_optimizer(self.outer, self.variables)
        self.part.accumulation.step(gradients, self.variables, lambda sums: self._update(sums, within),
                                    lambda: compat.advance_iterations(self.outer))
        return self.outer.iterations

    def _update(self, gradients: Sequence[Any], within: Any) -> Any:
        """Reduce gradients, also over the replicas of a strategy within this rank, and apply them."""
        update = choose_update(self, gradients, within)
        if self.is_local:
            return update.apply(_already_reduced(update, gradients))
        is_scaled = self.outer is not self.part.optimizer or self.part.options.scales_loss
        reducer = GradientReducer(self.part.exchange, self.part.local_keys(), is_scaled, update=update.text,
                                  shares=update.shares, optimizer=self.part.optimizer)
        if global_batch().started:
            scale = (lambda: compat.loss_scale(self.outer)) if is_scaled else None
            return update.apply(marks().mark(gradients, self.variables, reducer, scale))
        if within is None and is_scaled:
            compat.build_optimizer(self.outer, self.variables)
            reduced = reducer.reduce_scaled(gradients, self.variables, lambda: compat.loss_scale(self.outer))
        elif within is None:
            reduced = reducer.reduce(gradients, self.variables)
        else:
            reduced = replicas.reduce_over_both(gradients, lambda summed: reducer.reduce(summed, self.variables))
        return update.apply(reduced)

    def _when_due(self, due: Any) -> Any:
        """Apply gradients that are already reduced, if an update is due."""
        def update() -> Any:
            chosen = choose_update(self, self.gradients, may_compile=False)
            return chosen.apply(_already_reduced(chosen, self.gradients))

        if due is None:
            return update()
        compat.build_optimizer(self.outer, self.variables)
        where_due(due, update, lambda: compat.advance_iterations(self.outer))
        return self.outer.iterations


def _already_reduced(update: Update, gradients: Sequence[Any]) -> list[Any]:
    return update.take(gradients) if isinstance(update, ShardedUpdate) else list(gradients)


@graphs.without_autograph
def choose_update(step: GradientStep, gradients: Sequence[Any], within: Any = None, may_compile: bool = True) -> Update:
    """Return the update of a step: sharded if the user wants that, compiled if that pays, otherwise plain.

    Args:
        gradients: This rank's gradients, not reduced yet.
        within: The strategy within this rank, if there is one.
        may_compile: Whether the update of complete variables may be compiled. False if gradients were reduced before
            the step, because their plan does not contain the decision, and ranks could differ in it.
    """
    part = step.part
    plain = PlainUpdate(part.optimizer, step.outer, part.options, step.variables, step.finish)
    shards = None if part.sharding is None else part.sharding.shards_for(step.outer, step.variables)
    if shards is not None:
        if within is not None:
            replicas.refuse_shards(within)
        return ShardedUpdate(plain, shards, part.compiler, gradients, not step.is_local)
    compiled = part.compiler.compiled(plain, gradients) if may_compile else None
    if within is not None:
        replicas.require_servable(within, part.optimizer, part.options.passes)
    return compiled or plain

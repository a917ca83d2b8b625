"""Classes that make optimizers distributed, and accessors for other modules."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

from hvkeras import compat
from hvkeras.backends.capabilities import objection_to_xla
from hvkeras.compat import patches
from hvkeras.errors import UnsupportedError, UsageError, explain
from hvkeras.gradients.distributed_part import DistributedPart, Reducing, part_of
from hvkeras.gradients.options import Options
from hvkeras.gradients.sharded_state import ShardedState
from hvkeras.gradients.sharding import Sharding
from hvkeras.gradients.step import GradientStep
from hvkeras.host.console import say
from hvkeras.job.session import current_session, is_initialized
from hvkeras.typing import GradientTapeLike, VariableLike


class Distributed(Reducing):
    """Common base of distributed optimizers; mixed into a dynamic subclass of the optimizer's class."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)  # a tuple, not a string, in every version of Keras
        function, arguments, *state = reduced
        cls, options = type(self), part_of(self).options
        if getattr(function, "__self__", None) is cls:
            function = getattr(options.plain, function.__name__)
        arguments = tuple(options.plain if argument is cls else argument for argument in arguments)
        return (_restored, (function, arguments, options), *state)


def _restored(function: Callable[..., Any], arguments: tuple[Any, ...], options: Options) -> Any:
    """Restore the distributed class of a copied or unpickled optimizer."""
    return distribute(function(*arguments), options)


class DistributedKeras(Distributed):
    """Overrides of methods of Keras 3's optimizers."""

    def compute_gradients(self, loss: Any, var_list: Sequence[VariableLike],
                          tape: GradientTapeLike | None = None) -> list[tuple[Any, Any]]:
        """Compute and reduce gradients, for loops that change them before they are applied.

        The following call of `apply_gradients` does not reduce them again, and with `backward_passes_per_step` applies
        them only when an update is due.

        Args:
            loss: A tensor, or a function that returns one.
            tape: The tape that has recorded the loss; not needed if `loss` is a function.
        """
        return part_of(self).reduce_computed(compat.gradients_of(loss, var_list, tape))

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Reduce the gradients over the ranks, then apply them."""
        part, finish = part_of(self), super().apply  # type: ignore[misc]  # the optimizer's
        if compat.is_summed(self):
            return finish(grads, trainable_variables)
        variables = part.trained() if trainable_variables is None else list(trainable_variables)

        def finish_over(reduced: Any, over: Any = variables) -> Any:
            return finish(reduced, over)

        return GradientStep(part, self, list(grads), variables, finish_over).run()

    def _apply_weight_decay(self, variables: Any) -> None:
        """Decay variables like Keras, except those that compiled functions decay when they update them."""
        update = part_of(self).current
        if update is not None and update.dense is not None and update.dense.decays:
            variables = update.dense.others(variables)
        super()._apply_weight_decay(variables)  # type: ignore[misc]  # the optimizer's

    def _update_model_variables_moving_average(self, variables: Any) -> None:
        """Update the averages of weights like Keras, which start from the weights after the first update."""
        if part_of(self).sharding is None:
            compat.start_averages(self, variables, part_of(self).options.passes)
        super()._update_model_variables_moving_average(variables)  # type: ignore[misc]  # the optimizer's

    def _distributed_tf_update_step(self, distribution: Any, grads_and_vars: Any, learning_rate: Any) -> None:
        """Update variables like Keras, except those that compiled functions update."""
        pairs, update = list(grads_and_vars), part_of(self).current
        if update is not None and update.dense is not None:
            gradients = {compat.variable_key(variable): gradient for gradient, variable in pairs}
            update.dense.update(*(gradients[key] for key in update.dense.keys))
            pairs = [pair for pair in pairs if compat.variable_key(pair[1]) not in update.dense.keys]
        super()._distributed_tf_update_step(distribution, pairs, learning_rate)  # type: ignore[misc]  # the optimizer's


class DistributedTfKeras(Distributed):
    """Overrides of methods of tf_keras's optimizers, both legacy and current."""

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduce the gradients over the ranks, then apply them."""
        part, finish = part_of(self), super().apply_gradients  # type: ignore[misc]  # the optimizer's
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        if compat.is_summed(self) or (compat.reduces_elsewhere(kwargs) and part.ahead.find(variables) is None):
            return finish(pairs, *args, **kwargs)

        def finish_over(reduced: Any, over: Any = variables) -> Any:
            return finish(list(zip(reduced, over, strict=True)), *args, **kwargs)

        return GradientStep(part, self, [gradient for gradient, _ in pairs], variables, finish_over).run()

    def minimize(self, *args: Any, **kwargs: Any) -> Any:
        """Minimize a loss; the step that applies the gradients also reduces them."""
        with part_of(self).minimizing():
            return super().minimize(*args, **kwargs)  # type: ignore[misc]  # the optimizer's

    def compute_gradients(self, loss: Any, var_list: Any, tape: Any = None) -> list[Any]:
        """Compute and reduce gradients. Within `minimize`, tf_keras calls this method only to compute them."""
        part = part_of(self)
        if not part.is_minimizing:
            return self._compute_gradients(loss, var_list, None, tape)
        pairs = super().compute_gradients(loss, var_list, tape)  # type: ignore[misc]  # the optimizer's
        part.ahead.forget([variable for _, variable in pairs])
        return list(pairs)

    def _compute_gradients(self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None) -> list[Any]:
        """Compute and reduce gradients, for training loops that call this method as in Horovod or tf_keras.

        The following call of `apply_gradients` does not reduce them again, and with `backward_passes_per_step` applies
        them only when an update is due.
        """
        plain = getattr(super(), "_compute_gradients", None)  # of legacy optimizers
        if plain is not None:
            pairs = plain(loss, var_list, grad_loss, tape)
        else:
            pairs = super().compute_gradients(compat.weighed_loss(loss, grad_loss, tape), var_list, tape)  # type: ignore[misc]  # the optimizer's
        return part_of(self).reduce_computed(pairs)

    def _aggregate_gradients(self, grads_and_vars: Any) -> list[Any]:
        """Reduce gradients over the ranks, unless `_compute_gradients` has already done so."""
        part = part_of(self)
        if part.is_reduced_elsewhere():
            plain = getattr(super(), "_aggregate_gradients", list)  # legacy optimizers have it, and call it in the step
            return list(plain(grads_and_vars))
        return part.reduce_ahead(list(grads_and_vars), computed=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the optimizer with a reference to its strategy, which cannot be copied; tf_keras alone would fail."""
        strategy = self.__dict__.get("_distribution_strategy")
        memo[id(strategy)] = strategy
        plain_deepcopy = getattr(super(), "__deepcopy__", None)
        if plain_deepcopy is not None:
            return plain_deepcopy(memo)
        function, arguments, state, *_ = self.__reduce_ex__(4)
        clone = function(*arguments)
        memo[id(self)] = clone
        clone.__dict__.update(copy.deepcopy(state, memo))
        return clone


class Sharded(Distributed):
    """Overrides of methods of optimizers with a sharded update; see `Sharding`."""

    def build(self, variables: Any) -> None:
        """Create the slots of this rank's parts of the variables."""
        _sharding_of(self).build(super().build, variables)  # type: ignore[misc]  # the optimizer's

    @property
    def variables(self) -> Any:
        """The optimizer's variables; sharded ones are `ShardedStateVariable`s."""
        found: Any = super().variables  # type: ignore[misc]  # the optimizer's
        state = part_of(self).sharded_state
        return found if state is None else type(found)(state.variables(found))

    def set_weights(self, weights: Any) -> None:
        """Assign values to all variables."""
        variables = list(self.variables)
        if len(weights) != len(variables):
            raise UsageError(explain("set_weights needs a value for each variable of the optimizer",
                                     values=len(weights), variables=len(variables)))
        for variable, value in zip(variables, weights, strict=True):
            variable.assign(value)

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        """Raise for checkpoints of TensorFlow, which would contain parts; exports of Keras 3 have no optimizer."""
        if part_of(self).sharded_state is None:
            found: dict[str, Any] = super()._trackable_children(save_type, **kwargs)  # type: ignore[misc]
            return found
        if save_type != "checkpoint" and compat.family_of(self) == compat.KERAS:
            return {}
        raise UnsupportedError(explain(
            "TensorFlow's own checkpoints and SavedModels would hold only a part of an optimizer with"
            " shard_update=True",
            'save a file of Keras instead: model.save("model.keras") or save_weights("model.weights.h5")',
            optimizer=type(self).__name__))

    def _use_weight_decay(self, variable: Any) -> bool:
        """Return Keras's result for the variable of a part, because users exclude variables by name."""
        shards = _sharding_of(self).shards
        if shards is not None:
            complete = shards.variable_of(variable)
            variable = compat.as_tf_variable(complete) if compat.as_tf_variable(variable) is variable else complete
        return bool(super()._use_weight_decay(variable))  # type: ignore[misc]  # the optimizer's

    def _clip_gradients(self, grads: Any) -> Any:
        """Clip by norms of complete gradients, of which this rank has parts."""
        update = part_of(self).current
        if update is None or update.clip is None:
            return super()._clip_gradients(grads)  # type: ignore[misc]  # the optimizer's
        return update.clip(list(grads))

    def _update_model_variables_moving_average(self, variables: Any) -> None:
        """Update the averages of all of this rank's parts, also of those without gradients in this step."""
        with _sharding_of(self).parts_with_averages(variables) as parts:
            compat.start_averages(self, parts, part_of(self).options.passes)
            super()._update_model_variables_moving_average(parts)  # type: ignore[misc]  # the optimizer's

    def _overwrite_model_variables_with_average_value(self, variables: Any) -> None:
        """Overwrite this rank's parts, which are gathered afterwards."""
        with _sharding_of(self).parts_with_averages(variables) as parts:
            super()._overwrite_model_variables_with_average_value(parts)  # type: ignore[misc]  # the optimizer's

    def finalize_variable_values(self, var_list: Any) -> None:
        """End training: averages of weights, if there are any, become the weights on all ranks."""
        super().finalize_variable_values(var_list)  # type: ignore[misc]  # the optimizer's
        if _sharding_of(self).has_averages:
            _sharding_of(self).gather_weights()


class _ShardedKeras(DistributedKeras, Sharded):
    pass


class _ShardedTfKeras(DistributedTfKeras, Sharded):
    pass


def _sharding_of(optimizer: Any) -> Sharding:
    found = part_of(optimizer).sharding
    assert found is not None
    return found


def distribute(optimizer: Any, options: Options) -> Any:
    """Change an optimizer's class to its distributed class, without validation of options."""
    is_keras_3 = options.family == compat.KERAS
    mixin: type = ((_ShardedKeras if options.shard_kind else DistributedKeras) if is_keras_3
                   else _ShardedTfKeras if options.shard_kind else DistributedTfKeras)
    compat.adopt_class(optimizer, compat.subclass_like(options.plain, mixin, {"_hvkeras": options}))
    install_hooks()
    if not is_keras_3:
        patches.install(patches.SCALED)
    if options.shard_kind:
        _sharding_of(optimizer).share_if_built()
    return optimizer


def distributed_part(optimizer: Any) -> DistributedPart | None:
    """Return the state of a distributed optimizer, or of the one inside a `LossScaleOptimizer`.

    Returns:
        The state; None if the optimizer is not distributed.
    """
    for candidate in (optimizer, compat.inner_optimizer(optimizer)):
        if isinstance(candidate, Distributed):
            return part_of(candidate)
    return None


def state_of(optimizer: Any) -> ShardedState | None:
    """Return the sharded state of an optimizer, or of the one inside it; None if its update is not sharded."""
    part = distributed_part(optimizer)
    return None if part is None else part.sharded_state


def apply_locally(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
    """Apply gradients like a step, without reducing them or gathering the updates of other ranks.

    `hvkeras bench` times this part of a step.

    Args:
        optimizer: An optimizer that is itself distributed.
    """
    part = part_of(optimizer)

    def finish(reduced: Sequence[Any], over: Sequence[Any] = variables) -> Any:
        plain: Any = part.options.plain
        return plain.apply_gradients(optimizer, list(zip(reduced, over, strict=True)))

    GradientStep(part, optimizer, list(gradients), list(variables), finish, is_local=True).run()


# Hooks into Keras beyond the optimizer itself.


def install_hooks() -> None:
    """Install the patches of Keras that distributed optimizers need; single-rank jobs need them only for recording."""
    session = current_session() if is_initialized() else None
    if session is not None and (session.topology.size > 1 or session.settings.record or session.settings.report):
        patches.install(patches.OPTIMIZERS, patches.OptimizerBehaviour(
            _reduce_before_loss_scale, refuses_xla, _swap_averages, _begin_averages))


def _reduce_before_loss_scale(finish: Callable[[list[Any]], Any], optimizer: Any, gradients: Sequence[Any],
                              variables: Sequence[Any]) -> Any:
    """Reduce gradients before a `LossScaleOptimizer` decides whether to skip the step.

    The decision must be the same on all ranks: if only one rank skipped the step, the others would hang in the
    reduction of the inner optimizer.
    """
    inner = compat.inner_optimizer(optimizer)
    if isinstance(optimizer, Distributed) or not isinstance(inner, Distributed):
        return finish(list(gradients))
    return GradientStep(part_of(inner), optimizer, list(gradients), list(variables), finish).run()


def _swap_averages(original: Callable[[Any], Any], callback: Any) -> None:
    """Replace a method of `SwapEMAWeights`, which would swap only this rank's parts; `original` is Keras's method."""
    sharding = _with_averages(callback.model.optimizer)
    if sharding is None:
        original(callback)
    else:
        sharding.swap_averages()


def _begin_averages(original: Callable[[Any], Any], callback: Any) -> None:
    """Replace the method of `SwapEMAWeights` for the end of training, when averages have become the weights."""
    sharding = _with_averages(callback.model.optimizer)
    if sharding is None:
        original(callback)
    else:
        sharding.begin_averages()


def _with_averages(optimizer: Any) -> Sharding | None:
    """Return the sharding of an optimizer, or of the one inside it, if it has averages of weights."""
    part = distributed_part(optimizer)
    sharding = None if part is None else part.sharding
    return sharding if sharding is not None and sharding.has_averages else None


def refuses_xla() -> bool:
    """Return whether Keras's automatic XLA must be off because the backend's collectives cannot be compiled."""
    if not is_initialized():
        return False
    session = current_session()
    if session.topology.size == 1 or not objection_to_xla(session.backend):
        return False
    if session.topology.rank == 0:
        _log_no_xla(session.backend.name)
    return True


@functools.cache
def _log_no_xla(backend: str) -> None:
    say(f'jit_compile="auto" means False here: XLA cannot compile the collectives of the backend {backend!r}')

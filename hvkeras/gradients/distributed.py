"""The step of a distributed optimizer, of any Keras: it reduces gradients over all ranks, and applies the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from hvkeras import compat
from hvkeras.collectives.differentiable import of_tensors
from hvkeras.compat import graphs
from hvkeras.gradients import replicas, shard_step
from hvkeras.gradients.accumulation import Accumulation, where_due
from hvkeras.gradients.buckets import reduce_gradients
from hvkeras.gradients.compiled_update import CompiledUpdate
from hvkeras.gradients.exchange import Reducing
from hvkeras.gradients.reduced_ahead import ReducedAhead
from hvkeras.gradients.shards import Shards
from hvkeras.gradients.step_parts import StepParts
from hvkeras.profiling import spans
from hvkeras.typing import LayerLike, VariableLike

UPDATE = "_hvkeras_update"  # the attribute of the compiled update


class Distributed(Reducing):
    """The common part of all distributed optimizers; mixed into a dynamic subclass of the optimizer's class."""

    _hvkeras_passes: ClassVar[tuple[int, bool]]
    _hvkeras_compile: ClassVar[bool | str]
    _hvkeras_kind: ClassVar[str] = ""  # what ranks share the update by: "elements", "variables", or "" for not at all
    _hvkeras_plain: ClassVar[type]
    _hvkeras_rebuild: ClassVar[Callable[..., Any]]

    def register_local_var(self, var: VariableLike) -> None:
        """Keeps a variable's gradient on this rank; the variable may then differ between ranks.

        Args:
            var: A variable of the model; also one without a gradient, which `fit` then neither averages nor compares.
        """
        self.__dict__.setdefault("_hvkeras_local", {})[compat.variable_key(var)] = compat.variable_name(var)

    def keep_local(self, layers: Sequence[LayerLike]) -> None:
        """Keeps the gradients of layers on this rank; the layers need not be built yet.

        Args:
            layers: Layers of the model.
        """
        self.__dict__.setdefault("_hvkeras_local_layers", []).extend(layers)

    def _hvkeras_step(self, apply: Callable[..., Any], optimizer: Any, gradients: Sequence[Any],
                      variables: Sequence[Any]) -> Any:
        """Reduces gradients, then has `optimizer` apply them.

        Args:
            apply: Applies reduced gradients to the variables, or to those that are its second argument.
            optimizer: The outermost optimizer: this one, or the `LossScaleOptimizer` around it.
            gradients: This rank's gradients.
            variables: Their variables.
        """
        within = replicas.strategy_within_rank()
        if within is None and graphs.reducing_strategy() is not None:
            return apply(list(gradients))  # the strategy already reduces over all ranks
        variables = list(variables)
        ahead = self._hvkeras_ahead().take(variables)
        if ahead is not None:
            return self._hvkeras_finish(apply, optimizer, gradients, variables, ahead.due)
        gradients = [of_tensors(gradient) for gradient in gradients]

        def update(local_gradients: Sequence[Any]) -> Any:
            return self._hvkeras_reduce_and_apply(apply, optimizer, local_gradients, variables, within)

        if self._hvkeras_passes[0] == 1:
            return update(gradients)
        compat.build_optimizer(optimizer, variables)
        self._hvkeras_sums().step(gradients, variables, update, lambda: compat.advance_iterations(optimizer))
        return optimizer.iterations

    def _hvkeras_reduce_and_apply(self, apply: Callable[..., Any], optimizer: Any, gradients: Sequence[Any],
                                  variables: Sequence[Any], within: Any) -> Any:
        """Reduces gradients, also over the replicas of a strategy within this rank, and applies them.

        The update is compiled where that pays, and shared with other ranks if the user wants that.
        """
        shards = self._hvkeras_shards_for(optimizer, variables)
        if shards is not None:
            if within is not None:
                replicas.refuse_shards(within)
            make = (shard_step.update_reduced if shard_step.APART in self.__dict__ else shard_step.reduce_and_update)
            return make(self, shards, apply, optimizer, gradients, variables)
        compiled = self._hvkeras_compiled_update().prepare(self, optimizer, apply, gradients, variables)
        over_ranks = self._hvkeras_over_ranks(optimizer, variables, compiled is not None)
        if within is None:
            reduced = over_ranks(gradients)
        else:
            replicas.require_servable(within, self, self._hvkeras_passes[0])
            reduced = replicas.reduce_over_both(gradients, over_ranks)
        with spans.store().update(self._hvkeras_exchange.name, reduced, variables), compat.summed(self):
            if compiled is None:
                return apply(reduced)
            compiled(reduced)
        return None if compat.family_of(self) == compat.KERAS else optimizer.iterations  # as they do themselves

    def _hvkeras_apply_alone(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Applies gradients as a step does, but does not reduce them: `hvkeras bench` times this part of a step."""
        with (compat.attribute(self, "_hvkeras_over_ranks", lambda *_: list),
              compat.attribute(self, shard_step.APART, True)):
            self.apply_gradients(zip(gradients, variables, strict=True))  # type: ignore[attr-defined]  # the optimizer's

    def _hvkeras_dense_update(self) -> Callable[[list[Any]], Any] | None:
        """Returns Keras's own function that updates variables from pairs of dense gradients and variables.

        None if it cannot be called for a part of the variables.
        """
        return None

    def _hvkeras_update_of_one(self) -> Callable[[Any, Any], None] | None:
        """Returns Keras's own function that updates one variable, by its dense gradient.

        None if the update of all variables is more than that of each.
        """
        return None

    def _hvkeras_shards_for(self, optimizer: Any, variables: Sequence[Any]) -> Shards | None:  # noqa: ARG002
        """Returns the parts of variables in which the ranks share the update; None if they do not."""
        return None

    def _hvkeras_trained(self) -> list[Any]:
        """Returns the model's variables that the optimizer was built for."""
        return list(self._trainable_variables)  # type: ignore[attr-defined]  # the optimizer's

    def _hvkeras_local_keys(self) -> dict[Any, str]:
        """Returns the names of the variables that each rank keeps for itself, by their keys."""
        for layer in self.__dict__.get("_hvkeras_local_layers", ()):
            for weight in compat.model_weights(layer):
                self.register_local_var(weight)
        found: dict[Any, str] = self.__dict__.get("_hvkeras_local", {})
        return found

    def _hvkeras_over_ranks(self, optimizer: Any, variables: Sequence[Any], is_compiled: bool = False,
                            parts: StepParts | None = None) -> Callable[[Sequence[Any]], list[Any]]:
        """Returns a function that reduces the gradients of `variables` over the ranks; with `parts`, those alone."""
        local = self._hvkeras_local_keys()
        all_ranks_skip = compat.inner_optimizer(optimizer) is not None
        exchange = replace(self._hvkeras_exchange, update="compiled update") if is_compiled else self._hvkeras_exchange
        return lambda gradients: reduce_gradients(gradients, variables, exchange, local, all_ranks_skip, parts=parts)

    def _hvkeras_sums(self) -> Accumulation:
        sums: Accumulation = self.__dict__.setdefault("_hvkeras_accumulation", Accumulation(*self._hvkeras_passes))
        return sums

    def _hvkeras_compiled_update(self) -> CompiledUpdate:
        made: CompiledUpdate = self.__dict__.setdefault(UPDATE, CompiledUpdate(self._hvkeras_compile))
        return made

    def _hvkeras_ahead(self) -> ReducedAhead:
        ahead: ReducedAhead = self.__dict__.setdefault("_hvkeras_reduced_ahead", ReducedAhead())
        return ahead

    def _hvkeras_reduce(self, pairs: Sequence[tuple[Any, Any]], computed: bool) -> list[tuple[Any, Any]]:
        """Reduces gradients for a caller that applies them later; the later step does not reduce them again.

        Args:
            pairs: This rank's gradients and their variables.
            computed: Whether the gradients have just been computed; if not, they may be reduced already.
        """
        gradients, variables = [of_tensors(gradient) for gradient, _ in pairs], [variable for _, variable in pairs]
        ahead = self._hvkeras_ahead().find(variables)
        if ahead is not None and ahead.computed and not computed:
            return list(pairs)
        over_ranks, due = self._hvkeras_over_ranks(self, variables), None
        if self._hvkeras_passes[0] == 1:
            reduced = over_ranks(gradients)
        else:
            reduced, due = self._hvkeras_sums().collect(gradients, variables, over_ranks)
        self._hvkeras_ahead().note(variables, due, computed)
        return list(zip(reduced, variables, strict=True))

    def _hvkeras_reduce_computed(self, pairs: Sequence[tuple[Any, Any]],
                                 by_step: bool = False) -> list[tuple[Any, Any]]:
        """Reduces gradients that have just been computed, unless the step that applies them does so, or Keras."""
        if by_step or self._hvkeras_leaves_to_keras():
            self._hvkeras_ahead().forget([variable for _, variable in pairs])
            return list(pairs)
        return self._hvkeras_reduce(pairs, computed=True)

    def _hvkeras_leaves_to_keras(self) -> bool:
        """Whether gradients are reduced elsewhere: by the step that applies them, or by a strategy."""
        in_strategy = replicas.strategy_within_rank() is not None or graphs.reducing_strategy() is not None
        return in_strategy or compat.is_summed(self)

    def _hvkeras_finish(self, apply: Callable[..., Any], optimizer: Any, gradients: Sequence[Any],
                        variables: Sequence[Any], due: Any) -> Any:
        """Applies gradients that are already reduced, if an update is due."""
        shards = self._hvkeras_shards_for(optimizer, variables)

        def update() -> Any:
            if shards is not None:
                return shard_step.update_reduced(self, shards, apply, optimizer, gradients, variables)
            with spans.store().update(self._hvkeras_exchange.name, gradients, variables), compat.summed(self):
                return apply(list(gradients))

        if due is None:
            return update()
        compat.build_optimizer(optimizer, variables)
        where_due(due, update, lambda: compat.advance_iterations(optimizer))
        return optimizer.iterations

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)  # a tuple, not a string, in every version of Keras
        function, arguments, *state = reduced
        cls = type(self)
        plain = cls._hvkeras_plain
        if getattr(function, "__self__", None) is cls:
            function = getattr(plain, function.__name__)
        arguments = tuple(plain if argument is cls else argument for argument in arguments)
        options = (cls._hvkeras_exchange, cls._hvkeras_passes, cls._hvkeras_compile, cls._hvkeras_kind)
        return (cls._hvkeras_rebuild, (function, arguments, *options), *state)

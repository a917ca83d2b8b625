"""State of a distributed optimizer, in one attribute that Keras does not track."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hvkeras import compat
from hvkeras.collectives.operations import of_tensors
from hvkeras.compat import graphs
from hvkeras.gradients import replicas
from hvkeras.gradients.accumulation import Accumulation
from hvkeras.gradients.compiled_update import UpdateCompiler
from hvkeras.gradients.options import Options, ReductionOptions
from hvkeras.gradients.reducer import GradientReducer
from hvkeras.gradients.sharded_state import ShardedState
from hvkeras.gradients.sharding import Sharding
from hvkeras.job.process_sets import ProcessSet
from hvkeras.typing import LayerLike, VariableLike


class DistributedPart(compat.OptimizerState):
    """State of a distributed optimizer: its options, and what it stores between steps.

    Args:
        optimizer: The optimizer; None for a copy that is not attached to an optimizer yet.
        options: The options of the distributed optimizer.

    Attributes:
        layers: The local layers, whose gradients are not reduced.
        ahead: The gradients that were reduced before the step that applies them.
        compiler: Compiler of updates.
        is_minimizing: Whether tf_keras's `minimize` runs, whose step reduces the gradients.
    """

    def __init__(self, optimizer: Any, options: Options) -> None:
        super().__init__()
        self._optimizer: Callable[[], Any] = _no_optimizer if optimizer is None else weakref.ref(optimizer)
        self.options: Options = options
        self.layers: list[Any] = []
        self._local: dict[Any, str] = {}
        self.accumulation: Accumulation = Accumulation(options.passes, options.averages_passes)
        self.ahead: ReducedAhead = ReducedAhead()
        self.compiler: UpdateCompiler = UpdateCompiler(options.compile_update)
        self.is_minimizing: bool = False
        self._sharding: Sharding | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedPart:
        """Copy the local variables and the sharding, but no accumulated gradients and no compiled functions."""
        copied = memo[id(self)] = DistributedPart(None, self.options)
        copied.__setstate__(copy.deepcopy(self._persistent(), memo))
        return copied

    def __reduce__(self) -> Any:
        return DistributedPart, (None, self.options), self._persistent()

    def _persistent(self) -> tuple[Any, ...]:
        return self._local, self.layers, self._sharding

    def __setstate__(self, persistent: tuple[Any, ...]) -> None:
        """Restore the state of a copied or unpickled optimizer."""
        self._local, self.layers, self._sharding = persistent

    def of(self, optimizer: Any) -> DistributedPart:
        """Return this object if it belongs to the optimizer or to none yet; otherwise a new one with equal options."""
        owner = self._optimizer()
        if owner is None:
            self._optimizer = weakref.ref(optimizer)
        elif owner is not optimizer:
            part = DistributedPart(optimizer, self.options)
            part.__setstate__((dict(self._local), list(self.layers), None))
            return part
        return self

    @property
    def optimizer(self) -> Any:
        """The optimizer."""
        return self._optimizer()

    @property
    def exchange(self) -> ReductionOptions:
        """Options of the reduction of gradients."""
        return self.options.exchange

    @property
    def sharding(self) -> Sharding | None:
        """Sharding of the update; None if the update is not sharded."""
        if self._sharding is None and self.options.shard_kind:
            self._sharding = Sharding(self.optimizer, self.options, self.local_keys)
        return self._sharding

    @property
    def sharded_state(self) -> ShardedState | None:
        """Sharded slots; None if the update is not sharded."""
        return None if self.sharding is None else self.sharding.state

    def reshard(self, variables: Sequence[Any] = ()) -> None:
        """Shard the update over the current ranks of the job; see `Sharding.reshard`."""
        if self.sharding is not None:
            self.compiler = UpdateCompiler(self.options.compile_update)
            self.sharding.reshard(variables)

    def trained(self) -> list[Any]:
        """Return the model's variables that an optimizer of Keras 3 was built for."""
        shards = None if self.sharding is None else self.sharding.shards
        return list(self.optimizer._trainable_variables if shards is None else shards.variables)

    def local_keys(self) -> dict[Any, str]:
        """Return the names of the local variables, whose gradients are not reduced, by their keys."""
        for layer in self.layers:
            for weight in compat.model_weights(layer):
                self.register_local_var(weight)
        return self._local

    def register_local_var(self, variable: Any) -> None:
        """Exclude a variable's gradient from the reduction."""
        self._local[compat.variable_key(variable)] = compat.variable_name(variable)

    @contextlib.contextmanager
    def minimizing(self) -> Iterator[None]:
        """Set `is_minimizing` within the context."""
        before, self.is_minimizing = self.is_minimizing, True
        try:
            yield
        finally:
            self.is_minimizing = before

    def is_reduced_elsewhere(self) -> bool:
        """Return whether gradients are reduced elsewhere: by the step that applies them, or by a strategy."""
        in_strategy = replicas.strategy_within_rank() is not None or graphs.reducing_strategy() is not None
        return in_strategy or compat.is_summed(self.optimizer)

    def reduce_computed(self, pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Reduce gradients that were just computed, unless the step that applies them or a strategy does so.

        Args:
            pairs: This rank's gradients and their variables.
        """
        if self.is_minimizing or self.is_reduced_elsewhere():
            self.ahead.forget([variable for _, variable in pairs])
            return list(pairs)
        return self.reduce_ahead(pairs, computed=True)

    def reduce_ahead(self, pairs: Sequence[tuple[Any, Any]], computed: bool) -> list[tuple[Any, Any]]:
        """Reduce gradients for a caller that applies them later, in a step that does not reduce them again.

        Args:
            pairs: This rank's gradients and their variables.
            computed: Whether the gradients have just been computed; if not, they may have been reduced already.
        """
        gradients, variables = [of_tensors(gradient) for gradient, _ in pairs], [variable for _, variable in pairs]
        ahead = self.ahead.find(variables)
        if ahead is not None and ahead.computed and not computed:
            return list(pairs)
        reducer = GradientReducer(self.exchange, self.local_keys(), self.options.scales_loss, optimizer=self.optimizer)
        due = None
        if self.options.passes == 1:
            reduced = reducer.reduce(gradients, variables)
        else:
            reduced, due = self.accumulation.collect(gradients, variables, lambda sums: reducer.reduce(sums, variables))
        self.ahead.add(variables, due, computed)
        return list(zip(reduced, variables, strict=True))


def _no_optimizer() -> None:
    """Return None, like a dead weak reference."""


class Reducing:
    """Public attributes of optimizers that reduce gradients; mixed into a dynamic subclass of the optimizer's class.

    The only attribute that the subclass adds is `_hvkeras`, with the options. Under the same name, the `__dict__` of an
    optimizer has its `DistributedPart`, which neither Keras's tracker nor `tf.train.Checkpoint` sees.
    """

    _hvkeras: Options

    @property
    def process_set(self) -> ProcessSet:
        """Process set of the ranks over which gradients are reduced."""
        return part_of(self).exchange.process_set

    @property
    def scale_local_gradients(self) -> bool:
        """True if gradients of local variables are divided by the number of ranks."""
        return part_of(self).exchange.scale_local_gradients

    def register_local_var(self, var: VariableLike) -> None:
        """Exclude a variable's gradient from the reduction; the variable may then differ between ranks.

        Args:
            var: A variable of the model; also one without a gradient, which `fit` then neither averages nor compares.
        """
        part_of(self).register_local_var(var)

    def keep_local(self, layers: Sequence[LayerLike]) -> None:
        """Exclude the gradients of layers from the reduction; the layers need not be built yet.

        Args:
            layers: Layers of the model.
        """
        part_of(self).layers.extend(layers)


def part_of(optimizer: Any) -> DistributedPart:
    """Return the distributed part of an optimizer that is itself distributed."""
    found = optimizer.__dict__.get("_hvkeras")
    if isinstance(found, DistributedPart):
        part = found.of(optimizer)
    else:
        part = DistributedPart(optimizer, type(optimizer)._hvkeras)
    if part is not found:
        if found is not None:
            part.applying = found.applying
        optimizer.__dict__["_hvkeras"] = part
    return part


@dataclass(frozen=True)
class Ahead:
    """Record of a gradient that was reduced before the step that applies it.

    Attributes:
        graph: Weak reference to the function graph in which the gradient was reduced; None for eager mode.
        due: Boolean tensor, true if the gradient is to be applied; None if it always is.
        computed: Whether the gradient was reduced when it was computed.
    """

    graph: Any
    due: Any
    computed: bool


class ReducedAhead:
    """Variables of an optimizer whose gradients are reduced but not yet applied."""

    def __init__(self) -> None:
        self._ahead: dict[Any, Ahead] = {}

    def add(self, variables: Sequence[Any], due: Any, computed: bool) -> None:
        """Record that gradients are reduced, in the function under construction or in eager mode."""
        graph = graphs.function_graph()
        ahead = Ahead(None if graph is None else weakref.ref(graph), due, computed)
        self._ahead.update((compat.variable_key(variable), ahead) for variable in variables)

    def forget(self, variables: Sequence[Any]) -> None:
        """Discard the records of these variables, because other gradients replace the reduced ones."""
        for variable in variables:
            self._ahead.pop(compat.variable_key(variable), None)

    def find(self, variables: Sequence[Any]) -> Ahead | None:
        """Return the record of these variables in this graph or in eager mode; None unless all of them have one."""
        if not self._ahead:
            return None
        graph = graphs.function_graph()
        found = [self._ahead.get(compat.variable_key(variable)) for variable in variables]
        here = [ahead for ahead in found if ahead is not None and (ahead.graph and ahead.graph()) is graph]
        return here[0] if here and len(here) == len(found) else None

    def take(self, variables: Sequence[Any]) -> Ahead | None:
        """Return the record like `find`, and discard it, because the gradients are being applied."""
        found = self.find(variables)
        if found is not None:
            for variable in variables:
                del self._ahead[compat.variable_key(variable)]
        return found

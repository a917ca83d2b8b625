"""State of a distributed optimizer that Keras does not see, under one attribute."""

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
    """What makes an optimizer a distributed one: how its gradients are reduced, and what it keeps between steps.

    Args:
        optimizer: The optimizer; None for a copy that no optimizer has taken yet.
        options: How it is distributed.

    Attributes:
        options: How it is distributed.
        layers: The layers whose variables each rank keeps for itself.
        accumulation: The sums of passes.
        ahead: The gradients that were reduced before the step that applies them.
        compiler: Compiles updates.
        is_minimizing: Whether tf_keras's `minimize` runs, whose step reduces the gradients.
    """

    def __init__(self, optimizer: Any, options: Options) -> None:
        super().__init__()
        self._optimizer: Callable[[], Any] = _nothing if optimizer is None else weakref.ref(optimizer)
        self.options: Options = options
        self.layers: list[Any] = []
        self._local: dict[Any, str] = {}
        self.accumulation: Accumulation = Accumulation(options.passes, options.averages_passes)
        self.ahead: ReducedAhead = ReducedAhead()
        self.compiler: UpdateCompiler = UpdateCompiler(options.compile_update)
        self.is_minimizing: bool = False
        self._sharding: Sharding | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedPart:
        """A copied optimizer keeps its local variables, and begins with no gradients and nothing compiled."""
        copied = memo[id(self)] = DistributedPart(None, self.options)
        copied.__setstate__(copy.deepcopy(self._lasting(), memo))
        return copied

    def __reduce__(self) -> Any:
        return DistributedPart, (None, self.options), self._lasting()

    def _lasting(self) -> tuple[Any, ...]:
        return self._local, self.layers, self._sharding

    def __setstate__(self, lasting: tuple[Any, ...]) -> None:
        """Takes what a copied or unpickled optimizer keeps."""
        self._local, self.layers, self._sharding = lasting

    def of(self, optimizer: Any) -> DistributedPart:
        """Returns this part if it is the optimizer's, or no optimizer's yet; else a new one that is alike."""
        owner = self._optimizer()
        if owner is None:
            self._optimizer = weakref.ref(optimizer)
        elif owner is not optimizer:
            made = DistributedPart(optimizer, self.options)
            made.__setstate__((dict(self._local), list(self.layers), None))
            return made
        return self

    @property
    def optimizer(self) -> Any:
        """The optimizer."""
        return self._optimizer()

    @property
    def exchange(self) -> ReductionOptions:
        """How gradients are reduced."""
        return self.options.exchange

    @property
    def sharding(self) -> Sharding | None:
        """How ranks share the update; None if they do not."""
        if self._sharding is None and self.options.shard_kind:
            self._sharding = Sharding(self.optimizer, self.options, self.local_keys)
        return self._sharding

    @property
    def sharded_state(self) -> ShardedState | None:
        """The slots that ranks share; None if they share none."""
        return None if self.sharding is None else self.sharding.state

    def reshard(self, variables: Sequence[Any] = ()) -> None:
        """Shares the update among the ranks that the job has now; see `Sharding.reshard`."""
        if self.sharding is not None:
            self.compiler = UpdateCompiler(self.options.compile_update)
            self.sharding.reshard(variables)

    def trained(self) -> list[Any]:
        """Returns the model's variables that an optimizer of Keras 3 was built for."""
        shards = None if self.sharding is None else self.sharding.shards
        return list(self.optimizer._trainable_variables if shards is None else shards.variables)

    def local_keys(self) -> dict[Any, str]:
        """Returns the names of the variables that each rank keeps for itself, by their keys."""
        for layer in self.layers:
            for weight in compat.model_weights(layer):
                self.register_local_var(weight)
        return self._local

    def register_local_var(self, variable: Any) -> None:
        """Keeps a variable's gradient on this rank."""
        self._local[compat.variable_key(variable)] = compat.variable_name(variable)

    @contextlib.contextmanager
    def minimizing(self) -> Iterator[None]:
        """A scope in which tf_keras's `minimize` runs."""
        before, self.is_minimizing = self.is_minimizing, True
        try:
            yield
        finally:
            self.is_minimizing = before

    def is_reduced_elsewhere(self) -> bool:
        """Whether gradients are reduced elsewhere: by the step that applies them, or by a strategy."""
        in_strategy = replicas.strategy_within_rank() is not None or graphs.reducing_strategy() is not None
        return in_strategy or compat.is_summed(self.optimizer)

    def reduce_computed(self, pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        """Reduces gradients that were just computed, unless the step that applies them does so, or a strategy.

        Args:
            pairs: This rank's gradients and their variables.
        """
        if self.is_minimizing or self.is_reduced_elsewhere():
            self.ahead.forget([variable for _, variable in pairs])
            return list(pairs)
        return self.reduce_ahead(pairs, computed=True)

    def reduce_ahead(self, pairs: Sequence[tuple[Any, Any]], computed: bool) -> list[tuple[Any, Any]]:
        """Reduces gradients for a caller that applies them later; the later step does not reduce them again.

        Args:
            pairs: This rank's gradients and their variables.
            computed: Whether the gradients have just been computed; if not, they may be reduced already.
        """
        gradients, variables = [of_tensors(gradient) for gradient, _ in pairs], [variable for _, variable in pairs]
        ahead = self.ahead.find(variables)
        if ahead is not None and ahead.computed and not computed:
            return list(pairs)
        reducer, due = GradientReducer(self.exchange, self.local_keys(), self.options.scales_loss), None
        if self.options.passes == 1:
            reduced = reducer.reduce(gradients, variables)
        else:
            reduced, due = self.accumulation.collect(gradients, variables, lambda sums: reducer.reduce(sums, variables))
        self.ahead.note(variables, due, computed)
        return list(zip(reduced, variables, strict=True))


def _nothing() -> None:
    """What refers to no optimizer."""


class Reducing:
    """What optimizers that reduce gradients say about it; mixed into a dynamic subclass of the optimizer's class.

    The subclass has the options, under the one name `_hvkeras`. Under the same name, the `__dict__` of an optimizer has
    its `DistributedPart`, which neither Keras's tracker nor `tf.train.Checkpoint` see.
    """

    _hvkeras: Options

    @property
    def process_set(self) -> ProcessSet:
        """The ranks whose gradients are combined."""
        return part_of(self).exchange.process_set

    @property
    def scale_local_gradients(self) -> bool:
        """Whether gradients that stay on this rank are divided by the number of ranks."""
        return part_of(self).exchange.scale_local_gradients

    def register_local_var(self, var: VariableLike) -> None:
        """Keeps a variable's gradient on this rank; the variable may then differ between ranks.

        Args:
            var: A variable of the model; also one without a gradient, which `fit` then neither averages nor compares.
        """
        part_of(self).register_local_var(var)

    def keep_local(self, layers: Sequence[LayerLike]) -> None:
        """Keeps the gradients of layers on this rank; the layers need not be built yet.

        Args:
            layers: Layers of the model.
        """
        part_of(self).layers.extend(layers)


def part_of(optimizer: Any) -> DistributedPart:
    """Returns the distributed part of an optimizer that is distributed itself."""
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
    """How a variable's gradient was reduced before the step that applies it.

    Attributes:
        graph: A weak reference to the function graph in which the gradient was reduced; None for eager mode.
        due: A boolean tensor that says whether to apply the gradient; None if it is always applied.
        computed: Whether the gradient was reduced when it was computed.
    """

    graph: Any
    due: Any
    computed: bool


class ReducedAhead:
    """The variables of an optimizer whose gradients are reduced but not yet applied."""

    def __init__(self) -> None:
        self._ahead: dict[Any, Ahead] = {}

    def note(self, variables: Sequence[Any], due: Any, computed: bool) -> None:
        """Records that gradients are reduced, in the function under construction or in eager mode."""
        graph = graphs.function_graph()
        ahead = Ahead(None if graph is None else weakref.ref(graph), due, computed)
        self._ahead.update((compat.variable_key(variable), ahead) for variable in variables)

    def forget(self, variables: Sequence[Any]) -> None:
        """Forgets the entries of these variables: others are applied instead of the gradients that were reduced."""
        for variable in variables:
            self._ahead.pop(compat.variable_key(variable), None)

    def find(self, variables: Sequence[Any]) -> Ahead | None:
        """Returns how the gradients of these variables were reduced here, or None unless all of them were."""
        if not self._ahead:
            return None
        graph = graphs.function_graph()
        found = [self._ahead.get(compat.variable_key(variable)) for variable in variables]
        here = [ahead for ahead in found if ahead is not None and (ahead.graph and ahead.graph()) is graph]
        return here[0] if here and len(here) == len(found) else None

    def take(self, variables: Sequence[Any]) -> Ahead | None:
        """Does the same as `find`, and forgets the entries, because the gradients are being applied."""
        found = self.find(variables)
        if found is not None:
            for variable in variables:
                del self._ahead[compat.variable_key(variable)]
        return found

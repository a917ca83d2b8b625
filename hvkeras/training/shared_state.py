"""State of a model that all ranks must hold alike: weights, untrained variables, and what layers have learned."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras import compat
from hvkeras.collectives.broadcasts import allgather_object, gather_objects
from hvkeras.errors import DivergenceError, explain
from hvkeras.job.process_sets import ProcessSet
from hvkeras.training import moving_statistics
from hvkeras.training.learned_state import Learned, first_difference, require_same_layers, shared_layers, summary_of
from hvkeras.training.sketches import all_diverged, sketches, spread


@dataclass(frozen=True)
class Difference:
    """Variable, or learned state of a layer, that differs between two ranks.

    Attributes:
        name: The variable, or the layer with its class.
        ranks: The first rank, and the one that differs most from it.
        layer: The layer that updates the variable outside the optimizer, or has learned the state; "" for weights.
        layer_class: The class of this layer.
        distance: The relative difference of a variable; None for learned state.
        tokens: The vocabulary sizes on these ranks; empty for other state.
    """

    name: str
    ranks: tuple[int, int]
    layer: str = ""
    layer_class: str = ""
    distance: float | None = None
    tokens: tuple[int, ...] = ()

    @property
    def between(self) -> str:
        """Both ranks as text."""
        return f"ranks {self.ranks[0]} and {self.ranks[1]}"


class SharedState:
    """State of a model on this rank.

    Args:
        local: The keys of variables that may differ between ranks.
        statistics: Whether moving statistics must be equal.
    """

    def __init__(self, model: Any, process_set: ProcessSet, local: Collection[Any], statistics: bool) -> None:
        self._model, self._process_set = model, process_set
        self.layers: list[Any] = shared_layers(model, local)
        self.trained: list[Any] = []
        self.untrained: list[compat.UntrainedVariable] = []
        self.is_built: bool = bool(model.built)
        if self.is_built:
            self.trained = [variable for variable in model.trainable_variables
                            if compat.variable_key(variable) not in local and tf.as_dtype(variable.dtype).is_floating]
            self.untrained = [one for one in compat.kept_variables(model) if one.key not in local and (
                statistics or not moving_statistics.is_statistic(one))]

    def sketches(self, untrained: bool = True) -> Any:
        """Return the sketches of the weights, followed by those of the untrained variables."""
        mine = sketches(self._model, "trained", self.trained)
        if not untrained or not self.untrained:
            return mine
        return tf.concat([mine, sketches(self._model, "untrained", [one.variable for one in self.untrained])], 0)

    def compare(self, report_learned: Callable[[Difference], None], name: str,
                hint: str = "") -> tuple[list[int], Any] | None:
        """Compare the state of models that ranks have built by themselves; all ranks must call this.

        Args:
            report_learned: Called with a layer that has learned different state, on which shapes of variables may
                depend.
            name: The name of the collective, for messages.
            hint: What to do if not all ranks make this call.

        Returns:
            The indices of the variables that differ, and the sketches of all ranks, of shape `[ranks, variables, ...]`;
            None if a rank has not built its model.

        Raises:
            DivergenceError: The models have different variables or layers.
        """
        mine = (self.is_built, [_shape_of(one) for one in self.trained],
                [_shape_of(one.variable) for one in self.untrained], self.sketches().numpy(),
                [summary_of(layer) for layer in self.layers])
        built, trained, untrained, sketched, learned = zip(
            *gather_objects(mine, self._process_set, name, hint), strict=True)
        differing = self._learned_difference(learned)
        if differing is not None:
            report_learned(differing)
        if not all(built):
            return None
        self._require_same_variables(trained, "trainable variable")
        self._require_same_variables(untrained, "non-trainable variable")
        everyone = np.stack(sketched)
        return all_diverged(everyone.max(0), everyone.min(0), 0), everyone

    def spread(self, name: str, steps: int, more: Sequence[float] = (),
               untrained: bool = True) -> tuple[list[int], Any, Any]:
        """Compare the state after the models were found alike, in a single collective; all ranks must call this.

        Args:
            name: The name of the collective, for messages.
            steps: Steps since the models were equal.
            more: More numbers, of which the same collective finds the maxima over the ranks.
            untrained: Whether to compare untrained variables, too.

        Returns:
            The indices of the variables that differ, this rank's sketches, and the maxima.
        """
        mine = self.sketches(untrained)
        high, low, maxima = spread(mine, name, self._process_set, more)
        return all_diverged(high, low, steps), mine, maxima

    def is_weight(self, index: int) -> bool:
        """Return whether the variable of an index is trained."""
        return index < len(self.trained)

    def is_statistic(self, index: int) -> bool:
        """Return whether the variable of an index is a moving statistic, which may be averaged."""
        return not self.is_weight(index) and moving_statistics.is_statistic(self.untrained[index - len(self.trained)])

    def difference(self, index: int, everyone: Any) -> Difference:
        """Describe a difference.

        Args:
            index: The index of the variable; untrained ones follow the trained ones.
            everyone: The sketches of this variable on all ranks.
        """
        ranks = self._process_set.ranks
        other = max(range(1, len(ranks)), key=lambda rank: float(np.abs(everyone[rank] - everyone[0]).max()))
        gaps = np.abs(everyone[other] - everyone[0])[:-1]
        distance = float(np.sqrt(np.mean(gaps**2)) / max(everyone[0][-1], everyone[other][-1], 1e-30))
        between, rounded = (ranks[0], ranks[other]), float(f"{distance:.2g}")
        if self.is_weight(index):
            return Difference(compat.variable_name(self.trained[index]), between, distance=rounded)
        one = self.untrained[index - len(self.trained)]
        return Difference(compat.variable_name(one.variable), between, one.layer.name, type(one.layer).__name__,
                          rounded)

    def _learned_difference(self, everyone: Sequence[Sequence[Learned]]) -> Difference | None:
        ranks = self._process_set.ranks
        require_same_layers(everyone, ranks)
        found = first_difference(self.layers, everyone, self._process_set)
        if found is None:
            return None
        index, other = found
        name, cls = everyone[0][index].layer.rsplit(" ", 1)
        tokens = tuple(count for rank in (0, other) if (count := everyone[rank][index].tokens) is not None)
        return Difference(f"{name} ({cls})", (ranks[0], ranks[other]), name, cls, tokens=tokens)

    def _require_same_variables(self, everyone: Sequence[Sequence[tuple[str, tuple[int, ...]]]], what: str) -> None:
        for rank, variables in zip(self._process_set.ranks, everyone, strict=True):
            shapes, first = [shape for _, shape in variables], [shape for _, shape in everyone[0]]
            if shapes == first:
                continue
            index = next((index for index, pair in enumerate(zip(shapes, first, strict=False)) if pair[0] != pair[1]),
                         min(len(shapes), len(first)))
            raise DivergenceError(explain(
                f"All ranks must train the same model, but {what} {index + 1} differs",
                "build the model alike on every rank; register layers that are meant to differ with"
                " optimizer.register_local_var(variable)",
                **{f"rank_{self._process_set.ranks[0]}": _one_of(everyone[0], index),
                   f"rank_{rank}": _one_of(variables, index)}))


def gather_sketches(mine: Any, process_set: ProcessSet) -> Any:
    """Return all ranks' sketches of a variable that has diverged; all ranks must call this."""
    return allgather_object(mine, name="the diverged variable of fit", process_set=process_set)


def _shape_of(variable: Any) -> tuple[str, tuple[int, ...]]:
    return compat.variable_name(variable), tuple(variable.shape)


def _one_of(variables: Sequence[tuple[str, tuple[int, ...]]], index: int) -> str:
    return f"{variables[index][0]} {list(variables[index][1])}" if index < len(variables) else "none"

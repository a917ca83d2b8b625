"""Divergence check: verify that all ranks hold the same weights and the same non-trainable state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras import compat
from hvkeras.collectives.broadcasts import allgather_object
from hvkeras.errors import DivergenceError, explain
from hvkeras.gradients.optimizer_classes import distributed_part
from hvkeras.horovod import as_horovod
from hvkeras.host.console import prints_at, say
from hvkeras.job.process_sets import ProcessSet
from hvkeras.job.session import current_session
from hvkeras.training import moving_statistics
from hvkeras.training.learned_state import Learned, first_difference, require_same_layers, shared_layers, summary_of
from hvkeras.training.sketches import all_diverged, first_diverged, sketches, spread

_UNEQUAL_START = "that the ranks did not start from the same weights"
_STRATEGIES = ("MultiWorkerMirroredStrategy", "CollectiveAllReduceStrategy")
_BROADCAST = "add hvd.callbacks.BroadcastGlobalVariablesCallback(0) to fit's callbacks"


class DivergenceCheck:
    """Comparison of the variables of a model across the ranks during training.

    Args:
        local: Returns the keys of variables that may differ between ranks.
        broadcasts: Whether a callback broadcasts the initial weights.
        averages: Whether `fit` averages moving statistics; otherwise they are local to each rank.
        one_step: Whether `fit` has only one step: scripts for `elastic` build a model so, before they broadcast it.
    """

    def __init__(self, model: Any, process_set: ProcessSet, local: Callable[[], Collection[Any]], broadcasts: bool,
                 averages: bool, one_step: bool) -> None:
        self._model, self._process_set, self._local = model, process_set, local
        self._broadcasts, self._averages, self._one_step = broadcasts, averages, one_step
        self._equal_at_start: bool | None = None
        self._diverged_at_start: set[Any] = set()  # keys of non-trainable variables that differed before the first step
        self._accepts_divergence = False
        self._warned = False  # of different non-trainable state

    def start(self) -> bool:
        """Compare the weights and the learned state of layers before the first step.

        Unequal weights raise no error yet, since a broadcast may still follow.

        Returns:
            True if all ranks have built the model.

        Raises:
            DivergenceError: The ranks' models have different variables, or layers with different learned state.
        """
        built, layers = bool(self._model.built), shared_layers(self._model, self._local())
        variables = self._trained() if built else []
        untrained = self._untrained() if built else []
        mine = (built, [_shape_of(one) for one in variables], [_shape_of(one.variable) for one in untrained],
                self._sketches(variables).numpy(), self._sketches_of_untrained(untrained).numpy(),
                [summary_of(layer) for layer in layers])
        everyone = allgather_object(mine, name="the weights at the start of fit", process_set=self._process_set)
        self._require_same_learned(layers, [learned for *_, learned in everyone])
        if not all(is_built for is_built, *_ in everyone):
            return False
        self._require_same_variables([names for _, names, *_ in everyone], "trainable variable")
        self._require_same_variables([names for _, _, names, *_ in everyone], "non-trainable variable")
        found, untrained_sketches = (np.stack(ranks) for ranks in zip(*(rank[3:5] for rank in everyone), strict=True))
        self._equal_at_start = first_diverged(found.max(0), found.min(0), 0) is None
        diverged = all_diverged(untrained_sketches.max(0), untrained_sketches.min(0), 0)
        self._diverged_at_start = {untrained[index].key for index in diverged}
        return True

    def check(self, steps: int, flag: bool, at_end: bool) -> bool:
        """Compare the weights; all ranks must call this at the same step.

        Args:
            steps: Steps since the start.
            flag: A flag of this rank, reduced over all ranks in the same collective.
            at_end: Whether this is the end of an epoch, where non-trainable state must be equal as well.

        Returns:
            True if any rank set the flag.

        Raises:
            DivergenceError: A variable differs between ranks.
        """
        trained, untrained = self._trained(), self._untrained() if at_end else []
        mine = self._sketches(trained)
        if untrained:
            mine = tf.concat([mine, self._sketches_of_untrained(untrained)], 0)
        high, low, flagged = spread(mine, "the divergence check of fit", self._process_set, flag)
        index = first_diverged(high, low, steps)
        if index is not None and not self._accepts_divergence:
            if index < len(trained):
                self._raise_diverged(steps, trained[index], mine[index].numpy())
            else:
                self._raise_untrained_diverged(steps, untrained[index - len(trained)], mine[index].numpy())
        return flagged

    def _trained(self) -> list[Any]:
        local = self._local()
        return [variable for variable in self._model.trainable_variables
                if compat.variable_key(variable) not in local and _is_floating(variable)]

    def _untrained(self) -> list[compat.UntrainedVariable]:
        """Return the non-trainable variables that must be equal: without statistics that are local to each rank."""
        local = self._local()
        return [one for one in compat.kept_variables(self._model) if one.key not in local and (
            self._averages or not moving_statistics.is_statistic(one))]

    def _sketches(self, variables: Sequence[Any]) -> Any:
        return sketches(self._model, "trained", variables)

    def _sketches_of_untrained(self, untrained: Sequence[compat.UntrainedVariable]) -> Any:
        return sketches(self._model, "untrained", [one.variable for one in untrained])

    def _require_same_learned(self, layers: Sequence[Any], everyone: Sequence[Sequence[Learned]]) -> None:
        ranks = self._process_set.ranks
        require_same_layers(everyone, ranks)
        found = first_difference(layers, everyone, self._process_set)
        if found is None:
            return
        index, other = found
        name, cls = everyone[0][index].layer.rsplit(" ", 1)
        if as_horovod.is_installed():
            self._warn(f"the layer {name} ({cls}) has learned different state on ranks {ranks[0]} and {ranks[other]},"
                       " which compute different functions (an error without --as-horovod)")
            return
        tokens = {f"tokens_on_rank_{ranks[rank]}": everyone[rank][index].tokens for rank in (0, other)}
        raise DivergenceError(explain(
            f"All ranks must compute the same function, but the layer {name} ({cls}) has learned different state on"
            f" ranks {ranks[0]} and {ranks[other]}", "adapt it to the data of all ranks together with hvd.adapt(layer,"
            " data), or give all ranks the root's with hvd.callbacks.BroadcastGlobalVariablesCallback(0)", layer=name,
            **{key: count for key, count in tokens.items() if count is not None}))

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

    def _raise_diverged(self, steps: int, variable: Any, mine: Any) -> None:
        first, other, distance = self._distance(mine)
        cause, hint = self._cause()
        if cause == _UNEQUAL_START and as_horovod.is_installed():
            self._accept_divergence()
            return
        raise DivergenceError(explain(
            f"All ranks must hold the same weights, but after {steps} step{'s' * (steps != 1)} of fit"
            f" {compat.variable_name(variable)} differs between ranks {first} and {other}; the likely cause"
            f" is {cause}", hint, variable=compat.variable_name(variable), relative_difference=distance))

    def _raise_untrained_diverged(self, steps: int, untrained: compat.UntrainedVariable, mine: Any) -> None:
        first, other, distance = self._distance(mine)
        name = compat.variable_name(untrained.variable)
        layer = f"{untrained.layer.name} ({type(untrained.layer).__name__})"
        if as_horovod.is_installed():
            if not self._warned:
                self._warn(f"the state {name} of the layer {layer} differs between ranks {first} and {other}: a file"
                           " saved by one rank does not match the others (an error without --as-horovod)")
            self._warned = True
            return
        differed = untrained.key in self._diverged_at_start and not self._broadcasts
        raise DivergenceError(explain(
            f"All ranks must hold the same state, but after {steps} step{'s' * (steps != 1)} of fit {name}, which the"
            f" layer {layer} updates outside the optimizer, differs between ranks {first} and {other}"
            + f", as it did before the first step; the likely cause is {_UNEQUAL_START}" * differed,
            _BROADCAST if differed else
            "if it is a moving average, let fit average it with hvd.register_statistic(layer); otherwise assign the"
            " result of hvd.allreduce, or register it as local to each rank with"
            " optimizer.register_local_var(variable)",
            variable=name, layer=untrained.layer.name, relative_difference=distance))

    def _distance(self, mine: Any) -> tuple[int, int, float]:
        """Return the first rank, the rank whose sketch differs most from it, and their relative difference."""
        everyone = allgather_object(mine, name="the diverged variable of fit", process_set=self._process_set)
        ranks = self._process_set.ranks
        other = max(range(1, len(ranks)), key=lambda rank: float(np.abs(everyone[rank] - everyone[0]).max()))
        gaps = np.abs(everyone[other] - everyone[0])[:-1]
        distance = float(np.sqrt(np.mean(gaps**2)) / max(everyone[0][-1], everyone[other][-1], 1e-30))
        return ranks[0], ranks[other], float(f"{distance:.2g}")

    def _accept_divergence(self) -> None:
        """Let this `fit` continue, as in Horovod."""
        self._accepts_divergence = True
        if not self._one_step:
            self._warn("the ranks did not start this fit from the same weights, and train different models (an error"
                       f" without --as-horovod)\nHINT: {_BROADCAST}")

    def _warn(self, text: str) -> None:
        session = current_session()
        if session.topology.rank == self._process_set.ranks[0] and prints_at(session.settings, "WARNING"):
            say(text)

    def _cause(self) -> tuple[str, str]:
        """Return the likely cause and the hint."""
        if distributed_part(self._model.optimizer) is None:
            if type(getattr(self._model, "distribute_strategy", None)).__name__ in _STRATEGIES:
                return "a strategy that has this rank as its only worker", (
                    'create it by hvd.strategy("multi_worker_mirrored"), or start the script with hvkeras run'
                    " --tf-config")
            if compat.steps_by_itself(self._model):
                hint = "compile with hvd.DistributedOptimizer(optimizer)"
            else:
                hint = ("average the gradients in your train_step: compile with hvd.DistributedOptimizer(optimizer), or"
                        " use hvd.DistributedGradientTape")
            return "an optimizer that is not distributed", hint + ("" if self._broadcasts else f", and {_BROADCAST}")
        if self._equal_at_start is False or (self._equal_at_start is None and not self._broadcasts):
            return _UNEQUAL_START, _BROADCAST + (
                "; or, if this fit only builds the model for hvd.elastic, remove it" if self._one_step else "")
        return ("a layer or an assignment that depends on the rank",
                ("update weights through the optimizer alone and alike on every rank, or register those that are meant"
                 " to differ with optimizer.register_local_var(variable)"))


def _shape_of(variable: Any) -> tuple[str, tuple[int, ...]]:
    return compat.variable_name(variable), tuple(variable.shape)


def _is_floating(variable: Any) -> bool:
    return bool(tf.as_dtype(variable.dtype).is_floating)


def _one_of(variables: Sequence[tuple[str, tuple[int, ...]]], index: int) -> str:
    return f"{variables[index][0]} {list(variables[index][1])}" if index < len(variables) else "none"

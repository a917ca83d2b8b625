"""Divergence check: verifies that all ranks still hold the same weights, and the same state that layers keep."""

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
_BROADCAST = "add hvd.callbacks.BroadcastGlobalVariablesCallback(0) to fit's callbacks"


class DivergenceCheck:
    """Compares the variables of a model across the ranks during training.

    Args:
        model: The model.
        process_set: The ranks that train it.
        local: Returns the keys of variables that may differ between ranks.
        broadcasts: Whether a callback gives all ranks the same initial weights.
        averages: Whether `fit` averages moving statistics; otherwise each rank keeps its own.
    """

    def __init__(self, model: Any, process_set: ProcessSet, local: Callable[[], Collection[Any]], broadcasts: bool,
                 averages: bool) -> None:
        self._model, self._process_set, self._local = model, process_set, local
        self._broadcasts, self._averages = broadcasts, averages
        self._started_equal: bool | None = None
        self._kept_apart: set[Any] = set()  # keys of what layers keep, if it differed before the first step
        self._tolerates = False  # whether different weights on the ranks are accepted
        self._warned = False  # that layers keep different state

    def start(self) -> bool:
        """Compares the weights and the learned state of layers before the first step.

        Unequal weights raise no error yet, since they may still be corrected.

        Returns:
            Whether all ranks have built the model.

        Raises:
            DivergenceError: The ranks' models have different variables, or layers with different learned state.
        """
        built, layers = bool(self._model.built), shared_layers(self._model, self._local())
        variables = self._trained() if built else []
        kept = self._kept() if built else []
        mine = (built, [_shape_of(one) for one in variables], [_shape_of(one.variable) for one in kept],
                self._sketches(variables).numpy(), self._sketches_of_kept(kept).numpy(),
                [summary_of(layer) for layer in layers])
        everyone = allgather_object(mine, name="the weights at the start of fit", process_set=self._process_set)
        self._require_same_learned(layers, [learned for *_, learned in everyone])
        if not all(there for there, *_ in everyone):
            return False
        self._require_same_variables([names for _, names, *_ in everyone], "trainable variable")
        self._require_same_variables([names for _, _, names, *_ in everyone], "variable that layers keep,")
        found, of_kept = (np.stack(ranks) for ranks in zip(*(rank[3:5] for rank in everyone), strict=True))
        self._started_equal = first_diverged(found.max(0), found.min(0), 0) is None
        self._kept_apart = {kept[index].key for index in all_diverged(of_kept.max(0), of_kept.min(0), 0)}
        return True

    def check(self, steps: int, flag: bool, at_end: bool) -> bool:
        """Compares the weights; all ranks call it at the same step.

        Args:
            steps: Steps since the start.
            flag: A flag of this rank, shared with all ranks in the same collective.
            at_end: Whether this is the end of an epoch, where moving statistics are averaged and everything else that
                layers keep by themselves must be equal.

        Returns:
            Whether any rank set the flag.

        Raises:
            DivergenceError: A variable differs between ranks.
        """
        trained, kept = self._trained(), self._kept() if at_end else []
        mine = self._sketches(trained)
        if kept:
            mine = tf.concat([mine, self._sketches_of_kept(kept)], 0)
        high, low, flagged = spread(mine, "the divergence check of fit", self._process_set, flag)
        index = first_diverged(high, low, steps)
        if index is not None and not self._tolerates:
            if index < len(trained):
                self._explain(steps, trained[index], mine[index].numpy())
            else:
                self._explain_kept(steps, kept[index - len(trained)], mine[index].numpy())
        return flagged

    def _trained(self) -> list[Any]:
        local = self._local()
        return [variable for variable in self._model.trainable_variables
                if compat.variable_key(variable) not in local and _is_floating(variable)]

    def _kept(self) -> list[compat.UntrainedVariable]:
        """Returns what layers keep by themselves and must be equal, which leaves out statistics of each rank's own."""
        local = self._local()
        return [one for one in compat.kept_variables(self._model) if one.key not in local and (
            self._averages or not moving_statistics.is_statistic(one))]

    def _sketches(self, variables: Sequence[Any]) -> Any:
        return sketches(self._model, "trained", variables)

    def _sketches_of_kept(self, kept: Sequence[compat.UntrainedVariable]) -> Any:
        return sketches(self._model, "kept", [one.variable for one in kept])

    def _require_same_learned(self, layers: Sequence[Any], everyone: Sequence[Sequence[Learned]]) -> None:
        ranks = self._process_set.ranks
        require_same_layers(everyone, ranks)
        found = first_difference(layers, everyone, self._process_set)
        if found is None:
            return
        index, other = found
        name, cls = everyone[0][index].layer.rsplit(" ", 1)
        if as_horovod.is_installed():
            self._warn(f"the layer {name} ({cls}) has learned different things on ranks {ranks[0]} and {ranks[other]},"
                       " which train different functions (an error without --as-horovod)")
            return
        tokens = {f"tokens_on_rank_{ranks[rank]}": everyone[rank][index].tokens for rank in (0, other)}
        raise DivergenceError(explain(
            f"All ranks must compute the same function, but the layer {name} ({cls}) has learned different things on"
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

    def _explain(self, steps: int, variable: Any, mine: Any) -> None:
        first, other, distance = self._distance(mine)
        cause, hint = self._cause()
        if cause == _UNEQUAL_START and as_horovod.is_installed():
            self._tolerate()
            return
        raise DivergenceError(explain(
            f"All ranks must hold the same weights, but after {steps} step{'s' * (steps != 1)} of fit"
            f" {compat.variable_name(variable)} differs between ranks {first} and {other}; the likely cause"
            f" is {cause}", hint, variable=compat.variable_name(variable), relative_difference=distance))

    def _explain_kept(self, steps: int, kept: compat.UntrainedVariable, mine: Any) -> None:
        first, other, distance = self._distance(mine)
        name, layer = compat.variable_name(kept.variable), f"{kept.layer.name} ({type(kept.layer).__name__})"
        if as_horovod.is_installed():
            if not self._warned:
                self._warn(f"the layer {layer} keeps other values of {name} on rank {other} than on rank {first}: the"
                           " file of one rank fits no other (an error without --as-horovod)")
            self._warned = True
            return
        differed = kept.key in self._kept_apart and not self._broadcasts
        raise DivergenceError(explain(
            f"All ranks must hold the same state, but after {steps} step{'s' * (steps != 1)} of fit {name}, which the"
            f" layer {layer} keeps by itself, differs between ranks {first} and {other}"
            + f", as it did before the first step; the likely cause is {_UNEQUAL_START}" * differed,
            _BROADCAST if differed else
            "if it is a moving average, let fit average it with hvd.register_statistic(layer); otherwise assign what"
            " hvd.allreduce makes of the ranks' values, or register it as one that is meant to differ with"
            " optimizer.register_local_var(variable)",
            variable=name, layer=kept.layer.name, relative_difference=distance))

    def _distance(self, mine: Any) -> tuple[int, int, float]:
        """Returns the first rank, the one whose sketch differs most from its, and their relative difference."""
        everyone = allgather_object(mine, name="the diverged variable of fit", process_set=self._process_set)
        ranks = self._process_set.ranks
        other = max(range(1, len(ranks)), key=lambda rank: float(np.abs(everyone[rank] - everyone[0]).max()))
        gaps = np.abs(everyone[other] - everyone[0])[:-1]
        distance = float(np.sqrt(np.mean(gaps**2)) / max(everyone[0][-1], everyone[other][-1], 1e-30))
        return ranks[0], ranks[other], float(f"{distance:.2g}")

    def _tolerate(self) -> None:
        """Lets this `fit` continue, as Horovod does: scripts for `elastic` fit one step before they broadcast."""
        self._tolerates = True
        self._warn("the ranks did not start this fit from the same weights, and train different models until weights"
                   " are broadcast (an error without --as-horovod)")

    def _warn(self, text: str) -> None:
        session = current_session()
        if session.topology.rank == self._process_set.ranks[0] and prints_at(session.settings, "WARNING"):
            say(text)

    def _cause(self) -> tuple[str, str]:
        """Returns the likely cause and its remedy."""
        if distributed_part(self._model.optimizer) is None:
            if compat.steps_by_itself(self._model):
                hint = "compile with hvd.DistributedOptimizer(optimizer)"
            else:
                hint = ("average the gradients in your train_step: compile with hvd.DistributedOptimizer(optimizer), or"
                        " use hvd.DistributedGradientTape")
            return "an optimizer that is not distributed", hint + ("" if self._broadcasts else f", and {_BROADCAST}")
        if self._started_equal is False or (self._started_equal is None and not self._broadcasts):
            return _UNEQUAL_START, _BROADCAST
        return ("a layer or an assignment that depends on the rank",
                ("update weights through the optimizer alone and alike on every rank, or register those that are meant"
                 " to differ with optimizer.register_local_var(variable)"))


def _shape_of(variable: Any) -> tuple[str, tuple[int, ...]]:
    return compat.variable_name(variable), tuple(variable.shape)


def _is_floating(variable: Any) -> bool:
    return bool(tf.as_dtype(variable.dtype).is_floating)


def _one_of(variables: Sequence[tuple[str, tuple[int, ...]]], index: int) -> str:
    return f"{variables[index][0]} {list(variables[index][1])}" if index < len(variables) else "none"

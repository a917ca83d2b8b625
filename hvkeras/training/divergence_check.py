"""Divergence check: verifies that all ranks still hold the same weights.

Each variable is sketched by a few sums of its elements under fixed pseudo-random signs. The difference of two sketches
estimates the norm of the variables' difference (Alon, Matias, Szegedy: "The space complexity of approximating the
frequency moments", 1996), whatever the difference looks like. Sums without signs would miss differences in the bias of
a softmax layer, whose gradients add up to zero.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras import as_horovod, compat
from hvkeras.collectives.broadcasts import allgather_object
from hvkeras.collectives.operations import Max
from hvkeras.collectives.reductions import allreduce
from hvkeras.errors import DivergenceError, explain
from hvkeras.gradients.optimizer import distributed_part
from hvkeras.host.console import prints_at, say
from hvkeras.job.process_sets import ProcessSet
from hvkeras.job.state import current_job
from hvkeras.training.learned_state import Learned, first_difference, require_same_layers, shared_layers, summary_of

SKETCHES = 4  # sums per variable
WIDTH = 4096  # elements per row; every row uses the same column signs
_NOT_FINITE = 3e38  # replaces infinity and NaN, so that they show as a difference if only some ranks have them

_UNEQUAL_START = "that the ranks did not start from the same weights"

_signs = np.random.default_rng(0)
_COLUMNS = _signs.choice([-1.0, 1.0], (WIDTH, SKETCHES)).astype(np.float32)


def tolerance(steps: int) -> float:
    """Returns how far weights may be apart, relative to their norm.

    Ranks apply the same gradients, so weights differ at most by the rounding of different processors, which
    accumulates like a random walk.

    Args:
        steps: Steps since the start.
    """
    return 1e-5 + 2e-7 * math.sqrt(steps)


# For each model: the keys of its variables, and the function that sketches them: tracing takes longer than running.
_functions: weakref.WeakKeyDictionary[Any, tuple[list[Any], Any]] = weakref.WeakKeyDictionary()


def _sketch_all(variables: Sequence[Any]) -> Any:
    columns = tf.constant(_COLUMNS)
    return tf.stack([sketch(variable, columns) for variable in variables])


def sketch(variable: Any, columns: Any = _COLUMNS) -> Any:
    """Computes the sketch of a variable.

    Args:
        variable: A floating-point variable or tensor.
        columns: The signs of the elements in a row.

    Returns:
        A float32 tensor of shape `[SKETCHES + 1]`: the signed sums and the norm.
    """
    values = tf.cast(tf.reshape(variable, [-1]), tf.float32)
    size = values.shape[0]
    rows, rest = divmod(size, WIDTH)
    sums = tf.linalg.matvec(columns[:rest], values[rows * WIDTH :], transpose_a=True)
    if rows:
        signs = np.random.default_rng(1).choice([-1.0, 1.0], (rows, 1)).astype(np.float32)
        sums += tf.reduce_sum(tf.matmul(tf.reshape(values[: rows * WIDTH], [rows, WIDTH]), columns) * signs, 0)
    sketched = tf.concat([sums, tf.norm(values)[tf.newaxis]], 0)
    return tf.where(tf.math.is_finite(sketched), sketched, _NOT_FINITE)


class DivergenceCheck:
    """Compares the trainable variables of a model across the ranks during training.

    Args:
        model: The model.
        process_set: The ranks that train it.
        local: Keys of variables that may differ between ranks.
        broadcasts: Whether a callback gives all ranks the same initial weights.
    """

    def __init__(self, model: Any, process_set: ProcessSet, local: Collection[Any], broadcasts: bool) -> None:
        self._model, self._process_set, self._local, self._broadcasts = model, process_set, local, broadcasts
        self._started_equal: bool | None = None
        self._tolerates = False  # whether different weights on the ranks are accepted

    def start(self) -> None:
        """Compares the weights and the learned state of layers before the first step.

        Unequal weights raise no error yet, since they may still be corrected.

        Raises:
            DivergenceError: The ranks' models have different variables, or layers with different learned state.
        """
        built, layers = bool(self._model.built), shared_layers(self._model, self._local)
        variables = self._variables() if built else []
        mine = (built, [(compat.variable_name(one), tuple(one.shape)) for one in variables],
                self._sketches(variables).numpy(), [summary_of(layer) for layer in layers])
        everyone = allgather_object(mine, name="the weights at the start of fit", process_set=self._process_set)
        self._require_same_learned(layers, [learned for _, _, _, learned in everyone])
        if not all(there for there, _, _, _ in everyone):
            return
        self._require_same_variables([names for _, names, _, _ in everyone])
        sketches = np.stack([found for _, _, found, _ in everyone])
        self._started_equal = _first_diverged(sketches.max(0), sketches.min(0), 0) is None

    def check(self, steps: int, flag: bool) -> bool:
        """Compares the weights; all ranks call it at the same step.

        Args:
            steps: Steps since the start.
            flag: A flag of this rank, shared with all ranks in the same collective.

        Returns:
            Whether any rank set the flag.

        Raises:
            DivergenceError: A variable differs between ranks.
        """
        variables = self._variables()
        mine = self._sketches(variables)
        flat = tf.reshape(mine, [-1])
        largest = allreduce(tf.concat([[float(flag)], flat, -flat], 0), op=Max, name="the divergence check of fit",
                            process_set=self._process_set).numpy()
        high, low = largest[1 : 1 + len(flat)], -largest[1 + len(flat) :]
        place = _first_diverged(high.reshape(mine.shape), low.reshape(mine.shape), steps)
        if place is not None and not self._tolerates:
            self._explain(steps, variables[place], mine[place].numpy())
        return bool(largest[0])

    def _variables(self) -> list[Any]:
        return [variable for variable in self._model.trainable_variables
                if compat.variable_key(variable) not in self._local and _is_floating(variable)]

    def _sketches(self, variables: Sequence[Any]) -> Any:
        """Sketches all variables, with a function that is retraced when the variables change."""
        natives = [compat.native(variable) for variable in variables]
        keys = [compat.variable_key(variable) for variable in variables]
        if not natives:
            return tf.zeros([0, SKETCHES + 1])
        known = _functions.get(self._model)
        if known is None or known[0] != keys:
            # Keep the concrete function: TensorFlow would warn about many tf.functions where many models are trained.
            known = (keys, tf.function(lambda: _sketch_all(natives), autograph=False).get_concrete_function())
            _functions[self._model] = known
        return known[1]()

    def _require_same_learned(self, layers: Sequence[Any], everyone: Sequence[Sequence[Learned]]) -> None:
        ranks = self._process_set.ranks
        require_same_layers(everyone, ranks)
        found = first_difference(layers, everyone, self._process_set)
        if found is None:
            return
        place, other = found
        name, cls = everyone[0][place].layer.rsplit(" ", 1)
        if as_horovod.is_installed():
            self._warn(f"the layer {name} ({cls}) has learned different things on ranks {ranks[0]} and {ranks[other]},"
                       " which train different functions (an error without --as-horovod)")
            return
        tokens = {f"tokens_on_rank_{ranks[rank]}": everyone[rank][place].tokens for rank in (0, other)}
        raise DivergenceError(explain(
            f"All ranks must compute the same function, but the layer {name} ({cls}) has learned different things on"
            f" ranks {ranks[0]} and {ranks[other]}", "adapt it to the data of all ranks together with hvd.adapt(layer,"
            " data), or give all ranks the root's with hvd.callbacks.BroadcastGlobalVariablesCallback(0)", layer=name,
            **{key: count for key, count in tokens.items() if count is not None}))

    def _require_same_variables(self, everyone: Sequence[Sequence[tuple[str, tuple[int, ...]]]]) -> None:
        for rank, variables in zip(self._process_set.ranks, everyone, strict=True):
            shapes, first = [shape for _, shape in variables], [shape for _, shape in everyone[0]]
            if shapes == first:
                continue
            place = next((place for place, pair in enumerate(zip(shapes, first, strict=False)) if pair[0] != pair[1]),
                         min(len(shapes), len(first)))
            raise DivergenceError(explain(
                f"All ranks must train the same model, but trainable variable {place + 1} differs",
                "build the model alike on every rank; register layers that are meant to differ with"
                " optimizer.register_local_var(variable)",
                **{f"rank_{self._process_set.ranks[0]}": _one_of(everyone[0], place),
                   f"rank_{rank}": _one_of(variables, place)}))

    def _explain(self, steps: int, variable: Any, mine: Any) -> None:
        everyone = allgather_object(mine, name="the diverged variable of fit", process_set=self._process_set)
        ranks = self._process_set.ranks
        other = max(range(1, len(ranks)), key=lambda rank: float(np.abs(everyone[rank] - everyone[0]).max()))
        gaps = np.abs(everyone[other] - everyone[0])[:-1]
        distance = float(np.sqrt(np.mean(gaps**2)) / max(everyone[0][-1], everyone[other][-1], 1e-30))
        cause, hint = self._cause()
        if cause == _UNEQUAL_START and as_horovod.is_installed():
            self._tolerate()
            return
        raise DivergenceError(explain(
            f"All ranks must hold the same weights, but after {steps} step{'s' * (steps != 1)} of fit"
            f" {compat.variable_name(variable)} differs between ranks {ranks[0]} and {ranks[other]}; the likely cause"
            f" is {cause}", hint, variable=compat.variable_name(variable),
            relative_difference=float(f"{distance:.2g}")))

    def _tolerate(self) -> None:
        """Lets this `fit` continue, as Horovod does: scripts for `elastic` fit one step before they broadcast."""
        self._tolerates = True
        self._warn("the ranks did not start this fit from the same weights, and train different models until weights"
                   " are broadcast (an error without --as-horovod)")

    def _warn(self, text: str) -> None:
        job = current_job()
        if job.topology.rank == self._process_set.ranks[0] and prints_at(job.settings, "WARNING"):
            say(text)

    def _cause(self) -> tuple[str, str]:
        """Returns the likely cause and its remedy."""
        broadcast = "add hvd.callbacks.BroadcastGlobalVariablesCallback(0) to fit's callbacks"
        if distributed_part(self._model.optimizer) is None:
            if compat.steps_by_itself(self._model):
                hint = "compile with hvd.DistributedOptimizer(optimizer)"
            else:
                hint = ("average the gradients in your train_step: compile with hvd.DistributedOptimizer(optimizer), or"
                        " use hvd.DistributedGradientTape")
            return "an optimizer that is not distributed", hint + ("" if self._broadcasts else f", and {broadcast}")
        if self._started_equal is False or (self._started_equal is None and not self._broadcasts):
            return _UNEQUAL_START, broadcast
        return ("a layer or an assignment that depends on the rank",
                ("update weights through the optimizer alone and alike on every rank, or register those that are meant"
                 " to differ with optimizer.register_local_var(variable)"))


def _first_diverged(high: Any, low: Any, steps: int) -> int | None:
    """Returns the index of the first variable whose sketches differ by more than the tolerance, or None."""
    difference = (high.astype(np.float64) - low)[:, :-1].max(1, initial=0.0)
    allowed = tolerance(steps) * high[:, -1].astype(np.float64)
    places = np.flatnonzero(difference > allowed)
    return int(places[0]) if len(places) else None


def _is_floating(variable: Any) -> bool:
    return bool(tf.as_dtype(variable.dtype).is_floating)


def _one_of(variables: Sequence[tuple[str, tuple[int, ...]]], place: int) -> str:
    return f"{variables[place][0]} {list(variables[place][1])}" if place < len(variables) else "none"

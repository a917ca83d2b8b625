"""Broadcast and comparison of the state that layers have learned from data."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvkeras import compat
from hvkeras.collectives.broadcasts import allgather_object, broadcast_object
from hvkeras.errors import DivergenceError, explain
from hvkeras.job.process_sets import ProcessSet, global_process_set

TOLERANCE = 1e-5  # relative; sums in different orders on different processors


@dataclass(frozen=True)
class Learned:
    """Summary of the learned state of a layer, for comparison between ranks.

    Attributes:
        digest: The digest of the complete state.
        whole: The digest of the parts that must be equal, and of the shapes of the others.
        tokens: The size of the vocabulary, including special tokens; None for layers without a vocabulary.
        width: The required width of its outputs; None if any width is allowed.
    """

    layer: str
    digest: str
    whole: str
    tokens: int | None
    width: int | None

    @property
    def kind(self) -> str:
        """Class of the layer."""
        return self.layer.rpartition(" ")[2]


def shared_layers(model: Any, local: Collection[Any] = ()) -> list[Any]:
    """Return the layers that learn from data, except those with local variables only."""
    def is_local(layer: Any) -> bool:
        keys = [compat.variable_key(one) for one in compat.model_weights(layer)]
        return bool(keys) and all(key in local for key in keys)

    return [layer for layer in compat.learned_layers(model) if not is_local(layer)]


def summary_of(layer: Any) -> Learned:
    """Summarize the learned state of a layer in a few bytes."""
    state = compat.learned_state(layer)
    function = compat.learned_function(state)
    whole = {name: repr(array.shape) if np.issubdtype(array.dtype, np.floating) else array
             for name, array in function.items()}
    return Learned(f"{layer.name} {type(layer).__name__}", _digest(function), _digest(whole),
                   compat.token_count(layer, state) if "tokens" in state else None, compat.fixed_width(layer))


def broadcast_learned(model: Any, root_rank: int, local: Collection[Any] = (),
                      process_set: ProcessSet = global_process_set) -> None:
    """Broadcast the learned state of layers from the root to all ranks, including lookup tables.

    Args:
        root_rank: The global rank to broadcast from.
        local: The keys of variables that are local to each rank.

    Raises:
        DivergenceError: The ranks' models have different layers, or layers with different output widths.
    """
    layers = shared_layers(model, local)
    mine = [summary_of(layer) for layer in layers]
    shapes = [tuple(weight.shape) for weight in compat.model_weights(model)] if layers and model.built else []
    gathered = allgather_object((mine, shapes), name="the learned state of layers", process_set=process_set)
    everyone = [found for found, _ in gathered]
    root = process_set.ranks.index(root_rank)
    require_same_layers(everyone, process_set.ranks)
    differing_indices = [index for index, column in enumerate(zip(*everyone, strict=True))
                        if len({one.digest for one in column}) > 1]
    for index in differing_indices:
        theirs = everyone[root][index].tokens
        for rank, (found, others) in zip(process_set.ranks, gathered, strict=True):
            own = found[index]
            if own.width not in (None, theirs) or (own.tokens != theirs and others != gathered[root][1]):
                raise DivergenceError(explain(
                    f"Layer {own.layer} must have a vocabulary of one size on all ranks, as shapes of outputs or"
                    " weights depend on it", "adapt it to all ranks' data with hvd.adapt(layer, data), before the"
                    " model is built",
                    **{f"rank_{root_rank}": theirs, f"rank_{rank}": own.tokens}))
    if not differing_indices:
        return
    states = broadcast_object([compat.learned_state(layers[index]) for index in differing_indices], root_rank,
                              name="the root's learned state of layers", process_set=process_set)
    for index, state in zip(differing_indices, states, strict=True):
        compat.take_learned_state(layers[index], state)
    if any(mine[index].digest != summary_of(layers[index]).digest for index in differing_indices):
        compat.retrace(model)


def require_same_layers(everyone: Sequence[Sequence[Learned]], ranks: Sequence[int]) -> None:
    """Check that all ranks have the same layers that learn from data.

    Args:
        everyone: The summaries of the layers of each rank.

    Raises:
        DivergenceError: The layers differ.
    """
    for rank, layers in zip(ranks, everyone, strict=True):
        if [one.kind for one in layers] == [one.kind for one in everyone[0]]:
            continue
        raise DivergenceError(explain(
            "All ranks must train the same model, but the layers that learn from data differ", "build the model alike"
            " on every rank", **{f"rank_{ranks[0]}": [one.layer for one in everyone[0]],
                              f"rank_{rank}": [one.layer for one in layers]}))


def first_difference(layers: Sequence[Any], everyone: Sequence[Sequence[Learned]],
                     process_set: ProcessSet) -> tuple[int, int] | None:
    """Return the first layer whose learned state differs from that on the first rank.

    The result is the same on every rank.

    Args:
        everyone: The summaries of the layers of each rank.

    Returns:
        The index of the layer, and the index of the other rank in the set; None if all are equal or nearly so.
    """
    for index, column in enumerate(zip(*everyone, strict=True)):
        if len({one.digest for one in column}) == 1:
            continue
        other = next((rank for rank, one in enumerate(column) if one.whole != column[0].whole), None)
        if other is None:
            other = _first_numeric_difference(layers[index], process_set)
        if other is not None:
            return index, other
    return None


def _first_numeric_difference(layer: Any, process_set: ProcessSet) -> int | None:
    """Return the index of the first rank whose numbers differ from those of the first; all ranks must call it."""
    function = compat.learned_function(compat.learned_state(layer))
    mine = {name: array.astype(np.float64) for name, array in function.items()
            if np.issubdtype(array.dtype, np.floating)}
    first = broadcast_object(mine, process_set.ranks[0], name="the learned state of a layer", process_set=process_set)
    everyone = allgather_object(_are_near(mine, first), name="the comparison of learned state", process_set=process_set)
    return everyone.index(False) if False in everyone else None


def _are_near(mine: dict[str, Any], others: dict[str, Any]) -> bool:
    for name, array in mine.items():
        other = others[name]
        scale = np.maximum(np.abs(array), np.abs(other))
        if name == "mean":  # relative to the standard deviation
            scale = scale + np.sqrt(np.maximum(others["variance"], 0))
        elif name == "variance":
            scale = scale + TOLERANCE * np.square(others["mean"])
        elif name == "boundaries" and array.size:
            scale = scale + np.ptp(other)
        if not np.all(np.isclose(array, other, 0, TOLERANCE * scale, equal_nan=True)):
            return False
    return True


def _digest(arrays: dict[str, Any]) -> str:
    found = hashlib.sha256()
    for name in sorted(arrays):
        array = np.asarray(arrays[name])
        found.update(f"{name} {array.shape} {array.dtype}".encode())
        found.update(array.tobytes() if array.dtype.kind not in "UO" else str(array).encode())
    return found.hexdigest()

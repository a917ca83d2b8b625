"""`hvd.adapt`: the state of preprocessing layers, computed from the data of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras import compat
from hvkeras.collectives.broadcasts import allgather_object
from hvkeras.collectives.operations import members
from hvkeras.compat import graphs, learned
from hvkeras.errors import UnsupportedError, UsageError, explain
from hvkeras.job.process_sets import ProcessSet, global_process_set
from hvkeras.typing import AdaptableLike, Data

_SUMMARY_RESOLUTION = 100  # points of the summary that a rank sends, per 1 / `epsilon` of the layer
_MAX_EXACT_VALUES = 2**20  # values up to which a rank summarizes nothing


@graphs.without_autograph
def adapt(layer: AdaptableLike, data: Data, batch_size: int | None = None, steps: int | None = None,
          process_set: ProcessSet = global_process_set) -> None:
    """Adapt a layer to the data of all ranks, as `layer.adapt` does with the data of one process.

    All ranks must call this function, each with its own shard of the data. Every rank gets the state that a single
    process would compute from all data. Vocabularies are built from summed counts, with ties ordered as in Keras. Means
    and variances are combined in float64. Boundaries of `Discretization` are at least as close to the quantiles as
    Keras's.

    Example:
        text = keras.layers.TextVectorization(max_tokens=20_000)
        hvd.adapt(text, hvd.shard(sentences))

    Args:
        layer: A `StringLookup`, `IntegerLookup`, `TextVectorization`, `Normalization`, `Discretization` or
            `FeatureSpace`, of Keras 3 or tf_keras.
        data: This rank's shard, in any form that the layer's own `adapt` takes; None on a rank without data.
        batch_size: As for the layer's own `adapt`, if it has this parameter.
        steps: The number of batches to use; all by default.
        process_set: The participating ranks.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: No rank has data, the layer was created with its state (such as a vocabulary), or the ranks' data
            are incompatible.
        UnsupportedError: The layer is none of those listed.
    """
    members(process_set, "adapt")
    kind = compat.kind_of_learning(layer)
    if kind in (None, compat.OTHER) or (kind != compat.SPACE and learned.is_customized(layer)):
        raise UnsupportedError(explain(
            "hvd.adapt supports these layers of Keras: StringLookup, IntegerLookup, TextVectorization,"
            " Normalization, Discretization and FeatureSpace", "gather the state of this layer with"
            " hvd.allgather_object, and set the same on every rank", layer=type(layer).__name__))
    if kind == compat.SPACE:
        _adapt_space(layer, data, batch_size, steps, process_set)
        return
    _require_learning(layer, kind)
    options = {name: value for name, value in (("batch_size", batch_size), ("steps", steps)) if value is not None}
    if kind == compat.MOMENTS:
        _adapt_moments(layer, data, options, process_set)
    elif kind == compat.QUANTILES:
        _adapt_quantiles(layer, data, options, process_set)
    else:
        counted = learned.count_tokens(layer, data, options)
        everyone = _gather_results(layer, counted if len(counted[0]["counts"]) else None, process_set)
        learned.learn_tokens(layer, everyone)


def _adapt_space(space: Any, data: Any, batch_size: int | None, steps: int | None, process_set: ProcessSet) -> None:
    if batch_size is not None or steps is not None:
        raise UsageError(explain("A FeatureSpace must be adapted to a whole dataset", "dataset.take(steps)",
                                 batch_size=batch_size, steps=steps))
    if not isinstance(data, (dict, tf.data.Dataset, type(None))):
        raise UsageError(explain("A FeatureSpace must be adapted to a dataset or a dict of arrays",
                                 "tf.data.Dataset.from_tensor_slices(arrays)", data=type(data).__name__))
    mine = None if isinstance(data, tf.data.Dataset) and learned.is_empty_dataset(data) else data
    for layer, part in learned.features_to_learn(space, mine):
        adapt(layer, part, process_set=process_set)
    learned.finish_space(space)


def _require_learning(layer: Any, kind: str) -> None:
    """Raise if the layer was created with its state, such as a vocabulary."""
    given = {compat.MOMENTS: ("mean", getattr(layer, "input_mean", None) is not None),
             compat.QUANTILES: ("bin_boundaries", getattr(layer, "num_bins", 0) is None)}
    argument, is_given = given.get(
        kind, ("vocabulary", getattr(learned.lookup_of(layer), "_has_input_vocabulary", False)))
    if is_given:
        raise UsageError(explain("A layer to adapt must not have a given state",
                                 f"create it without {argument}", layer=layer.name))


def _gather_results(layer: Any, mine: Any, process_set: ProcessSet) -> list[Any]:
    """Gather the results of the ranks that have data; raise if ranks adapt different kinds of layers."""
    everyone = allgather_object((type(layer).__name__, mine), name="hvd.adapt", process_set=process_set)
    ranks = process_set.ranks
    for rank, (name, _) in zip(ranks, everyone, strict=True):
        if name != everyone[0][0]:
            raise UsageError(explain("All ranks must adapt their layers in the same order", "call hvd.adapt alike on"
                                     " every rank", **{f"rank_{ranks[0]}": everyone[0][0], f"rank_{rank}": name}))
    found = [part for _, part in everyone if part is not None]
    if not found:
        raise UsageError(explain("A layer needs data on at least one rank", "give hvd.adapt data", layer=layer.name))
    return found


def _adapt_moments(layer: Any, data: Any, options: Mapping[str, Any], process_set: ProcessSet) -> None:
    """Compute means and variances (Chan et al., 1979, "Updating formulae and a pairwise algorithm")."""
    mine: tuple[Any, Any, Any] = (0, 0.0, 0.0)
    for batch in learned.batches_to_learn(layer, data, options.get("batch_size"), options.get("steps")):
        if not batch.size:
            continue
        if any(axis in (0, -batch.ndim) for axis in layer.axis):
            raise UsageError(explain("A Normalization must have a mean per feature, not per sample", "create it"
                                     " with axis=None for a single mean, or pass data with an axis for features",
                                     axis=layer.axis, shape=batch.shape))
        learned.build_for_learning(layer, (None, *batch.shape[1:]))
        shape = learned.kept_shape(layer)
        if len(shape) != batch.ndim or any(size not in (None, actual) for size, actual in
                                           zip(shape, batch.shape, strict=True)):
            raise UsageError(explain("Data must have the shape that the layer is built for", layer=layer.name,
                                     shape=batch.shape, of_the_layer=shape))
        axes, values = tuple(layer._reduce_axis), batch.astype(np.float64)
        mean = values.mean(axes)
        spread = np.square(values - values.mean(axes, keepdims=True)).sum(axes)
        mine = _merge_moments([mine, (values.size // max(mean.size, 1), mean, spread)])
    everyone = _gather_results(layer, (mine, learned.kept_shape(layer)) if mine[0] else None, process_set)
    shapes = [shape for _, shape in everyone]
    if any(shape != shapes[0] for shape in shapes):
        raise UsageError(explain("All ranks must adapt a layer to data of one shape", "give each rank a shard of the"
                                 " same data", layer=layer.name, shapes=shapes))
    count, mean, spread = _merge_moments([found for found, _ in everyone])
    learned.build_for_learning(layer, shapes[0])
    learned.set_moments(layer, mean, spread / count, count if learned.is_of_tf_keras(layer) else 0)
    learned.finish(layer)


def _merge_moments(parts: Sequence[tuple[Any, Any, Any]]) -> tuple[Any, Any, Any]:
    count = sum(part[0] for part in parts)
    mean = sum(part[0] * part[1] for part in parts) / count
    return count, mean, sum(part[2] + part[0] * np.square(part[1] - mean) for part in parts)


def _adapt_quantiles(layer: Any, data: Any, options: Mapping[str, Any], process_set: ProcessSet) -> None:
    points = np.zeros((2, 0))
    for batch in learned.batches_to_learn(layer, data, options.get("batch_size"), options.get("steps")):
        values = batch.astype(np.float32).ravel()  # the dtype that Keras uses
        points = np.concatenate([points, [values, np.ones(values.size)]], 1)
        if points.shape[1] > _MAX_EXACT_VALUES:
            points = _summarize(points, _MAX_EXACT_VALUES // 2)
    resolution = int(np.ceil(_SUMMARY_RESOLUTION / layer.epsilon))
    everyone = _gather_results(layer, _summarize(points, resolution) if points.size else None, process_set)
    learned.set_summary(layer, _summarize(np.concatenate(everyone, 1), resolution))
    learned.finish(layer)


def _summarize(points: Any, most: int) -> Any:
    """Reduce weighted values, an array of shape `[2, values]` (values and weights), to at most `most`.

    Each result is the midpoint of an equal share of the weight. If there are no more than `most` values, they are only
    sorted.
    """
    points = points[:, np.argsort(points[0], kind="stable")]
    if points.shape[1] <= most:
        return points
    reached = np.cumsum(points[1])
    share = reached[-1] / most
    indices = np.searchsorted(reached, (np.arange(most) + 0.5) * share)
    return np.stack([points[0, np.minimum(indices, points.shape[1] - 1)], np.full(most, share)])

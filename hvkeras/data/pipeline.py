"""Analysis of a `tf.data` pipeline: whether it batches, and whether its order can vary.

Stages are recognized by the names of TensorFlow's private classes. With an unrecognized stage, the result is None
("unknown"), and the user must decide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from hvkeras.compat.graphs import operations_of
from hvkeras.data.partition import Batches

_BATCHING = {"Batch", "ParallelBatch", "PaddedBatch", "DenseToSparseBatch", "MapAndBatch", "Rebatch", "LegacyRebatch"}
_UNBATCHED = {"TensorSlice", "Range", "Random", "TFRecord", "TextLine", "FixedLengthRecord", "Csv", "Unbatch"}
# Stages that produce one element for each input element.
_ONE_TO_ONE = {"Map", "ParallelMap", "Prefetch", "Cache", "Options", "Shuffle", "AssertCardinality", "Model",
               "CopyToDevice", "MaxIntraOpParallelism", "PrivateThreadPool", "Restructured", "Snapshot"}
# Also stages that drop or repeat elements.
_BATCH_PRESERVING = {*_ONE_TO_ONE, "Repeat", "Skip", "Take", "Shard", "Filter", "Scan", "TakeWhile", "Unique",
                     "IgnoreErrors"}
# Stages that read all that their inputs have.
COMPLETE = {*_ONE_TO_ONE, *_BATCHING, "Repeat", "Zip", "Unbatch", "TensorSlice"} - {"Restructured", "Rebatch"}
_MAPPING = {"Map", "ParallelMap", "Scan", "Restructured"}
_JOINING = {"Zip", "Concatenate", "DirectedInterleave"}


def stage_name(dataset: Any) -> str:
    """Return the name of the last stage: `Batch` for the class `_BatchDataset`."""
    return type(dataset).__name__.lstrip("_").split("Dataset")[0]


def inputs(dataset: Any) -> list[Any]:
    """Return the stages that the last stage reads."""
    return list(dataset._inputs()) if hasattr(dataset, "_inputs") else []


def stages(dataset: Any) -> list[Any]:
    """Return all stages, last one first."""
    return [dataset, *(stage for source in inputs(dataset) for stage in stages(source))]


def is_batched(dataset: Any) -> bool | None:
    """Return whether the elements are batches; None if unknown."""
    stage, sources = stage_name(dataset), inputs(dataset)
    if stage in _UNBATCHED or has_scalars(dataset):
        return False
    if stage in _BATCHING:
        return True
    if stage in _BATCH_PRESERVING and len(sources) == 1:
        return is_batched(sources[0])
    if stage in _JOINING:
        sources = sources[1:] if stage == "DirectedInterleave" else sources  # the first selects the source
        found = {answer for answer in map(is_batched, sources) if answer is not None}
        return found.pop() if len(found) == 1 else None
    return None


def has_scalars(dataset: Any) -> bool:
    """Return whether an element contains a scalar, which batches never do."""
    specs = tf.nest.flatten(dataset.element_spec)
    return any(getattr(getattr(spec, "shape", None), "rank", None) == 0 for spec in specs)


def have_equal_shapes(spec: Any) -> bool:
    """Return whether elements can be batched: all have the same shapes, which are known."""
    leaves = tf.nest.flatten(spec)
    return bool(leaves) and all(type(leaf) is tf.TensorSpec and leaf.shape.is_fully_defined()
                                and leaf.dtype not in (tf.variant, tf.resource) for leaf in leaves)


def batches_of(dataset: Any) -> Batches | None:
    """Return the row counts of the elements of a batched pipeline, if known without reading it."""
    count = int(dataset.cardinality())
    rows = static_rows(dataset)
    if count < 0:
        return None
    if rows is not None:
        return Batches(rows, count, 0)
    while stage_name(dataset) in _ONE_TO_ONE and len(inputs(dataset)) == 1:
        dataset = inputs(dataset)[0]
    if stage_name(dataset) not in ("Batch", "ParallelBatch", "PaddedBatch"):
        return None
    if stage_name(inputs(dataset)[0]) in _BATCHING:
        return None
    rows, samples = int(dataset._batch_size), int(inputs(dataset)[0].cardinality())
    if samples < 0 or -(-samples // rows) != count:
        return None
    return Batches(rows, samples // rows, samples % rows)


def static_rows(dataset: Any) -> int | None:
    """Return the number of rows of every batch, if the static shapes contain it."""
    for spec in tf.nest.flatten(dataset.element_spec):
        if spec.shape.rank:
            return None if spec.shape[0] is None else int(spec.shape[0])
    return None


def zipped_batches(dataset: Any, unmapped: bool = False) -> list[Any]:
    """Return the batched pipelines that a pipeline zips; empty unless there are several.

    Their rows belong to different samples, and their batch sizes may differ.

    Args:
        unmapped: Whether the arrays of an element must be those of the pipelines, in this order.
    """
    while stage_name(dataset) in _BATCH_PRESERVING and len(inputs(dataset)) == 1:
        if unmapped and stage_name(dataset) in _MAPPING:
            return []
        dataset = inputs(dataset)[0]
    if stage_name(dataset) != "Zip":
        return []
    found = [one for source in inputs(dataset) for one in zipped_batches(source, unmapped) or [source]]
    return found if len(found) > 1 and all(map(is_batched, found)) else []


def has_stage(dataset: Any, is_sought: Callable[[Any], bool]) -> bool:
    """Return whether a pipeline has such a stage."""
    return any(map(is_sought, stages(dataset)))


def batch_size(dataset: Any) -> int | None:
    """Return the number of rows in a full batch, if the static shapes or the batching stage contain it."""
    rows = static_rows(dataset)
    if rows is not None:
        return rows
    while stage_name(dataset) in _BATCH_PRESERVING and len(inputs(dataset)) == 1:
        dataset = inputs(dataset)[0]
    found = getattr(dataset, "_batch_size", None) if stage_name(dataset) in _BATCHING else None
    return None if found is None else int(found)


def batching_to(dataset: Any, is_source: Callable[[Any], bool]) -> tuple[Any, int | None, bool]:
    """Trace a pipeline back to a stage, through stages that keep the order of elements and batch at most once.

    Args:
        is_source: Whether a stage is the wanted one.

    Returns:
        The stage, the rows per batch, and whether an incomplete last batch is dropped. The stage is None if it cannot
        be reached like this; the rows are None if nothing batches.
    """
    rows: int | None = None
    drops = False
    while not is_source(dataset):
        stage, sources = stage_name(dataset), inputs(dataset)
        if stage in ("Batch", "ParallelBatch", "PaddedBatch") and rows is None:
            rows, drops = int(dataset._batch_size), bool(dataset._drop_remainder)
        elif stage not in _ONE_TO_ONE or stage in ("Shuffle", "Cache", "Snapshot"):
            return None, rows, drops
        if len(sources) != 1:
            return None, rows, drops
        dataset = sources[0]
    return dataset, rows, drops


def shuffle_seeds(dataset: Any) -> list[tuple[int, int]]:
    """Return the seed pairs of stages that shuffle or draw; (0, 0) means a different order after each start."""
    return [(int(stage._seed), int(stage._seed2)) for stage in stages(dataset)
            if hasattr(stage, "_seed") and hasattr(stage, "_seed2")]


def is_class_weighting(dataset: Any) -> bool:
    """Return whether a map is Keras's, which adds the weights of classes to a batch row by row."""
    function = dataset._map_func._func
    return (str(getattr(function, "__module__", "")).startswith("keras.")
            and "class_weight" in getattr(function, "__qualname__", ""))


# Operations that count as stateful, but whose results depend on their inputs only while data are read.
_WITHOUT_STATE = {"LookupTableFindV2", "LookupTableSizeV2", "ReadVariableOp", "ResourceGather", "ResourceGatherNd",
                  "StatefulPartitionedCall", "If", "While", "Case", "Assert"}
DRAWING = {"RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal", "RandomShuffle",
           "RandomGammaGrad", "RandomGamma", "RandomPoissonV2", "Multinomial", "ParameterizedTruncatedNormal"}


def state_of(dataset: Any) -> bool | None:
    """Return whether the function of a map draws random numbers; None if it may have other state."""
    definition = dataset._map_func.function.graph.as_graph_def()
    operations = {node.op for nodes in operations_of(dataset._map_func) for node in nodes}
    stateful = {name for name in operations if (found := op_def_registry.get(name)) is None or found.is_stateful}
    functions = {function.signature.name for function in definition.library.function}
    others = stateful - _WITHOUT_STATE - functions - {"Placeholder"}
    return bool(others) if others <= DRAWING else None


def is_nondeterministic(dataset: Any) -> bool:
    """Return whether the order of elements may differ between runs, as they are yielded when ready."""
    return dataset.options().deterministic is False or any(
        getattr(stage, "_deterministic", None) == "false" for stage in stages(dataset))

"""Functions that bring all ranks to the same state: variables, and any Python object."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras import compat, context
from hvkeras.errors import UsageError, explain
from hvkeras.operations import members, require_root
from hvkeras.planned import allgather_raw, broadcast_raw
from hvkeras.process_sets import ProcessSet, global_process_set


def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set,
    inplace: bool = False,  # noqa: ARG001 - Horovod's parameter
) -> None:
    """Gives every rank the root's values of variables, in few collectives.

    Example:
        hvd.broadcast_variables(model.variables, root_rank=0)

    Args:
        variables: `tf.Variable`s or Keras variables; same dtypes and shapes, in the same order, on every rank.
        root_rank: The global rank whose values all get.
        process_set: The ranks that take part.
        inplace: Accepted for Horovod's sake; values are always assigned to the variables.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: The root or this rank is not in `process_set`, or something is no variable.
    """
    ranks = members(process_set, "broadcast")
    require_root(root_rank, ranks)
    targets = [compat.native(variable) for variable in variables]
    wrong = [target for target in targets if not isinstance(target, tf.Variable)]
    if wrong:
        raise UsageError(explain("broadcast_variables takes variables", "pass model.variables or a list of tf.Variable",
                                 received=wrong[0]))
    if len(ranks) == 1:
        return
    names = [compat.variable_name(variable) for variable in variables]
    for places in _chunks(targets, context.current().settings.bucket_size):
        flat = [tf.reshape(targets[place].read_value(), [-1]) for place in places]
        fused = broadcast_raw(flat, root_rank, ranks, "variables", [names[place] for place in places])
        for place, values in zip(places, fused, strict=True):
            targets[place].assign(tf.reshape(values, targets[place].shape))


def _chunks(targets: Sequence[Any], limit: int) -> list[list[int]]:
    """Splits variables into lists of one dtype, each of at most `limit` bytes unless one alone is larger."""
    chunks: list[list[int]] = []
    open_chunk: dict[Any, tuple[list[int], int]] = {}
    for place, target in enumerate(targets):
        size = int(target.shape.num_elements() or 0) * int(target.dtype.size)
        chunk, used = open_chunk.get(target.dtype, ([], 0))
        if not chunk or used + size > limit:
            chunk, used = [], 0
            chunks.append(chunk)
        chunk.append(place)
        open_chunk[target.dtype] = (chunk, used + size)
    return chunks


def broadcast_object(
    obj: Any = None, root_rank: int = 0, session: Any = None, name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Gives every rank the root's Python object.

    Objects travel pickled, between the job's ranks only.

    Example:
        settings = hvd.broadcast_object(settings, root_rank=0)

    Args:
        obj: What to send; only the root's matters.
        root_rank: The global rank that sends.
        session: Horovod's parameter for TensorFlow 1; only None is supported.
        name: Identifies the collective across ranks.
        process_set: The ranks that take part.

    Returns:
        The object; on the root the very one it gave.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: The root or this rank is not in `process_set`, or a session was given.
    """
    ranks = members(process_set, "broadcast_object")
    require_root(root_rank, ranks)
    _require_eager(session)
    mine = context.current().topology.rank == root_rank
    data = np.frombuffer(pickle.dumps(obj), np.uint8) if mine else np.zeros(0, np.uint8)
    called = name or "object"
    length = broadcast_raw([tf.constant([data.size], tf.int64)], root_rank, ranks, f"{called} (length)")[0]
    if not mine:
        data = np.zeros(int(length[0]), np.uint8)
    received = broadcast_raw([tf.constant(data)], root_rank, ranks, called)[0]
    return obj if mine else pickle.loads(received.numpy().tobytes())


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Gives every rank the Python objects of all ranks.

    Objects travel pickled, between the job's ranks only.

    Example:
        scores = hvd.allgather_object({"rank": hvd.rank(), "score": score})

    Args:
        obj: This rank's object.
        session: Horovod's parameter for TensorFlow 1; only None is supported.
        name: Identifies the collective across ranks.
        process_set: The ranks that take part.

    Returns:
        The objects in rank order.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: This rank is not in `process_set`, or a session was given.
    """
    ranks = members(process_set, "allgather_object")
    _require_eager(session)
    data = np.frombuffer(pickle.dumps(obj), np.uint8)
    called = name or "object"
    lengths = allgather_raw(tf.constant([data.size], tf.int64), ranks, f"{called} (length)").numpy()
    everything = allgather_raw(tf.constant(data), ranks, called).numpy()
    ends = np.cumsum(lengths)
    return [pickle.loads(everything[end - length : end].tobytes()) for end, length in zip(ends, lengths, strict=True)]


def _require_eager(session: Any) -> None:
    if session is not None:
        raise UsageError(explain("Sessions belong to TensorFlow 1", "leave session out", session=session))
    if not tf.executing_eagerly():
        raise UsageError(explain("Python objects are sent in eager mode only", "call this outside tf.function"))

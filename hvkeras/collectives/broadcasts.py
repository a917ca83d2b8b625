"""Functions that synchronize state across ranks: variables and arbitrary Python objects."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

import numpy as np
import tensorflow as tf

from hvkeras import compat
from hvkeras.collectives.buckets import bucket_size, pack
from hvkeras.collectives.dispatch import allgather_raw, broadcast_raw
from hvkeras.collectives.operations import members, require_root
from hvkeras.compat import graphs
from hvkeras.errors import UsageError, explain
from hvkeras.job.process_sets import ProcessSet, global_process_set
from hvkeras.job.session import current_session
from hvkeras.typing import Operation, Tensor, VariableLike, VariableT

ObjectT = TypeVar("ObjectT")


@graphs.without_autograph
def broadcast_variables(
    variables: Sequence[VariableLike], root_rank: int, process_set: ProcessSet = global_process_set,
    inplace: bool = False,  # noqa: ARG001 - Horovod's parameter
) -> Operation | None:
    """Broadcast variables from the root to every rank, fused into a few collectives.

    Example:
        hvd.broadcast_variables(model.variables, root_rank=0)

    Args:
        variables: `tf.Variable`s or Keras variables; same dtypes and shapes, in the same order, on every rank.
        root_rank: The global rank whose values are broadcast.
        process_set: The participating ranks.
        inplace: Accepted for compatibility with Horovod; values are always assigned to the variables.

    Returns:
        None in eager mode; inside a graph, the assignment operation, which a TensorFlow 1 session must run.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: The root or this rank is not in `process_set`, or an element of `variables` is not a variable.
    """
    ranks = members(process_set, "broadcast")
    require_root(root_rank, ranks)
    static = _broadcast_dynamic(_broadcast_sharded(variables, root_rank, process_set), root_rank, process_set)
    targets = [compat.as_tf_variable(variable) for variable in static]
    wrong = [target for target in targets if not isinstance(target, tf.Variable)]
    if wrong:
        raise UsageError(explain("broadcast_variables takes variables", "pass model.variables or a list of tf.Variable",
                                 received=wrong[0]))
    assigned = _broadcast_into(targets, static, root_rank, ranks)
    if tf.executing_eagerly():
        return None
    operation: Operation = tf.group(*assigned)
    return operation


@graphs.without_autograph
def broadcast_(
    variables: Sequence[VariableT], root_rank: int, name: str | None = None,  # noqa: ARG001 - Horovod's parameter
    process_set: ProcessSet = global_process_set,
) -> list[VariableT] | list[Tensor]:
    """Broadcast variables from the root to every rank, and return them.

    Example:
        hvd.broadcast_(model.variables, root_rank=0)

    Args:
        variables: As for `broadcast_variables`.
        root_rank: The global rank whose values are broadcast.
        name: Accepted for compatibility with Horovod; the variables themselves identify the collective.
        process_set: The participating ranks.

    Returns:
        The variables in eager mode; inside a graph, their new values.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: As for `broadcast_variables`.
    """
    done = broadcast_variables(variables, root_rank, process_set)
    if done is None:
        return list(variables)
    with tf.control_dependencies([done]):
        return [compat.as_tf_variable(variable).read_value() for variable in variables]


@graphs.without_autograph
def broadcast_global_variables(root_rank: int) -> Operation:
    """Broadcast the global variables of a TensorFlow 1 graph from the root to every rank.

    Example:
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(hvd.broadcast_global_variables(0))

    Args:
        root_rank: The global rank whose values are broadcast.

    Returns:
        The operation for the session to run.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: The root does not exist, or eager mode is active, which has no global variables.
    """
    if tf.executing_eagerly():
        raise UsageError(explain("Global variables are those of a TensorFlow 1 graph; eager mode has none",
                                 "hvd.broadcast_variables(model.variables, root_rank)", root_rank=root_rank))
    return cast(Operation, broadcast_variables(tf.compat.v1.global_variables(), root_rank))


def _broadcast_sharded(variables: Sequence[Any], root_rank: int, process_set: ProcessSet) -> list[Any]:
    """Broadcast variables that are sharded over ranks, and return the remaining ones.

    Only complete values that the root has assigned, such as from a file, are sent. Trained shards stay on their ranks.
    """
    sharded = [one for one in variables if getattr(one, "is_whole_of_shards", False)]
    if not sharded:
        return list(variables)
    own = [one.assigned for one in sharded]
    assigned = broadcast_object([value is not None for value in own], root_rank, name="values of whole variables",
                                process_set=process_set)
    for number, (one, value, is_sent) in enumerate(zip(sharded, own, assigned, strict=True)):
        if is_sent:
            one.assign(broadcast_object(value, root_rank, name=f"whole variable {number}", process_set=process_set))
    return [one for one in variables if not getattr(one, "is_whole_of_shards", False)]


def _broadcast_dynamic(variables: Sequence[Any], root_rank: int, process_set: ProcessSet) -> list[Any]:
    """Broadcast the layer state that tf_keras lists among the weights, and return the remaining variables.

    In tf_keras a vocabulary is not a variable, and bin boundaries have a different shape on each rank.
    """
    dynamic = [one for one in variables if compat.is_dynamic(one)] if tf.executing_eagerly() else []
    if not dynamic:
        return list(variables)
    values = broadcast_object([compat.dynamic_value(one) for one in dynamic], root_rank,
                              name="what layers have learned", process_set=process_set)
    for one, value in zip(dynamic, values, strict=True):
        compat.set_dynamic(one, value)
    return [one for one in variables if not compat.is_dynamic(one)]


def _broadcast_into(targets: Sequence[Any], variables: Sequence[Any], root_rank: int,
                    ranks: Sequence[int]) -> list[Any]:
    if len(ranks) == 1:
        return []
    assigned = []
    names = [compat.variable_name(variable) for variable in variables]
    dtypes = {index: target.dtype.name for index, target in enumerate(targets)}
    sizes = {index: int(target.shape.num_elements() or 0) * int(target.dtype.size)
             for index, target in enumerate(targets)}
    for indices in pack(range(len(targets)), dtypes, sizes, bucket_size(current_session().settings)):
        flat = [tf.reshape(targets[index].read_value(), [-1]) for index in indices]
        fused = broadcast_raw(flat, root_rank, ranks, "variables", [names[index] for index in indices],
                              is_of_model=True)
        for index, values in zip(indices, fused, strict=True):
            assigned.append(targets[index].assign(tf.reshape(values, targets[index].shape)))
    return assigned


@graphs.without_autograph
def broadcast_object(
    obj: ObjectT | None = None, root_rank: int = 0,
    session: object = None,  # noqa: ARG001 - Horovod's parameter
    name: str | None = None, process_set: ProcessSet = global_process_set,
) -> ObjectT:
    """Broadcast a Python object from the root to every rank.

    Objects are pickled, and are sent only between the ranks of the job.

    Example:
        settings = hvd.broadcast_object(settings, root_rank=0)

    Args:
        obj: The object to send; ignored on ranks other than the root.
        root_rank: The global rank that sends.
        session: Accepted for compatibility with Horovod; no session is needed.
        name: Identifies the collective across ranks.
        process_set: The participating ranks.

    Returns:
        The root's object; on the root, `obj` itself.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: The root or this rank is not in `process_set`, or a `tf.function` is being traced.
    """
    ranks = members(process_set, "broadcast_object")
    require_root(root_rank, ranks)
    return cast(ObjectT, _eagerly(lambda: _broadcast_object(obj, root_rank, ranks, name or "object")))


def _broadcast_object(obj: Any, root_rank: int, ranks: Sequence[int], label: str) -> Any:
    is_root = current_session().topology.rank == root_rank
    data = np.frombuffer(pickle.dumps(obj), np.uint8) if is_root else np.zeros(0, np.uint8)
    length = broadcast_raw([tf.constant([data.size], tf.int64)], root_rank, ranks, f"{label} (length)")[0]
    if not is_root:
        data = np.zeros(int(length[0]), np.uint8)
    received = broadcast_raw([tf.constant(data)], root_rank, ranks, label)[0]
    return obj if is_root else pickle.loads(received.numpy().tobytes())


def broadcast_object_fn(
    root_rank: int = 0, session: object = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[ObjectT | None], ObjectT]:
    """Return a function that broadcasts a Python object from the root to every rank.

    Example:
        share = hvd.broadcast_object_fn(root_rank=0)
        settings = share(settings)

    Args:
        root_rank: As for `broadcast_object`.
        session: As for `broadcast_object`.
        name: As for `broadcast_object`.
        process_set: As for `broadcast_object`.

    Returns:
        A function that takes the object; see `broadcast_object`.
    """
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


@graphs.without_autograph
def allgather_object(
    obj: ObjectT, session: object = None, name: str | None = None,  # noqa: ARG001 - Horovod's parameter
    process_set: ProcessSet = global_process_set,
) -> list[ObjectT]:
    """Gather a Python object from each rank on every rank.

    Objects are pickled, and are sent only between the ranks of the job.

    Example:
        scores = hvd.allgather_object({"rank": hvd.rank(), "score": score})

    Args:
        obj: This rank's object.
        session: Accepted for compatibility with Horovod; no session is needed.
        name: Identifies the collective across ranks.
        process_set: The participating ranks.

    Returns:
        The objects in rank order.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: This rank is not in `process_set`, or a `tf.function` is being traced.
    """
    return gather_objects(obj, process_set, name or "object")


def gather_objects(obj: ObjectT, process_set: ProcessSet, name: str, hint: str = "") -> list[ObjectT]:
    """Gather objects like `allgather_object`; `hint` is the fix to suggest if only one rank calls this by mistake."""
    ranks = members(process_set, "allgather_object")
    return list(_eagerly(lambda: _gather_objects(obj, ranks, name, hint)))


def _gather_objects(obj: Any, ranks: Sequence[int], label: str, hint: str) -> list[Any]:
    data = np.frombuffer(pickle.dumps(obj), np.uint8)
    lengths = allgather_raw(tf.constant([data.size], tf.int64), ranks, f"{label} (length)", hint).numpy()
    gathered = allgather_raw(tf.constant(data), ranks, label, hint).numpy()
    ends = np.cumsum(lengths)
    return [pickle.loads(gathered[end - length : end].tobytes()) for end, length in zip(ends, lengths, strict=True)]


def _eagerly(action: Callable[[], Any]) -> Any:
    """Run an action in eager mode, even while a TensorFlow 1 graph is under construction."""
    if tf.executing_eagerly():
        return action()
    if graphs.from_function_graphs():
        raise UsageError(explain("Collectives of Python objects cannot run in a tf.function",
                                 "call this outside of it"))
    with ThreadPoolExecutor(1, "hvkeras-objects") as pool:  # a new thread has no default graph
        return pool.submit(_in_eager_mode, action).result()


def _in_eager_mode(action: Callable[[], Any]) -> Any:
    with graphs.eagerly():
        return action()

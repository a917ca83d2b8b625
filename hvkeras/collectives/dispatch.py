"""Planned collectives without gradients: the layer between the public collectives and the backend.

Each collective is described by a `hvkeras.job.plans.Plan`, so a mismatch between ranks raises an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvkeras.backends.interface import Reduction
from hvkeras.collectives.mismatch import compared, refusable
from hvkeras.collectives.operations import plan_of, require_kernels, shaped
from hvkeras.diagnostics import spans
from hvkeras.job.plans import Call, Plan
from hvkeras.job.session import Session, current_session


def run(session: Session, plan: Plan, calls: Sequence[Call]) -> list[Any]:
    """Run a plan's calls, and return the result of each call.

    Raises:
        MismatchError: Other ranks have entered different collectives. A graph raises it when it runs.
    """
    with session.entries.entering(plan, calls):
        engine = spans.store().timed(session.backend, plan)
        results = [call.run(engine) for call in compared(session, plan, calls)]
    return list(refusable(session, plan, results))


def allreduce_raw(tensors: Sequence[Any], reduction: Reduction, ranks: Sequence[int], name: str | None,
                  operation: str, how: str = "", factors: Sequence[tuple[float, float] | None] = (),
                  specs: Sequence[Any] = ()) -> list[Any]:
    """Combine tensors, in one collective for each dtype.

    `how` describes the operation if the name of the reduction does not suffice. `factors` has the scaling factors of
    each tensor, or None if the engine does not scale it. `specs` has the shapes and dtypes on which the ranks must
    agree, if they differ from those of the tensors.
    """
    session = current_session()
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if len(ranks) == 1:
        return [tf.identity(tensor) for tensor in tensors]
    require_kernels(session.backend)
    plan = plan_of(operation, specs or tensors, ranks, name, label_of(operation, name), how=how or reduction.value)
    results: list[Any] = list(tensors)
    kinds = [(tensor.dtype, factors[index] if factors else None) for index, tensor in enumerate(tensors)]
    groups = {kind: [index for index, found in enumerate(kinds) if found == kind] for kind in dict.fromkeys(kinds)}
    calls = [Call("allreduce", [tensors[index] for index in indices], f"{plan.key}.{number}", reduction, tuple(ranks),
                  *(kind[1] or ())) for number, (kind, indices) in enumerate(groups.items())]
    for combined, indices in zip(run(session, plan, calls), groups.values(), strict=True):
        for index, tensor in zip(indices, combined, strict=True):
            results[index] = shaped(tensor, tensors[index])
    return results


def allgather_raw(tensor: Any, ranks: Sequence[int], name: str | None, hint: str = "") -> Any:
    """Gather a tensor without a gradient; `hint` is the fix to suggest if only one rank calls this by mistake."""
    session = current_session()
    if len(ranks) == 1:
        return tf.identity(tensor)
    require_kernels(session.backend)
    shape = _with_unknown_rows(tensor.shape)
    plan = plan_of("allgather", [tf.TensorSpec(shape, tensor.dtype)], ranks, name, label_of("allgather", name),
                   hint=hint)
    call = Call("allgather", tensor, plan.key, tuple(ranks))
    [gathered] = run(session, plan, [call])
    if not tf.executing_eagerly():
        gathered.set_shape(shape)
    return gathered


def broadcast_raw(tensors: Sequence[Any], root_rank: int, ranks: Sequence[int], name: str | None,
                  names: Sequence[str] | None = None, is_of_model: bool = False) -> list[Any]:
    """Broadcast tensors without gradients, each in a separate collective of one plan."""
    session = current_session()
    if len(ranks) == 1:
        return [tf.identity(tensor) for tensor in tensors]
    require_kernels(session.backend)
    plan = plan_of("broadcast", tensors, ranks, name, label_of("broadcast", name), names, f"from {root_rank}",
                   is_of_model=is_of_model)
    calls = [Call("broadcast", tensor, root_rank, f"{plan.key}.{number}", tuple(ranks))
             for number, tensor in enumerate(tensors)]
    return [shaped(result, call.data) for result, call in zip(run(session, plan, calls), calls, strict=True)]


def alltoall_raw(tensor: Any, splits: Any, ranks: Sequence[int], name: str | None) -> tuple[Any, Any]:
    """Send rows to each rank; return the received rows and their number from each rank."""
    session = current_session()
    if len(ranks) == 1:
        return tf.identity(tensor), tf.identity(splits)
    require_kernels(session.backend)
    shape = _with_unknown_rows(tensor.shape)
    plan = plan_of("alltoall", [tf.TensorSpec(shape, tensor.dtype)], ranks, name, label_of("alltoall", name))
    call = Call("alltoall", tensor, splits, plan.key, tuple(ranks))
    [(received, rows)] = run(session, plan, [call])
    if not tf.executing_eagerly():
        received.set_shape(shape)
        rows.set_shape([len(ranks)])
    return received, rows


def reducescatter_raw(tensor: Any, ranks: Sequence[int], name: str | None, how: str,
                      factors: tuple[float, float] | None = None, spec: Any = None) -> Any:
    """Sum a tensor over the ranks, and return this rank's rows.

    `spec` has the shape and dtype on which the ranks must agree, if they differ from those of the tensor.
    """
    session = current_session()
    if len(ranks) == 1:
        return tf.identity(tensor)
    require_kernels(session.backend)
    described = tensor if spec is None else spec
    plan = plan_of("reducescatter", [described], ranks, name, label_of("reducescatter", name), how=how)
    call = Call("reducescatter", tensor, plan.key, tuple(ranks), *(factors or ()))
    [scattered] = run(session, plan, [call])
    if not tf.executing_eagerly():
        scattered.set_shape(_with_unknown_rows(tensor.shape))
    return scattered


def _with_unknown_rows(shape: Any) -> Any:
    """Return a shape with an unknown number of rows; an unknown shape if the rank of the tensor is unknown."""
    return tf.TensorShape(None) if shape.rank is None else tf.TensorShape([None]).concatenate(shape[1:])


def label_of(operation: str, name: str | None) -> str:
    """Return the label of a collective in messages."""
    return f'{operation} "{name}"' if name else f"an unnamed {operation}"


def derived(name: str | None, suffix: str) -> str | None:
    """Return the name of a dependent collective; None if the original one is unnamed."""
    return name and f"{name}.{suffix}"

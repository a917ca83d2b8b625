"""Losses and metrics in a step: those that need all rows of the batch get them, gathered from all ranks.

A loss or a metric function that returns one number for a batch may depend on all of its rows together, as a Dice
coefficient does. It is computed from the labels and predictions of all ranks, and each rank gets the gradient for its
predictions. So are metrics of users that do not declare how to merge their states. All other losses and metrics are
combined from each rank's rows (`hvkeras.training.losses`, `hvkeras.global_batch.states`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from hvkeras import compat
from hvkeras.collectives.reductions import allgather
from hvkeras.collectives.row_share import RowShare, global_batch
from hvkeras.compat import graphs
from hvkeras.global_batch.states import Changes, flat_metrics, is_undeclared


def update_mean(original: Callable[..., Any], metric: Any, values: Any, sample_weight: Any = None) -> Any:
    """Add values to a `Mean` or `Sum`: a scalar counts by the rank's share of the rows."""
    rows = global_batch().rows
    if rows is not None and sample_weight is None and not _rank_of(values):
        sample_weight = tf.cast(rows.share, metric.dtype)
    return original(metric, values, sample_weight)


def update_function(original: Callable[..., Any], metric: Any, y_true: Any, y_pred: Any, sample_weight: Any = None,
                    ) -> Any:
    """Add the values of a metric function, which gets all rows if it returns one number for a batch."""
    rows = global_batch().rows
    if rows is not None and sample_weight is None and _returns_scalar(metric, y_true, y_pred):
        y_true, y_pred = _gathered(y_true, rows), _gathered(y_pred, rows)
    return original(metric, y_true, y_pred, sample_weight)


def update_metrics(changes: Changes | None, original: Callable[..., Any], listed: Any, y_true: Any, y_pred: Any,
                   sample_weight: Any = None) -> Any:
    """Add a batch to the metrics of an output; those of users that cannot be merged get all rows."""
    rows = global_batch().rows
    undeclared = [] if rows is None or changes is None else [one for one in listed.metrics if is_undeclared(one)]
    if not undeclared:
        return original(listed, y_true, y_pred, sample_weight)
    assert rows is not None
    assert changes is not None
    whole = [_gathered(one, rows) for one in (y_true, y_pred, sample_weight)]
    for metric in listed.metrics:
        if metric not in undeclared:
            metric.update_state(y_true, y_pred, sample_weight=sample_weight)
            continue
        with global_batch().computing(None):
            metric.update_state(*whole[:2], sample_weight=whole[2])
        changes.complete |= {id(variable) for variable in metric.variables}
    return None


@contextlib.contextmanager
def gathering_metrics(model: Any, changes: Changes) -> Iterator[None]:
    """Enter a scope in which the metrics of users that a model tracks, and that cannot be merged, get all rows."""
    with contextlib.ExitStack() as stack:
        for metric in flat_metrics(model):
            if is_undeclared(metric):
                updated = functools.partial(_update_whole, changes, metric, metric.update_state)
                stack.enter_context(compat.attribute(metric, "update_state", updated))
        yield


def _update_whole(changes: Changes, metric: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    rows = global_batch().rows
    if rows is None:
        return original(*args, **kwargs)
    args, kwargs = tf.nest.map_structure(lambda one: _gather(one, rows) if _rank_of(one) else one, (args, kwargs))
    with global_batch().computing(None):
        result = original(*args, **kwargs)
    changes.complete |= {id(variable) for variable in metric.variables}
    return result


def make(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Make a tensor of a shape; where the step needs it, one with the rows of the batch gets this rank's rows."""
    rows = global_batch().rows
    shape = args[0] if args else kwargs.get("shape")
    if rows is None or rows.constants is None or not isinstance(shape, (list, tuple)) or shape[:1] not in (
            [rows.constants[0]], (rows.constants[0],)):
        return original(*args, **kwargs)
    own = (rows.constants[1], *shape[1:])
    return original(own, *args[1:], **kwargs) if args else original(**{**kwargs, "shape": own})


def call_loss(original: Callable[..., Any], loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
    """Compute a loss, from all rows if it is one number for a batch."""
    rows = global_batch().rows
    if rows is None or sample_weight is not None or not _is_scalar_loss(loss, y_true, y_pred):
        return original(loss, y_true, y_pred, sample_weight)
    return original(loss, _gathered(y_true, rows), _gathered(y_pred, rows))


@graphs.without_autograph
def _gathered(value: Any, rows: RowShare) -> Any:
    """Return the rows of all ranks; their gradients are weighted by the ranks' shares and summed up."""
    return tf.nest.map_structure(lambda leaf: leaf if leaf is None else _gather(leaf, rows), value)


def _gather(leaf: Any, rows: RowShare) -> Any:
    leaf = tf.convert_to_tensor(leaf)
    counted = tf.where(rows.has_rows, tf.shape(leaf)[0], 0)
    return allgather(leaf[:counted], name="the rows of a batch")


def _returns_scalar(metric: Any, y_true: Any, y_pred: Any) -> bool:
    values = metric._fn(y_true, y_pred, **metric._fn_kwargs)
    return _rank_of(values) == 0


def _is_scalar_loss(loss: Any, y_true: Any, y_pred: Any) -> bool:
    import keras

    def converted(value: Any) -> Any:  # as `Loss.__call__` does
        return keras.tree.map_structure(lambda leaf: keras.ops.convert_to_tensor(leaf, dtype=loss.dtype), value)

    return _rank_of(loss.call(converted(y_true), converted(y_pred))) == 0


def call_losses(original: Callable[..., Any], losses: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
    """Compute the losses of a model, from all rows if a class of the user does not compute them as Keras does."""
    import keras

    rows = global_batch().rows
    own = [one for one in keras.tree.flatten(losses._user_loss) if isinstance(one, keras.losses.Loss)
           and "__call__" in vars(type(one)) | _inherited(type(one), keras.losses.Loss)]
    if rows is None or not own:
        return original(losses, y_true, y_pred, sample_weight)
    whole = [_gathered(one, rows) for one in (y_true, y_pred, sample_weight)]
    with global_batch().computing(None):
        return original(losses, *whole)


def _inherited(cls: type, base: type) -> dict[str, Any]:
    """Return what a class inherits from those between it and `base`."""
    between = cls.__mro__[: cls.__mro__.index(base)]
    return {name: value for each in reversed(between) for name, value in vars(each).items()}


def _rank_of(value: Any) -> int | None:
    shape = getattr(value, "shape", None)
    return 0 if shape is None else len(shape)

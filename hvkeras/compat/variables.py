"""Uniform access to variables of Keras 3 and TensorFlow, including tf_keras's session without eager execution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras.compat.families import default_keras


def as_tf_variable(variable: Any) -> Any:
    """Returns the `tf.Variable` of a Keras 3 variable, or any other variable unchanged."""
    value = getattr(variable, "value", None)
    return variable if value is None or callable(value) else value


def as_array(tensor: Any) -> Any:
    """Returns a tensor in host memory as an array, which shares its memory where NumPy knows the dtype."""
    try:
        return np.asarray(memoryview(tensor))
    except (TypeError, ValueError, BufferError, NotImplementedError):
        return tensor.numpy()


def local_parts(variable: Any) -> tuple[Any, ...]:
    """Returns this process's own variables behind a strategy's variable; for any other variable, itself alone."""
    variable = as_tf_variable(variable)
    return tuple(variable.values) if isinstance(variable, tf.distribute.DistributedValues) else (variable,)


def assign_locally(variable: Any, value: Any) -> None:
    """Assigns to this process's own variables, where a strategy would involve other workers."""
    for part in local_parts(variable):
        part.assign(tf.cast(value, part.dtype))


def variable_key(variable: Any) -> Any:
    """Returns a unique key of a variable, which is the same for a Keras 3 variable and its `tf.Variable`."""
    return as_tf_variable(variable)._unique_id


def variable_name(variable: Any) -> str:
    """Returns a variable's name for messages."""
    return str(getattr(variable, "path", None) or getattr(variable, "name", None) or "unnamed variable")


def variable_like(variable: Any, shape: Sequence[int], name: str = "") -> Any:
    """Returns a new variable of zeros, of the same Keras, dtype and name as another one.

    Args:
        variable: A Keras 3 variable or a `tf.Variable`.
        shape: The shape of the new one.
        name: Its name, if that is to be another.
    """
    with tf.init_scope():
        if as_tf_variable(variable) is variable:
            known = name or str(variable.name).split(":")[0]
            return tf.Variable(tf.zeros(shape, variable.dtype), name=known, trainable=True)
        made = type(variable)(np.zeros(shape, tf.as_dtype(variable.dtype).as_numpy_dtype), dtype=variable.dtype,
                              trainable=True, name=name or variable.name)
        if not name and hasattr(variable, "_path"):
            made._path = variable._path
        return made


def is_overwritten(variable: Any) -> bool:
    """Whether a variable's "gradient" is its new value, as of the scales in float8 training.

    Of several such values, Keras's `gradient_accumulation_steps` takes the largest.
    """
    return bool(getattr(variable, "overwrite_with_gradient", False))


def aggregation_of(variable: Any) -> str:
    """Returns how a metric's variable is merged between replicas: "sum" (the default), "mean", ..."""
    aggregation = getattr(variable, "aggregation", None)
    name = getattr(aggregation, "name", aggregation)  # an enum in TensorFlow, a string in Keras 3
    return str(name or "sum").lower()


def value_of(variable: Any) -> Any:
    """Returns a variable's value as a NumPy value; uses tf_keras's session where eager execution was disabled."""
    variable = as_tf_variable(variable)
    if tf.executing_eagerly() or not isinstance(variable, tf.Variable):
        return variable.numpy() if isinstance(variable, tf.Variable) else variable
    return default_keras().backend.get_value(variable)


def multiply(variables: Sequence[tf.Variable], factor: float) -> None:
    """Multiplies variables in one call; uses tf_keras's session where eager execution was disabled."""
    if tf.executing_eagerly():
        _multiply(list(variables), tf.constant(factor, tf.float64))
        return
    backend = default_keras().backend
    backend.batch_set_value([(one, value * value.dtype.type(factor)) for one, value in
                             zip(variables, backend.batch_get_value(list(variables)), strict=True)])


@tf.function(autograph=False)  # type: ignore[untyped-decorator]  # TensorFlow ships no types
def _multiply(variables: list[tf.Variable], factor: Any) -> None:
    for variable in variables:
        variable.assign(variable * tf.cast(factor, variable.dtype))


def run_in_session(make: Callable[[], Any]) -> None:
    """Runs an action without a result: at once, or in tf_keras's session where eager execution was disabled.

    Args:
        make: Acts immediately in eager mode; otherwise returns an operation.
    """
    operation = make()
    if operation is not None:
        tf.compat.v1.keras.backend.get_session().run(operation)

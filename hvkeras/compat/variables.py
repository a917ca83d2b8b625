"""Uniform access to variables of Keras 3 and TensorFlow, including tf_keras's session without eager execution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras.compat.families import default_keras


def as_tf_variable(variable: Any) -> Any:
    """Return the `tf.Variable` of a Keras 3 variable, or any other variable unchanged."""
    value = getattr(variable, "value", None)
    return variable if value is None or callable(value) else value


def as_array(tensor: Any) -> Any:
    """Return a tensor in host memory as an array, without a copy if NumPy supports the dtype."""
    try:
        return np.asarray(memoryview(tensor))
    except (TypeError, ValueError, BufferError, NotImplementedError):
        return tensor.numpy()


def local_parts(variable: Any) -> tuple[Any, ...]:
    """Return this process's copies of a strategy's variable; for any other variable, a tuple of only itself."""
    variable = as_tf_variable(variable)
    return tuple(variable.values) if isinstance(variable, tf.distribute.DistributedValues) else (variable,)


def assign_locally(variable: Any, value: Any) -> None:
    """Assign only to this process's copies of a strategy's variable, without involving other workers."""
    for part in local_parts(variable):
        part.assign(tf.cast(value, part.dtype))


def variable_key(variable: Any) -> Any:
    """Return a unique key of a variable, shared by a Keras 3 variable and its `tf.Variable`."""
    return as_tf_variable(variable)._unique_id


def variable_name(variable: Any) -> str:
    """Return a variable's name for messages."""
    return str(getattr(variable, "path", None) or getattr(variable, "name", None) or "unnamed variable")


def variable_like(variable: Any, shape: Sequence[int], name: str = "") -> Any:
    """Create a variable of zeros with the class, dtype and name of another one.

    Args:
        variable: A Keras 3 variable or a `tf.Variable`.
        shape: The shape of the new variable.
        name: The name of the new variable; by default that of `variable`.
    """
    with tf.init_scope():
        if as_tf_variable(variable) is variable:
            new_name = name or str(variable.name).split(":")[0]
            return tf.Variable(tf.zeros(shape, variable.dtype), name=new_name, trainable=True)
        made = type(variable)(np.zeros(shape, tf.as_dtype(variable.dtype).as_numpy_dtype), dtype=variable.dtype,
                              trainable=True, name=name or variable.name)
        if not name and hasattr(variable, "_path"):
            made._path = variable._path
        return made


def is_overwritten(variable: Any) -> bool:
    """Return whether a variable's "gradient" is its new value, as for the scales in float8 training.

    When Keras accumulates gradients (`gradient_accumulation_steps`), it takes the largest of these values.
    """
    return bool(getattr(variable, "overwrite_with_gradient", False))


def aggregation_of(variable: Any) -> str:
    """Return the aggregation of a metric's variable over replicas: "sum" (the default), "mean", ..."""
    aggregation = getattr(variable, "aggregation", None)
    name = getattr(aggregation, "name", aggregation)  # an enum in TensorFlow, a string in Keras 3
    return str(name or "sum").lower()


def value_of(variable: Any) -> Any:
    """Return a variable's value as a NumPy value, read in tf_keras's session if eager execution is disabled."""
    variable = as_tf_variable(variable)
    if tf.executing_eagerly() or not isinstance(variable, tf.Variable):
        return variable.numpy() if isinstance(variable, tf.Variable) else variable
    return default_keras().backend.get_value(variable)


def multiply(variables: Sequence[tf.Variable], factor: float) -> None:
    """Multiply variables in one call, in tf_keras's session if eager execution is disabled."""
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
    """Run an action eagerly, or in tf_keras's session if eager execution is disabled.

    Args:
        make: Runs the action in eager mode and returns None; otherwise returns an operation.
    """
    operation = make()
    if operation is not None:
        tf.compat.v1.keras.backend.get_session().run(operation)

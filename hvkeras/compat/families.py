"""Detection of the Keras in use (Keras 3 or tf_keras) and of an optimizer's family (one of three)."""

from __future__ import annotations

import sys
from typing import Any

import tensorflow as tf

KERAS, TF_KERAS, TF_KERAS_LEGACY = "keras", "tf_keras", "tf_keras.legacy"


def default_keras() -> Any:
    """Returns the Keras behind `tf.keras`: Keras 3, or tf_keras if `TF_USE_LEGACY_KERAS` selects it."""
    if tf.keras.Model.__module__.startswith("tf_keras."):
        import tf_keras

        return tf_keras
    import keras

    return keras


def is_keras_3(keras: Any) -> bool:
    """Whether a Keras module is Keras 3 rather than tf_keras."""
    return str(keras.__name__) == "keras"


def loaded_families() -> list[str]:
    """Returns the Keras packages of this process: the one behind `tf.keras`, and any other that is imported."""
    default_keras()
    return [name for name in (KERAS, TF_KERAS) if hasattr(sys.modules.get(name), "Model")]


def is_of_keras(cls: type) -> bool:
    """Whether Keras itself defines a class."""
    return cls.__module__.split(".")[0] in ("keras", "tf_keras")


def foreign_backend() -> str | None:
    """Returns the backend of Keras 3 if it is not TensorFlow, else None."""
    keras: Any = sys.modules.get("keras")
    name = str(keras.backend.backend()) if hasattr(keras, "backend") else "tensorflow"
    return None if name == "tensorflow" else name


def family_of(optimizer: Any) -> str | None:
    """Returns an optimizer's family; None for other objects. Imports no Keras that is not loaded yet."""
    keras: Any = sys.modules.get("keras")
    tf_keras: Any = sys.modules.get("tf_keras")
    if hasattr(keras, "optimizers") and isinstance(optimizer, keras.optimizers.Optimizer):
        return KERAS
    if tf_keras is not None:
        if isinstance(optimizer, tf_keras.optimizers.legacy.Optimizer):
            return TF_KERAS_LEGACY
        if isinstance(optimizer, tf_keras.optimizers.Optimizer):
            return TF_KERAS
    return None

"""Which Keras this is: Keras 3 or tf_keras, and which of the three families of optimizers."""

from __future__ import annotations

import sys
from typing import Any

import tensorflow as tf

KERAS, TF_KERAS, TF_KERAS_LEGACY = "keras", "tf_keras", "tf_keras.legacy"


def default_keras() -> Any:
    """The Keras that `tf.keras` is: Keras 3, or tf_keras when `TF_USE_LEGACY_KERAS` says so."""
    if tf.keras.Model.__module__.startswith("tf_keras."):
        import tf_keras

        return tf_keras
    import keras

    return keras


def is_keras_3(keras: Any) -> bool:
    """Whether a Keras module is Keras 3 rather than tf_keras."""
    return str(keras.__name__) == "keras"


def loaded_families() -> list[str]:
    """The Kerases that this process has: the one that `tf.keras` is, and any other that is imported."""
    default_keras()
    return [name for name in (KERAS, TF_KERAS) if hasattr(sys.modules.get(name), "Model")]


def is_of_keras(cls: type) -> bool:
    """Whether Keras itself defines a class."""
    return cls.__module__.split(".")[0] in ("keras", "tf_keras")


def foreign_backend() -> str | None:
    """The backend of Keras 3 if it is not TensorFlow."""
    keras: Any = sys.modules.get("keras")
    name = str(keras.backend.backend()) if hasattr(keras, "backend") else "tensorflow"
    return None if name == "tensorflow" else name


def family_of(optimizer: Any) -> str | None:
    """Which family an optimizer is of; None for anything else. Imports no Keras that is not there yet."""
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

"""Detection of the Keras in use (Keras 3 or tf_keras) and of an optimizer's family; subclasses that Keras accepts."""

from __future__ import annotations

import sys
import weakref
from operator import itemgetter
from typing import Any

import tensorflow as tf

from hvkeras.errors import UsageError, explain

KERAS, TF_KERAS, TF_KERAS_LEGACY = "keras", "tf_keras", "tf_keras.legacy"


def default_keras() -> Any:
    """Return the Keras behind `tf.keras`: Keras 3, or tf_keras if `TF_USE_LEGACY_KERAS` selects it."""
    if tf.keras.Model.__module__.startswith("tf_keras."):
        import tf_keras

        return tf_keras
    import keras

    return keras


def is_keras_3(keras: Any) -> bool:
    """Return whether a Keras module is Keras 3 rather than tf_keras."""
    return str(keras.__name__) == "keras"


def loaded_families() -> list[str]:
    """Return the Keras packages of this process: the one behind `tf.keras`, and any other that is imported."""
    default_keras()
    return [name for name in (KERAS, TF_KERAS) if hasattr(sys.modules.get(name), "Model")]


def require_no_horovod(instance: Any) -> None:
    """Check that an optimizer or a callback is not one of Horovod's own, whose engine has not been started.

    Raises:
        UsageError: It is.
    """
    if any(base.__module__.partition(".")[0] == "horovod" for base in type(instance).__mro__):
        name = type(instance).__name__
        made = (f"horovod's {name}" if hasattr(instance, "on_train_begin") else
                f"{name} that Horovod's DistributedOptimizer made")
        raise UsageError(explain("Optimizers and callbacks must be those of hvkeras where hvkeras.init() has joined the"
                                 " job", "import hvkeras as hvd in place of horovod.tensorflow.keras, throughout the"
                                 " script", found=made))


def is_of_keras(cls: type) -> bool:
    """Return whether Keras itself defines a class."""
    return cls.__module__.split(".")[0] in ("keras", "tf_keras")


def foreign_backend() -> str | None:
    """Return the backend of Keras 3 if it is not TensorFlow, else None."""
    keras: Any = sys.modules.get("keras")
    name = str(keras.backend.backend()) if hasattr(keras, "backend") else "tensorflow"
    return None if name == "tensorflow" else name


def family_of(optimizer: Any) -> str | None:
    """Return an optimizer's family; None for other objects. Does not import Keras."""
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


def subclass_like(base: type, mixin: type, attributes: dict[str, Any]) -> type:
    """Return a subclass of `mixin` and `base` that Keras saves under the name of `base`, cached by its attributes."""
    key = (base, mixin, *sorted(attributes.items(), key=itemgetter(0)))
    try:
        found = _subclasses.get(key)
    except TypeError:  # attributes that users pass, such as compressors, may not be hashable
        return _create_subclass(base, mixin, attributes)
    return found or _subclasses.setdefault(key, _create_subclass(base, mixin, attributes))


# Optimizers with equal attributes share one class, as a saved and a loaded optimizer do in plain Keras. Keras keeps
# every class that is registered by name, so new classes for each optimizer would also fill its tables.
_subclasses: weakref.WeakValueDictionary[Any, type] = weakref.WeakValueDictionary()


def _create_subclass(base: type, mixin: type, attributes: dict[str, Any]) -> type:
    namespace = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    exported = {name: base.__dict__[name] for name in ("_keras_api_names", "_keras_api_names_v1")
                if name in base.__dict__}  # tf_keras looks up its public names here
    cls: type = type(base)(base.__name__, (mixin, base), {**namespace, **exported, **attributes})
    for module, tables in _CLASS_NAME_TABLES:
        if module in sys.modules:
            for table in tables:
                names = getattr(sys.modules[module], table, {})
                if base in names:
                    names[cls] = names[base]
    return cls


# Tables of the public names under which Keras saves classes. Without entries for subclasses, files would refer to
# Keras's private modules, which move between versions.
_CLASS_NAME_TABLES = (
    ("keras.src.api_export", ("REGISTERED_OBJS_TO_NAMES",)),
    ("keras.src.saving.object_registration", ("GLOBAL_CUSTOM_NAMES",)),
    ("tf_keras.src.saving.object_registration", ("_GLOBAL_CUSTOM_NAMES",)),
)


def adopt_class(instance: Any, cls: type) -> None:
    """Change an existing object's class to a subclass, bypassing the `__setattr__` of optimizers."""
    object.__setattr__(instance, "__class__", cls)

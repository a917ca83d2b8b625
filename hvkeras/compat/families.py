"""Detection of the Keras in use (Keras 3 or tf_keras), of an optimizer's family, and subclasses that Keras accepts."""

from __future__ import annotations

import sys
import weakref
from operator import itemgetter
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


def subclass_like(base: type, mixin: type, attributes: dict[str, Any]) -> type:
    """Returns a subclass of `mixin` and `base` that is saved under the name of `base`; one for equal attributes."""
    key = (base, mixin, *sorted(attributes.items(), key=itemgetter(0)))
    try:
        found = _made.get(key)
    except TypeError:  # of what a user passed, such as a compressor, not all can be hashed
        return _made_subclass(base, mixin, attributes)
    return found or _made.setdefault(key, _made_subclass(base, mixin, attributes))


# Objects that are alike have one class, as a saved optimizer and the loaded one in a plain Keras. Keras keeps what it
# knows the names of, so that these tables would grow, too.
_made: weakref.WeakValueDictionary[Any, type] = weakref.WeakValueDictionary()


def _made_subclass(base: type, mixin: type, attributes: dict[str, Any]) -> type:
    namespace = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    exported = {name: base.__dict__[name] for name in ("_keras_api_names", "_keras_api_names_v1")
                if name in base.__dict__}  # tf_keras looks up its public names here
    made: type = type(base)(base.__name__, (mixin, base), {**namespace, **exported, **attributes})
    for module, tables in _NAMES_BY_CLASS:
        if module in sys.modules:
            for table in tables:
                names = getattr(sys.modules[module], table, {})
                if base in names:
                    names[made] = names[base]
    return made


# Tables in which Keras looks up the public name of a class that it saves. Without entries for subclasses, the file
# would refer to Keras's private modules, which move between versions.
_NAMES_BY_CLASS = (
    ("keras.src.api_export", ("REGISTERED_OBJS_TO_NAMES",)),
    ("keras.src.saving.object_registration", ("GLOBAL_CUSTOM_NAMES",)),
    ("tf_keras.src.saving.object_registration", ("_GLOBAL_CUSTOM_NAMES",)),
)


def adopt_class(instance: Any, cls: type) -> None:
    """Turns an existing object into an instance of a subclass, bypassing the `__setattr__` of optimizers."""
    object.__setattr__(instance, "__class__", cls)

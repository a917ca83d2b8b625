"""Subclasses that Keras treats like their base class."""

from __future__ import annotations

import sys
import weakref
from operator import itemgetter
from typing import Any


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

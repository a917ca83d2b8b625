"""Pickling of models, optimizers, losses and metrics, including classes defined in a notebook."""

from __future__ import annotations

import importlib
import io
import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle

_FAMILIES = ("keras", "tf_keras")
_BY_CONFIG = ("Optimizer", "Loss", "Metric", "LearningRateSchedule")


def packed(value: Any) -> bytes:
    """Pickle a value that may contain Keras objects."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def unpacked(data: bytes, custom_objects: Mapping[str, Any] | None = None, family: str = "keras") -> Any:
    """Unpickle a value that `packed` has pickled.

    Args:
        custom_objects: Custom classes and functions by name, which Keras needs to load models.
        family: The Keras package of the objects: `keras` or `tf_keras`.
    """
    if not custom_objects:
        return pickle.loads(data)
    with _module(family).saving.custom_object_scope(dict(custom_objects)):
        return pickle.loads(data)


def model_file(model: Any) -> bytes:
    """Return a model as the bytes of a `.keras` file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        model.save(path)
        return path.read_bytes()


def model_of(data: bytes, family: str, custom_objects: Mapping[str, Any] | None = None, compiled: bool = True) -> Any:
    """Load a model from the bytes of its `.keras` file.

    Args:
        family: `keras` or `tf_keras`.
        custom_objects: Custom classes and functions by name, which Keras needs to load it.
        compiled: Whether to load the optimizer, loss and metrics, too.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.keras"
        path.write_bytes(data)
        return _module(family).models.load_model(path, custom_objects=dict(custom_objects or {}), compile=compiled)


def family_of(model: Any) -> str:
    """Return the Keras package of an object: `keras` or `tf_keras`; "" for other objects."""
    return next((root for cls in type(model).__mro__ if (root := cls.__module__.split(".")[0]) in _FAMILIES), "")


def own_objects(model: Any, *others: Any) -> dict[str, Any]:
    """Return the custom classes and functions of a model by name.

    Args:
        *others: Losses and metrics, possibly nested in lists and dicts.
    """
    objects = [model, *model._flatten_layers(), *(part for other in others for part in _flat(other))]
    classes = [part if hasattr(part, "__name__") else type(part) for part in objects]
    return {each.__name__: each for each in classes if each.__module__.split(".")[0] not in (*_FAMILIES, "builtins")}


def _flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    return [part for each in value for part in _flat(each)] if isinstance(value, (list, tuple)) else [value]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler of models as `.keras` files and of other Keras objects as configs, since variables cannot be pickled."""

    def reducer_override(self, obj: Any) -> Any:
        family = "" if isinstance(obj, type) else family_of(obj)
        if family:
            module = _module(family)
            if isinstance(obj, module.Model):
                return _model_again, (model_file(obj), family, own_objects(obj, getattr(obj, "loss", None)))
            if any(cls.__name__ in _BY_CONFIG for cls in type(obj).__mro__):
                return _from_config, (type(obj), obj.get_config())
        return super().reducer_override(obj)


def _model_again(data: bytes, family: str, custom_objects: Mapping[str, Any]) -> Any:
    """Load a model, uncompiled if its optimizer, loss or metrics cannot be restored."""
    try:
        return model_of(data, family, custom_objects)
    except (TypeError, ValueError):
        return model_of(data, family, custom_objects, compiled=False)


def _from_config(cls: Any, config: dict[str, Any]) -> Any:
    return cls.from_config(config)


def _module(family: str) -> Any:
    return importlib.import_module(family)

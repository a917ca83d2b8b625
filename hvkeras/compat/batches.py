"""Batches loaded by Python code: `PyDataset` in Keras 3, `Sequence` in tf_keras."""

from __future__ import annotations

import sys
from typing import Any


def batches_base(data: Any) -> Any:
    """Returns the base class of data whose batches Keras loads: `PyDataset` or `Sequence`; None for other data."""
    keras: Any = sys.modules.get("keras")
    tf_keras: Any = sys.modules.get("tf_keras")
    if hasattr(keras, "utils") and isinstance(data, keras.utils.PyDataset):
        return keras.utils.PyDataset
    if hasattr(tf_keras, "utils") and isinstance(data, tf_keras.utils.Sequence):
        return tf_keras.utils.Sequence
    return None


def count_batches(data: Any) -> int | None:
    """Returns the number of batches of a `PyDataset` or `Sequence`; None if it is infinite."""
    found = data.num_batches if hasattr(data, "num_batches") else len(data)
    return None if found is None else int(found)


def loading_options(data: Any) -> dict[str, Any]:
    """Returns a `PyDataset`'s loading options as constructor arguments; tf_keras takes them in `fit` instead."""
    names = ("workers", "use_multiprocessing", "max_queue_size")
    return {name: getattr(data, name) for name in names if hasattr(data, name)} if hasattr(data, "num_batches") else {}


def overrides(instance: Any, method: str) -> bool:
    """Whether the class of a `PyDataset` or `Sequence` overrides Keras's implementation of a method."""
    base = batches_base(instance)
    return getattr(type(instance), method, None) is not getattr(base, method, None)

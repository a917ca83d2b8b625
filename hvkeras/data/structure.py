"""Arrays of all kinds and structures of them: count and select rows."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import tensorflow as tf

from hvkeras.errors import UsageError, explain

Value = TypeVar("Value")


class IdentityMap(Generic[Value]):
    """Map from objects, by identity, to values, while the objects exist: arrays have no hash."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[weakref.ref[Any], Value]] = {}

    def __setitem__(self, thing: Any, value: Value) -> None:
        number = id(thing)
        self._found[number] = weakref.ref(thing, lambda _: self._found.pop(number, None)), value

    def get(self, thing: Any) -> Value | None:
        """Return the value of an object; None if it has none."""
        reference, value = self._found.get(id(thing), (None, None))
        return value if reference is not None and reference() is thing else None


def leaves(data: Any) -> list[Any]:
    """Return the arrays in a structure of tuples, lists and dicts; None counts as an array without rows."""
    return list(tf.nest.flatten(data))


def map_leaves(function: Callable[..., Any], *structures: Any) -> Any:
    """Apply a function to the arrays of structures of the same form; None stays None."""
    return tf.nest.map_structure(lambda *each: None if each[0] is None else function(*each), *structures)


def require_arrays(data: Any) -> None:
    """Check that every leaf has rows.

    Raises:
        UsageError: A leaf is a number, a string, or something else that cannot be sliced.
    """
    for leaf in leaves(data):
        if leaf is None:
            continue
        if isinstance(leaf, tf.sparse.SparseTensor):
            raise UsageError(explain("Data to shard must have rows to pick from", "shard"
                                     " tf.data.Dataset.from_tensor_slices(x) instead", data="tf.SparseTensor"))
        if isinstance(leaf, tf.data.Dataset):
            raise UsageError(explain("Datasets are sharded one by one", "call hvd.shard for each, or"
                                     " tf.data.Dataset.zip them", data=f"tf.data.Dataset in a {type(data).__name__}"))
        if isinstance(leaf, (str, bytes)) or not _has_rows(leaf):
            inside = "" if leaf is data else f" in a {type(data).__name__}"
            raise UsageError(explain(
                "Data to shard must be arrays, a tf.data.Dataset, a keras.utils.PyDataset, or a tuple, list or dict of"
                " arrays", "make it an array with numpy.asarray, or a dataset with tf.data.Dataset.from_generator",
                data=f"{type(leaf).__name__}{inside}"))


def _has_rows(leaf: Any) -> bool:
    shape = getattr(leaf, "shape", None)
    if shape is not None:
        return len(shape) > 0 and (hasattr(leaf, "__getitem__") or hasattr(leaf, "iloc"))
    return hasattr(leaf, "__len__") and hasattr(leaf, "__getitem__")


def count_rows(data: Any, way_out: str = "pass arrays such as (x, y), whose first dimension counts the samples") -> int:
    """Return the number of rows that every array of a structure has.

    Raises:
        UsageError: Arrays have different lengths, or there are no arrays.
    """
    counts = [int(leaf.shape[0]) if getattr(leaf, "shape", None) is not None else len(leaf) for leaf in leaves(data)
              if leaf is not None]
    if not counts or len(set(counts)) > 1:
        raise UsageError(explain("Arrays that belong together must have the same number of rows", way_out, rows=counts))
    return counts[0]


def take_slice(leaf: Any, rows: range | slice) -> Any:
    """Return evenly spaced rows of an array.

    Rows of a plain NumPy array are copied, so that the complete array can be freed; a memory-mapped array stays on
    disk.
    """
    picked = slice(rows.start, rows.stop, rows.step)
    found = _indexed(leaf, picked)
    return found.copy() if type(leaf) is np.ndarray and picked.step not in (None, 1) else found


def take_rows(leaf: Any, rows: Any) -> Any:
    """Return the rows of an array at the given indices (an int64 array), in that order."""
    if isinstance(leaf, (tf.Tensor, tf.Variable, tf.RaggedTensor)):
        return tf.gather(leaf, rows)
    if isinstance(leaf, np.ndarray) or hasattr(leaf, "iloc"):
        return _indexed(leaf, rows)
    ascending = np.argsort(rows)  # h5py, for example, reads in ascending order only
    return _indexed(_indexed(leaf, rows[ascending]), np.argsort(ascending))


def spec_of_rows(leaf: Any) -> Any:
    """Return the type of an array's rows in Keras; None for arrays that cannot be read by rows."""
    if isinstance(leaf, (tf.RaggedTensor, tf.sparse.SparseTensor)):
        return None
    try:
        dtype = tf.as_dtype(leaf.dtype)
    except (TypeError, AttributeError):
        return None
    if isinstance(leaf, np.ndarray) and dtype.is_floating:
        dtype = tf.as_dtype(tf.keras.backend.floatx())  # as Keras converts arrays
    return tf.TensorSpec([None, *leaf.shape[1:]], dtype)


def concatenate(parts: Sequence[Any]) -> Any:
    """Concatenate arrays of one kind along their rows."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], tf.sparse.SparseTensor):
        return tf.sparse.concat(0, list(parts))
    if isinstance(parts[0], (tf.Tensor, tf.RaggedTensor)):
        return tf.concat(list(parts), axis=0)
    if hasattr(parts[0], "tocsr"):
        return sys.modules["scipy.sparse"].vstack(list(parts), format=parts[0].format)
    return np.concatenate([np.asarray(part) for part in parts])


def with_rows(leaf: Any) -> Any:
    """Return an array with rows; a scalar becomes one row.

    None for other objects, such as a `tf.experimental.Optional`.
    """
    shape = getattr(leaf, "shape", None)
    if shape is None and not hasattr(leaf, "__len__"):
        return np.asarray([leaf]) if np.isscalar(leaf) else None
    if isinstance(leaf, (str, bytes)):
        return np.asarray([leaf])
    return leaf if shape is None or len(shape) else tf.expand_dims(leaf, 0) if tf.is_tensor(leaf) \
        else np.asarray(leaf)[None]


def _indexed(leaf: Any, rows: Any) -> Any:
    if isinstance(leaf, tf.sparse.SparseTensor):
        sizes = [int(size) for size in leaf.shape]
        first, after, _ = rows.indices(sizes[0])
        return tf.sparse.slice(leaf, [first, *[0] * len(sizes[1:])], [after - first, *sizes[1:]])
    if hasattr(leaf, "tocsr"):  # some sparse matrices of scipy cannot be sliced
        return leaf.tocsr()[rows].asformat(leaf.format)
    return leaf.iloc[rows] if hasattr(leaf, "iloc") else leaf[rows]

"""Columns of Arrow tables as arrays for Keras."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvkeras.errors import UsageError, explain


def column_array(name: str, column: Any) -> Any:
    """Converts a column of an Arrow table to an array with its rows along the first axis.

    Args:
        name: The column's name.
        column: Numbers, booleans or texts, or lists of numbers that are equally long (also nested).

    Returns:
        A NumPy array; float64 becomes float32, as in Keras.

    Raises:
        UsageError: The column has nulls, lists of unequal lengths, or something else in it.
    """
    import pyarrow as pa

    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if array.null_count:
        raise UsageError(explain("Columns for training must not contain nulls", f"df.dropna(subset=[{name!r}]), or fill"
                                 " them", column=name, nulls=array.null_count))
    shape = [len(array)]
    while pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type):
        values = array.flatten()
        length = len(values) // len(array) if len(array) else 0
        lengths = {length} if pa.types.is_fixed_size_list(array.type) else set(array.value_lengths().to_pylist())
        if lengths - {length}:
            raise UsageError(explain("The lists of a column must all have the same length", "pad them, or cut them",
                                     column=name, lengths=sorted(lengths)[:5]))
        shape.append(length)
        array = values
        if array.null_count:
            raise UsageError(explain("Columns for training must not contain nulls", "fill them", column=name))
    if not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type) or pa.types.is_boolean(array.type)
            or pa.types.is_string(array.type) or pa.types.is_large_string(array.type)
            or pa.types.is_decimal(array.type)):
        raise UsageError(explain("Columns for training must be numbers, booleans, texts, lists of numbers or vectors",
                                 "convert it with Spark's functions first", column=name, type=str(array.type)))
    if pa.types.is_decimal(array.type):
        array = array.cast(pa.float64())
    found = array.to_numpy(zero_copy_only=False)
    if found.dtype == np.float64:
        found = found.astype(np.float32)
    return found.reshape(shape)


def shaped(name: str, array: Any, shape: Any) -> Any:
    """Gives rows the shape that a model's input or a loss expects.

    Args:
        name: The column's name.
        array: The array.
        shape: The shape of a row, with None for dimensions of any size; None to leave rows as they are.

    Raises:
        UsageError: The rows have another number of values.
    """
    if shape is None or tuple(array.shape[1:]) == tuple(shape):
        return array
    if any(size is None for size in shape):
        return array  # Keras says what does not fit
    values, wanted = int(np.prod(array.shape[1:])), int(np.prod(shape))
    if values != wanted:
        raise UsageError(explain("Rows of a column must have as many values as the model expects",
                                 "compare the column with the model's inputs, or set label_shapes", column=name,
                                 values=values, expected=tuple(shape)))
    return array.reshape([len(array), *shape])

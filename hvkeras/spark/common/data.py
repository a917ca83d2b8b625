"""A DataFrame on its way to Parquet files in a store."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hvkeras.errors import UsageError, explain
from hvkeras.spark.common.store import Store

SCALAR, ARRAY, VECTOR = "scalar", "array", "vector"


@dataclass(frozen=True)
class Prepared:
    """Data in a store.

    Attributes:
        train_path: The folder of training data.
        val_path: The folder of validation data; "" without any.
        kinds: Whether each column is a scalar, an array or a vector.
    """

    train_path: str
    val_path: str
    kinds: Mapping[str, str]


@contextlib.contextmanager
def prepared(df: Any, store: Store, columns: Sequence[str], validation: float | str | None, partitions: int,
             seed: int | None) -> Iterator[Prepared]:
    """Writes the columns of a DataFrame to a store, for as long as the context lasts.

    Args:
        df: The DataFrame.
        store: The store.
        columns: The columns to write.
        validation: The share of rows that are held out for validation, or a column that is true or positive in them.
        partitions: The number of files of training data.
        seed: The seed of a random split.

    Yields:
        Where the data are.

    Raises:
        UsageError: A column does not exist, or the validation is neither a share nor a column.
    """
    train, val = _split(df, validation, seed)
    kinds = {name: _kind(df.schema[name].dataType) for name in _existing(df, columns)}
    index = uuid.uuid4().hex[:12]
    indices = store.get_train_data_path(index), store.get_val_data_path(index)
    try:
        for part, place in ((train, indices[0]), (val, indices[1])):
            if part is not None:
                _plain(part, kinds).repartition(partitions).write.mode("overwrite").parquet(store.for_spark(place))
        yield _checked(Prepared(indices[0], "" if val is None else indices[1], kinds), store)
    finally:
        for place in indices:
            store.delete(place)


def found_in(store: Store, index: object) -> Prepared:
    """Finds data that the user has written to a store's folder of training data, and of validation data.

    Args:
        store: The store.
        index: What tells several from each other, or None.

    Raises:
        UsageError: There is no Parquet data.
    """
    import pyarrow as pa
    from pyarrow import dataset

    train_path, val_path = store.get_train_data_path(index), store.get_val_data_path(index)
    if not store.is_parquet_dataset(train_path):
        raise UsageError(explain("The store must have Parquet data to train on", f"df.write.parquet({train_path!r})",
                                 path=train_path))
    filesystem, place = store.located(train_path)
    schema = dataset.dataset(place, format="parquet", filesystem=filesystem).schema
    kinds = {field.name: ARRAY if pa.types.is_nested(field.type) else SCALAR for field in schema}
    return _checked(Prepared(train_path, val_path if store.is_parquet_dataset(val_path) else "", kinds), store)


def _checked(found: Prepared, store: Store) -> Prepared:
    """Looks for nulls before any rank starts, and leaves out a validation without rows.

    Raises:
        UsageError: A column of numbers has nulls.
    """
    rows = {path: _rows_of(path, found.kinds, store) for path in (found.train_path, found.val_path) if path}
    return found if rows.get(found.val_path) else replace(found, val_path="")


def _rows_of(path: str, kinds: Mapping[str, str], store: Store) -> int:
    from pyarrow import dataset

    filesystem, index = store.located(path)
    files = [fragment.metadata for fragment in dataset.dataset(index, format="parquet", filesystem=filesystem)
             .get_fragments()]
    for group in (file.row_group(number) for file in files for number in range(file.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            if kinds.get(column.path_in_schema) == SCALAR and column.statistics and column.statistics.null_count:
                name = column.path_in_schema
                raise UsageError(explain("Columns for training must not contain nulls",
                                         f"df.dropna(subset=[{name!r}]), or fill them", column=name))
    return sum(file.num_rows for file in files)


def _existing(df: Any, columns: Sequence[str]) -> Sequence[str]:
    missing = [name for name in columns if name not in df.columns]
    if missing:
        raise UsageError(explain("The DataFrame must have all columns that are trained on",
                                 "the columns are " + ", ".join(df.columns), column=missing[0]))
    return columns


def _split(df: Any, validation: float | str | None, seed: int | None) -> tuple[Any, Any]:
    if validation is None or validation == 0:
        return df, None
    if isinstance(validation, str):
        from pyspark.sql import functions
        from pyspark.sql.types import BooleanType

        _existing(df, [validation])
        held_out = functions.col(validation)
        held_out = held_out if isinstance(df.schema[validation].dataType, BooleanType) else held_out > 0
        return df.filter(~held_out), df.filter(held_out)
    if not isinstance(validation, float) or not 0 < validation < 1:
        raise UsageError(explain("validation must be a share of the rows below 1, or the name of a column",
                                 "validation=0.1", validation=validation))
    train, val = df.randomSplit([1.0 - validation, validation], seed=seed)
    return train, val


def _kind(type_: Any) -> str:
    if type_.typeName() == "vector" or type(type_).__name__ == "VectorUDT":
        return VECTOR
    return ARRAY if type_.typeName() == "array" else SCALAR


def _plain(df: Any, kinds: Mapping[str, str]) -> Any:
    """Returns the columns, with vectors as arrays."""
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions

    return df.select(*(vector_to_array(functions.col(name), dtype="float32").alias(name) if kind == VECTOR
                       else functions.col(name) for name, kind in kinds.items()))

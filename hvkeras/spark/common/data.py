"""Training data of estimators: DataFrames are written to Parquet files in a store."""

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
    """Training and validation data in a store.

    Attributes:
        val_path: "" without validation data.
        kinds: SCALAR, ARRAY or VECTOR for each column.
    """

    train_path: str
    val_path: str
    kinds: Mapping[str, str]


@contextlib.contextmanager
def prepared(df: Any, store: Store, columns: Sequence[str], validation: float | str | None, partitions: int,
             seed: int | None) -> Iterator[Prepared]:
    """Write the columns of a DataFrame to a store, and delete them on exit.

    Args:
        validation: The fraction of rows held out for validation, or a column that is true or positive in them.
        partitions: The number of files of training data.
        seed: The seed of a random split.

    Yields:
        The paths of the data.

    Raises:
        UsageError: A column does not exist, or validation is neither a fraction nor a column.
    """
    train, val = _split(df, validation, seed)
    kinds = {name: _kind(df.schema[name].dataType) for name in _existing(df, columns)}
    suffix = uuid.uuid4().hex[:12]
    paths = store.get_train_data_path(suffix), store.get_val_data_path(suffix)
    try:
        for part, path in ((train, paths[0]), (val, paths[1])):
            if part is not None:
                _vectors_as_arrays(part, kinds).repartition(partitions).write.mode("overwrite").parquet(
                    store.for_spark(path))
        yield _validated(Prepared(paths[0], "" if val is None else paths[1], kinds), store)
    finally:
        for path in paths:
            store.delete(path)


def find_data(store: Store, index: object) -> Prepared:
    """Find the training and validation data that the user has written to a store.

    Args:
        index: The identifier of the dataset in the store, or None.

    Raises:
        UsageError: There are no Parquet data, or a scalar column has nulls.
    """
    import pyarrow as pa
    from pyarrow import dataset

    train_path, val_path = store.get_train_data_path(index), store.get_val_data_path(index)
    if not store.is_parquet_dataset(train_path):
        raise UsageError(explain("The store must have Parquet data to train on", f"df.write.parquet({train_path!r})",
                                 path=train_path))
    filesystem, path = store.located(train_path)
    schema = dataset.dataset(path, format="parquet", filesystem=filesystem).schema
    kinds = {field.name: ARRAY if pa.types.is_nested(field.type) else SCALAR for field in schema}
    return _validated(Prepared(train_path, val_path if store.is_parquet_dataset(val_path) else "", kinds), store)


def _validated(found: Prepared, store: Store) -> Prepared:
    """Check for nulls before any rank starts, and omit validation data without rows.

    Raises:
        UsageError: A scalar column has nulls.
    """
    rows = {path: _rows_of(path, found.kinds, store) for path in (found.train_path, found.val_path) if path}
    return found if rows.get(found.val_path) else replace(found, val_path="")


def _rows_of(path: str, kinds: Mapping[str, str], store: Store) -> int:
    from pyarrow import dataset

    filesystem, located = store.located(path)
    files = [fragment.metadata for fragment in dataset.dataset(located, format="parquet", filesystem=filesystem)
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
        raise UsageError(explain("The DataFrame must have all columns that training needs",
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
        raise UsageError(explain("validation must be a fraction of the rows between 0 and 1, or the name of a column",
                                 "validation=0.1", validation=validation))
    train, val = df.randomSplit([1.0 - validation, validation], seed=seed)
    return train, val


def _kind(type_: Any) -> str:
    if type_.typeName() == "vector" or type(type_).__name__ == "VectorUDT":
        return VECTOR
    return ARRAY if type_.typeName() == "array" else SCALAR


def _vectors_as_arrays(df: Any, kinds: Mapping[str, str]) -> Any:
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions

    return df.select(*(vector_to_array(functions.col(name), dtype="float32").alias(name) if kind == VECTOR
                       else functions.col(name) for name, kind in kinds.items()))

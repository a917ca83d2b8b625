"""A rank's shard of Parquet data, read by pyarrow as batches of NumPy arrays.

The rows of all row groups, in the order of their files, are divided into equal contiguous shards, one for each rank. A
rank reads only the row groups that overlap its shard, and at most two of these belong to other ranks as well. All ranks
have the same number of batches, whatever the sizes of the row groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvkeras.errors import MachineError, UsageError, explain


def column_array(name: str, column: Any) -> Any:
    """Convert a column of an Arrow table to a NumPy array of shape `[rows, ...]`.

    Args:
        column: Numbers, booleans, strings, or (nested) lists of numbers of equal length.

    Returns:
        A NumPy array; float64 becomes float32, as in Keras.

    Raises:
        UsageError: The column has nulls, lists of unequal lengths, or another type.
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
    result = array.to_numpy(zero_copy_only=False)
    if result.dtype == np.float64:
        result = result.astype(np.float32)
    return result.reshape(shape)


def shaped(name: str, array: Any, shape: Any) -> Any:
    """Reshape rows to the shape that a model's input or a loss expects.

    Args:
        array: An array of shape `[rows, ...]`.
        shape: The shape of a row, with None for unknown dimensions; None for no reshaping.

    Raises:
        UsageError: The rows have another number of values.
    """
    if shape is None or tuple(array.shape[1:]) == tuple(shape):
        return array
    if any(size is None for size in shape):
        return array  # Keras raises if it does not fit
    values, expected = int(np.prod(array.shape[1:])), int(np.prod(shape))
    if values != expected:
        raise UsageError(explain("Rows of a column must have as many values as the model expects",
                                 "compare the column with the model's inputs, or set label_shapes", column=name,
                                 values=values, expected=tuple(shape)))
    return array.reshape([len(array), *shape])


POOL_BYTES = 256 * 1024**2  # default size of the shuffle buffer

Arrays = dict[str, Any]


@dataclass(frozen=True)
class RowRange:
    """Rows of one row group.

    Attributes:
        fragment: The row group, a fragment of pyarrow's dataset.
        start: The first row of the range in the row group.
    """

    fragment: Any
    start: int
    count: int


class ParquetShare:
    """One rank's shard of a Parquet dataset.

    Args:
        filesystem: pyarrow's file system.
        path: The dataset's folder in that file system.
        training: Whether all ranks get the same number of rows; the remainder is dropped.
        transform: Called with a pandas DataFrame of the rows of a row group; returns one with as many rows.

    Attributes:
        rows: The number of rows of this rank.
        total: The number of rows of all ranks.

    Raises:
        MachineError: The dataset does not exist.
        UsageError: A training dataset has fewer rows than there are ranks.
    """

    def __init__(self, filesystem: Any, path: str, columns: Sequence[str], rank: int, size: int, training: bool = True,
                 transform: Callable[[Any], Any] | None = None) -> None:
        from pyarrow import dataset

        self._columns, self._transform = list(columns), transform
        try:
            source = dataset.dataset(path, format="parquet", filesystem=filesystem)
            fragments = [piece for file in sorted(source.get_fragments(), key=lambda each: str(each.path))
                         for piece in file.split_by_row_group()]
        except FileNotFoundError:
            raise MachineError(explain("All ranks must be able to read the data that Spark has written",
                                       "use a store that all hosts share", path=path)) from None
        sizes = [sum(group.num_rows for group in fragment.row_groups) for fragment in fragments]
        self.total: int = sum(sizes)
        first, after = share_of(self.total, rank, size, training)
        self.rows: int = after - first
        if training and not self.rows:
            raise UsageError(explain("Training needs at least one row for each rank", "start fewer ranks",
                                     rows=self.total, ranks=size))
        self._pieces: list[RowRange] = []
        self._bytes = sum(group.total_byte_size for fragment in fragments for group in fragment.row_groups)
        begin = 0
        for fragment, count in zip(fragments, sizes, strict=True):
            start, stop = max(first, begin), min(after, begin + count)
            if start < stop:
                self._pieces.append(RowRange(fragment, start - begin, stop - start))
            begin += count
        if not self._pieces and fragments:
            self._pieces.append(RowRange(fragments[0], 0, 0))
        self._cached: list[Arrays] | None = None

    def keep_in_memory(self) -> None:
        """Read all rows once, and cache them in memory."""
        self._cached = [self._read(piece) for piece in self._pieces]

    def batches(self, batch_size: int, shuffle: bool = False, pool: int | None = None,
                seed: int | Sequence[int] = 0) -> Iterator[Arrays]:
        """Iterate over the rows once.

        Args:
            batch_size: The number of rows of a batch; the last batch may be smaller.
            shuffle: Whether to read row groups in random order, and to shuffle rows within a buffer of row groups.
            pool: The number of rows in the shuffle buffer; by default as many as fit into 256 MiB.
            seed: The seed of the order, or several numbers that form one.

        Yields:
            The columns of each batch. A rank without rows yields one empty batch, as Keras needs at least one.
        """
        random = np.random.default_rng(seed)
        order = random.permutation(len(self._pieces)) if shuffle else range(len(self._pieces))
        pool_rows = max(batch_size, self._pool_rows() if pool is None else pool) if shuffle else batch_size
        buffered: list[Arrays] = []
        rows = 0
        for index, number in enumerate(order):
            buffered.append(self._cached[number] if self._cached is not None else self._read(self._pieces[number]))
            rows += self._pieces[number].count
            last = index == len(self._pieces) - 1
            if rows < pool_rows and not last:
                continue
            pooled = _joined(buffered)
            if shuffle:
                pooled = _rows_of(pooled, random.permutation(rows))
            complete = rows if last else rows - rows % batch_size
            for start in range(0, max(complete, not self.rows), batch_size):
                yield _rows_of(pooled, slice(start, min(start + batch_size, complete)))
            buffered, rows = [_rows_of(pooled, slice(complete, rows))], rows - complete

    def _pool_rows(self) -> int:
        return max(1, POOL_BYTES * self.total // max(1, int(self._bytes)))

    def _read(self, piece: RowRange) -> Arrays:
        if self._transform is None:
            table = piece.fragment.to_table(columns=self._columns)
        else:
            table = self._transformed(piece.fragment.to_table())
        # One row at least, since the row shape of an empty list column is unknown.
        table = table.slice(piece.start, max(1, piece.count))
        arrays = {name: column_array(name, table.column(name)) for name in self._columns}
        return arrays if piece.count else _rows_of(arrays, slice(0))

    def _transformed(self, table: Any) -> Any:
        import pyarrow as pa

        assert self._transform is not None
        transformed = self._transform(table.to_pandas())
        if len(transformed) != table.num_rows:
            raise UsageError(explain("transformation_fn must return as many rows as it gets", "filter rows with Spark",
                                     rows=table.num_rows, returned=len(transformed)))
        missing = [name for name in self._columns if name not in transformed.columns]
        if missing:
            raise UsageError(explain("transformation_fn must return all columns that training needs",
                                     f"return {missing[0]!r} as well", columns=list(transformed.columns)))
        return pa.Table.from_pandas(transformed[self._columns], preserve_index=False)


def share_of(total: int, rank: int, size: int, training: bool) -> tuple[int, int]:
    """Return the range of a rank's rows: the first, and the one after the last.

    Args:
        training: Whether all ranks get the same number of rows.
    """
    if training:
        return rank * (total // size), (rank + 1) * (total // size)
    return rank * total // size, (rank + 1) * total // size


def _joined(parts: Sequence[Arrays]) -> Arrays:
    return dict(parts[0]) if len(parts) == 1 else {name: np.concatenate([part[name] for part in parts])
                                                   for name in parts[0]}


def _rows_of(arrays: Arrays, rows: Any) -> Arrays:
    return {name: array[rows] for name, array in arrays.items()}

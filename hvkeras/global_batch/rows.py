"""Rows of a batch: each rank computes a contiguous block of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvkeras.collectives.row_share import RowShare
from hvkeras.compat import graphs
from hvkeras.data.datasets import leading_rows
from hvkeras.errors import UsageError, explain

CANNOT_CUT = "All arrays of a batch must have the same number of rows, so that each rank can compute its rows"
WRITE = ('for batches that are not made of rows, such as graphs whose nodes are concatenated, run without'
          ' --data-parallel, and give each rank whole batches: hvd.init(); hvd.shard(dataset, by="elements")')


@dataclass(frozen=True)
class Block:
    """This rank's block of the rows of a batch. Numbers are integers if the batch has a static shape, else tensors.

    Attributes:
        start: Index of the first row that this rank computes.
        rows: Number of rows that it computes: `counted`, but at least one, so that no layer sees an empty batch.
        counted: Number of these rows that count.
        total: Number of rows of the batch.
    """

    start: Any
    rows: Any
    counted: Any
    total: Any

    @property
    def is_static(self) -> bool:
        """True if the numbers are integers, and this rank computes some of the rows."""
        return isinstance(self.total, int) and self.rows != self.total

    def share(self, trains: bool, reduces: bool, cuts_constants: bool = False) -> RowShare:
        """Return the share of the rows for a step.

        Args:
            cuts_constants: Whether tensors of a constant number of rows are to be made for this rank's rows.
        """
        share = tf.math.divide_no_nan(tf.cast(self.counted, tf.float64), tf.cast(self.total, tf.float64))
        constants = (self.total, self.rows) if cuts_constants and self.is_static else None
        return RowShare(share, tf.convert_to_tensor(self.counted > 0), trains, reduces, constants)


def block_of(leaves: Sequence[Any], rank: int, size: int) -> Block | None:
    """Return a rank's block of the rows of a batch.

    Args:
        leaves: The arrays of the batch: tensors, dense, ragged or sparse, and other values, which have no rows.

    Returns:
        The block; None if no array has rows.

    Raises:
        UsageError: Arrays have different numbers of rows.
    """
    static = [_static_rows(leaf) for leaf in leaves if _has_rows(leaf)]
    if not static:
        return None
    known = sorted({count for count in static if count is not None})
    if len(known) > 1:
        raise UsageError(explain(CANNOT_CUT, WRITE, rows=known))
    if None not in static:
        return bounds(known[0], rank, size)
    counts = [leading_rows(leaf) for leaf in leaves if _has_rows(leaf)]
    total = counts[0]
    checks = [tf.debugging.assert_equal(count, total, explain(CANNOT_CUT, WRITE)) for count in counts[1:]]
    with tf.control_dependencies([check for check in checks if check is not None]):
        return bounds(tf.identity(total), rank, size)


def bounds(total: Any, rank: int, size: int) -> Block:
    """Return a rank's block of a number of rows; the first ranks get one more if it cannot be divided."""
    larger, smaller = (max, min) if isinstance(total, int) else (tf.maximum, tf.minimum)
    each, more = total // size, total % size
    start = rank * each + smaller(more, rank)
    counted = each + (int(rank < more) if isinstance(total, int) else tf.cast(rank < more, total.dtype))
    rows = smaller(larger(counted, 1), total)
    return Block(smaller(start, larger(total - rows, 0)), rows, counted, total)


@graphs.without_autograph
def cut_zipped(batch: Any, rank: int, size: int) -> tuple[Any, Block]:
    """Return a rank's rows of a batch of datasets that were batched one by one and then zipped, and its block.

    Rows belong together in groups: of 16 labelled and 48 unlabelled rows, one and three. The block counts groups.
    """
    leaves = tf.nest.flatten(batch)
    counts = [leading_rows(leaf) for leaf in leaves if _has_rows(leaf)]
    groups = functools.reduce(_greatest_common_divisor, counts)
    block = bounds(groups, rank, size)

    def rows_of(leaf: Any) -> Any:
        if not _has_rows(leaf):
            return leaf
        each = leading_rows(leaf) // groups
        return _rows_of(leaf, Block(block.start * each, block.rows * each, block.counted, block.total))

    return tf.nest.map_structure(rows_of, batch), block


def _greatest_common_divisor(one: Any, other: Any) -> Any:
    found, _ = tf.while_loop(lambda _, rest: rest > 0, lambda number, rest: (rest, number % rest), (one, other))
    return found


@graphs.without_autograph
def cut(batch: Any, block: Block) -> Any:
    """Return the rows of a block, in the structure of the batch."""
    return tf.nest.map_structure(lambda leaf: _rows_of(leaf, block) if _has_rows(leaf) else leaf, batch)


def _rows_of(leaf: Any, block: Block) -> Any:
    stop = block.start + block.rows
    if not isinstance(leaf, tf.sparse.SparseTensor):
        return leaf[block.start : stop]
    start, rows = (tf.cast(number, tf.int64) for number in (block.start, block.rows))
    others = leaf.dense_shape[1:]
    part = tf.sparse.slice(leaf, tf.concat([[start], tf.zeros_like(others)], 0), tf.concat([[rows], others], 0))
    part.set_shape([None, *leaf.shape[1:]])
    return part


def _has_rows(leaf: Any) -> bool:
    if isinstance(leaf, (tf.RaggedTensor, tf.sparse.SparseTensor)):
        return True
    return isinstance(leaf, tf.Tensor) and leaf.shape.rank != 0


def _static_rows(leaf: Any) -> int | None:
    shape = leaf.shape
    found: int | None = None if shape.rank is None else shape[0]
    return found

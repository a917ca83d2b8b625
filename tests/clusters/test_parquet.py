"""Shares of Parquet data: row groups of any size come out even."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from hvkeras.errors import MachineError, UsageError
from hvkeras.spark.common.reader import ParquetShare, column_array, shaped, share_of
from hvkeras.spark.common.store import DBFSLocalStore, FilesystemStore, HDFSStore, LocalStore, Store

GROUPS = ((5, 40, 1), (17,), (2, 2, 2, 30))  # the rows of the row groups of each file: 99 in all


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path, first = tmp_path_factory.mktemp("data"), 0
    for number, groups in enumerate(GROUPS):
        schema = pa.schema([("number", pa.int64()), ("pair", pa.list_(pa.float64()))])
        with pq.ParquetWriter(path / f"part-{number}.parquet", schema) as writer:
            for rows in groups:
                numbers = list(range(first, first + rows))
                writer.write_table(pa.table({"number": numbers, "pair": [[each, -each] for each in numbers]}, schema))
                first += rows
    return path


def share(folder, rank, size, **options):
    return ParquetShare(fs.LocalFileSystem(), str(folder), ["number", "pair"], rank, size, **options)


def numbers(part, *arguments, **options):
    return [batch["number"].tolist() for batch in part.batches(*arguments, **options)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("training", [True, False])
def test_every_row_has_one_rank_and_shares_are_even(folder, size, training):
    parts = [share(folder, rank, size, training=training) for rank in range(size)]
    read = [list(chain(*numbers(part, 8))) for part in parts]
    assert [part.rows for part in parts] == [len(rows) for rows in read]
    assert len({part.rows for part in parts}) <= (1 if training else 2)
    assert list(chain(*read)) == list(range(99 // size * size if training else 99))


def test_batches_are_full_but_for_the_last(folder):
    assert [len(batch) for batch in numbers(share(folder, 0, 2), 8)] == [8] * 6 + [1]
    assert [len(batch) for batch in numbers(share(folder, 0, 2), 8, shuffle=True, pool=20)] == [8] * 6 + [1]


def test_shuffled_rows_are_the_same_in_another_order_each_time(folder):
    part = share(folder, 1, 3)
    part.keep_in_memory()
    orders = [list(chain(*numbers(part, 8, shuffle=True, pool=pool, seed=(1, epoch))))
              for epoch in (0, 1) for pool in (None, 12)]
    assert all(sorted(order) == list(range(33, 66)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


def test_lists_are_arrays_and_a_transformation_sees_frames(folder):
    batch = next(iter(share(folder, 0, 2).batches(3)))
    assert batch["pair"].dtype == np.float32 and batch["pair"].tolist() == [[0, 0], [1, -1], [2, -2]]

    def doubled(frame):
        return frame.assign(number=2 * frame["number"])

    assert numbers(share(folder, 0, 2, transform=doubled), 3)[0] == [0, 2, 4]
    with pytest.raises(UsageError, match="as many rows"):
        numbers(share(folder, 0, 2, transform=lambda frame: frame[:-1]), 3)
    with pytest.raises(UsageError, match="return 'pair' as well"):
        numbers(share(folder, 0, 2, transform=lambda frame: frame[["number"]]), 3)


def test_a_rank_without_rows_has_one_empty_batch(folder):
    part = share(folder, 0, 200, training=False)
    assert part.rows == 0 and numbers(part, 8) == [[]]
    assert next(iter(part.batches(8)))["pair"].shape == (0, 2)
    with pytest.raises(UsageError, match="at least one row for each rank"):
        share(folder, 0, 200)


def test_absent_data_are_told(tmp_path):
    with pytest.raises(MachineError, match="a store that all hosts share"):
        share(tmp_path / "nothing", 0, 1)


def test_share_of():
    assert [share_of(10, rank, 3, True) for rank in range(3)] == [(0, 3), (3, 6), (6, 9)]
    assert [share_of(10, rank, 3, False) for rank in range(3)] == [(0, 3), (3, 6), (6, 10)]


@pytest.mark.parametrize(("column", "words"), [
    (pa.array([1, None]), "must not contain nulls"),
    (pa.array([[1, 2], [3]]), "same length"),
    (pa.array([[1, None]]), "must not contain nulls"),
    (pa.array([{"a": 1}]), "numbers, booleans, texts"),
])
def test_columns_that_are_no_arrays_are_told(column, words):
    with pytest.raises(UsageError, match=words):
        column_array("column", column)


def test_rows_take_the_shape_of_an_input():
    array = np.arange(12).reshape(2, 6)
    assert shaped("x", array, (2, 3)).shape == (2, 2, 3)
    assert shaped("x", array, (None, 3)) is array and shaped("x", array, None) is array
    assert shaped("x", np.arange(2), (1,)).shape == (2, 1)
    with pytest.raises(UsageError, match=r"values=6, expected=\(5,\)"):
        shaped("x", array, (5,))


def test_stores_by_their_urls(tmp_path):
    kinds = {"/a/b": LocalStore, "file:///a/b": LocalStore, "hdfs://name:8020/a": HDFSStore, "dbfs:/a": DBFSLocalStore,
             "/dbfs/a": DBFSLocalStore, "s3://bucket/a": FilesystemStore}
    assert {url: type(Store.create(url)) for url in kinds} == kinds
    assert Store.create("file:///a/b/").get_train_data_path(3) == "/a/b/intermediate_train_data.3"
    assert Store.create("/a").for_spark("/a/x") == "file:///a/x"
    dbfs = Store.create("dbfs:/a")
    assert (dbfs.get_logs_path("r"), dbfs.for_spark("/dbfs/a/x")) == ("/dbfs/a/runs/r/logs", "dbfs:/a/x")
    hdfs = HDFSStore("/me", host="name", port=9000)
    assert hdfs.get_checkpoint_path("r") == "hdfs://name:9000/me/runs/r/checkpoint.keras"
    store = Store.create(f"file://{tmp_path}/s")
    assert not store.exists(store.get_checkpoint_path("r"))
    store.write_text(store.get_checkpoint_path("r"), "text")
    assert store.read(store.get_checkpoint_path("r")) == b"text" and store.exists(store.get_run_path("r"))
    store.delete(store.get_runs_path())
    assert not store.exists(store.get_runs_path())
    with pytest.raises(UsageError, match="needs a folder"):
        LocalStore("")

"""How gradients are sorted into buckets."""

from __future__ import annotations

import pytest

from hvkeras.collectives.buckets import FIRST_BUCKET, by_dtype, pack

MIB = 1024**2


def packed(sizes: list[int | None], limit: int = 25 * MIB, dtypes: list[str] | None = None) -> list[list[int]]:
    indices = list(range(len(sizes)))
    kinds = dict(enumerate(dtypes or ["float32"] * len(sizes)))
    return pack(indices, kinds, dict(enumerate(sizes)), limit, FIRST_BUCKET)


def test_the_first_bucket_is_small_and_later_ones_are_full() -> None:
    assert FIRST_BUCKET == MIB
    assert packed([MIB // 2, MIB // 2, MIB, 20 * MIB, 4 * MIB, MIB]) == [[0, 1], [2, 3, 4], [5]]


def test_a_tensor_above_the_limit_has_a_bucket_of_its_own() -> None:
    assert packed([1, 100 * MIB, 1, 1]) == [[0], [1], [2, 3]]


def test_a_limit_below_the_first_bucket_counts_from_the_start() -> None:
    assert packed([4, 4, 4], limit=8) == [[0, 1], [2]]
    assert packed([4, 4, 4], limit=0) == [[0], [1], [2]]


def test_each_bucket_has_one_dtype() -> None:
    assert packed([4, 4, 4, 4], dtypes=["float32", "float16", "float32", "float16"]) == [[0, 2], [1, 3]]


def test_tensors_of_unknown_size_go_alone() -> None:
    assert packed([4, None, 4]) == [[1], [0, 2]]


@pytest.mark.parametrize("limit", [1, 7, 8, 9, 64, MIB])
def test_every_tensor_is_in_exactly_one_bucket(limit: int) -> None:
    sizes: list[int | None] = [3, None, 8, 0, 9, 64, 1, None, 8]
    assert sorted(index for bucket in packed(sizes, limit) for index in bucket) == list(range(len(sizes)))


def test_by_dtype_keeps_the_order() -> None:
    assert by_dtype([3, 1, 2, 0], {0: "a", 1: "b", 2: "a", 3: "b"}) == [[3, 1], [2, 0]]

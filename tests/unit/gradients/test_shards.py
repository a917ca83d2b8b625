"""How variables are assigned to ranks that share an optimizer's update."""

from __future__ import annotations

import itertools

import pytest

from hvkeras.gradients.shards import Bounds, Extent, by_elements, by_variables

MIB = 1024**2


def extents(*shapes: tuple[int, ...], **options: bool) -> list[Extent]:
    return [Extent(shape, "float32", 4, **options) for shape in shapes]


def loads(bounds: list[Bounds], ranks: int) -> list[int]:
    return [sum(each[rank + 1] - each[rank] for each in bounds) for rank in range(ranks)]


def lookups_and_biases() -> list[Extent]:
    return extents((30_000, 512), *[(512, 512), (512,)] * 12)


def convolutions() -> list[Extent]:
    return extents((7, 7, 3, 64), *[(3, 3, 256, 256), (256,), (256,)] * 16, (2048, 1000), (1000,))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("model", [lookups_and_biases(), convolutions()], ids=["lookups and biases", "convolutions"])
def test_ranks_have_equal_shares_of_elements(model: list[Extent], ranks: int) -> None:
    bounds = by_elements(model, ranks, 25 * MIB)
    for each, extent in zip(bounds, model, strict=True):
        assert (each[0], each[-1], len(each)) == (0, extent.count, ranks + 1)
        assert list(each) == sorted(each)
    total = sum(extent.count for extent in model)
    assert max(loads(bounds, ranks)) <= 1.02 * total / ranks


def test_few_variables_are_cut_and_lookups_between_rows_that_are_aligned() -> None:
    model = lookups_and_biases()
    bounds = by_elements(model, 4, 25 * MIB)
    cuts = [cut for each, extent in zip(bounds, model, strict=True) for cut in each if 0 < cut < extent.count]
    assert len(cuts) <= 3 * 3  # of three buckets, each into four
    assert all(cut % 512 == 0 for cut in bounds[0])
    assert all(cut * 4 % 64 == 0 for each in bounds for cut in each if cut != each[-1])


def test_variables_that_must_not_be_cut_stay_whole() -> None:
    bounds = by_elements(extents((100, 100), (80, 100), (90, 100), may_be_cut=False), 2, 25 * MIB)
    assert all(set(each) <= {0, each[-1]} for each in bounds)
    assert min(loads(bounds, 2)) > 0


def test_each_dtype_is_assigned_for_itself() -> None:
    bounds = by_elements([Extent((1000,), "float32", 4), Extent((1000,), "float64", 8)], 2, MIB)
    assert bounds == [(0, 500, 1000), (0, 496, 1000)]  # 64 bytes are 8 of the second's, 16 of the first's


def test_whole_variables_go_to_whoever_has_the_least() -> None:
    bounds = by_variables(extents((10,), (30,), (20,), (25,)), 2)
    assert bounds == [(0, 10, 10), (0, 30, 30), (0, 0, 20), (0, 0, 25)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_fewer_elements_than_ranks_leave_some_with_nothing(ranks: int) -> None:
    for assignment in (by_elements(extents((1,), ()), ranks, MIB), by_variables(extents((1,), ()), ranks)):
        assert sum(loads(assignment, ranks)) == 2
        assert all(start <= stop for each in assignment for start, stop in itertools.pairwise(each))

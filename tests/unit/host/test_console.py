"""The texts of lines that hvkeras prints."""

from __future__ import annotations

import pytest

from hvkeras.host.console import format_ranks, some_of


@pytest.mark.parametrize(("ranks", "text"), [
    ([1], "rank 1"), ([1, 3], "ranks 1, 3"), ([0, 1, 2], "ranks 0, 1, 2"), ([0, 2, 1, 3], "ranks 0, 2, 1, 3"),
    ([0, 1, 2, 3, 5], "ranks 0 to 3, 5"), ([7, *range(512, 1024)], "ranks 7, 512 to 1023"),
    ([*range(0, 16, 2)], "ranks 0, 2, 4, 6, 8, 10, 12, 14"),
    ([*range(0, 1024, 2)], "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 504 more"),
    ([*range(5), *range(10, 30, 2), *range(100, 200)], "ranks 0 to 4, 10, 12, 14, 16, 18, 20, 22 and 103 more")])
def test_ranks_in_words_stay_short_and_few_are_all_named(ranks: list[int], text: str) -> None:
    assert format_ranks(ranks) == text


def test_some_of_many_texts_are_listed() -> None:
    assert some_of(["a", "b"]) == "a, b"
    assert some_of([f"t{number}" for number in range(10)]) == "t0, t1, t2, t3, t4, t5, t6, t7 and 2 more"

"""Layouts in which a function of parts gives parts of its results without communication, whatever rules say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from hvkeras.partition.layouts import Divided, Layout, Partial
from unit.partition.brute_force import ROWS, Combination, parts_of, whole_of
from unit.partition.simulation import Traced

RANKS, NUMBERS = 3, (7, 5)


def possible_layouts(case: Traced, layouts: Combination) -> list[set[str]] | None:
    """Return the layouts that each result could have; None if the function cannot be given parts, or a result has none.

    Args:
        case: A case that has been traced for `NUMBERS`.
        layouts: Layouts of its operands.
    """
    found: list[set[str]] = []
    generator = np.random.default_rng(3)
    for number in NUMBERS:
        lanes = zip(
            *(
                parts_of(array, layout, number, RANKS, generator)
                for array, layout in zip(case.arrays[number], layouts, strict=True)
            ),
            strict=True,
        )
        try:
            results = [tf.nest.flatten(case.whole(*map(tf.constant, parts))) for parts in lanes]
        except tf.errors.OpError:
            return None
        of_number = [
            set(_layouts_of_parts([part.numpy() for part in parts], right, number, case))
            for parts, right in zip(zip(*results, strict=True), case.wanted[number], strict=True)
        ]
        found = [one & other for one, other in zip(found, of_number, strict=True)] if found else of_number
    return found if all(found) else None


def _layouts_of_parts(parts: Sequence[np.ndarray], right: np.ndarray, number: int, case: Traced) -> Iterator[str]:
    """Yield the layouts in which parts are those of an array."""
    if all(case.is_close(part, right) for part in parts):
        yield "replicated"
    for layout in _layouts_of(right.shape, number):
        if isinstance(layout, Partial):
            fits = right.dtype != bool and all(part.shape == right.shape for part in parts)
        else:
            fits = all(
                part.shape
                == (
                    *right.shape[: layout.axis],
                    right.shape[layout.axis] // number * (number // RANKS + (number % RANKS > rank)),
                    *right.shape[layout.axis + 1 :],
                )
                for rank, part in enumerate(parts)
            )
        if fits and case.is_close(whole_of(parts, layout, number), right):
            yield str(layout).replace(f", {number}]", ", all]").replace(f"[{number},", "[all,")


def _layouts_of(shape: Sequence[int], number: int) -> Iterator[Divided | Partial]:
    yield from (Partial(reduction, ROWS) for reduction in ("sum", "max", "min"))
    for axis, size in enumerate(shape):
        if size and size % number == 0:
            yield from (
                Divided(ROWS, axis, outer, size // number // outer)
                for outer in range(1, size // number + 1)
                if size // number % outer == 0
            )


def told(layouts: Sequence[Layout]) -> str:
    """Return layouts in few words."""
    return ", ".join(
        "whole" if str(layout) == "replicated" else str(layout).removeprefix("divided by rows along ")
        for layout in layouts
    )

"""The sketches by which ranks compare their weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from hvkeras.training.sketches import SKETCHES, WIDTH, all_diverged, sketch, tolerance

SHAPES = [(3,), (7, 5), (WIDTH,), (WIDTH + 1,), (3 * WIDTH + 17,), ()]


def apart(one: Any, other: Any, steps: int = 1) -> bool:
    found = np.stack([sketch(tf.constant(value)).numpy()[np.newaxis] for value in (one, other)])
    return bool(all_diverged(found.max(0), found.min(0), steps))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_sketch_is_short_and_holds_the_norm(shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(1).normal(size=shape).astype("float32")
    found = sketch(tf.constant(values)).numpy()
    assert found.shape == (SKETCHES + 1,)
    assert found[-1] == pytest.approx(np.linalg.norm(values), rel=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_equal_weights_are_not_apart_and_others_are(shape: tuple[int, ...], dtype: str) -> None:
    random = np.random.default_rng(2)
    values = random.normal(size=shape).astype(dtype)
    assert not apart(values, values)
    assert apart(values, (values + 0.01 * random.normal(size=shape)).astype(dtype))


def test_differences_that_add_up_to_zero_are_seen() -> None:
    values = np.ones(10, "float32")
    moved = values + np.array([0.1, -0.1] * 5, "float32")
    assert apart(values, moved)


def test_one_element_of_many_is_seen() -> None:
    values = np.random.default_rng(3).normal(size=100_000).astype("float32")
    moved = values.copy()
    moved[77_777] += 0.1
    assert apart(values, moved)


@pytest.mark.parametrize("strange", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_on_one_rank_alone_is_seen(strange: float) -> None:
    values = np.ones(5, "float32")
    broken = values.copy()
    broken[2] = strange
    assert apart(values, broken)
    assert not apart(broken, broken)


def test_rounding_is_tolerated_and_more_after_more_steps() -> None:
    values = np.random.default_rng(4).normal(size=5000).astype("float32")
    rounded = values * (1 + np.float32(1e-7) * np.random.default_rng(5).choice([-1, 1], 5000).astype("float32"))
    assert not apart(values, rounded)
    assert tolerance(1) < tolerance(10_000) < 1e-4

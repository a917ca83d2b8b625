"""Whole training steps: what ranks compute together is what one process computes, and costs little more."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import pytest
import tensorflow as tf

from unit.partition.steps import ROWS, STEPS, use_float64

QUICK = ("mlp", "cnn", "contrastive", "lambda")
LONG = ("lstm", "gru")
CASES = [*(pytest.param(name, 3, marks=() if name in QUICK else pytest.mark.slow) for name in STEPS),
         *(pytest.param(name, 2, marks=pytest.mark.nightly if name in LONG else pytest.mark.slow) for name in STEPS)]


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    use_float64()
    yield
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(policy)


@pytest.mark.parametrize(("name", "size"), CASES)
def test_a_step_on_ranks_is_that_of_one_process(name: str, size: int):
    step = STEPS[name]
    ranks, summed = step.on(size)
    assert step.differences(ranks) == []
    report = ranks.partitioned.report
    assert len(report.rounds) <= step.rounds
    assert bool(report.gathered) == (not step.nbytes), report
    nbytes = sum(variable.shape.num_elements() * tf.as_dtype(variable.dtype).size for variable in summed)
    assert not step.nbytes or all(report.nbytes({"rows": rows}) <= step.nbytes * nbytes for rows in ROWS)

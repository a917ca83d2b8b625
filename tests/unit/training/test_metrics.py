"""How the states of one metric on several ranks become one."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvkeras.errors import UsageError
from hvkeras.training.metrics import average, merge_states, merging_of


def updated(make: Any, truth: Any, guess: Any) -> Any:
    metric = make()
    metric.update_state(truth, guess)
    return metric


@pytest.mark.parametrize("make", [
    keras.metrics.Mean, keras.metrics.AUC, keras.metrics.Precision, keras.metrics.Recall, keras.metrics.BinaryAccuracy,
    keras.metrics.MeanSquaredError, keras.metrics.RootMeanSquaredError, keras.metrics.CosineSimilarity,
    lambda: keras.metrics.MeanIoU(2), lambda: keras.metrics.F1Score(threshold=0.5), keras.metrics.R2Score,
    lambda: keras.metrics.SensitivityAtSpecificity(0.5), keras.metrics.LogCoshError,
    lambda: keras.metrics.MeanMetricWrapper(lambda y, p: tf.abs(y - p), name="own"),
], ids=lambda make: getattr(make, "__name__", "made"))
def test_merged_states_give_the_result_of_all_samples(make: Any) -> None:
    random = np.random.default_rng(1)
    truth = (random.random((30, 1)) > 0.5).astype("float32")
    guess = random.random((30, 1)).astype("float32")
    parts = [slice(0, 17), slice(17, 25), slice(25, 30)]
    if make is keras.metrics.Mean:
        truth, guess = guess, None
    whole, *ranks = [updated(make, truth[part], None if guess is None else guess[part])
                     for part in (slice(None), *parts)]
    merged = merge_states(ranks[0], [[np.asarray(one) for one in metric.variables] for metric in ranks])
    for variable, value in zip(ranks[0].variables, merged, strict=True):
        variable.assign(value.astype(np.asarray(variable).dtype))
    np.testing.assert_allclose(np.asarray(ranks[0].result()), np.asarray(whole.result()), rtol=1e-6)


class Own(keras.metrics.Metric):  # type: ignore[misc]
    """A metric with two variables of its own, that does not say how they are merged."""

    def __init__(self) -> None:
        super().__init__(name="own")
        self.least = self.add_variable((), "zeros", name="least")
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, *args: Any) -> None:
        raise NotImplementedError

    def result(self) -> Any:
        return self.least + self.count


class Inheriting(keras.metrics.Mean):  # type: ignore[misc]
    """A metric with Keras's state alone."""


class Adding(keras.metrics.Mean):  # type: ignore[misc]
    """A metric with one variable beside Keras's."""

    def __init__(self) -> None:
        super().__init__()
        self.more = self.add_variable((), "zeros", name="more")


def with_merge(declared: Any) -> Any:
    return type("Own", (Own,), {"hvkeras_merge": declared})()


STATES = [[np.float32(3), np.int64(1)], [np.float32(2), np.int64(5)]]


@pytest.mark.parametrize(("declared", "merged"), [
    ("sum", [5, 6]), ("max", [3, 5]), ("mean", [2.5, 3]), ("first", [3, 1]), (["min", "sum"], [2, 6]),
    (lambda self, states: [max(state[0] for state in states), len(states)], [3, 2]),
])
def test_a_metric_says_how_it_is_merged(declared: Any, merged: list[float]) -> None:
    assert merge_states(with_merge(declared), STATES) == merged


@pytest.mark.parametrize("declared", ["maximum", ["sum"], ["sum", "sum", "sum"], 3])
def test_a_wrong_declaration_is_an_error(declared: Any) -> None:
    with pytest.raises(UsageError, match="hvkeras_merge must be one of sum, mean, max, min, first"):
        merging_of(with_merge(declared))


def test_only_state_of_the_users_own_must_be_declared() -> None:
    assert merging_of(Inheriting()) == ["sum", "sum"]
    for metric in (Own(), Adding()):
        with pytest.raises(UsageError, match=f"The metric {type(metric).__name__} must declare how"):
            merging_of(metric)


def test_the_aggregation_of_variables_counts_as_a_declaration() -> None:
    metric = Own()
    metric.least = metric.add_variable((), "zeros", name="averaged", aggregation="mean")
    assert merging_of(metric) == ["sum", "sum", "mean"]


def test_sums_do_not_depend_on_how_many_ranks_there_are() -> None:
    parts = np.random.default_rng(2).random(1000).astype("float32")
    (merged,) = merge_states(keras.metrics.Sum(), [[part] for part in parts])
    assert merged == pytest.approx(float(parts.astype("float64").sum()), rel=1e-12)


def test_an_average_is_over_those_that_have_the_number() -> None:
    assert average([{"a": 1.0}, {"a": 2.0, "b": np.array([1, 2])}]).keys() == {"a", "b"}
    assert average([{"a": 1.0}, {"a": 2.0, "b": 4}]) == {"a": 1.5, "b": 4.0}

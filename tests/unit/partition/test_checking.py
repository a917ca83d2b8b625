"""The check mode names the first tensor that the ranks compute otherwise than one process."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from hvkeras.partition.collectives import Simulated
from hvkeras.partition.layouts import Partial, Replicated
from hvkeras.partition.partitioning import Partitioned
from hvkeras.partition.rules import RULES


class Model:
    """A step with a loop, a branch, random numbers and variables."""

    def __init__(self) -> None:
        self.weights = tf.Variable(tf.reshape(tf.range(12.0), [4, 3]) / 10)
        self.steps = tf.Variable(0.0)

    def step(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            hidden = tf.tanh(x @ self.weights + 0.1 * tf.random.normal(tf.shape(x)[:1])[:, None])
            mean, variance = tf.nn.moments(hidden, [0], keepdims=True)
            loss = tf.reduce_mean(tf.square((hidden - mean) / tf.sqrt(variance + 0.1) - y))
        gradient = tape.gradient(loss, self.weights)
        for _ in tf.range(2):
            self.steps.assign_add(1.0)
        if loss > 100:
            loss = loss + self.steps
        self.weights.assign_sub(0.1 * gradient)
        return loss


def differences_of(rules: Any) -> tuple[Any, Any]:
    """Return the differences and the check of a step of three ranks."""
    model = Model()
    whole = tf.function(model.step).get_concrete_function(tf.TensorSpec([None, 4]), tf.TensorSpec([None, 3]))
    partitioned = Partitioned(whole.graph, {"rows": (0, 1)}, rules)
    checks = []

    @tf.function(autograph=False)
    def run(x: tf.Tensor, y: tf.Tensor) -> Any:
        given = [[x] * 3, [y] * 3, *([tensor] * 3 for tensor in whole.captured_inputs)]
        results, differences, check = partitioned.create_checked(given, range(3), 3, Simulated())
        checks.append(check)
        return results, differences

    generator = tf.random.Generator.from_seed(1)
    _, differences = run(generator.normal([7, 4]), generator.normal([7, 3]))
    return [lane.numpy() for lane in differences], checks[0]


def test_right_rules_differ_by_rounding_only() -> None:
    differences, check = differences_of(RULES)
    assert len(differences[0]) > 20
    assert [check.first(lane) for lane in differences] == [None] * 3


@pytest.mark.parametrize("type_", ["Mean", "MatMul"])
def test_the_first_tensor_that_differs_is_named_with_its_line(type_: str) -> None:
    def wrong(call: Any) -> Any:
        from dataclasses import replace

        from hvkeras.partition.decisions import by_pattern

        found = RULES[type_](call)
        decision = found if hasattr(found, "vectors") else by_pattern(call, found)
        return replace(
            decision,
            results=tuple(
                replace(value, layout=Replicated()) if isinstance(value.layout, Partial) else value
                for value in decision.results
            ),
        )

    differences, check = differences_of({**RULES, type_: wrong})
    first = check.first(differences[0])
    assert first is not None
    assert first.operation.startswith(type_)
    assert "test_checking.py:" in first.line and " in step" in first.line
    assert first.largest > 1e-3

"""Training with parameter servers: with one worker, all numbers equal those of Keras's own `fit`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import Outcome

WORKER = Path(__file__).parent / "workers" / "parameter_server.py"
pytestmark = pytest.mark.nightly  # tests/launch/test_parameter_server.py has quick tests


@pytest.fixture
def result(launch_once: Callable[..., Outcome]) -> Callable[[str], Any]:
    """Function that returns the result of a check on the chief."""
    outcome = launch_once("tf_config", WORKER, np=4, roles=("chief", "worker", "ps", "ps"))
    assert outcome.stdout(0).endswith("the chief is done\n")
    return lambda check: outcome.result(check, 0)


@pytest.mark.parametrize("check", ["adam_and_all_kinds_of_layers", "several_inputs_and_momentum",
                                   "several_steps_an_execution_with_moving_averages_and_decay",
                                   "training_after_all_these_errors"])
def test_one_worker_trains_as_fit_does(check: str, result: Callable[[str], Any]) -> None:
    assert result(check) < 1e-5


def test_variables_are_spread_by_size(result: Callable[[str], Any]) -> None:
    found = result("variables_are_spread_by_size")
    # Kernels of 1,024 bytes, biases of 256 and 16 bytes, and four weights and a bias: each goes to the less loaded
    # server.
    assert found["places"] == [0, 1, 1, 0, 0, 0]
    # Adam's two slots are on the variable's server
    assert found["slots"] == [index for index in found["places"] for _ in range(2)]
    assert (found["batches"], found["last"]) == (4, 3)


def test_keras_callbacks_work(result: Callable[[str], Any]) -> None:
    names, epochs, rate, iterations = result("keras_callbacks")
    assert names == ["accuracy", "auc", "learning_rate", "loss", "val_accuracy", "val_auc", "val_loss"]
    assert epochs == 2
    assert rate == pytest.approx(0.005)
    assert iterations == 8  # from ModelCheckpoint's file, which loads without the cluster


def test_training_resumes_from_a_checkpoint(result: Callable[[str], Any]) -> None:
    distance, same_history, kept, epochs, done = result("going_on_from_a_checkpoint")
    assert distance < 1e-6 and same_history
    assert kept == [3, 4]
    assert (epochs, done) == ([2, 3], [])


@pytest.mark.parametrize(("name", "words"), [
    ("another model", r"UsageError: A checkpoint must belong to the model .* path='checkpoints/epoch-00004.weights."),
    ("an error in a step", r"InvalidArgumentError: (?s:.*)no number : Tensor had NaN values"),
    ("no batches", "UsageError: dataset_fn must return a dataset that has batches"),
    ("no length", r"UsageError: .* HINT: pass steps_per_epoch="),
    ("no dataset", r"UsageError: dataset_fn must return a tf.data.Dataset of batches. Received: returned='list'"),
    ("no model", "UsageError: build_model must return a Keras 3 model that is compiled"),
    ("accumulation", r"UsageError: .* leave gradient_accumulation_steps out"),
])
def test_what_cannot_be_is_an_error_in_words(name: str, words: str, result: Callable[[str], Any]) -> None:
    assert re.match(words, result("what_cannot_be")[name])

"""The chief's training loop: schedules steps, accumulates metrics, and calls Keras's callbacks."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from hvkeras import compat
from hvkeras.compat import asynchronous
from hvkeras.errors import UsageError, explain
from hvkeras.host.console import say
from hvkeras.parameter_server.checkpoints import Checkpoints
from hvkeras.parameter_server.chief import Chief
from hvkeras.parameter_server.steps import (
    DatasetFunction,
    Tally,
    evaluation,
    full_dataset,
    per_worker_batches,
    steps_of,
    training_steps,
)

_AHEAD = 16  # pending executions per worker
_RETRY = 0.1  # seconds until a failed fetch of a result is retried
_LOGS_EVERY = 0.1  # seconds between computations of the logs within an epoch


@dataclass(frozen=True)
class TrainingPlan:
    """Arguments of `train`."""

    build_model: Any
    dataset_fn: DatasetFunction
    epochs: int
    steps_per_epoch: int | None
    initial_epoch: int
    verbose: Any
    callbacks: Sequence[Any]
    validation_data: DatasetFunction | None
    validation_freq: int
    checkpoints: Checkpoints | None


def built_model(plan: TrainingPlan, spec: Any) -> Any:
    """Build the model, including the variables of its metrics and optimizer.

    Raises:
        UsageError: `build_model` did not return a compiled Keras 3 model.
    """
    with asynchronous.reset_object_names():
        model = plan.build_model()
        if not isinstance(model, keras.Model) or getattr(model, "optimizer", None) is None:
            raise UsageError(explain("build_model must return a Keras 3 model that is compiled with an optimizer",
                                     "call model.compile(...) in it, and return the model",
                                     returned=type(model).__name__))
        optimizer = compat.inner_optimizer(model.optimizer) or model.optimizer
        passes = getattr(optimizer, "gradient_accumulation_steps", None)
        if passes:
            raise UsageError(explain("Gradients cannot be accumulated on variables that several workers change at the"
                                     " same time", "leave gradient_accumulation_steps out, and make larger batches",
                                     gradient_accumulation_steps=passes))
        asynchronous.build_like(model, spec)
    return model


def fit(chief: Chief, plan: TrainingPlan) -> Any:
    """Train on the workers of a cluster.

    Args:
        plan: The arguments of `train`.

    Returns:
        Keras's `History`, whose model is an ordinary model with the trained variables.
    """
    dataset = full_dataset(plan.dataset_fn, "dataset_fn")
    steps = plan.steps_per_epoch or steps_of(dataset)
    with chief.scope():
        model = built_model(plan, dataset.element_spec)
    first = _restored_epoch(plan, model)
    loop = _Loop(chief, plan, model, steps)
    history = loop.run(max(first, plan.initial_epoch))
    result = built_model(plan, dataset.element_spec)
    _copy(model, result)
    history.set_model(result)
    return history


def _restored_epoch(plan: TrainingPlan, model: Any) -> int:
    """Restore the latest checkpoint, if any, and return its number of completed epochs."""
    epochs = plan.checkpoints.epochs() if plan.checkpoints is not None else []
    if not epochs or plan.checkpoints is None:
        return 0
    plan.checkpoints.restore(model, epochs[-1])
    say(f"training resumes after epoch {epochs[-1]}, from {plan.checkpoints.path(epochs[-1])}")
    return epochs[-1]


def _copy(model: Any, result: Any) -> None:
    for source, target in zip(_all_variables(model), _all_variables(result), strict=True):
        compat.as_tf_variable(target).assign(compat.as_tf_variable(source).numpy())


def _all_variables(model: Any) -> list[Any]:
    return [*model.weights, *asynchronous.seed_states(model), *model.optimizer.variables]


class _Loop:
    """Training loop of one call of `fit`."""

    def __init__(self, chief: Chief, plan: TrainingPlan, model: Any, steps: int) -> None:
        self._coordinator = chief.coordinator
        self._workers = chief.workers
        self._plan = plan
        self._model = model
        self._steps_per_execution = compat.steps_per_execution(model)
        self._steps = steps
        self._tally = Tally(model)
        remainder = steps % self._steps_per_execution
        self._execute = training_steps(model, chief.strategy, self._tally, self._steps_per_execution)
        self._execute_last = (training_steps(model, chief.strategy, self._tally, remainder) if remainder
                              else self._execute)
        self._evaluate = None
        if plan.validation_data is not None:
            self._evaluate = evaluation(model, self._tally, plan.validation_data, self._workers)
        verbose = (1 if sys.stdout.isatty() else 2) if plan.verbose == "auto" else plan.verbose
        self._callbacks = keras.callbacks.CallbackList(
            list(plan.callbacks), add_history=True, add_progbar=verbose != 0, verbose=verbose, epochs=plan.epochs,
            steps=steps, model=model)

    def run(self, first: int) -> Any:
        """Train from epoch `first` on, and return the history."""
        model, plan, logs = self._model, self._plan, {}
        model.stop_training = False
        batches = per_worker_batches(self._coordinator, plan.dataset_fn, self._workers)
        self._callbacks.on_train_begin()
        for epoch in range(first, plan.epochs):
            self._callbacks.on_epoch_begin(epoch)
            logs = self._epoch(batches)
            if self._evaluate is not None and (epoch + 1) % plan.validation_freq == 0:
                logs |= {f"val_{name}": value for name, value in self._validation().items()}
            self._callbacks.on_epoch_end(epoch, logs)
            if plan.checkpoints is not None:
                plan.checkpoints.save(model, epoch + 1)
            if model.stop_training:
                break
        model.optimizer.finalize_variable_values(model.trainable_weights)
        self._callbacks.on_train_end(logs)
        return model.history

    def _epoch(self, batches: Any) -> dict[str, Any]:
        self._tally.reset()
        executions = -(-self._steps // self._steps_per_execution)
        scheduled, pending, logged_at = 0, deque[Any](), 0.0
        logs: dict[str, Any] = {}
        for done in range(executions):
            while scheduled < min(executions, done + _AHEAD * self._workers) and not self._model.stop_training:
                self._callbacks.on_train_batch_begin(scheduled * self._steps_per_execution)
                scheduled += 1
                execute = self._execute if scheduled < executions else self._execute_last
                pending.append(self._coordinator.schedule(execute, args=(batches,)))
            if not pending:
                break
            self._tally.add(self._result(pending.popleft()))
            if time.monotonic() - logged_at > _LOGS_EVERY:
                logs, logged_at = self._tally.logs(), time.monotonic()
            self._callbacks.on_train_batch_end(min((done + 1) * self._steps_per_execution, self._steps) - 1, logs)
        return self._tally.logs()

    def _validation(self) -> dict[str, Any]:
        assert self._evaluate is not None
        self._callbacks.on_test_begin()
        self._tally.reset()
        results = [self._coordinator.schedule(self._evaluate, args=(tf.constant(index, tf.int64),))
                   for index in range(self._workers)]
        for result in results:
            self._tally.add(self._result(result))
        logs = self._tally.logs()
        self._callbacks.on_test_end(logs)
        return logs

    def _result(self, remote: Any) -> Any:
        """Return the result of a step; raise UsageError if a worker's shard has no batches."""
        try:
            return self._fetched(remote)
        except tf.errors.OutOfRangeError as error:  # also after the loss of a parameter server
            raise UsageError(explain("dataset_fn must give every worker batches", "shard by examples rather than files,"
                                     " or start fewer workers", workers=self._workers)) from error

    def _fetched(self, remote: Any) -> Any:
        """Fetch a result; if its worker was lost, another worker recomputes it."""
        all_done = False
        while True:
            try:
                return remote.fetch()
            except tf.errors.OpError:
                if all_done:
                    raise
                all_done = self._coordinator.done()  # raises the exception of a failed step
                time.sleep(_RETRY)

"""Training and evaluation steps of workers on shared variables, and the workers' datasets.

A step returns its contribution to the metrics. So a step that is repeated because its worker was lost counts once, and
workers do not update metrics concurrently. Each worker repeats its shard of the dataset until training ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras import compat
from hvkeras.compat import asynchronous
from hvkeras.errors import UsageError, explain
from hvkeras.training import metrics

DatasetFunction = Callable[[Any], Any]


def full_dataset(function: DatasetFunction, what: str) -> Any:
    """Return the dataset that a single worker would get.

    Args:
        function: Function that takes a `tf.distribute.InputContext`, and returns a dataset.
        what: The name of the function in messages.

    Raises:
        UsageError: The function returns something other than batches.
    """
    return _checked(function(tf.distribute.InputContext(1, 0, 1)), what)


def dataset_shard(function: DatasetFunction, what: str, number: int, index: Any) -> Any:
    """Return shard `index`, which may be a tensor, of `number` shards of a dataset."""
    return _checked(function(tf.distribute.InputContext(number, index, 1)), what)


def per_worker_batches(coordinator: Any, function: DatasetFunction, workers: int) -> Any:
    """Return an iterator on each worker that repeats its shard, as pairs of worker index and batch."""

    def make() -> Any:
        index = tf.distribute.coordinator.experimental_get_current_worker_index()
        batches = dataset_shard(function, "dataset_fn", workers, tf.cast(index, tf.int64)).repeat()
        return tf.data.Dataset.zip((tf.data.Dataset.from_tensors(index).repeat(), batches))

    return iter(coordinator.create_per_worker_dataset(make))


def steps_of(dataset: Any) -> int:
    """Return the number of batches in a dataset.

    Raises:
        UsageError: The number is unknown, or the dataset is infinite or empty.
    """
    count = int(dataset.cardinality().numpy())
    if count < 0:
        raise UsageError(explain("An epoch over a dataset that repeats, or whose length is not known, must be given a"
                                 " number of steps", "pass steps_per_epoch=", cardinality="infinite" if count == -1 else
                                 "unknown"))
    if count == 0:
        raise UsageError(explain("dataset_fn must return a dataset that has batches", "check what it reads",
                                 batches=0))
    return count


def _checked(dataset: Any, what: str) -> Any:
    if not isinstance(dataset, tf.data.Dataset):
        raise UsageError(explain(f"{what} must return a tf.data.Dataset of batches", "return tf.data.Dataset"
                                 ".from_tensor_slices((x, y)).shard(context.num_input_pipelines,"
                                 " context.input_pipeline_id).batch(32)", returned=type(dataset).__name__))
    return dataset


_ASSOCIATIVE = ("sum", "max", "min", "first")


class Tally:
    """Metrics of a model, accumulated in the chief over steps that workers run.

    Args:
        model: The compiled model, whose metrics are built.

    Raises:
        UsageError: A metric does not define how its states are merged.
    """

    def __init__(self, model: Any) -> None:
        metrics.check(model)
        model.reset_metrics()
        self._model = model
        self._metrics = [metric for group in compat.metric_groups(model) for metric in group]
        self.variables = [variable for metric in self._metrics for variable in metric.variables]
        self.initial = [np.asarray(variable) for variable in self.variables]
        self._added: list[list[Any]] = []

    def reset(self) -> None:
        """Discard all steps."""
        self._added = []

    def add(self, states: Sequence[Any]) -> None:
        """Add the metric states of one or several steps, each starting from reset metrics.

        Args:
            states: An array of shape `[steps, ...]` for each metric variable.
        """
        for number in range(len(states[0]) if states else 0):
            self._added.append([np.asarray(values)[number] for values in states])

    def _merged(self) -> list[Any]:
        """Return the merged state of all steps, which replaces their states if merging is associative."""
        merged: list[Any] = []
        for metric in self._metrics:
            own = slice(len(merged), len(merged) + len(metric.variables))
            merged += metrics.merge_states(metric, [states[own] for states in self._added])
        rules = [metrics.merging_of(metric) for metric in self._metrics]
        if all(rule in _ASSOCIATIVE for group in rules for rule in ([group] if callable(group) else group)):
            self._added = [merged]
        return merged

    def logs(self) -> dict[str, float]:
        """Return the metric results in the form of Keras's `logs`."""
        values = self._merged() if self._added else self.initial
        typed = [(variable, np.asarray(value).astype(initial.dtype)) for variable, value, initial in
                 zip(self.variables, values, self.initial, strict=True)]
        with asynchronous.OwnState(typed, []):
            results = self._model.get_metrics_result()
        return {name: _as_float(value) for name, value in results.items()}


def training_steps(model: Any, strategy: Any, tally: Tally, steps: int) -> Any:
    """Build the function with which a worker runs `steps` training steps.

    Args:
        strategy: The strategy under which the model was created.
        steps: The number of steps in one call.

    Returns:
        A `tf.function` that takes an iterator of pairs of worker index and batch. It returns the values of each metric
        variable after each step and replica.
    """
    seeds, counters = asynchronous.seed_states(model), asynchronous.step_counters(model.optimizer)

    def on_replica(iterator: Any) -> list[Any]:
        worker, batch = next(iterator)
        # Concurrent workers read the same seed state, so each adds its index to it; worker 0 uses Keras's seed.
        seed_states = [tf.convert_to_tensor(compat.as_tf_variable(seed)) for seed in seeds]
        offset_states = [state + tf.cast(tf.stack([worker, 0]), state.dtype) for state in seed_states]
        local_values = [*zip(tally.variables, tally.initial, strict=True), *zip(seeds, offset_states, strict=True)]
        with asynchronous.OwnState(local_values, counters) as state:
            model.train_step(batch)
        for seed, after, before in zip(seeds, state.values(seeds), offset_states, strict=True):
            compat.as_tf_variable(seed).assign_add(after - before)
        metric_values: list[Any] = state.values(tally.variables)
        return metric_values

    def one(iterator: Any) -> list[Any]:
        results = strategy.run(on_replica, args=(iterator,))
        return [tf.stack(strategy.experimental_local_results(result)) for result in results]

    def several(iterator: Any) -> list[Any]:
        arrays = [tf.TensorArray(value.dtype, steps, element_shape=(None, *value.shape)) for value in tally.initial]
        _, arrays = tf.while_loop(
            lambda step, _: step < steps,
            lambda step, found: (step + 1, [array.write(step, value) for array, value in
                                            zip(found, one(iterator), strict=True)]),
            (tf.constant(0), arrays))
        return [array.concat() for array in arrays]

    return tf.function(one if steps == 1 else several, autograph=False)


def evaluation(model: Any, tally: Tally, function: DatasetFunction, parts: int) -> Any:
    """Build the function with which a worker evaluates one shard of the validation data.

    Args:
        function: Function that creates the validation data.

    Returns:
        A `tf.function` that takes the index of the shard, and returns an array of shape `[1, ...]` for each metric
        variable.
    """

    def evaluate(index: Any) -> list[Any]:
        iterator = iter(dataset_shard(function, "validation_data", parts, index))

        def step(values: list[Any], batch: Any) -> tuple[list[Any], Any]:
            with asynchronous.OwnState(list(zip(tally.variables, values, strict=True)), []) as state:
                model.test_step(batch.get_value())
            return state.values(tally.variables), iterator.get_next_as_optional()

        initial = [tf.constant(value) for value in tally.initial]
        values, _ = tf.while_loop(lambda _, batch: batch.has_value(), step, (initial, iterator.get_next_as_optional()))
        return [value[tf.newaxis] for value in values]

    return tf.function(evaluate, autograph=False)


def _as_float(value: Any) -> Any:
    array = np.asarray(value)
    return float(array) if array.ndim == 0 else array

"""Repairs of Keras 3 under strategies (keras-team/keras#20585).

`import hvkeras` installs them (`hvkeras.compat.patches`). Each repair checks the installed Keras when a strategy first
needs it, and changes nothing where Keras works.

Trainer: four things fail in Keras 3.15. The model is built on a batch of which each replica has only a part, and that
batch is lost. Numbers are averaged over workers as if they were rows. Several steps cannot run in one execution. All
replicas draw the same random numbers, so that dropout applies the same mask to the rows of each.

Optimizers: gradients must be summed over the replicas before anything inspects them, and Keras 3.15 sums them last. It
clips the gradients of each replica separately, and checks only one replica for finite gradients. An infinity on another
replica then results in NaN weights or, between workers, in workers that skip the step while the others wait for them.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, SimpleNamespace
from typing import Any

import tensorflow as tf

from hvkeras.compat import graphs
from hvkeras.errors import UnsupportedError, explain

_STATE = "_hvkeras"  # where an optimizer's `__dict__` holds its `OptimizerState`


class OptimizerState:
    """State of hvkeras for an optimizer, hidden from Keras and from `tf.train.Checkpoint`.

    Attributes:
        applying: The update that is applying already summed gradients, by replica number.
    """

    def __init__(self) -> None:
        self.applying: dict[int, Any] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> OptimizerState:
        return OptimizerState()

    def __reduce__(self) -> Any:
        return OptimizerState, ()

    @property
    def current(self) -> Any:
        """Update that is applying gradients on this replica; None if none is."""
        return self.applying.get(number_of_replica()) if self.applying else None


def sum_last(original: Callable[..., Any], self: Any, pairs: Any) -> Any:
    """Sum gradients over the replicas unless they are already summed."""
    return list(pairs) if is_summed(self) else original(self, pairs)


def apply_sums(original: Callable[..., Any], self: Any, grads: Any, trainable_variables: Any = None) -> Any:
    """Sum gradients over the replicas before they are clipped, and apply them."""
    steps = (original, *(getattr(type(self), name, None) for name in ("_backend_apply_gradients", "_clip_gradients")))
    if is_summed(self) or not _clips(self) or not _is_replica() or any(map(_sums, steps)):
        return original(self, grads, trainable_variables)
    with summed(self):
        return original(self, sum_over_replicas(list(grads)), trainable_variables)


def apply_scaled_sums(original: Callable[..., Any], self: Any, grads: Any, trainable_variables: Any = None) -> Any:
    """Sum gradients over the replicas before a `LossScaleOptimizer` checks that they are finite, and apply them."""
    inner = self.inner_optimizer
    if is_summed(inner) or not _is_replica() or _sums(original) or _sums(getattr(self, "_tf_apply", None)):
        return original(self, grads, trainable_variables)
    reduced = list(grads) if is_summed(self) else sum_over_replicas(list(grads))
    with summed(inner):
        return original(self, reduced, trainable_variables)


def sums_once(optimizer: Any) -> bool:
    """Return whether `summed` prevents an optimizer from summing over the replicas again."""
    return hasattr(getattr(type(optimizer), "_all_reduce_sum_gradients", None), "__wrapped__")


@contextlib.contextmanager
def summed(optimizer: Any, update: Any = None) -> Iterator[None]:
    """Context manager in which this replica applies gradients that are already summed over the replicas.

    Args:
        update: The update that applies them, for `OptimizerState.current`.
    """
    state: OptimizerState = optimizer.__dict__.setdefault(_STATE, OptimizerState())
    applying, replica, nothing = state.applying, number_of_replica(), object()
    before = applying.get(replica, nothing)
    applying[replica] = update
    try:
        yield
    finally:
        if before is nothing:
            del applying[replica]
        else:
            applying[replica] = before


def is_summed(optimizer: Any) -> bool:
    """Return whether this replica is applying gradients that are already summed."""
    state: OptimizerState | None = optimizer.__dict__.get(_STATE)
    return state is not None and bool(state.applying) and number_of_replica() in state.applying


def number_of_replica() -> int:
    """Return the index of the replica that runs this code; 0 without a strategy."""
    replica = tf.distribute.get_replica_context()
    number = getattr(replica, "_replica_id_in_sync_group", 0)
    return number if isinstance(number, int) else 0


def sum_over_replicas(gradients: Sequence[Any]) -> list[Any]:
    """All-reduce gradients over the replicas; None stays None."""
    indices = [index for index, gradient in enumerate(gradients) if gradient is not None]
    result = list(gradients)
    replica = tf.distribute.get_replica_context()
    if indices:
        reduced = replica.all_reduce(tf.distribute.ReduceOp.SUM, [gradients[index] for index in indices])
        for index, one in zip(indices, reduced, strict=True):
            result[index] = one
    return result


def _is_replica() -> bool:
    """Return whether one of several replicas runs this code, and Keras divides losses by their number (not in 3.3)."""
    return (hasattr(sys.modules.get("keras.src.losses.loss"), "scale_loss_for_distribution")
            and tf.distribute.get_replica_context() is not None and graphs.reducing_strategy() is not None)


def _clips(optimizer: Any) -> bool:
    return any(getattr(optimizer, name, None) is not None for name in ("clipnorm", "global_clipnorm", "clipvalue"))


def _sums(function: Any) -> bool:
    return mentions(function, "all_reduce")


_SEED_STRIDE = 2_654_435_761  # between the seeds of two replicas: a prime, unlikely to match users' seeds


def reduce_per_replica(original: Callable[..., Any], values: Any, strategy: Any, reduction: str) -> Any:
    """Average scalars over workers without treating them as rows, and gather predictions of any dtype."""
    if reduction in ("auto", "mean") and _spans_workers(strategy) and _averages_rows(original):
        require_scaled_loss(sys.modules.get(original.__module__))
        return tf.nest.map_structure(lambda value: strategy.reduce("MEAN", value, axis=None), values)
    if reduction == "concat" and _spans_workers(strategy):
        return tf.nest.map_structure(lambda value: _gathered(original, value, strategy), values)
    return original(values, strategy, reduction)


def symbolic_build(original: Callable[..., Any], self: Any, iterator: Any = None, data_batch: Any = None) -> Any:
    """Build a model from the shapes of a batch, without consuming a batch of the iterator."""
    if iterator is not None and _has_replicas(self._distribute_strategy) and _reduces_batches(original):
        iterator, data_batch = None, _batch_spec(iterator, self._distribute_strategy)
    return original(self, iterator, data_batch)


def make_function(original: Callable[..., Any], self: Any, step_function: Any) -> Any:
    """Create a train, test or predict function that runs its steps in separate calls under strategies."""
    made, steps = original(self, step_function), self.steps_per_execution
    return _run_separately(made, self, steps) if steps > 1 and _has_replicas(self._distribute_strategy) else made


def next_seed(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the next seed, different on each replica."""
    seed, replica = original(self, *args, **kwargs), tf.distribute.get_replica_context()
    if replica is None or graphs.reducing_strategy() is None or mentions(original, "replica"):
        return seed
    number = tf.cast(replica.replica_id_in_sync_group, tf.int64)
    return seed + tf.cast(tf.stack([number * _SEED_STRIDE % 2**31, tf.constant(0, tf.int64)]), seed.dtype)


def counted_function(counted: Callable[[str], Any], original: Callable[..., Any], self: Any, step_function: Any) -> Any:
    """Run each call of a training or test function on several workers in a context manager.

    Args:
        counted: Creates the context manager, given the name of Keras's method: `train_step` or `test_step`.
        original: Keras's `_make_function`.
        step_function: Keras's method.
    """
    made = original(self, step_function)
    if not _spans_workers(self._distribute_strategy):
        return made

    def function(iterator: Any) -> Any:
        with counted(step_function.__name__):
            return made(iterator)

    return function


def mentions(function: Any, word: str) -> bool:
    """Return whether the code of a function, or of a function nested in it, uses a name that contains a word.

    Args:
        function: The function; the result is False for None and for objects without Python code.
    """
    code = getattr(function, "__code__", None)
    codes: list[CodeType] = [code] if code is not None else []
    for one in codes:
        codes += [inner for inner in one.co_consts if isinstance(inner, CodeType)]
    return any(word in name for one in codes for name in one.co_names)


def _spans_workers(strategy: Any) -> bool:
    return isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) and graphs.spans_workers(strategy)


def _has_replicas(strategy: Any) -> bool:
    return (strategy is not None and (strategy.num_replicas_in_sync > 1 or _spans_workers(strategy))
            and not isinstance(strategy, tf.distribute.TPUStrategy))


def require_scaled_loss(trainer: Any = None) -> None:
    """Raise UnsupportedError if Keras does not divide the loss by the number of replicas, so gradients would add up.

    Args:
        trainer: Keras's trainer module; by default that of the installed Keras.
    """
    trainer = sys.modules.get("keras.src.backend.tensorflow.trainer") if trainer is None else trainer
    if not hasattr(getattr(trainer, "loss_module", None), "scale_loss_for_distribution"):
        version = getattr(sys.modules.get("keras"), "__version__", "3")
        raise UnsupportedError(explain("fit under a strategy of several replicas needs a Keras that divides the loss"
                                       " by the number of replicas", "pip install --upgrade keras", keras=version))


def _gathered(original: Callable[..., Any], value: Any, strategy: Any) -> Any:
    parts = strategy.experimental_local_results(value)
    if not all(getattr(part, "dtype", None) == tf.bfloat16 for part in parts):
        return original(value, strategy, "concat")
    # TensorFlow's collective has no kernel for bfloat16.
    wide = strategy.run(lambda part: tf.cast(part, tf.float32), args=(value,))
    return tf.cast(original(wide, strategy, "concat"), tf.bfloat16)


def _batch_spec(iterator: Any, strategy: Any) -> Any:
    """Return the shapes and types of one replica's part of a batch, or such a part itself."""
    specs = tf.nest.map_structure(lambda spec: getattr(spec, "_value_specs", [spec])[0],
                                  iterator._distributed_dataset.element_spec)
    if all(isinstance(spec, tf.TensorSpec) and spec.shape.rank is not None for spec in tf.nest.flatten(specs)):
        return specs
    batch = next(iter(iterator._distributed_dataset))
    return tf.nest.map_structure(lambda value: strategy.experimental_local_results(value)[0], batch)


def _run_separately(made: Callable[[Any], Any], trainer: Any, steps: int) -> Callable[[Any], Any]:
    # TensorFlow 2.21 cannot run collectives in Keras's loop over steps.
    def function(iterator: Any) -> Any:
        outputs = None
        trainer.steps_per_execution = 1
        try:
            for _ in range(steps):
                outputs = made(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            if outputs is None:
                raise
        finally:
            trainer.steps_per_execution = steps
        return outputs

    return function


class _Probe(tf.distribute.MultiWorkerMirroredStrategy):  # type: ignore[misc]  # TensorFlow ships no types
    """Strategy with two workers that only records the axes over which Keras reduces."""

    def __init__(self) -> None:
        self.axes: list[Any] = []

    num_replicas_in_sync = 2

    @property
    def extended(self) -> Any:
        return SimpleNamespace(_in_multi_worker_mode=lambda: True)

    def reduce(self, reduce_op: Any, value: Any, axis: Any) -> Any:  # noqa: ARG002 - TensorFlow's signature
        self.axes.append(axis)
        return value


@functools.cache
def _averages_rows(reduce_per_replica: Callable[..., Any]) -> bool:
    """Return whether Keras's own function mistakes one scalar per worker for rows."""
    probe = _Probe()
    reduce_per_replica(0.0, probe, "mean")
    return probe.axes == [0]


@functools.cache
def _reduces_batches(build: Callable[..., Any]) -> bool:
    """Return whether Keras's own method reduces a batch over the workers."""
    probe, batch = _Probe(), tf.distribute.DistributedValues.__new__(tf.distribute.DistributedValues)
    trainer = SimpleNamespace(_distribute_strategy=probe, distribute_strategy=probe)
    with contextlib.suppress(Exception):  # fails later, as these objects are stand-ins
        build(trainer, [(0, 1, iter([batch]))])
    return bool(probe.axes)

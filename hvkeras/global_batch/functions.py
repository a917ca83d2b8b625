"""Training and test functions of models: they run cut steps, check those of users, and explain what cannot be cut."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from hvkeras import compat
from hvkeras.collectives.row_share import global_batch
from hvkeras.errors import UsageError, explain
from hvkeras.global_batch import step
from hvkeras.global_batch.probe import Probe
from hvkeras.global_batch.rows import CANNOT_CUT, WRITE
from hvkeras.global_batch.states import flat_metrics
from hvkeras.training.fit_hooks import running_calls

_CHECKED_CALL = 2  # all layers are built


class StepFunction:
    """Training or test function of a model, which Keras calls with an iterator over batches.

    Args:
        make: Keras's method that makes such a function from a model and a step.
        step_function: The model's `train_step` or `test_step`.
        trains: Whether it is the former.
        changes: Gets the changes of variables while steps run.
        probe: Checks the training steps of users.
    """

    def __init__(self, make: Callable[..., Any], model: Any, step_function: Any, trains: bool,
                 changes: step.StepChanges, probe: Probe) -> None:
        reduces = trains and not compat.steps_by_itself(model)
        self._make, self._model, self._step = make, model, step_function
        self._trains, self._probe = trains, probe
        self._cut = [step.cutting(step_function, model, trains, reduces, changes, cuts_constants)
                     for cuts_constants in (False, True)]
        self._cuts_constants = False
        self._made: dict[tuple[bool, bool, bool], Any] = {}
        self._calls: int | None = 0 if trains and is_of_user(model) else None  # None if there is nothing to check
        self._is_first = not compat.is_of_keras(_owner(type(model), "train_step" if trains else "test_step"))

    def __call__(self, iterator: Any) -> Any:
        """Run one or several steps, and return the logs of the last one."""
        on_batch = not isinstance(iterator, (tf.data.Iterator, tf.distribute.DistributedIterator))
        # `evaluate` of each rank's part merges the metrics at its end: numbers of batches may differ.
        if running_calls().alone or not (self._trains or global_batch().whole or on_batch):
            return self._run(iterator, cuts=False)
        batches = list(iterator) if on_batch else iterator
        own = step.constant_rows(iterator) if self._is_first and isinstance(iterator, tf.data.Iterator) else None
        if own is not None:
            batches = list(self._next(iterator))
            self._cuts_constants = self._probe.fails(self._step, step.rows_of(batches[0]), own)
        self._is_first = False
        if self._calls is not None and not isinstance(iterator, tf.distribute.DistributedIterator):
            self._calls += 1
            if self._calls == _CHECKED_CALL:
                self._calls = None
                batches = batches if isinstance(batches, list) else list(self._next(iterator))
                self._check(batches[0])
        logs = self._run(batches)
        if on_batch:
            global_batch().require_same_batches()
        return logs

    def _next(self, iterator: Any) -> Iterator[Any]:
        """Return the batches of one call; Keras expects `StopIteration` if there are none."""
        first = next(iterator)
        return itertools.chain([first], itertools.islice(iterator, compat.steps_per_execution(self._model) - 1))

    def _run(self, batches: Any, cuts: bool = True) -> Any:
        key = cuts, global_batch().whole, self._cuts_constants
        if key not in self._made:
            self._made[key] = self._make(self._model, self._cut[self._cuts_constants] if cuts else self._step)
        try:
            return self._made[key](iter(batches) if isinstance(batches, list) else batches)
        except tf.errors.InvalidArgumentError as error:
            if CANNOT_CUT not in str(error):
                raise
            raise UsageError(explain(CANNOT_CUT, WRITE)) from None

    def _check(self, batch: Any) -> None:
        """Check that the ranks' gradients combine to those of one process."""
        if self._cuts_constants:
            return  # the step takes whole batches only
        states = [variable for metric in flat_metrics(self._model) for variable in metric.variables]
        self._probe.check(self._model, self._step, step.whole(batch), states)


def is_of_user(model: Any) -> bool:
    """Return whether the training step of a model, its computation of losses, a loss or a layer is the user's."""
    owners: list[Any] = [_owner(type(model), method) for method in ("train_step", "compute_loss")]
    losses = tf.nest.flatten(getattr(model._compile_loss, "_user_loss", None))
    owners += [loss if inspect.isfunction(loss) else type(loss) for loss in losses
               if loss is not None and not isinstance(loss, str)]
    owners += [type(layer) for layer in model._flatten_layers() if layer is not model]
    return not all(map(compat.is_of_keras, owners))


def _owner(cls: type, method: str) -> type:
    """Return the class that defines a method of `cls`."""
    return next(base for base in cls.__mro__ if method in vars(base))

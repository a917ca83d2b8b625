"""`BackupAndRestore`: training that resumes from its last backup after an interruption."""

from __future__ import annotations

import itertools
import numbers
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hvkeras import compat
from hvkeras.callbacks import randomness
from hvkeras.callbacks.backup_file import Backup, BackupFolder, Position
from hvkeras.callbacks.base import KerasCallback, should_print
from hvkeras.callbacks.training_group import TrainingGroup, group_of
from hvkeras.control.relayed_ranks import as_runs
from hvkeras.errors import HvkerasError, UnsupportedError, UsageError, explain
from hvkeras.gradients.optimizer import gather_optimizer
from hvkeras.gradients.optimizer_classes import distributed_part, state_of
from hvkeras.host.console import say
from hvkeras.job.preemption import PreemptionSignal
from hvkeras.typing import CallbackLike, Logs, ModelLike, PathLike

# Attributes by the class of the callback or of one of its bases.
_SAVED_ATTRIBUTES = {
    "EarlyStopping": ("best", "wait", "best_epoch", "stopped_epoch", "best_weights"),
    "ReduceLROnPlateau": ("best", "wait", "cooldown_counter"),
    "ModelCheckpoint": ("best",),
}


def states_of(callbacks: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Return the states of Keras's callbacks, as numbers and arrays, under keys that are stable between runs."""
    return {key: {name: _as_python(getattr(callback, name)) for name in names if hasattr(callback, name)}
            for key, callback, names in _saved_attributes(callbacks)}


def restore(callbacks: Sequence[Any], states: Mapping[str, Mapping[str, Any]]) -> None:
    """Restore the states of callbacks, matched by kind, monitor and position in the list."""
    for key, callback, names in _saved_attributes(callbacks):
        for name in names:
            if name in states.get(key, {}):
                setattr(callback, name, states[key][name])
        if "best" in states.get(key, {}):
            _preserve_best(callback, states[key]["best"])


def _preserve_best(callback: Any, best: Any) -> None:
    """Preserve the best value of a callback when it determines the direction of improvement, at the end of an epoch.

    Older versions of Keras 3 reset the best value to the worst possible one at that point.
    """
    set_direction = getattr(callback, "_set_monitor_op", None)
    if set_direction is None or getattr(callback, "monitor_op", True) is not None:
        return

    def once() -> None:
        set_direction()
        callback.best = best
        del callback._set_monitor_op  # this function, to restore the method

    callback._set_monitor_op = once


def _saved_attributes(callbacks: Sequence[Any]) -> Iterator[tuple[str, Any, tuple[str, ...]]]:
    seen: dict[str, int] = {}
    for callback in callbacks:
        kind = next((cls.__name__ for cls in type(callback).__mro__ if cls.__name__ in _SAVED_ATTRIBUTES), None)
        if kind is not None:
            name = f"{kind} of {getattr(callback, 'monitor', '')}"
            seen[name] = seen.get(name, 0) + 1
            yield f"{name}, number {seen[name]}", callback, _SAVED_ATTRIBUTES[kind]


def _as_python(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [np.asarray(one) for one in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(np.asarray(value))


if TYPE_CHECKING:
    from hvkeras.typing import Callback as _Callback
else:
    _Callback = compat.default_keras().callbacks.Callback

_training_ids = itertools.count()  # of the calls of fit in this process


class BackupAndRestore(KerasCallback):
    """Callback that saves the state of training, and restores it on all workers after a restart.

    The parameters are those of Keras's `BackupAndRestore`. Add the callback to the list on every rank, both under
    `hvd.init()` and under tf.distribute strategies. Only the chief writes and reads the backup, and sends the state to
    the others, so the folder need not be shared. A run that is killed at any moment leaves the last complete backup.
    The next run resumes from it, at the step after which it was saved, on any number of workers and any backend.

    On SIGTERM from a scheduler or a preempted machine, all ranks complete the same step, save, and exit with code 143,
    within `HVKERAS_LEAVE_GRACE` seconds (25).

    Example:
        model.fit(dataset, epochs=10, callbacks=[hvd.callbacks.BackupAndRestore("backup", save_freq=100)])

    Args:
        backup_dir: The folder, for this training only.
        save_freq: "epoch", or the number of steps between backups. After the last step of an epoch, the backup is saved
            at the end of the epoch.
        double_checkpoint: Whether to keep the previous backup, in case the last one is corrupted.
        delete_checkpoint: Whether to remove the backup when training has completed.

    Raises:
        UnsupportedError: `tf.keras` is tf_keras.
        UsageError: An argument is wrong; or, when training begins, the model has no weights yet, or the backup belongs
            to another model or another optimizer.
        MachineError: During training, the backup cannot be written.
    """

    def __init__(self, backup_dir: PathLike, save_freq: int | Literal["epoch"] = "epoch",
                 double_checkpoint: bool = False, delete_checkpoint: bool = True) -> None:
        super().__init__()
        if not compat.is_keras_3(compat.default_keras()):
            raise UnsupportedError(explain("hvkeras's BackupAndRestore needs Keras 3", "leave TF_USE_LEGACY_KERAS out,"
                                           " or use hvd.elastic, which works with tf_keras"))
        if not isinstance(backup_dir, (str, os.PathLike)) or not os.fspath(backup_dir) or "://" in str(backup_dir):
            raise UsageError(explain("BackupAndRestore needs a local folder",
                                     'pass backup_dir="backup"', backup_dir=backup_dir))
        is_step_count = isinstance(save_freq, int) and not isinstance(save_freq, bool) and save_freq > 0
        if save_freq != "epoch" and not is_step_count:
            raise UsageError(explain('save_freq must be "epoch" or a positive number of steps', "pass save_freq=100",
                                     save_freq=save_freq))
        self.backup_dir: str = os.fspath(backup_dir)
        self.save_freq = save_freq
        self.double_checkpoint: bool = double_checkpoint
        self.delete_checkpoint: bool = delete_checkpoint
        self._folder = BackupFolder(Path(self.backup_dir), double_checkpoint)
        if is_step_count:  # with a method, Keras would wait for the logs of each step
            self.on_train_batch_end = self._after_step  # type: ignore[method-assign]
        self._group = TrainingGroup(is_chief=True)
        self._restored: Backup | None = None  # the restored state, until its epoch begins
        self._callbacks: Sequence[Any] = ()
        self._random_at_epoch: Any = None
        self._steps: int | None = None  # per epoch
        self._rows: int | None = None  # samples per step, on all workers
        self._epoch = self._step = self._completed = self._steps_since_save = 0
        self._save_pending = False  # whether to save at the end of the epoch
        self._preemption = PreemptionSignal("")

    def set_model(self, model: ModelLike) -> None:
        """Set the model before training begins."""
        super().set_model(model)
        compat.passes()

    def on_train_begin(self, logs: Logs | None = None) -> None:  # noqa: ARG002 - Keras's signature
        """Restore the backup on every worker."""
        model = self.model
        if not model.built:
            raise UsageError(explain("BackupAndRestore needs a model whose weights exist", "give it an input shape, or"
                                     " call it on a batch before fit()", model=getattr(model, "name", model)))
        compat.build_optimizer(model.optimizer, model.trainable_variables)
        self._group = group_of(model)
        self._restored, self._save_pending = None, False
        self._step = self._completed = self._steps_since_save = 0
        self._steps = (self.params or {}).get("steps")
        compat.begin_with_epoch(model, None)
        local_random = randomness.capture()
        answer, number = self._group.broadcast(
            (self._read(local_random), next(_training_ids)) if self._group.is_chief else None)
        if isinstance(answer, str):
            raise UsageError(answer)
        self._listen_for_preemption(number)
        if answer is None:
            return
        backup, seeds, random_of_chief = answer
        if self._group.is_chief:
            self._group.restore_rounding_errors(model, backup.rounding_errors)
        self._group.broadcast_learned_state(model)
        self._group.broadcast_variables(compat.model_weights(model) + compat.optimizer_variables(model.optimizer))
        if backup.seeds is not None:
            randomness.restore_layer_seeds(model, backup.seeds, seeds)
        shared = [None if states is None else randomness.shared_states(states, local_random, random_of_chief)
                  for states in (backup.random, backup.random_at_epoch)]
        self._restored = Backup(backup.position, callbacks=backup.callbacks, random=shared[0],
                                random_at_epoch=shared[1])
        compat.begin_with_epoch(model, backup.position.epoch)

    def after_other_callbacks(self, callbacks: Sequence[CallbackLike]) -> None:
        """Receive all callbacks, after they have begun and with this one as the last.

        Args:
            callbacks: All callbacks of this `fit`.

        Raises:
            UsageError: More than one of them is a `BackupAndRestore`.
        """
        if sum(isinstance(callback, BackupAndRestore) for callback in callbacks) > 1:
            raise UsageError(explain("One fit() can have one BackupAndRestore", "remove the others from callbacks"))
        self._callbacks = callbacks
        if self._restored is not None:
            restore(callbacks, self._restored.callbacks or {})
            if self._restored.random is not None and not self._restored.position.step:
                randomness.restore(self._restored.random)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:  # noqa: ARG002 - Keras's signature
        """Let the data resume at the restored step."""
        self._epoch, self._step, self._completed = epoch, 0, 0
        compat.begin_with_epoch(self.model, None)
        self._random_at_epoch = randomness.capture()
        compat.passes().at_next(self._on_pass_begin)

    def on_train_batch_begin(self, batch: int, logs: Logs | None = None) -> None:  # noqa: ARG002 - Keras's signature
        """Record the step, as the index that Keras passes at the end of a step differs between versions.

        After SIGTERM, save and exit before the step.
        """
        if batch and self._has_shared_gradients() and self._preemption.is_due():
            self._save_and_end(Position(self._epoch, batch, self._steps, self._rows, self._group.workers),
                               f"after step {batch} of epoch {self._epoch + 1}")
        self._step = batch

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:  # noqa: ARG002 - Keras's signature
        """Save, after all other callbacks."""
        after = Position(epoch + 1, 0, self._steps, self._rows, self._group.workers)
        if self._preemption.is_due():
            self._save_and_end(after, f"after epoch {epoch + 1}")
        if self.save_freq == "epoch" or self._save_pending:
            self._save(after)

    def on_train_end(self, logs: Logs | None = None) -> None:  # noqa: ARG002 - Keras's signature
        """Remove the backup if `delete_checkpoint` is set."""
        self._preemption.forget()
        compat.begin_with_epoch(self.model, None)
        if self.delete_checkpoint and self._group.is_chief:
            self._folder.remove()

    def _read(self, local_random: Any) -> Any:
        """Return the backup with the chief's random states, None without a backup, or an error for all workers."""
        seeds, optimizer = randomness.layer_seeds(self.model), self._optimizer()
        try:
            self._folder.remove_leftovers()
            answer = self._folder.load(self.model, optimizer)
        except HvkerasError as error:
            return str(error)
        except OSError as error:
            return explain(f"The folder of a backup must be readable and writable ({error.strerror or error})",
                           "pass another backup_dir", backup_dir=self.backup_dir)
        if answer is None:
            return None
        backup, remark = answer
        if backup.seeds is not None and len(backup.seeds) != len(seeds):
            return explain("A backup must belong to the model that is trained", "remove the folder to start over",
                           random_seeds=len(backup.seeds), of_the_model=len(seeds), backup_dir=self.backup_dir)
        if should_print(self.model):
            position, workers = backup.position, backup.position.workers
            step = f" after step {position.step}" if position.step else ""
            say(f"training resumes with epoch {position.epoch + 1}{step}, from the backup of {workers} "
                f"worker{'s' * (workers > 1)} in {self.backup_dir}{f' ({remark})' if remark else ''}")
        return backup, seeds, local_random

    def _on_pass_begin(self, facts: compat.PassFacts) -> compat.Done | None:
        """Receive facts about the data of an epoch, and return the part that was already trained on."""
        if self._steps is not None:  # if unknown, Keras guesses it from the second epoch on
            self._steps = facts.steps
        self._rows = None if facts.rows is None else facts.rows * self._group.size
        restored, self._restored = self._restored, None
        if restored is None:
            return None
        position = restored.position
        step = position.step_for(self._steps, self._rows, self._group.workers)
        if step is None:
            step = 0
            if should_print(self.model):
                say(f"the position of {self._group.workers} workers cannot be derived from that of {position.workers}"
                    f" workers in data of unknown length: epoch {position.epoch + 1} starts over")
        at_epoch = self._random_at_epoch
        if step and restored.random_at_epoch is not None:
            at_epoch = self._random_at_epoch = {**at_epoch, **restored.random_at_epoch}
        self._completed = step
        if facts.runs_on and position.epoch and facts.steps and should_print(self.model):
            say(f"skips {position.epoch * facts.steps + step} batches, as the epochs share one pass over the data")

        def after() -> None:
            if position.step and restored.random is not None:
                randomness.restore(restored.random)

        return compat.Done(position.epoch, step, lambda: randomness.restore(at_epoch), after)

    def _after_step(self, batch: int, logs: Logs | None = None) -> None:  # noqa: ARG002 - Keras's signature
        done = self._completed_steps()
        self._steps_since_save += done - self._completed
        self._completed = done
        if self.save_freq == "epoch" or self._steps_since_save < self.save_freq or not self._has_shared_gradients():
            return
        if done == self._steps:  # the backup includes validation and the callbacks at the epoch's end
            self._save_pending = True
        else:
            self._save(Position(self._epoch, done, self._steps, self._rows, self._group.workers))

    def _completed_steps(self) -> int:
        done = self._step + compat.steps_per_execution(self.model)
        return done if self._steps is None else min(done, self._steps)

    def _has_shared_gradients(self) -> bool:
        """Return whether all ranks have exchanged their gradients (`backward_passes_per_step`)."""
        part = distributed_part(self.model.optimizer)
        passes = 1 if part is None else part.options.passes
        return passes == 1 or compat.step_counter(self.model.optimizer) % passes == 0

    def _save(self, position: Position) -> None:
        self._steps_since_save, self._save_pending = 0, False
        if self._group.ranks is not None and state_of(self.model.optimizer) is not None:
            gather_optimizer(self.model, self._group.ranks[:1])
        errors = self._group.rounding_errors(self.model)
        if self._group.is_chief:
            self._folder.write(self.model, Backup(
                position, self._optimizer(), randomness.layer_seeds(self.model), randomness.capture(),
                self._random_at_epoch if position.step else None, states_of(self._callbacks), errors))

    def _listen_for_preemption(self, number: int) -> None:
        """Save on SIGTERM, if the processes that train together are known."""
        self._preemption.forget()
        ranks = self._group.ranks
        if ranks is not None:
            self._preemption = PreemptionSignal(f"training {number} of ranks {as_runs(ranks)}, kept in a backup", ranks)
            self._preemption.listen()

    def _save_and_end(self, position: Position, after: str) -> None:
        self._save(position)
        self._group.broadcast(None)
        self._preemption.end(f"training was saved in {self.backup_dir} {after}")

    def _optimizer(self) -> str:
        optimizer = self.model.optimizer
        return type(compat.inner_optimizer(optimizer) or optimizer).__name__

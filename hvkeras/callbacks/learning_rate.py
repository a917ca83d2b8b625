"""Learning rates as a function of the epoch: `LearningRateScheduleCallback` and `LearningRateWarmupCallback`."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvkeras import compat
from hvkeras.callbacks.base import KerasCallback, is_chief
from hvkeras.collectives.operations import Min
from hvkeras.collectives.reductions import allreduce
from hvkeras.compat import graphs
from hvkeras.errors import UsageError, explain
from hvkeras.horovod import as_horovod
from hvkeras.host.console import prints_at, say
from hvkeras.job.session import current_session
from hvkeras.training.fit_hooks import shared_by
from hvkeras.typing import Logs


class LearningRateScheduleCallback(KerasCallback):
    """Callback that sets the learning rate to `initial_lr` x `multiplier` over a range of epochs.

    Epochs are counted by the optimizer's `iterations`, so training with a restored optimizer resumes at the right
    epoch, with or without `initial_epoch` in `fit`. If the two disagree (a new optimizer, different batches),
    `initial_epoch` takes precedence. Outside its epochs, the callback does not change the rate. The rate changes
    between steps; it is constant within one execution of the compiled function (`steps_per_execution`). At the end of
    an epoch, `logs["lr"]` contains the rate.

    Example:
        callbacks = [hvd.callbacks.LearningRateScheduleCallback(0.4, 0.1, start_epoch=30, end_epoch=60),
                     hvd.callbacks.LearningRateScheduleCallback(0.4, 0.01, start_epoch=60)]

    Args:
        initial_lr: The learning rate to multiply.
        multiplier: A number, or a function that takes the epoch (from 0) and returns a number. With `--as-horovod`,
            a number is raised to the power of `epoch - start_epoch`, as in Horovod since 0.23.
        start_epoch: The first epoch, from 0.
        end_epoch: The epoch before which the callback stops; None for never.
        staircase: Whether the rate changes only at the beginning of epochs, and a function gets integer epochs.
            Otherwise the rate changes at each step, and a function gets `epoch + batch / steps_per_epoch`.
        momentum_correction: Whether to scale the velocities of SGD and RMSprop with momentum by new / old rate when the
            rate changes, since they contain the learning rate (Goyal et al. 2017, remark 2:
            https://arxiv.org/abs/1706.02677).
        steps_per_epoch: The number of steps per epoch; by default as in `fit`.

    Raises:
        UsageError: An argument is wrong; or, when training begins, the optimizer's learning rate is a schedule, or the
            number of steps per epoch is needed and unknown.
    """

    def __init__(
        self, initial_lr: float, multiplier: float | Callable[[float], float], start_epoch: float = 0,
        end_epoch: float | None = None, staircase: bool = True, momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self.initial_lr: float = self._validated("initial_lr", initial_lr)
        if compat.is_schedule(multiplier):
            raise self._error("the multiplier must be a number or a function of the epoch",
                              "give the schedule to the optimizer, and leave the callback out", multiplier=multiplier)
        self._constant_multiplier = (
            None if callable(multiplier) else self._validated("multiplier", multiplier, least=0.0))
        self.multiplier: Callable[[float], float] = multiplier if callable(multiplier) else self._multiply_by_constant
        self.start_epoch: float = self._validated("start_epoch", start_epoch, least=0)
        self.end_epoch: float | None = (
            None if end_epoch is None else self._validated("end_epoch", end_epoch, least=start_epoch))
        if steps_per_epoch is not None and (not isinstance(steps_per_epoch, numbers.Integral) or steps_per_epoch < 1):
            raise self._error("steps_per_epoch must be a positive integer", steps_per_epoch=steps_per_epoch)
        self.staircase = staircase
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch: int = 0
        self._steps = 0  # per epoch; 0 if unknown
        self._steps_ahead: int | None = None  # steps by which the schedule is ahead of `fit`
        self._rate: float | None = None  # the optimizer's rate, if known
        self._is_unfinished = self._has_begun = False

    def on_train_begin(self, logs: Logs | None = None) -> None:  # noqa: ARG002 - Keras's signature
        """Check the optimizer."""
        current_session()
        self._steps_ahead, self._is_unfinished, self._has_begun = None, False, False
        optimizer = self.model.optimizer
        if compat.learning_rate(optimizer) is None:
            raise self._error("the optimizer's learning rate must be a number", self._hint_for_schedule(),
                              optimizer=type(optimizer).__name__,
                              learning_rate=type(compat.learning_rate_source(optimizer)).__name__)
        if self.model.built:
            compat.build_optimizer(optimizer, self.model.trainable_variables)

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:  # noqa: ARG002 - Keras's signature
        """Determine the epoch at which training begins or resumes."""
        self.current_epoch, self._rate = epoch, None
        if self._steps_ahead is None:
            self._start(epoch)

    def on_batch_begin(self, batch: int, logs: Logs | None = None) -> None:  # noqa: ARG002 - Keras's signature
        """Set the rate of this step if the epoch is one of the callback's."""
        if not self._has_begun:
            self._has_begun = True
            if batch:  # BackupAndRestore resumes within an epoch
                self._steps_ahead = 0
        epoch = self._epoch_at(min(batch, self._steps - 1))  # further steps belong to the same epoch
        if epoch < self.start_epoch:
            return
        if self._has_ended(epoch):
            self._finish()
            return
        self._set(self._rate_at(epoch))
        self._is_unfinished = not self.staircase and self.end_epoch is not None

    def on_epoch_end(self, epoch: int, logs: Logs | None = None) -> None:  # noqa: ARG002 - Keras's signature
        """Log the rate as "lr"."""
        if self._is_unfinished and self._has_ended(self._epoch_at(self._steps)):
            self._finish()
        if logs is not None:
            logs["lr"] = compat.learning_rate(self.model.optimizer)

    def _start(self, epoch: int) -> None:
        """Align this `fit` with the schedule, with the same result on every rank."""
        session = current_session()
        steps = self.steps_per_epoch or _steps(self.params or {})
        iterations = compat.step_counter(self.model.optimizer)
        process_set = shared_by(self.model)
        if process_set is not None:
            with graphs.eagerly():
                least = allreduce(tf.constant([steps, iterations], tf.int64), op=Min, process_set=process_set,
                                  name=f"the steps of {type(self).__name__}, which every rank needs")
                steps, iterations = (int(number) for number in least)
        is_needed = steps <= 0 and not self._has_ended(epoch)
        if is_needed and not self.staircase:
            raise self._error("the steps of an epoch must be known",
                              f"pass steps_per_epoch= to {type(self).__name__}, or to fit()", steps=None)
        if is_needed and iterations and not epoch:
            raise self._error("the steps of an epoch must be known where training resumes",
                              f"pass steps_per_epoch= to {type(self).__name__}, or initial_epoch= to fit()",
                              steps=None, iterations=iterations)
        self._steps = max(steps, 0)
        agree = bool(self._steps) and (not epoch or iterations // steps == epoch)
        self._steps_ahead = iterations - epoch * steps if agree else 0
        if is_chief(self.model) and prints_at(session.settings, "WARNING"):
            first_epoch = self._epoch_at(0)
            text = self._describe(session.topology.size) + (self._describe_resume(first_epoch) if first_epoch else "")
            disagrees = iterations and self._steps and not agree
            if disagrees:
                text += f" (initial_epoch takes precedence, though the optimizer is at step {iterations})"
            say(text)

    def _epoch_at(self, batch: int) -> float:
        """Return the epoch of the schedule after `batch` steps of the current epoch; an integer for a staircase."""
        if not self._steps:
            return self.current_epoch
        done = self.current_epoch * self._steps + (self._steps_ahead or 0) + batch
        return done // self._steps if self.staircase else done / self._steps

    def _has_ended(self, epoch: float) -> bool:
        return self.end_epoch is not None and epoch >= self.end_epoch

    def _finish(self) -> None:
        """Set the rate of the last step, if it was within an execution of several steps."""
        if self._is_unfinished and self.end_epoch is not None:
            self._is_unfinished = False
            self._set(self._rate_at((math.ceil(round(self.end_epoch * self._steps, 6)) - 1) / self._steps))

    def _rate_at(self, epoch: float) -> float:
        multiplier = self.multiplier(epoch)
        try:
            rate = self.initial_lr * float(multiplier)
        except (TypeError, ValueError):
            rate = math.nan
        if not 0 <= rate < math.inf:
            raise self._error("the multiplier must return a number that is not negative", epoch=epoch,
                              multiplier=multiplier)
        return rate

    def _multiply_by_constant(self, epoch: float) -> float:
        # In Horovod, the rate is multiplied again in each epoch.
        number: float = self._constant_multiplier or 0.0
        return number ** (epoch - self.start_epoch) if as_horovod.is_installed() else number

    def _set(self, rate: float) -> None:
        """Set the learning rate, and correct the momentum if the rate changes."""
        optimizer = self.model.optimizer
        old = compat.learning_rate(optimizer) if self._rate is None else self._rate
        self._rate = compat.as_learning_rate(optimizer, rate)
        if self._rate == old:
            return
        compat.set_learning_rate(optimizer, rate)
        if self.momentum_correction and old:
            slots = compat.velocities(optimizer)
            if slots:
                compat.multiply(slots, self._rate / old)

    def _describe(self, size: int) -> str:  # noqa: ARG002 - the warm-up depends on it
        """Describe the schedule, for the line printed at the start of training."""
        if self._constant_multiplier is None:
            name = getattr(self.multiplier, "__name__", "<lambda>")
            factor = f"{'multiplier' if name == '<lambda>' else name}(epoch)"
        else:
            factor = f"{self._constant_multiplier:g}"
            if as_horovod.is_installed() and self._constant_multiplier != 1:
                factor += f"^(epoch - {self.start_epoch:g})"
        end = "on" if self.end_epoch is None else f"to {self.end_epoch:g}"
        return (f"learning rate: {self.initial_lr:g} x {factor} from epoch {self.start_epoch:g} {end}"
                f"{'' if self.staircase else ', changing at each step'}")

    def _describe_resume(self, epoch: float) -> str:
        if epoch < self.start_epoch:
            return ""
        if self._has_ended(epoch):
            return f"; resumes at epoch {epoch:g}: ended, and stays {compat.learning_rate(self.model.optimizer):g}"
        return f"; resumes at epoch {epoch:g}: {self._rate_at(epoch):g}"

    def _validated(self, name: str, value: Any, least: float | None = None) -> float:
        """Return an argument if it is a number of at least `least`, or positive if `least` is None."""
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or (value <= 0 if least is None else value < least):
            allowed = "a positive number" if least is None else f"a number of at least {least:g}"
            raise self._error(f"{name} must be {allowed}", self._hint_for_schedule()
                              if compat.is_schedule(value) else f"pass {name}=0.1, for example", **{name: value})
        return value  # type: ignore[no-any-return]

    def _hint_for_schedule(self) -> str:
        return ("give the optimizer a number; or leave the callback out, and let the schedule in the optimizer decide"
                " (multiply its rates by hvd.size())")

    def _error(self, must_hold: str, hint: str = "", **received: object) -> UsageError:
        return UsageError(explain(f"{type(self).__name__}: {must_hold}", hint, **received))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Callback that increases the learning rate step by step from `initial_lr` / size to `initial_lr`.

    A rate multiplied by the number of ranks is too high for the first steps. With epoch = (completed steps + 1) /
    steps_per_epoch, the rate is `initial_lr / size * (1 + epoch * (size - 1) / warmup_epochs)`, so the last step of the
    warmup uses `initial_lr` (the gradual warmup of Goyal et al. 2017, section 2.2: https://arxiv.org/abs/1706.02677).
    Rank 0 prints one line that describes the warmup. Like `LearningRateScheduleCallback`, the callback resumes with a
    restored optimizer.

    Example:
        rate = 0.1 * hvd.size()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9)), loss="mse")
        model.fit(dataset, callbacks=[hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=5)])

    Args:
        initial_lr: The learning rate after the warmup: that of one process, multiplied by `hvd.size()`.
        warmup_epochs: The length of the warmup in epochs, not necessarily an integer; 0 for no warmup.
        momentum_correction: As for `LearningRateScheduleCallback`.
        steps_per_epoch: The number of steps per epoch; by default as in `fit`.
        verbose: Whether rank 0 prints a line at the end of the warmup.

    Raises:
        UsageError: As for `LearningRateScheduleCallback`.
    """

    def __init__(
        self, initial_lr: float, warmup_epochs: float = 5, momentum_correction: bool = True,
        steps_per_epoch: int | None = None, verbose: int = 0,
    ) -> None:
        self.warmup_epochs: float = self._validated("warmup_epochs", warmup_epochs, least=0)
        self.verbose = verbose
        super().__init__(initial_lr, self._warmup_multiplier, 0, warmup_epochs, staircase=False,
                         momentum_correction=momentum_correction, steps_per_epoch=steps_per_epoch)

    def _finish(self) -> None:
        finishes = self._is_unfinished
        super()._finish()
        if finishes and self.verbose and is_chief(self.model):
            say(f"epoch {self.current_epoch + 1}: the warm-up has reached the learning rate {self.initial_lr:g}")

    def _warmup_multiplier(self, epoch: float) -> float:
        size = current_session().topology.size
        progress = min((epoch + 1 / self._steps) / self.warmup_epochs, 1.0)
        return (1 + progress * (size - 1)) / size

    def _describe(self, size: int) -> str:
        if size == 1 or not self.warmup_epochs:
            return f"learning rate: {self.initial_lr:g}, without a warm-up" + " (1 rank)" * (size == 1)
        return (f"learning rate: {self.initial_lr / size:g} x {size} ranks -> {self.initial_lr:g} over"
                f" {self.warmup_epochs:g} epoch{'s' * (self.warmup_epochs != 1)}")

    def _hint_for_schedule(self) -> str:
        return ("give the optimizer a number; or leave the callback out, and let the schedule warm up:"
                " keras.optimizers.schedules.CosineDecay(rate / hvd.size(), decay_steps, warmup_target=rate,"
                " warmup_steps=5 * steps_per_epoch)")


def _steps(params: dict[str, Any]) -> int:
    """Return the steps per epoch if Keras reports them; for arrays, TensorFlow 1 graphs report only the samples."""
    if params.get("samples") and params.get("batch_size"):
        return math.ceil(int(params["samples"]) / int(params["batch_size"]))
    return int(params.get("steps") or 0)

"""`LearningRateWarmupCallback`: increases the learning rate to its scaled value over the first epochs."""

from __future__ import annotations

from hvkeras.callbacks.chief import is_chief
from hvkeras.callbacks.learning_rate_schedule import LearningRateScheduleCallback
from hvkeras.host.console import say
from hvkeras.job.session import current_session


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate step by step from `initial_lr` / size to `initial_lr`.

    A rate multiplied by the number of ranks is too high for the first steps. With
    epoch = (completed steps + 1) / steps_per_epoch, the rate is
    `initial_lr / size * (1 + epoch * (size - 1) / warmup_epochs)`, so the last step of the warm-up uses `initial_lr`
    (the gradual warm-up of Goyal et al. 2017, section 2.2: https://arxiv.org/abs/1706.02677). Rank 0 prints one line
    that describes the warm-up. Like any `LearningRateScheduleCallback`, the callback resumes where it stopped.

    Example:
        rate = 0.1 * hvd.size()
        model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9)), loss="mse")
        model.fit(dataset, callbacks=[hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=5)])

    Args:
        initial_lr: The learning rate after the warm-up: that of one process, multiplied by `hvd.size()`.
        warmup_epochs: The length of the warm-up in epochs; need not be a whole number, and 0 means no warm-up.
        momentum_correction: As for `LearningRateScheduleCallback`.
        steps_per_epoch: The number of steps per epoch; by default what `fit` knows from the data.
        verbose: Whether rank 0 prints a line at the end of the warm-up.

    Raises:
        UsageError: As for `LearningRateScheduleCallback`.
    """

    def __init__(
        self, initial_lr: float, warmup_epochs: float = 5, momentum_correction: bool = True,
        steps_per_epoch: int | None = None, verbose: int = 0,
    ) -> None:
        self.warmup_epochs: float = self._checked("warmup_epochs", warmup_epochs, least=0)
        self.verbose = verbose
        super().__init__(initial_lr, self._warming, 0, warmup_epochs, staircase=False,
                         momentum_correction=momentum_correction, steps_per_epoch=steps_per_epoch)

    def _finish(self) -> None:
        finishes = self._unfinished
        super()._finish()
        if finishes and self.verbose and is_chief(self.model):
            say(f"epoch {self.current_epoch + 1}: the warm-up has reached the learning rate {self.initial_lr:g}")

    def _warming(self, epoch: float) -> float:
        """Returns the fraction of `initial_lr` at an epoch."""
        size = current_session().topology.size
        warmed = min((epoch + 1 / self._steps) / self.warmup_epochs, 1.0)
        return (1 + warmed * (size - 1)) / size

    def _plan(self, size: int) -> str:
        if size == 1 or not self.warmup_epochs:
            return f"learning rate: {self.initial_lr:g}, without a warm-up" + " (1 rank)" * (size == 1)
        return (f"learning rate: {self.initial_lr / size:g} x {size} ranks -> {self.initial_lr:g} over"
                f" {self.warmup_epochs:g} epoch{'s' * (self.warmup_epochs != 1)}")

    def _instead_of_a_schedule(self) -> str:
        return ("give the optimizer a number; or leave the callback out, and let the schedule warm up:"
                " keras.optimizers.schedules.CosineDecay(rate / hvd.size(), decay_steps, warmup_target=rate,"
                " warmup_steps=5 * steps_per_epoch)")

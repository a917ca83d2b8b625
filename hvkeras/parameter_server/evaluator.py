"""Evaluator: evaluates checkpoints during training, up to the last one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import tensorflow as tf

from hvkeras.callbacks import tensorboard
from hvkeras.control.launch_environments import Launch
from hvkeras.errors import UsageError, explain
from hvkeras.host.console import say
from hvkeras.parameter_server.server import Registration
from hvkeras.parameter_server.steps import full_dataset
from hvkeras.parameter_server.training import TrainingPlan, built_model
from hvkeras.settings import Settings

_POLL_INTERVAL = 0.5  # seconds between checks for a new checkpoint


def evaluate_checkpoints(launch: Launch, settings: Settings, plan: TrainingPlan, log_dir: Any) -> NoReturn:
    """Evaluate checkpoints until training has ended, and then exit.

    Args:
        launch: The cluster, and this process's task in it.
        plan: The arguments of `train`.
        log_dir: The folder for TensorBoard's files; None to write none.

    Raises:
        UsageError: There are no checkpoints to evaluate, or no data to evaluate them on.
        SystemExit: Training has ended.
    """
    checkpoints, validation_data = plan.checkpoints, plan.validation_data
    if checkpoints is None or validation_data is None:
        raise UsageError(explain("An evaluator needs checkpoints, and data to evaluate them on", "pass checkpoint_dir="
                                 " and validation_data= to train(), or start no evaluator",
                                 checkpoint_dir=checkpoints and "given", validation_data=validation_data))
    registration = Registration(launch, settings)
    dataset = full_dataset(validation_data, "validation_data")
    model = built_model(plan, dataset.element_spec)
    writer = tf.summary.create_file_writer(str(Path(log_dir) / "evaluator")) if log_dir is not None else None
    last_epoch = max(0, plan.initial_epoch)
    while True:
        ended = registration.has_ended  # read before the check, so that the last checkpoint is not missed
        epochs = checkpoints.epochs()
        if epochs and epochs[-1] > last_epoch and not registration.failed:
            last_epoch = epochs[-1]
            if _restored(checkpoints, model, last_epoch):
                _report_results(last_epoch, model.evaluate(dataset, verbose=0, return_dict=True), writer)
        elif ended:
            registration.leave()
        else:
            registration.wait(_POLL_INTERVAL)


def _restored(checkpoints: Any, model: Any, epoch: int) -> bool:
    """Restore a checkpoint; return False if the chief has removed it in the meantime."""
    try:
        checkpoints.restore(model, epoch)
    except UsageError:
        if checkpoints.path(epoch).exists():
            raise
        return False
    return True


def _report_results(epoch: int, results: dict[str, float], writer: Any) -> None:
    say(f"evaluator: epoch {epoch}: " + ", ".join(f"{name} {value:.4f}" for name, value in results.items()))
    if writer is not None:
        with writer.as_default(), tf.summary.record_if(True):
            for name, value in results.items():
                tensorboard.scalar(f"epoch_{name}", value, step=epoch)
        writer.flush()

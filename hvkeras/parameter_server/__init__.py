"""Asynchronous training with parameter servers: `tf.distribute.ParameterServerStrategy` for Keras 3 models.

All tasks of a TF_CONFIG cluster, with the roles `chief`, `worker`, `ps` and optionally `evaluator`, run the same
script, which calls `train`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hvkeras.control.launch_environments import parameter_server_launch
from hvkeras.errors import UsageError, explain
from hvkeras.host.console import quiet_engines
from hvkeras.job.session import is_initialized
from hvkeras.parameter_server.server import serve
from hvkeras.settings import Settings
from hvkeras.typing import CallbackLike, DatasetLike, History, InputContext, ModelLike, PathLike

__all__ = ["train"]


def train(
    build_model: Callable[[], ModelLike], dataset_fn: Callable[[InputContext], DatasetLike], *, epochs: int = 1,
    steps_per_epoch: int | None = None, initial_epoch: int = 0, verbose: int | str = "auto",
    callbacks: Sequence[CallbackLike] = (), validation_data: Callable[[InputContext], DatasetLike] | None = None,
    validation_freq: int = 1, checkpoint_dir: PathLike | None = None, checkpoints_to_keep: int = 3,
    log_dir: PathLike | None = None,
) -> History:
    """Train a compiled Keras 3 model asynchronously on a cluster's workers, with its variables on parameter servers.

    Every task calls this function with the same arguments, and acts according to its role in TF_CONFIG. The chief
    schedules steps, and returns when training has ended. Workers and parameter servers run TensorFlow servers, and an
    evaluator evaluates checkpoints. Their processes exit when the job ends, so code after the call runs only in the
    chief.

    Example:
        def build_model():
            model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
            model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
            return model

        def dataset_fn(context):
            data = tf.data.Dataset.from_tensor_slices((x, y))
            data = data.shard(context.num_input_pipelines, context.input_pipeline_id)
            return data.shuffle(1000).batch(32)

        history = hvd.parameter_server.train(build_model, dataset_fn, epochs=5, checkpoint_dir="checkpoints")
        history.model.save("model.keras")

    Args:
        build_model: Function that creates and compiles the model. The chief schedules `steps_per_execution` steps at a
            time.
        dataset_fn: Function that takes a `tf.distribute.InputContext`, and returns a `tf.data.Dataset` of batches for
            `fit`: shard `input_pipeline_id` (a tensor) of `num_input_pipelines`. Each worker repeats its shard.
        epochs: The final epoch.
        steps_per_epoch: Steps per epoch, summed over all workers; by default the number of batches in the dataset that
            `dataset_fn` returns for a single worker.
        initial_epoch: The epoch at which training starts; a checkpoint of a later epoch takes precedence.
        verbose: As for `fit`; applies only to the chief.
        callbacks: Keras callbacks; they run only in the chief.
        validation_data: Like `dataset_fn`, for the data of validation and of the evaluator.
        validation_freq: The number of epochs between validations.
        checkpoint_dir: Folder of the checkpoints after each epoch, on storage that the chief and the evaluator share.
            Training resumes from the latest one when all tasks are restarted.
        checkpoints_to_keep: The number of latest checkpoints to keep.
        log_dir: Folder in which the evaluator writes its results for TensorBoard, in the subfolder `evaluator`.

    Returns:
        Keras's `History`. Its `model` is an ordinary Keras model with the trained weights and optimizer.

    Raises:
        UsageError: An argument or TF_CONFIG is invalid.
        MachineError: A port is in use, or a checkpoint cannot be written.
        PeerError: A task did not connect at the start, or a parameter server was lost.
        SystemExit: The job has ended; raised in all tasks except the chief.
    """
    if is_initialized():
        raise UsageError(explain("Training with parameter servers must not be mixed with synchronous training in one"
                                 " process", "leave hvd.init() out"))
    for name, number in {"epochs": epochs, "steps_per_epoch": 1 if steps_per_epoch is None else steps_per_epoch,
                         "validation_freq": validation_freq, "checkpoints_to_keep": checkpoints_to_keep}.items():
        if not isinstance(number, int) or number < 1:
            raise UsageError(explain(f"{name} must be a positive number", f"pass {name}=1 or more", **{name: number}))
    settings = Settings()
    quiet_engines(settings.log_level)
    launch = parameter_server_launch()
    role = launch.tasks[launch.rank].split()[0]
    if role in ("worker", "ps"):
        serve(launch, settings)
    from hvkeras.parameter_server.checkpoints import Checkpoints  # noqa: PLC0415 - imports TensorFlow
    from hvkeras.parameter_server.chief import running_chief  # noqa: PLC0415 - imports TensorFlow
    from hvkeras.parameter_server.training import TrainingPlan, fit  # noqa: PLC0415 - imports TensorFlow

    checkpoints = None if checkpoint_dir is None else Checkpoints(checkpoint_dir, checkpoints_to_keep)
    plan = TrainingPlan(build_model, dataset_fn, epochs, steps_per_epoch, initial_epoch, verbose, callbacks or (),
                validation_data, validation_freq, checkpoints)
    if role == "evaluator":
        from hvkeras.parameter_server.evaluator import evaluate_checkpoints  # noqa: PLC0415 - imports TensorFlow

        evaluate_checkpoints(launch, settings, plan, log_dir)
    with running_chief(launch, settings) as chief:
        history: History = fit(chief, plan)
        return history

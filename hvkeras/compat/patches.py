"""Table of all monkey patches that hvkeras applies to Keras and TensorFlow, and their installer.

Each row of `TABLE` names its targets, the reason for the patch, and what would make the patch unnecessary. Rows are
installed in groups. The behavior of a patched function is implemented in its own package, such as `hvkeras.training`.
The caller of `install` passes it as the group's behaviour, and the row adapts the call (`hvkeras.compat.adapters`).
`tools/foreign_changes.py`, a part of `make lint`, finds patches that are applied elsewhere.

Patches are plain functions instead of wrapt proxies. Proxies take twice as long to call, cannot be pickled, and cannot
be removed with the versions of wrapt that TensorFlow accepts. They also do not support attributes other than functions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from hvkeras.compat import keras_2, strategies
from hvkeras.compat.adapters import (
    Make,
    always,
    around,
    calls,
    data,
    given,
    global_state,
    implemented,
    masked,
    masked_by_tf_keras,
    moments_of_layer,
    moments_of_operation,
    moments_of_tf_keras,
    never,
    nothing,
    reduced,
    repaired,
    scaled_step,
    scaled_step_of_tf_keras,
    shuffled,
    stepped,
    stop_training,
    timed,
    unreduced,
    with_flag,
    xla,
)
from hvkeras.compat.families import loaded_families
from hvkeras.compat.fit_data import KerasData, TfKerasData
from hvkeras.compat.targets import find, is_in, package_of
from hvkeras.compat.variables import assign_locally

# Groups. `shutdown()` uninstalls those of a job; the others stay installed.
TRAINING, OPTIMIZERS, SCALED, RECORDING, TRACES, PASSES, ORDER = (
    "training", "optimizers", "scaled gradients", "recording", "elastic traces", "passes over data", "order of batches")
STRATEGIES, STEPS, LOCAL, KERAS_2 = "strategies", "steps of strategies", "local assignment", "--as-horovod"
GLOBAL_BATCH, FILES, DISTRIBUTION = "data parallel", "files of --data-parallel", "keras.distribution"
ONE_RANK = "record of one rank"
KEYS, SERVER, PEERS_SERVER = "keys of collectives", "server of tfdist", "server of hvkeras bench"
_OF_A_JOB = (TRAINING, OPTIMIZERS, SCALED, RECORDING, PASSES, ORDER, GLOBAL_BATCH, FILES, ONE_RANK)


@dataclass(frozen=True)
class Patch:
    """Row of the table: targets that are patched in the same way for the same reason.

    Attributes:
        group: The group that the row is installed with.
        targets: Patched attributes, as `module:Class.attribute` (see `hvkeras.compat.targets`).
        versions: Packages and versions that have these attributes and need the patch.
        why: Reason why a public API does not suffice.
        until: Change to Keras or TensorFlow that would make the row removable.
        make: Factory of the replacement.
        part: Feature that hvkeras loses if a target is missing; "" if none.
        adds: Whether the attribute may be missing and is then added.
        leaves: Value that `uninstall` assigns to an added attribute instead of deleting it, for objects that were
            created in the meantime; None to delete it.
    """

    group: str
    targets: tuple[str, ...]
    versions: str
    why: str
    until: str
    make: Make
    part: str = ""
    adds: bool = False
    leaves: Any = None


@dataclass(frozen=True)
class TrainingBehaviour:
    """Behavior of models around training. Functions that wrap a method receive the original and call it.

    `fit`, `evaluate`, `predict`, `reset_metrics`, `train_step` and `compute_loss` wrap the methods of the same name.

    Attributes:
        logs: Wraps the method that computes the logs of an epoch or an evaluation from the metrics, outside of graphs.
        data: Called with a `KerasData` or `TfKerasData` whenever data are prepared for iteration.
        stop_training: Called with a model and the value that this rank set; returns the value of `model.stop_training`.
        step: Called with a model and its step function of one batch, before tracing; returns the function to use
            instead. If Keras is too old for this, only explanations in messages are missing.
        weigh: Takes the sample weights that Keras derives from a mask, and the mask; returns the weights to use.
        combine: Takes a reduced loss, the name of its reduction, the sample weights (None where they do not matter),
            and the values that were reduced; returns the loss to use. It is not called for losses that are scalars
            before the reduction.
        moments: Takes a function that computes mean and variance as Keras does, the inputs, the axes to reduce over,
            whether the results keep these axes, and the mask or None; returns mean and variance over all replicas.
        synchronizes: Takes a layer of BatchNormalization; returns whether it uses the moments of all replicas.
        orbax: Wraps every save of Keras 3's `OrbaxCheckpoint`.
        save: Wraps `Model.save`.
    """

    fit: Callable[..., Any]
    evaluate: Callable[..., Any]
    predict: Callable[..., Any]
    reset_metrics: Callable[..., Any]
    logs: Callable[..., Any]
    data: Callable[[Any], None]
    stop_training: Callable[[Any, bool], bool]
    step: Callable[[Any, Callable[[Any], Any]], Callable[[Any], Any]]
    train_step: Callable[..., Any]
    compute_loss: Callable[..., Any]
    weigh: Callable[[Any, Any], Any]
    combine: Callable[[Any, str, Any, Any], Any]
    moments: Callable[..., Any]
    synchronizes: Callable[[Any], bool]
    orbax: Callable[..., Any]
    save: Callable[..., Any]


@dataclass(frozen=True)
class OptimizerBehaviour:
    """Behavior of Keras code around distributed optimizers.

    Attributes:
        loss_scale: Takes a function, the `LossScaleOptimizer`, the gradients and their variables; runs before the check
            for finite gradients. The function takes the reduced gradients, and their variables if these are others, and
            completes the step.
        refuses_xla: Returns whether `jit_compile="auto"` means False.
        swap_averages: Wraps `SwapEMAWeights._swap_variables`, which exchanges weights and their averages.
        begin_averages: Wraps `SwapEMAWeights._finalize_ema_values`.
    """

    loss_scale: Callable[..., Any]
    refuses_xla: Callable[[], bool]
    swap_averages: Callable[..., None]
    begin_averages: Callable[..., None]


@dataclass(frozen=True)
class GlobalBatchBehaviour:
    """Behavior of functions whose batches are those of all ranks. All wrap the attribute that they replace.

    Attributes:
        call: Calls a function of TensorFlow.
        data: Called with a `KerasData` whenever data are prepared for iteration.
        iterate: Initializes an iterator over a dataset.
        next: Returns the next batch of an iterator.
        next_as_optional: Returns it as an optional value.
        apply: Applies gradients with an optimizer of Keras 3.
        apply_pairs: Applies gradients with an optimizer of tf_keras.
    """

    call: Callable[..., Any]
    data: Callable[[Any], None]
    iterate: Callable[..., Any]
    next: Callable[..., Any]
    next_as_optional: Callable[..., Any]
    apply: Callable[..., Any]
    apply_pairs: Callable[..., Any]


@dataclass(frozen=True)
class OneRankBehaviour:
    """Recording of optimizers that are not distributed.

    Attributes:
        apply: Wraps the application of gradients.
    """

    apply: Callable[..., Any]


@dataclass(frozen=True)
class DistributionBehaviour:
    """Functions of Keras's distribution API that depend on the job.

    Attributes:
        initialize: Joins the job, given addresses, number of processes and process ID.
        num_processes: Returns the number of ranks.
        process_id: Returns this process's rank.
        list_devices: Wraps the function that returns the devices of this process.
        get_device_count: Returns the number of devices of all ranks.
        set_distribution: Called with a distribution before Keras stores it.
    """

    initialize: Callable[..., None]
    num_processes: Callable[[], int]
    process_id: Callable[[], int]
    list_devices: Callable[..., list[str]]
    get_device_count: Callable[..., int]
    set_distribution: Callable[[Any], None]


@dataclass(frozen=True)
class RecordingBehaviour:
    """Hooks that record training.

    Attributes:
        model_call: Wraps every call of a model.
        train_call: Called after each call of a model's train function with its begin and end, in seconds since the
            epoch, and its return value: the logs of its last step, usually a mapping of tensors.
        refuses_xla: Returns whether `jit_compile="auto"` means False.
        next_batch: Wraps the methods that fetch the next element of a `tf.data.Dataset`.
    """

    model_call: Callable[..., Any]
    train_call: Callable[[float, float, Any], None]
    refuses_xla: Callable[[], bool]
    next_batch: Callable[..., Any]


@dataclass(frozen=True)
class FilesBehaviour:
    """Behavior of functions and callbacks with files under `--data-parallel`. All receive the original and call it.

    Attributes:
        write: Wraps functions that write: one rank calls them, and the others wait for its files.
        write_alone: Wraps functions that write: one rank calls them, and the others go on.
        read: Wraps methods of callbacks that read the files that one rank has written.
        callbacks: Wraps the constructor of `CallbackList`.
        download: Wraps `get_file`.
        listed: Wraps functions that list a folder.
    """

    write: Callable[..., Any]
    write_alone: Callable[..., Any]
    read: Callable[..., Any]
    callbacks: Callable[..., None]
    download: Callable[..., Any]
    listed: Callable[..., list[str]]


class Installer:
    """Installer of the rows of a table, each at most once."""

    def __init__(self, table: tuple[Patch, ...]) -> None:
        self._table = table
        self._behaviours: dict[str, Any] = {}  # of the installed groups
        self._changes: list[_Change] = []  # in order of installation
        self._hidden: dict[tuple[str, str], bool] = {}  # (package, missing part) -> reported

    def install(self, group: str, behaviour: Any = None, modules: Mapping[str, Any] | None = None) -> Any:
        """Install the rows of a group that are not installed yet.

        Args:
            group: The group. If it is installed with another behaviour, it is reinstalled.
            behaviour: The behaviour that all rows of the group receive.
            modules: The only modules to patch; by default those of TensorFlow and of each loaded Keras.

        Returns:
            The behaviour.
        """
        if group in self._behaviours and self._behaviours[group] != behaviour:
            self.uninstall(group)
        self._behaviours[group] = behaviour
        for row in self._table:
            for target in row.targets if row.group == group else ():
                if _is_loaded(package_of(target)) if modules is None else is_in(target, modules):
                    self._install(row, target, modules, behaviour)
        return behaviour

    def _install(self, row: Patch, target: str, modules: Mapping[str, Any] | None, behaviour: Any) -> None:
        if any(change.row is row and change.target == target for change in self._changes):
            return
        owner, name = find(target, modules)
        if owner is None or not (hasattr(owner, name) or row.adds):
            if row.part:
                self._hidden.setdefault((package_of(target), row.part), False)
            return
        change = _Change(row, target, owner, name, vars(owner).get(name, _ABSENT))
        setattr(owner, name, row.make(getattr(owner, name, None), behaviour, name))
        self._changes.append(change)

    def uninstall(self, *groups: str) -> None:
        """Uninstall groups; those that are not installed are ignored."""
        removed = [change for change in self._changes if change.row.group in groups]
        for group in groups:
            self._behaviours.pop(group, None)
        if not removed:
            return
        first = self._changes.index(removed[0])
        later, self._changes = self._changes[first:], self._changes[:first]
        for change in reversed(later):
            change.undo()
        for change in later:  # reinstall other groups' patches, which wrapped the removed ones
            if change.row.group not in groups:
                change.redo(self._behaviours[change.row.group])
                self._changes.append(change)

    def uninstall_job(self) -> None:
        """Uninstall the groups of a job."""
        self.uninstall(*_OF_A_JOB)

    def behaviour(self, group: str) -> Any:
        """Return the behaviour of an installed group, else None."""
        return self._behaviours.get(group)

    @contextlib.contextmanager
    def installed(self, group: str, behaviour: Any = None) -> Iterator[None]:
        """Context manager in which a group is installed."""
        self.install(group, behaviour)
        try:
            yield
        finally:
            self.uninstall(group)

    def hidden(self, group: str) -> list[str]:
        """Return the parts of a group that need targets which the loaded packages lack."""
        targets = [(row.part, target) for row in self._table for target in row.targets
                   if row.group == group and row.part and not row.adds and _is_loaded(package_of(target))]
        return list(dict.fromkeys(part for part, target in targets if not hasattr(*find(target))))

    def newly_hidden(self) -> list[str]:
        """Return a sentence for each package with missing targets, each target once per process."""
        new = [found for found, reported in self._hidden.items() if not reported]
        self._hidden.update(dict.fromkeys(new, True))
        parts = {package: [part for owner, part in new if owner == package] for package, _ in new}
        return [f"this version of {package} hides internals that hvkeras needs; not supported: {', '.join(hidden)}"
                for package, hidden in parts.items()]


@dataclass
class _Change:
    """Patched attribute."""

    row: Patch
    target: str
    owner: Any
    name: str
    original: Any  # the entry in the owner's own `__dict__`, or _ABSENT

    def undo(self) -> None:
        if self.original is not _ABSENT:
            setattr(self.owner, self.name, self.original)
        elif self.row.leaves is not None:
            setattr(self.owner, self.name, self.row.leaves)
        else:
            delattr(self.owner, self.name)

    def redo(self, behaviour: Any) -> None:
        self.original = vars(self.owner).get(self.name, _ABSENT)
        setattr(self.owner, self.name, self.row.make(getattr(self.owner, self.name, None), behaviour, self.name))


_ABSENT = object()


def _is_loaded(package: str) -> bool:
    return package == "tensorflow" or package in loaded_families()


def repair(module: ModuleType) -> None:
    """Repair a module of Keras 3 for use under strategies; called by wrapt after the import."""
    install(STRATEGIES, modules={module.__name__: module})


def as_table() -> str:
    """Return the table in Markdown."""
    lines = ["| group | target | where | why | removable when |", "| --- | --- | --- | --- | --- |"]
    for row in TABLE:
        first, *others = row.targets
        owner = first[:max(map(first.rfind, ".:")) + 1]  # shared by all targets of most rows
        targets = ", ".join(f"`{each}`" for each in (first, *(one.removeprefix(owner) for one in others)))
        targets = targets.replace("|", "` or `")
        lines.append(f"| {row.group} | {targets} | {row.versions} | {row.why} | {row.until} |")
    return "\n".join(lines) + "\n"


_KERAS, _TF_KERAS = "Keras 3", "tf_keras"
_BOTH, _TENSORFLOW = "Keras 3, tf_keras", "TensorFlow"
_SINCE_3_7, _SINCE_3_12 = "Keras 3.7 and newer", "Keras 3.12 and newer"
_TRAINER, _ITERATOR = "keras.src.backend.tensorflow.trainer", "keras.src.backend.tensorflow.trainer:TFEpochIterator"
_HANDLER = "tf_keras.src.engine.data_adapter:DataHandler"
_TF_KERAS_LOSS_SCALE = "tf_keras.src.mixed_precision.loss_scale_optimizer"
_TF_KERAS_NORMALIZATION = "tf_keras.src.layers.normalization.batch_normalization"
_DEVICES = "keras.src.backend.tensorflow.distribution_lib:"
_DISTRIBUTION = "keras.src.distribution.distribution_lib:"
_BASE_OPTIMIZER = "keras.src.optimizers.base_optimizer:BaseOptimizer"
# The second names are those of Keras 3.16.
_TF_TRAINER = "keras.src.backend.tensorflow.trainer:TensorFlowTrainer|Trainer"
_TF_NN = "keras.src.backend.tensorflow.nn|keras.src.backend.tensorflow.ops.nn:"
_EXTENDED = "tensorflow.python.distribute.collective_all_reduce_strategy:CollectiveAllReduceExtended"
_CONTEXT = "tensorflow.python.eager.context:Context"
_DATASET = "tensorflow.python.data.ops.iterator_ops:OwnedIterator"
_FUNCTIONS = "tensorflow.python.eager.polymorphic_function"

_OF_KERAS_PROCESSES = "a Keras that trains on several processes with TensorFlow"
_OWN_OPTIMIZERS = "a Keras that reduces first under strategies"
_ONE_WRITER = "a Keras that writes on one process with every backend"
_NEVER = "never: these are Keras 2's names"


def _each(owner: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{owner}{'' if owner.endswith((':', '.')) else '.'}{name}" for name in names)


TABLE = (
    Patch(TRAINING, ("keras:Model.fit", "tf_keras:Model.fit"), _BOTH,
          "ranks agree on steps, callbacks and data before fit reads its arguments", "a hook of Keras around fit",
          around("fit"), "fit"),
    Patch(TRAINING, ("keras:Model.evaluate", "tf_keras:Model.evaluate"), _BOTH,
          "metrics cover all ranks; elastic jobs shard the data over the current ranks",
          "a hook of Keras around evaluate", around("evaluate"), "evaluate"),
    Patch(TRAINING, ("keras:Model.predict", "tf_keras:Model.predict"), _BOTH,
          "its batches do not count as input waits of training; messages name the call that a rank is in",
          "a hook of Keras around predict",
          around("predict"), "predict"),
    Patch(TRAINING, ("keras:Model.reset_metrics", "tf_keras:Model.reset_metrics"), _BOTH,
          "metric states merged over ranks must not be restored after a reset",
          "metrics that Keras reduces over processes",
          around("reset_metrics"), "reset_metrics"),
    Patch(TRAINING, ("keras:Model._get_metrics_result_or_logs", "tf_keras:Model._validate_and_get_metrics_result"),
          _BOTH, "logs must cover all ranks before any callback gets them, including History and the progress bar",
          "metrics that Keras reduces over processes", around("logs"), "the logs of fit"),
    Patch(TRAINING, (f"{_ITERATOR}.__init__",), _KERAS,
          "ranks agree on the number of steps once Keras has converted arrays, generators or PyDatasets to a dataset",
          "a public data adapter", data(KerasData), "the data of fit"),
    Patch(TRAINING, (f"{_HANDLER}._configure_dataset_and_inferred_steps",), _TF_KERAS, "the same",
          "no support of tf_keras", data(TfKerasData), "the data of fit"),
    Patch(TRAINING, ("keras:Model.stop_training", "tf_keras:Model.stop_training"), _BOTH,
          "Keras reads it after each step; all ranks must get the same value, and a later callback may still change it",
          "a method of Keras that decides whether to stop", stop_training, adds=True, leaves=False),
    Patch(TRAINING, (f"{_TF_TRAINER}._autoconvert_optionals",), _SINCE_3_12,
          "counts batches on arrival, inside the compiled step: callbacks cannot detect that a step waits for its"
          " batch", "a callback of Keras for the arrival of a batch", calls(stepped, "step")),
    Patch(TRAINING, ("keras:Model.train_step", "tf_keras:Model.train_step"), _BOTH,
          "distinguishes training losses from evaluation losses", "an argument of compute_loss for this",
          around("train_step"), "train_step"),
    Patch(TRAINING, ("keras:Model.compute_loss", "tf_keras:Model.compute_loss"), _BOTH,
          "losses are means over the samples of all ranks", "losses that Keras reduces over processes",
          around("compute_loss"), "compute_loss"),
    Patch(TRAINING, ("keras.src.losses.loss:reduce_values", "tf_keras.src.utils.losses_utils:reduce_weighted_loss"),
          _BOTH,
          "weights the loss by the samples of this rank, whose number is known only where Keras reduces the losses",
          "losses that Keras reduces over processes", calls(reduced, "combine"), "weighted losses"),
    Patch(TRAINING, ("keras.src.losses.loss:apply_mask",), _KERAS, "counts the unmasked values of all ranks",
          "losses that Keras reduces over processes", calls(masked, "weigh"), "masked losses"),
    Patch(TRAINING, ("tf_keras.src.utils.losses_utils:apply_valid_mask",), _TF_KERAS, "the same",
          "no support of tf_keras", calls(masked_by_tf_keras, "weigh"), "masked losses"),
    Patch(TRAINING, (f"{_TF_NN}_compute_moments_sync",), _KERAS,
          "a synchronized BatchNormalization, written for strategies, must use the moments of all ranks",
          "moments that Keras reduces over processes", calls(moments_of_operation, "moments"), "synchronized moments"),
    Patch(TRAINING, ("keras:layers.BatchNormalization._moments",), _KERAS, "the same, with masks",
          "moments that Keras reduces over processes", calls(moments_of_layer),
          "synchronized BatchNormalization"),
    Patch(TRAINING, (f"{_TF_KERAS_NORMALIZATION}:BatchNormalizationBase._moments",), _TF_KERAS, "the same",
          "no support of tf_keras", calls(moments_of_tf_keras), "synchronized BatchNormalization"),
    Patch(TRAINING, (f"{_TF_KERAS_NORMALIZATION}:BatchNormalization.get_config",), _TF_KERAS,
          "tf_keras does not save `synchronized`", "no support of tf_keras", repaired(with_flag)),
    Patch(TRAINING, ("keras:callbacks.OrbaxCheckpoint._save_checkpoint",), "Keras 3 with OrbaxCheckpoint",
          "only one rank may save; Keras distinguishes processes only with the JAX backend",
          "a Keras that determines the saving process with every backend", around("orbax")),
    Patch(TRAINING, ("keras:Model.save",), _KERAS, "says that several ranks may write the same file",
          "a Keras that saves on one process", around("save")),
    Patch(OPTIMIZERS, ("keras:optimizers.LossScaleOptimizer.apply",), _KERAS,
          "gradients must be reduced before it decides whether to skip the step", _OWN_OPTIMIZERS,
          calls(scaled_step, "loss_scale"), "loss scaling"),
    Patch(OPTIMIZERS,
          _each(f"{_TF_KERAS_LOSS_SCALE}:", "LossScaleOptimizer.apply_gradients",
                "LossScaleOptimizerV3.apply_gradients"), _TF_KERAS, "the same", "no support of tf_keras",
          calls(scaled_step_of_tf_keras, "loss_scale"), "loss scaling"),
    Patch(SCALED,
          _each(f"{_TF_KERAS_LOSS_SCALE}:", "LossScaleOptimizer._compute_gradients",
                "LossScaleOptimizerV3.compute_gradients"), _TF_KERAS,
          "gradients that are still scaled must not be reduced", "no support of tf_keras", repaired(unreduced)),
    Patch(OPTIMIZERS, ("keras:Model._resolve_auto_jit_compile",), _KERAS,
          'jit_compile="auto" must mean False where XLA cannot compile the collectives',
          "a setting of Keras for what auto means", calls(xla, "refuses_xla"), "the choice of XLA"),
    Patch(OPTIMIZERS, ("keras:callbacks.SwapEMAWeights._swap_variables",), "Keras 3 with SwapEMAWeights",
          "ranks with a sharded update each hold a part of the averages",
          "a public method of optimizers to exchange weights and averages", around("swap_averages")),
    Patch(OPTIMIZERS, ("keras:callbacks.SwapEMAWeights._finalize_ema_values",), "Keras 3 with SwapEMAWeights",
          "the same", "a public method of optimizers to exchange weights and averages", around("begin_averages")),
    Patch(GLOBAL_BATCH, (f"{_FUNCTIONS}.atomic_function:AtomicFunction.call_flat",), _TENSORFLOW,
          "several ranks carry out a function together, with the result of one process", _OF_KERAS_PROCESSES,
          around("call"), "functions"),
    Patch(GLOBAL_BATCH, (f"{_ITERATOR}.__init__",), _KERAS,
          "pipelines compute this rank's rows only, once Keras has converted arrays to a dataset",
          "a public data adapter", data(KerasData)),
    Patch(GLOBAL_BATCH, (f"{_DATASET}.__init__",), _TENSORFLOW,
          "such a pipeline is iterated when the original is, since each iteration shuffles differently",
          "a tf.data that maps after shuffling", around("iterate")),
    Patch(GLOBAL_BATCH, (f"{_DATASET}._next_internal",), _TENSORFLOW,
          "code outside of functions gets whole batches from such a pipeline", "a tf.data that maps after shuffling",
          around("next")),
    Patch(GLOBAL_BATCH, (f"{_DATASET}.get_next_as_optional",), _TENSORFLOW, "the same",
          "a tf.data that maps after shuffling", around("next_as_optional")),
    Patch(GLOBAL_BATCH,
          ("keras.src.backend.tensorflow.optimizer:TFOptimizer.apply", "keras:optimizers.LossScaleOptimizer.apply"),
          _KERAS, "marks gradients, which ranks sum up in buckets while the backward pass goes on", _OF_KERAS_PROCESSES,
          around("apply")),
    Patch(GLOBAL_BATCH,
          (*_each(f"{_TF_KERAS_LOSS_SCALE}:", "LossScaleOptimizer.apply_gradients",
                  "LossScaleOptimizerV3.apply_gradients"),
           "tf_keras.src.optimizers.optimizer:Optimizer.apply_gradients",
           "tf_keras.src.optimizers.legacy.optimizer_v2:OptimizerV2.apply_gradients"), _TF_KERAS, "the same",
          "no support of tf_keras", around("apply_pairs")),
    Patch(ONE_RANK, ("keras.src.backend.tensorflow.optimizer:TFOptimizer.apply",), _KERAS,
          "records the steps of optimizers that are not distributed", "a public hook around apply", around("apply"),
          "the steps of one rank"),
    Patch(DISTRIBUTION, _each(_DEVICES, "initialize", "num_processes", "process_id", "get_device_count"), _KERAS,
          "Keras has none of them for TensorFlow", _OF_KERAS_PROCESSES, implemented, adds=True),
    Patch(DISTRIBUTION, (f"{_DEVICES}list_devices",), _KERAS, "lists the devices of all ranks", _OF_KERAS_PROCESSES,
          around("list_devices")),
    Patch(DISTRIBUTION, (f"{_DISTRIBUTION}global_state",), _KERAS,
          "set_distribution starts data parallelism; scripts may have imported the function already",
          _OF_KERAS_PROCESSES, global_state),
    Patch(DISTRIBUTION, (f"{_DISTRIBUTION}Distribution._is_multi_process",), _KERAS,
          "steps cut the batches, so Keras must not deal out datasets, or refuse other data", _OF_KERAS_PROCESSES,
          never, adds=True),
    Patch(RECORDING, ("keras:Model.__call__", "tf_keras:Model.__call__"), _BOTH,
          "counts the samples that models are called on, in custom loops as well",
          "a public hook around calls of layers", around("model_call"), "the samples of steps"),
    Patch(RECORDING, ("keras:Model.make_train_function", "tf_keras:Model.make_train_function"), _BOTH,
          "times calls of the train function: a batch-end callback would disable asynchronous dispatch",
          "batch-end callbacks that do not disable it", calls(timed, "train_call"), "the times of steps"),
    Patch(RECORDING, ("keras:Model._resolve_auto_jit_compile",), _KERAS, "timestamps cannot be compiled by XLA",
          "a clock in XLA",
          calls(xla, "refuses_xla"), "the choice of XLA"),
    Patch(RECORDING, _each(_DATASET, "__next__", "get_next", "get_next_as_optional"), _TENSORFLOW,
          "measures how long a step waits for its batch; a wrapping dataset would measure when other threads prefetch"
          " it", "a tf.data statistic of waits", around("next_batch"), "input waits"),
    Patch(TRACES, (f"{_FUNCTIONS}.tracing_compilation:_maybe_define_function",), _TENSORFLOW,
          "traces contain rank and size: functions are retraced after an elastic job's membership has changed",
          "a public way to clear a function's traces", around("traced"), "functions traced before a change"),
    Patch(TRACES, (f"{_FUNCTIONS}.polymorphic_function:Function.get_concrete_function",), _TENSORFLOW,
          "the same, for concrete functions", "a public way to clear a function's traces", around("renewable"),
          "concrete functions traced before a change"),
    Patch(PASSES, ("keras:callbacks.CallbackList.on_train_begin",), _KERAS,
          "the backup callback must run after History and the progress bar, which Keras adds last",
          "an order of callbacks", around("put_last"), "the order of callbacks"),
    Patch(PASSES, (f"{_ITERATOR}._enumerate_iterator|enumerate_epoch",), _KERAS,
          "resumes within an epoch: Keras counts the skipped steps, whose data need not be read",
          "an initial step of fit", around("follow"), "resuming within an epoch"),
    Patch(PASSES, (f"{_HANDLER}.enumerate_epochs",), _TF_KERAS, "the same", "no support of tf_keras",
          around("with_iterator"), "resuming within an epoch"),
    Patch(PASSES, (f"{_HANDLER}.steps",), _TF_KERAS, "the same", "no support of tf_keras", around("follow_tf_keras"),
          "resuming within an epoch"),
    Patch(ORDER,
          ("keras.src.trainers.data_adapters.py_dataset_adapter:PyDatasetAdapter.__init__",
           "tf_keras.src.engine.data_adapter:KerasSequenceAdapter.__init__"), _BOTH,
          "a rank's shard shuffles its own batches, as requested by fit's `shuffle`, differently in each epoch",
          "a PyDataset that receives `shuffle`", calls(shuffled),
          "the order of sharded batches (pass shuffle=False to fit)"),
    Patch(FILES,
          (*_each("keras:Model", "save", "save_weights", "export"), "keras:export.ExportArchive.write_out",
           *_each("keras.saving:", "save_model", "save_weights"), "keras.models:save_model",
           *_each("keras.src.saving.saving_lib:", "save_model", "save_weights_only"),
           *_each("keras.utils:", "plot_model", "save_img")), _KERAS,
          "ranks would write the same files at the same time", _ONE_WRITER, around("write")),
    Patch(FILES,
          _each("keras:callbacks.", "ModelCheckpoint._save_model", "BackupAndRestore._save_model",
                "BackupAndRestore.on_train_end", "CSVLogger.on_train_end"), _KERAS, "the same, with what they decide",
          _ONE_WRITER, around("write"), "the files of callbacks"),
    Patch(FILES, ("keras:callbacks.BackupAndRestore.on_train_begin",), _KERAS,
          "all ranks must resume from the same backup", _ONE_WRITER, around("read"), "the files of callbacks"),
    Patch(FILES,
          _each("keras:callbacks.", "CSVLogger.on_train_begin", "CSVLogger.on_epoch_end",
                "RemoteMonitor.on_epoch_end"), _KERAS, "only one rank may log", _ONE_WRITER, around("write_alone"),
          "the files of callbacks"),
    Patch(FILES, ("keras:callbacks.CallbackList.__init__",), _KERAS,
          "the same, for TensorBoard, which has many methods and subclasses", _ONE_WRITER, around("callbacks"),
          "the files of callbacks"),
    Patch(FILES,
          (*(f"{module}:get_file" for module in ("keras.utils", "keras.src.utils", "keras.src.utils.file_utils")),
           *(f"keras.src.datasets.{name}:get_file" for name in (
               "boston_housing", "california_housing", "cifar10", "cifar100", "fashion_mnist", "imdb", "mnist",
               "reuters"))), _KERAS, "each file must be downloaded once per host, where ranks share the folder",
          "a lock in Keras", around("download"), "downloads"),
    Patch(FILES, ("tensorflow:io.gfile.listdir", "tensorflow.python.lib.io.file_io:list_directory_v2"), _TENSORFLOW,
          "private folders must be listed in the order of the common ones", "sorted lists in TensorFlow",
          around("listed")),
    Patch(STRATEGIES, (f"{_TRAINER}:reduce_per_replica",), _KERAS,
          "scalars are averaged over workers as if they were rows", "keras-team/keras#20585",
          repaired(strategies.reduce_per_replica)),
    Patch(STRATEGIES, (f"{_TF_TRAINER}._make_function",), _SINCE_3_7, "several steps cannot run in one execution",
          "keras-team/keras#20585", repaired(strategies.make_function)),
    Patch(STRATEGIES, (f"{_TF_TRAINER}._maybe_symbolic_build",), "Keras 3.5 and newer",
          "the model is built on a part of a batch, and that batch is lost", "keras-team/keras#20585",
          repaired(strategies.symbolic_build)),
    Patch(STRATEGIES, ("keras.src.backend.tensorflow.optimizer:TFOptimizer._all_reduce_sum_gradients",), _KERAS,
          "gradients that are already summed must not be summed again", _OWN_OPTIMIZERS, repaired(strategies.sum_last)),
    Patch(STRATEGIES, ("keras.src.backend.tensorflow.optimizer:TFOptimizer.apply",), _KERAS,
          "Keras clips the gradients of each replica separately", _OWN_OPTIMIZERS, repaired(strategies.apply_sums)),
    Patch(STRATEGIES, ("keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer.apply",), _KERAS,
          "Keras checks only one replica for finite gradients", _OWN_OPTIMIZERS,
          repaired(strategies.apply_scaled_sums)),
    Patch(STRATEGIES, ("keras.src.random.seed_generator:SeedGenerator.next",), _KERAS,
          "all replicas draw the same numbers", "a Keras that draws per replica", repaired(strategies.next_seed)),
    Patch(STEPS, (f"{_TF_TRAINER}._make_function",), _SINCE_3_7,
          "the control server must know which rank does not reach a step of a strategy: TensorFlow does not name it",
          "a hook of strategies around steps", calls(strategies.counted_function)),
    Patch(LOCAL, ("keras:Variable._direct_assign",), _KERAS,
          "one worker restores a backup; assigning to a strategy's variable would involve the other workers",
          "a public local assignment",
          always(assign_locally)),
    Patch(KEYS, ("tensorflow:distribute.MirroredStrategy._collective_key_base",), _TENSORFLOW,
          "distinguishes the collectives of MirroredStrategies in different ranks", "an argument for the key",
          given),
    Patch(SERVER, (f"{_EXTENDED}._local_or_standalone_client_mode",), _TENSORFLOW,
          "the strategy must use the running server instead of starting one", "a strategy for a running server",
          always(True), adds=True),
    Patch(SERVER, (f"{_EXTENDED}._enable_check_health",), _TENSORFLOW, "the same, for the coordination service",
          "a strategy for a running server", always(False), adds=True),
    Patch(PEERS_SERVER,
          _each(_CONTEXT, "configure_collective_ops", "configure_coordination_service", "enable_collective_ops"),
          _TENSORFLOW, "the same, for plain TensorFlow in hvkeras bench", "a strategy for a running server",
          always(nothing)),
    Patch(KERAS_2, ("keras.src.backend.tensorflow:Variable.ref",), _KERAS, "scripts of Keras 2 use it", _NEVER,
          keras_2.of_variables, adds=True),
    Patch(KERAS_2,
          _each(_BASE_OPTIMIZER, "__init__", "lr", "weights", "_create_all_weights", "compute_gradients", "minimize",
                "get_weights", "set_weights"), _KERAS, "scripts of Keras 2 use them", _NEVER, keras_2.of_optimizers,
          adds=True),
    Patch(KERAS_2,
          (f"{_BASE_OPTIMIZER}.variables", "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer.variables"),
          _KERAS, "scripts of Keras 2 call it", _NEVER, keras_2.callable_variables, adds=True),
    Patch(KERAS_2, ("keras.src.trainers.trainer:Trainer|BaseTrainer.compile",), _KERAS,
          "scripts of Keras 2 pass experimental_run_tf_function", _NEVER, keras_2.of_compile),
    Patch(KERAS_2, _each(_TF_TRAINER, "fit", "evaluate", "predict"), _KERAS,
          "scripts of Keras 2 pass options of queues", _NEVER, keras_2.of_fit),
    Patch(KERAS_2, _each(_TF_TRAINER, "fit_generator", "evaluate_generator", "predict_generator"), _KERAS,
          "scripts of Keras 2 call them", _NEVER, keras_2.of_generators, adds=True),
    Patch(KERAS_2, ("keras.src.layers.normalization.batch_normalization:BatchNormalization.__init__",), _KERAS,
          "scripts of Keras 2 pass fused", _NEVER, keras_2.of_batch_normalization),
    Patch(KERAS_2, _each("keras.optimizers.legacy:", "Adagrad", "Adam", "Ftrl", "RMSprop", "SGD"), _KERAS,
          "scripts of Keras 2 use them", _NEVER, keras_2.of_legacy_optimizers, adds=True),
    Patch(KERAS_2, _each("keras.src.legacy.backend:", "set_value", "batch_set_value"), _KERAS,
          "scripts of Keras 2 call them with variables of Keras 3", _NEVER, keras_2.of_backend, adds=True),
    Patch(KERAS_2, ("tf_keras.api._v2.keras:__version__", "tensorflow.keras:__version__"), _TF_KERAS,
          "scripts read it; tf.keras of tf_keras lacks it", "no support of tf_keras", keras_2.of_tf_keras, adds=True),
)

_installer = Installer(TABLE)
install, uninstall, uninstall_job = _installer.install, _installer.uninstall, _installer.uninstall_job
installed, behaviour_of = _installer.installed, _installer.behaviour
hidden, newly_hidden = _installer.hidden, _installer.newly_hidden

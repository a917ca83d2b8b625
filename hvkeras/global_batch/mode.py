"""Start of the mode in which all ranks compute the batches of one process."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvkeras import compat
from hvkeras.collectives.operations import Sum
from hvkeras.collectives.row_share import global_batch
from hvkeras.compat import graphs, patches
from hvkeras.control.location import call_site
from hvkeras.diagnostics.recorder import recording
from hvkeras.errors import UnsupportedError, explain
from hvkeras.frames import innermost, is_library
from hvkeras.global_batch import files, noise, seeds, step, whole_batch
from hvkeras.global_batch.functions import StepFunction
from hvkeras.global_batch.pipelines import iterated, rebuilt, without_prefetching
from hvkeras.global_batch.probe import Probe
from hvkeras.gradients.optimizer import sum_over_ranks
from hvkeras.gradients.optimizer_classes import distributed_part
from hvkeras.gradients.options import ReductionOptions
from hvkeras.gradients.reducer import GradientReducer
from hvkeras.gradients.tape import sources_of
from hvkeras.host.console import prints_at, say
from hvkeras.job.session import current_session
from hvkeras.training.fit_hooks import running_calls

_FLAG = "--data-parallel"
_TRIED = "keras>=3.12,<3.16"  # the releases that it was tried with


def start(is_whole: Callable[[], bool] | None = None) -> None:
    """Start the mode for the rest of this process; in a job of one rank, only record the steps if a record is made.

    Args:
        is_whole: Returns whether every rank gets the whole batch; False if each gets its part of it already.

    Raises:
        UnsupportedError: Keras is tf_keras, too old, or runs on a backend other than TensorFlow.
    """
    session = current_session()
    if is_whole is not None:
        global_batch().ask(is_whole)
    if session.topology.size == 1:
        if recording().is_on():
            patches.install(patches.ONE_RANK, patches.OneRankBehaviour(_recorded))
        return
    if global_batch().started:
        return
    _require_keras()
    if session.settings.run_membership:
        raise UnsupportedError(explain(f"{_FLAG} needs a fixed number of ranks", "leave out --min-np and --max-np;"
                                       " --reset-limit restarts the script, for BackupAndRestore to resume"))
    seeds.agree()
    global_batch().start()
    _install(Steps())
    files.install()
    if session.topology.rank == 0 and prints_at(session.settings, "WARNING"):
        moments = ("; BatchNormalization uses the mean and variance of the whole batch (HVKERAS_SYNC_BATCH_NORM=off: of"
                   " a rank's rows)" if session.settings.sync_batch_norm else "")
        rows = f"1/{session.topology.size} of the rows" if global_batch().whole else "its own part"
        say(f"data parallel: each rank computes {rows} of every batch{moments}")


def _recorded(original: Callable[..., Any], optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
    """Apply gradients on the only rank, and record the step."""
    if distributed_part(optimizer) is None:  # that of a distributed optimizer is recorded already
        variables = optimizer._trainable_variables if trainable_variables is None else trainable_variables
        recording().step(list(grads), list(variables))
    return original(optimizer, grads, trainable_variables)


def _require_keras() -> None:
    if compat.default_keras() is not sys.modules.get("keras") and "tf_keras" in sys.modules:
        raise UnsupportedError(explain(f"{_FLAG} needs Keras 3", "unset TF_USE_LEGACY_KERAS, or write the lines of"
                                       " hvkeras (README)", keras="tf_keras"))
    if compat.foreign_backend():
        raise UnsupportedError(explain("Keras must run on TensorFlow", "set KERAS_BACKEND=tensorflow",
                                       backend=compat.foreign_backend()))
    lacks = patches.hidden(patches.GLOBAL_BATCH)
    if lacks:
        import keras

        raise UnsupportedError(explain(f"{_FLAG} needs internals of Keras that this version lacks",
                                       f"pip install '{_TRIED}', or write the lines of hvkeras (README)",
                                       keras=keras.__version__, lacks=", ".join(lacks)))


def _install(steps: Steps) -> None:
    patches.install(patches.GLOBAL_BATCH, patches.GlobalBatchBehaviour(
        make_function=steps.make_function, make_predict=steps.make_predict, predict=steps.predicting,
        data=cut_early, iterate=iterated().iterate, apply=steps.apply, call_function=steps.call_function,
        gradient=steps.gradient, assign=steps.assign, next_seed=steps.next_seed, operation_seed=noise.operation_seed,
        make=whole_batch.make, update_mean=whole_batch.update_mean, update_function=whole_batch.update_function,
        update_metrics=steps.update_metrics, call_loss=whole_batch.call_loss,
        call_losses=whole_batch.call_losses))


class Steps:
    """Steps of models, which compute this rank's rows of the batches of all ranks."""

    def __init__(self) -> None:
        self._changes = step.StepChanges()
        self._probe = Probe()
        self._makes_predict = False
        self._has_loop = False  # a loop of the script was named
        self._assumed: set[type] = set()  # classes of models whose assumptions were said

    def make_function(self, original: Callable[..., Any], model: Any, step_function: Any) -> Any:
        """Make the training or test function of a model.

        Args:
            step_function: The model's `train_step` or `test_step`.
        """
        trains = "test" not in getattr(step_function, "__name__", "")
        by_itself = compat.steps_by_itself(model)
        if trains:
            _require_plain(model)
        if trains and by_itself and model.optimizer is not None:
            sum_over_ranks(model.optimizer)
            if compat.is_built(model):  # otherwise, the first trace of the step does, and another one follows
                compat.build_optimizer(model.optimizer, model.trainable_variables)
        if trains:
            self._say_assumption(model, by_itself)
        return StepFunction(original, model, step_function, trains, self._changes, self._probe)

    def _say_assumption(self, model: Any, by_itself: bool) -> None:
        """Say once for each class what is assumed about a training step or loss of the user."""
        cls, session = type(model), current_session()
        own = "train_step" if not by_itself else "compute_loss" if not compat.is_of_keras(next(
            base for base in cls.__mro__ if "compute_loss" in vars(base))) else ""
        if not own or cls in self._assumed:
            return
        self._assumed.add(cls)
        if session.topology.rank == 0 and prints_at(session.settings, "WARNING"):
            say(f"{cls.__name__}.{own} must compute means over the rows of its batch, each from its own row: then the"
                " result is that of one process (docs/data-parallel.md)")

    def apply(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Apply gradients; name the line of a loop outside of the steps of models, which is not distributed."""
        if self._probe.running:
            return None
        session = current_session()
        if global_batch().rows is None and not self._has_loop and not running_calls().alone:
            self._has_loop = True
            if session.topology.rank == 0 and prints_at(session.settings, "WARNING"):
                stack = graphs.traced_stack()
                line = call_site() if stack is None else innermost(stack)
                say(f"a training loop of this script is not distributed (it applies gradients at {line}): every rank"
                    " computes whole batches. To share its work, run it without --data-parallel, and write: import"
                    " hvkeras as hvd; hvd.init(); dataset = hvd.shard(dataset); tape ="
                    " hvd.DistributedGradientTape(tape)")
        return original(optimizer, *args, **kwargs)

    def make_predict(self, original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
        """Make the prediction function of a model."""
        before, self._makes_predict = self._makes_predict, not running_calls().alone
        try:
            return original(model, *args, **kwargs)
        finally:
            self._makes_predict = before

    def predicting(self, _: Any, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return the step of one batch, for predictions in parts."""
        return step.predicting(function) if self._makes_predict else function

    def gradient(self, original: Callable[..., Any], tape: Any, target: Any, sources: Any, output_gradients: Any = None,
                 unconnected_gradients: Any = tf.UnconnectedGradients.NONE) -> Any:
        """Compute gradients with respect to weights, weighted by the rank's share of the rows."""
        rows = global_batch().rows
        variables = sources_of(sources)
        are_weights = all(_is_weight(one) for one in tf.nest.flatten(sources))
        if rows is None or not rows.trains or not are_weights:
            gradients = original(tape, target, sources, output_gradients, unconnected_gradients)
            if self._probe.running and are_weights:
                self._probe.note_gradients(tf.nest.flatten(gradients), variables)
            return gradients
        targets = tf.nest.flatten(target)
        upstream = [None] * len(targets) if output_gradients is None else tf.nest.flatten(output_gradients)
        scaled = [rows.times_share(tf.ones_like(one) if given is None else tf.cast(given, one.dtype))
                  if one.shape.rank == 0 else rows.counted(tf.ones_like(one) if given is None else given)
                  for one, given in zip(targets, upstream, strict=True)]
        gradients = original(tape, target, sources, tf.nest.pack_sequence_as(target, scaled), unconnected_gradients)
        if not rows.reduces:
            return gradients
        flat = tf.nest.flatten(gradients)
        if self._probe.running:
            flat = [gradient if gradient is None else tf.convert_to_tensor(gradient) for gradient in flat]
        reduced = GradientReducer(_SUMS, differentiable=True).reduce(flat, variables)
        if self._probe.running:
            self._probe.note_gradients(reduced, variables)
        return tf.nest.pack_sequence_as(gradients, reduced)

    def assign(self, original: Callable[..., Any], variable: Any, value: Any) -> Any:
        """Assign to a variable, and note that the step changes it."""
        if self._probe.running:
            self._probe.note_state(variable, value)
            return None
        if self._changes.current is not None:
            self._changes.current.note(variable)
        return original(variable, value)

    def next_seed(self, original: Callable[..., Any], generator: Any, *args: Any, **kwargs: Any) -> Any:
        """Draw the seed of a random operation of Keras."""
        seed = noise.next_seed(original, generator, *args, **kwargs)
        return seed + self._probe.offset if self._probe.offset else seed

    def call_function(self, original: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a `tf.function`; one of the user becomes a part of the step, as it may compute its gradients."""
        in_step = global_batch().rows is not None or self._probe.running
        if not in_step or graphs.is_compiled(function) or not _is_of_user(function.python_function):
            return original(function, *args, **kwargs)
        return graphs.inlined(function, *args, **kwargs)

    def update_metrics(self, original: Callable[..., Any], metrics: Any, *args: Any, **kwargs: Any) -> Any:
        """Add a batch to the metrics of an output."""
        return whole_batch.update_metrics(self._changes.current, original, metrics, *args, **kwargs)


_SUMS = ReductionOptions("the training step", op=Sum)


def cut_early(data: Any) -> None:
    """Have the pipeline of data compute this rank's rows only, where that is provably the same.

    Generators are not prefetched: how many elements are, and then lost when Keras starts a new pass over the same
    generator, would differ between ranks.
    """
    if running_calls().alone:
        return
    if data.is_of_generator:
        data.replace(without_prefetching)
    elif global_batch().whole and (data.is_of_arrays or data.is_of_dataset):
        data.replace(lambda dataset: rebuilt(dataset, data.is_of_arrays))


def _is_of_user(function: Any) -> bool:
    """Return whether a function is defined by the user, and not in a library."""
    function = inspect.unwrap(function)
    if isinstance(function, functools.partial):
        return _is_of_user(function.func)
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return code is not None and not is_library(code.co_filename)


def _is_weight(source: Any) -> bool:
    return bool(getattr(source, "trainable", False))


def _require_plain(model: Any) -> None:
    strategy = graphs.reducing_strategy(model)
    if strategy is not None:
        raise UnsupportedError(explain(f"{_FLAG} trains models without a tf.distribute strategy", "leave out the"
                                       " strategy and its scope", strategy=type(strategy).__name__))
    fixed = next((one.shape for one in tf.nest.flatten(getattr(model, "inputs", None) or []) if one.shape[0]), None)
    if fixed is not None:
        raise UnsupportedError(explain(f"Under {_FLAG}, a model must take any number of rows, since each rank computes"
                                       " some of them", "leave out batch_size of Input, and batch_shape",
                                       input_shape=tuple(fixed)))
    stateful = next((layer.name for layer in model._flatten_layers() if getattr(layer, "stateful", False)), "")
    if stateful:
        raise UnsupportedError(explain(f"Under {_FLAG}, a layer must not keep states of rows from batch to batch",
                                       "leave out stateful=True, or train on one process", layer=stateful))

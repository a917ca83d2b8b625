"""Start of the mode in which several ranks carry out the steps of one process together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvkeras import compat
from hvkeras.collectives.global_batch import global_batch
from hvkeras.collectives.operations import Sum
from hvkeras.compat import graphs, patches
from hvkeras.control.location import call_site
from hvkeras.diagnostics.recorder import recording
from hvkeras.errors import UnsupportedError, explain
from hvkeras.global_batch import files, seeds
from hvkeras.global_batch.functions import functions
from hvkeras.global_batch.iterators import iterators
from hvkeras.global_batch.pipelines import without_prefetching
from hvkeras.global_batch.reports import reports
from hvkeras.gradients.marks import marks
from hvkeras.gradients.optimizer import sum_over_ranks
from hvkeras.gradients.optimizer_classes import distributed_part
from hvkeras.gradients.options import ReductionOptions, chosen_compression
from hvkeras.gradients.reducer import GradientReducer
from hvkeras.host.console import prints_at, say
from hvkeras.host.forks import at_exit
from hvkeras.job.session import current_session, this_process
from hvkeras.training import fit_hooks
from hvkeras.training.fit_hooks import running_calls

_FLAG = "--data-parallel"


def start(require_whole: Callable[[], None] | None = None) -> None:
    """Start the mode for the rest of this process; in a job of one rank, only record the steps if a record is made.

    Args:
        require_whole: Raises an error, when data are read, if ranks do not get whole batches.

    Raises:
        UnsupportedError: Keras runs on a backend other than TensorFlow, or a setting asks for what the mode lacks.
    """
    session = current_session()
    if session.topology.size == 1:
        if recording().is_on():
            patches.install(patches.ONE_RANK, patches.OneRankBehaviour(_recorded))
        return
    if require_whole is not None:
        global_batch().require_whole = require_whole
    if global_batch().started:
        _install()  # in a Keras that has been imported since
        return
    if compat.foreign_backend():
        raise UnsupportedError(explain("Keras must run on TensorFlow", "set KERAS_BACKEND=tensorflow",
                                       backend=compat.foreign_backend()))
    require_internals()
    if session.settings.run_membership:
        raise UnsupportedError(explain(f"{_FLAG} needs a fixed number of ranks", "leave out --min-np and --max-np;"
                                       " --reset-limit restarts the script, for BackupAndRestore to resume"))
    if session.settings.shard_update:
        raise UnsupportedError(explain(f"{_FLAG} cannot shard the update of the weights, which one process does not",
                                       "unset HVKERAS_SHARD_UPDATE, or write the lines of hvkeras (README)",
                                       shard_update=True))
    seeds.agree()
    global_batch().start()
    recording().divide_rows()
    at_exit(iterators().forget)
    _install()
    files.install()
    _say_what_is_ignored(session)


def _install() -> None:
    fit_hooks.install()
    optimizers = this_process().part(Optimizers)
    patches.install(patches.GLOBAL_BATCH, patches.GlobalBatchBehaviour(
        call=functions().call, data=cut_early, iterate=iterators().iterate, next=iterators().next,
        next_as_optional=iterators().next_as_optional, apply=optimizers.apply,
        apply_pairs=optimizers.apply_pairs))


def require_internals() -> None:
    """Check that this TensorFlow has what the mode hooks into.

    Raises:
        UnsupportedError: It has not.
    """
    if lacks := patches.hidden(patches.GLOBAL_BATCH):
        raise UnsupportedError(explain(f"{_FLAG} needs internals of TensorFlow that this version lacks",
                                       "pip install 'tensorflow>=2.16,<2.22', or write the lines of hvkeras (README)",
                                       tensorflow=tf.__version__, lacks=", ".join(lacks)))


def _say_what_is_ignored(session: Any) -> None:
    if session.topology.rank or not prints_at(session.settings, "WARNING"):
        return
    say(f"data parallel: each rank computes 1/{session.topology.size} of the rows of every batch")
    if not session.settings.sync_batch_norm:
        say("data parallel: HVKERAS_SYNC_BATCH_NORM=off means nothing here: BatchNormalization computes what it does in"
            " one process")


def _recorded(original: Callable[..., Any], optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
    """Apply gradients on the only rank, and record the step."""
    if distributed_part(optimizer) is None:  # that of a distributed optimizer is recorded already
        variables = optimizer._trainable_variables if trainable_variables is None else trainable_variables
        recording().step(list(grads), list(variables))
    return original(optimizer, grads, trainable_variables)


class Optimizers:
    """Optimizers, which mark the gradients that they are given in functions."""

    def __init__(self) -> None:
        self._is_applying = False  # the outermost optimizer has marked them

    def apply(self, original: Callable[..., Any], optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
        """Apply gradients with an optimizer of Keras 3."""
        if self._is_applying or not _is_reduced():
            return original(optimizer, grads, trainable_variables)
        self._is_applying = True
        try:
            if compat.applies_as_keras(optimizer) and distributed_part(optimizer) is None:
                sum_over_ranks(optimizer)  # its update may be compiled
                return optimizer.apply(grads, trainable_variables)
            if distributed_part(optimizer) is not None:
                return original(optimizer, grads, trainable_variables)
            variables = optimizer._trainable_variables if trainable_variables is None else trainable_variables
            return original(optimizer, _marked(optimizer, list(grads), list(variables)), trainable_variables)
        finally:
            self._is_applying = False

    def apply_pairs(self, original: Callable[..., Any], optimizer: Any, grads_and_vars: Any, *args: Any,
                    **kwargs: Any) -> Any:
        """Apply gradients with an optimizer of tf_keras."""
        pairs = list(grads_and_vars)
        if self._is_applying or not _is_reduced():
            return original(optimizer, pairs, *args, **kwargs)
        self._is_applying = True
        try:
            variables = [variable for _, variable in pairs]
            gradients = _marked(optimizer, [gradient for gradient, _ in pairs], variables)
            return original(optimizer, list(zip(gradients, variables, strict=True)), *args, **kwargs)
        finally:
            self._is_applying = False


def _is_reduced() -> bool:
    """Return whether the ranks reduce the gradients of an optimizer; say where they do not, as each has them all."""
    if not tf.executing_eagerly():
        return graphs.from_function_graphs()
    if not running_calls().alone:
        reports().say_once(
            f"a step runs eagerly (it applies gradients at {call_site()}): every rank computes all of it. To divide it,"
            " write @tf.function above the function of the step, or leave out run_eagerly=True")
    return False


def _marked(optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
    exchange = ReductionOptions(type(compat.inner_optimizer(optimizer) or optimizer).__name__, Sum,
                                chosen_compression(ReductionOptions.compression))
    is_scaled = compat.inner_optimizer(optimizer) is not None
    reducer = GradientReducer(exchange, all_ranks_skip=is_scaled, optimizer=optimizer)
    return marks().mark(gradients, variables, reducer, (lambda: compat.loss_scale(optimizer)) if is_scaled else None)


def cut_early(data: Any) -> None:
    """Have the pipeline of data compute this rank's rows only, where that is provably the same.

    Generators are not prefetched: how many elements are, and then lost when Keras starts a new pass over the same
    generator, would differ between ranks.
    """
    if running_calls().alone or not functions().are_here:
        return
    global_batch().require_whole()
    if data.is_distributed:
        raise UnsupportedError(explain(f"{_FLAG} trains models without a tf.distribute strategy", "leave out the"
                                       " strategy and its scope"))
    if data.is_of_generator:
        data.replace(without_prefetching)
    if data.dataset is not None:
        iterators().cut_early(data.dataset, data.is_of_arrays)

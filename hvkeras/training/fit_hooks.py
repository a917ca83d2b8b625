"""Hooks around Keras's `fit`, `evaluate` and `predict` in multi-rank jobs.

`init()` installs these functions in Keras, and `shutdown()` removes them (`hvkeras.compat.patches`). In `fit`, the
ranks agree on steps, compare their weights and stop together (`hvkeras.training.fit_run`). The logs of `fit` and
`evaluate` cover the data of all ranks (`hvkeras.training.metrics`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hvkeras import compat
from hvkeras.collectives.broadcasts import allgather_object
from hvkeras.collectives.global_batch import global_batch
from hvkeras.collectives.operations import Average
from hvkeras.compat import graphs, patches, strategies
from hvkeras.control import activity
from hvkeras.diagnostics import timeline
from hvkeras.diagnostics.recorder import recording
from hvkeras.errors import UnsupportedError, explain
from hvkeras.gradients.optimizer_classes import distributed_part, install_hooks
from hvkeras.horovod import as_horovod
from hvkeras.host.console import prints_at, say
from hvkeras.host.forks import detach_in_children
from hvkeras.job.process_sets import ProcessSet, global_process_set
from hvkeras.job.session import current_session, is_initialized, this_process
from hvkeras.training import losses, metrics
from hvkeras.training.divergence_check import require_same_state
from hvkeras.training.fit_account import FitAccount, account_for, current_share
from hvkeras.training.fit_callbacks import with_hook_callbacks
from hvkeras.training.fit_run import FitRun, flat
from hvkeras.training.shared_files import note_save
from hvkeras.training.sync_batch_norm import moments_over_ranks

# The parameters of these methods, in the order that all versions of Keras 3 and tf_keras share.
_EVALUATE = ("x", "y", "batch_size", "verbose", "sample_weight", "steps", "callbacks")
_PREDICT = ("x", "batch_size", "verbose", "steps", "callbacks")


@dataclass(frozen=True)
class _FitCall:
    """Running call of `fit`, of its own `validation`, or of `evaluate`, with its shared state where ranks share it."""

    kind: str
    run: FitRun | None = None
    account: FitAccount | None = None


class RunningCalls:
    """Calls of `fit` and `evaluate` that are running in this process."""

    def __init__(self) -> None:
        self._stack: list[_FitCall] = []  # the innermost is last
        self._alone = 0  # depth of local scopes
        self._in_train_step = False  # whether Keras's own training step is being traced or run
        self.unmerged: set[str] = set()  # types of metrics whose merges were said to mean nothing
        # Session number and ranks with which each model was traced.
        self._ranks: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        detach_in_children(self)

    @property
    def alone(self) -> bool:
        """True if calls of this rank are local: no other rank participates."""
        return self._alone > 0

    @contextlib.contextmanager
    def local_calls(self) -> Iterator[None]:
        """Enter a scope in which calls of this rank are local."""
        self._alone += 1
        try:
            yield
        finally:
            self._alone -= 1

    def in_child(self) -> None:
        """Make calls local in a process that a rank has forked.

        A process that was forked before `init()` may itself become a rank.
        """
        if is_initialized() and current_session().topology.size > 1:
            self._alone += 1

    @contextlib.contextmanager
    def running(self, call: _FitCall) -> Iterator[None]:
        """Enter a scope in which a call runs."""
        self._stack.append(call)
        try:
            yield
        finally:
            self._stack.pop()

    @contextlib.contextmanager
    def in_train_step(self) -> Iterator[None]:
        """Enter a scope in which Keras's own training step is traced or run."""
        before, self._in_train_step = self._in_train_step, True
        try:
            yield
        finally:
            self._in_train_step = before

    @property
    def innermost(self) -> _FitCall | None:
        """Innermost running call; None if none is running."""
        return self._stack[-1] if self._stack else None

    @property
    def trains(self) -> bool:
        """True if a loss that is computed now is a training loss."""
        return self._in_train_step or bool(self._stack and self._stack[-1].kind == "fit")

    def run_of(self, model: Any) -> FitRun | None:
        """Return the run of the innermost `fit` of a model that ranks share; None if there is none."""
        return next((call.run for call in reversed(self._stack) if call.run is not None and call.run.model is model),
                    None)

    def ranks(self) -> ProcessSet | None:
        """Return the ranks of the innermost `fit`, or of the job in a custom loop; None if this rank trains alone."""
        if self.alone or not _has_ranks() or current_session().topology.size == 1 or global_batch().started:
            return None
        fit = self._innermost_fit()
        return global_process_set if fit is None else None if fit.run is None else fit.run.process_set

    def data_ready(self, data: Any) -> None:
        """Pass data that were prepared for iteration to the account and the run of `fit`."""
        fit = self._innermost_fit()
        if fit is not None and fit.account is not None:
            fit.account.data_ready(data)
        if fit is not None and fit is self.innermost and fit.run is not None:
            fit.run.data_ready(data)

    def forget_other_ranks(self, model: Any, process_set: ProcessSet | None) -> None:
        """Make Keras retrace a step that was traced with other ranks, or before this worker joined."""
        number = current_session().number if is_initialized() else 0
        ranks = (number, None if process_set is None else process_set.ranks)
        traced = self._ranks.get(model)
        if traced != ranks and (traced is not None or getattr(model, "train_function", None) is not None):
            compat.forget_train_function(model)
        self._ranks[model] = ranks

    def _innermost_fit(self) -> _FitCall | None:
        return next((call for call in reversed(self._stack) if call.kind == "fit"), None)


def running_calls() -> RunningCalls:
    """Return the calls that are running in this process."""
    return this_process().part(RunningCalls)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Run `fit` and `evaluate` on this rank alone: nothing in the scope waits for other ranks.

    Outside of it, the metrics of every `fit` and `evaluate` cover the data of all ranks, so all ranks must make the
    call.

    Example:
        if hvd.rank() == 0:
            with hvd.alone():
                print(model.evaluate(x_test, y_test))
    """
    with running_calls().local_calls():
        yield


def install() -> None:
    """Install the hooks in every loaded Keras; called by `init()` in multi-rank jobs, or when recording."""
    install_hooks()
    patches.install(patches.TRAINING, patches.TrainingBehaviour(
        fit=_hooked_fit, evaluate=_hooked_evaluate, predict=_hooked_predict, reset_metrics=_hooked_reset,
        logs=_hooked_logs, data=running_calls().data_ready, stop_training=_stop_training, step=activity.counting,
        train_step=_hooked_train_step, compute_loss=_hooked_compute_loss, weigh=losses.weigh_by_mask,
        combine=losses.combine, moments=_hooked_moments, synchronizes=_synchronizes, orbax=_hooked_orbax,
        save=_hooked_save))
    for sentence in patches.newly_hidden():
        job = current_session()
        if job.topology.rank == 0 and prints_at(job.settings, "WARNING"):
            say(sentence)


def shared_by(model: Any) -> ProcessSet | None:
    """Return the ranks that train this model together; None if this rank uses it alone."""
    if running_calls().alone or not _has_ranks() or current_session().topology.size == 1:
        return None
    if graphs.spans_workers(graphs.reducing_strategy(model)):
        return None
    part = distributed_part(getattr(model, "optimizer", None))
    process_set = global_process_set if part is None else part.exchange.process_set
    return process_set if len(process_set.members()) > 1 and process_set.included() else None


def _has_ranks() -> bool:
    """Return whether this process is a rank: False before `init()` and while waiting to join an elastic job."""
    return is_initialized() and current_session().backend.has_ranks


def _hooked_fit(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `fit`, or let a callback run it (`hvd.elastic.ElasticCallback`)."""
    given = compat.fit_arguments(args, kwargs)

    def run(**changed: Any) -> Any:
        by_index, by_name = compat.with_arguments(args, kwargs, changed)
        return _fit(original, model, given | changed, *by_index, **by_name)

    elastic = next((callback for callback in flat(given["callbacks"]) if hasattr(callback, "run_fit")), None)
    return run() if elastic is None else elastic.run_fit(run, model, given)


def _fit(original: Callable[..., Any], model: Any, given: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    if _has_ranks() and current_session().topology.size > 1:
        for part in (getattr(model, "optimizer", None), *flat(given["callbacks"])):
            compat.require_no_horovod(part)
    process_set = shared_by(model)
    running_calls().forget_other_ranks(model, process_set)
    account = account_for(model, given) if _has_ranks() and not running_calls().alone else None
    changed = current_share({"validation_data": given["validation_data"]})
    if account is not None:
        changed |= account.arguments()
    run = None
    if process_set is not None:
        if graphs.reducing_strategy(model) is not None:
            strategies.require_scaled_loss()
        run = FitRun(model, process_set, given | changed)
    args, kwargs = compat.with_arguments(
        args, kwargs, {**changed, "callbacks": with_hook_callbacks(model, given["callbacks"], run, account)})
    timed = timeline.is_on()
    if timed:
        compat.forget_train_function(model)
    try:
        with running_calls().running(_FitCall("fit", run, account)), activity.running(activity.TRAIN, model):
            history = original(model, *args, **kwargs)
    finally:
        if run is not None:
            run.end()
        if timed:
            compat.forget_train_function(model)
    if not running_calls().alone:
        recording().record_logs("fit", {name: values[-1] for name, values in history.history.items() if values})
    return history


def _hooked_evaluate(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    run = None if running_calls().alone else running_calls().run_of(model)
    given = {**dict.fromkeys(_EVALUATE), **dict(zip(_EVALUATE, args, strict=False)), **kwargs}
    changed = {"callbacks": with_hook_callbacks(model, given["callbacks"])}
    if not running_calls().alone:
        changed |= current_share({name: given[name] for name in ("x", "y") if given[name] is not None})
    args, kwargs = compat.with_arguments(args, kwargs, changed, _EVALUATE)
    # For its own validation within fit, Keras requests a cached dataset.
    kind = "validation" if "_use_cached_eval_dataset" in kwargs else "evaluate"
    process_set = shared_by(model) if kind == "evaluate" else None
    if kind == "validation" and run is not None:
        run.average_statistics(kind)
    # A local evaluation during a shared fit must not change the metrics of that fit.
    is_local = running_calls().alone and running_calls().run_of(model) is not None
    preserved_metrics = metrics.preserved(model) if is_local else contextlib.nullcontext()
    same_state = contextlib.nullcontext() if process_set is None else same_state_of(model, process_set, kind)
    with (same_state, running_calls().running(_FitCall(kind)), preserved_metrics, recording().evaluating(),
          activity.running(activity.TEST, model)):
        return original(model, *args, **kwargs)


@contextlib.contextmanager
def same_state_of(model: Any, process_set: ProcessSet, what: str, hint: str = "") -> Iterator[None]:
    """Enter a scope in which all ranks evaluate or predict with a model: they must hold the same weights and state.

    Within `fit`, its own checks compare the weights, and only moving statistics are averaged.

    Args:
        what: The call, for messages.
        hint: What to do if not all ranks make this call.
    """
    run = None if running_calls().alone else running_calls().run_of(model)
    if run is not None and run.process_set.ranks == process_set.ranks:
        run.average_statistics(what)
        yield
    elif global_batch().started:  # states are those of all ranks
        yield
    else:
        hint = hint or metrics.missing_call_hint(what)
        is_compared = require_same_state(model, process_set, what, hint)
        yield
        if not is_compared:  # the call has built the model
            require_same_state(model, process_set, what, hint)


def _hooked_predict(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    given = {"callbacks": None, **dict(zip(_PREDICT, args, strict=False)), **kwargs}
    changed = {"callbacks": with_hook_callbacks(model, given["callbacks"])}
    args, kwargs = compat.with_arguments(args, kwargs, changed, _PREDICT)
    with recording().evaluating(), activity.running(activity.PREDICT, model):
        return original(model, *args, **kwargs)


def _hooked_train_step(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    with running_calls().in_train_step():
        return original(model, *args, **kwargs)


def _hooked_compute_loss(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute training losses over all ranks, and evaluation losses as Keras does.

    With --as-horovod, training losses stay as in Horovod: learning rates of scripts are tuned to them.
    """
    if as_horovod.is_installed() or global_batch().started:
        return original(model, *args, **kwargs)
    part = distributed_part(getattr(model, "optimizer", None)) if running_calls().trains else None
    averages = part is not None and part.exchange.op == Average
    run = running_calls().run_of(model)
    with losses.averaged_over(shared_by(model) if averages else None, run is not None and run.by_rows):
        return original(model, *args, **kwargs)


def _hooked_moments(own: Callable[[], Any], inputs: Any, axes: Any, keep_dims: bool, mask: Any) -> Any:
    # A strategy over several processes reduces over all of them itself.
    process_set = running_calls().ranks()
    if process_set is None or graphs.spans_workers(graphs.reducing_strategy()):
        return own()
    return moments_over_ranks(inputs, axes, keep_dims, mask, process_set)


def _synchronizes(layer: Any) -> bool:
    """Return whether a layer of BatchNormalization uses the moments of all ranks."""
    return compat.is_synchronized(layer)


def _hooked_orbax(original: Callable[..., Any], callback: Any, *args: Any, **kwargs: Any) -> None:
    """Save on the first rank only; Keras distinguishes only processes of JAX."""
    model = callback.model
    if graphs.spans_workers(graphs.reducing_strategy(model)):
        raise UnsupportedError(explain("OrbaxCheckpoint cannot save a model under a strategy over several processes",
                                       "use hvd.callbacks.ModelCheckpoint", directory=callback.directory))
    process_set = shared_by(model)
    if process_set is None or current_session().topology.rank == process_set.ranks[0]:
        original(callback, *args, **kwargs)


def _hooked_save(original: Callable[..., Any], model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
    """Save, and say on the second rank that others may write the same file; callbacks are checked before `fit`."""
    session = current_session() if is_initialized() else None
    if session is not None and session.topology.rank == 1 and running_calls().innermost is None and (
            not global_batch().started and prints_at(session.settings, "WARNING")):
        note_save(filepath, say)
    return original(model, filepath, *args, **kwargs)


def _hooked_reset(original: Callable[..., Any], model: Any) -> None:
    original(model)
    metrics.forget_merged(model)
    run = running_calls().run_of(model)
    if run is not None and not running_calls().alone:
        run.frozen = None


def _say_unmerged(model: Any) -> None:
    """Say once for each type of metric that the merge that it declares means nothing, since it sees all rows."""
    declared = {type(metric).__name__ for metrics_ in compat.metric_groups(model) for metric in metrics_
                if hasattr(metric, "hvkeras_merge")} - running_calls().unmerged
    running_calls().unmerged |= declared
    session = current_session()
    if declared and session.topology.rank == 0 and prints_at(session.settings, "WARNING"):
        say(f"data parallel: hvkeras_merge of {', '.join(sorted(declared))} means nothing here: metrics see all rows")


def _hooked_logs(original: Callable[..., Any], model: Any, logs: Any) -> Any:
    """Compute the logs of an epoch or an evaluation from the metrics of all ranks."""
    call = running_calls().innermost
    if call is None:
        return original(model, logs)
    activity.end_steps()
    kind, run, outer = call.kind, call.run, running_calls().run_of(model)
    name_of_call = "fit" if kind == "fit" else "evaluate" if outer is None else "validation"
    process_set = shared_by(model)
    if process_set is None or global_batch().started:  # states are those of all ranks
        result = original(model, logs)
        if global_batch().started:
            global_batch().require_same_batches()
            _say_unmerged(model)
    else:
        if run is not None:
            run.average_statistics("fit")  # before validation, and before callbacks that save
        result = _shared_logs(lambda: original(model, logs), logs, model, process_set, kind, run)
        if outer is not None and isinstance(result, dict):
            outer.exact |= {f"val_{name}" if name_of_call == "validation" else name for name in result}
    if name_of_call == "evaluate" and not running_calls().alone and isinstance(result, dict):
        recording().record_logs(name_of_call, result)
    if name_of_call == "fit":
        recording().record_epoch(result)
    return result


def _shared_logs(make: Callable[[], Any], logs: Any, model: Any, process_set: ProcessSet, what: str,
                 run: FitRun | None) -> Any:
    frozen = run.frozen if run is not None else None
    if run is not None:
        run.frozen = None
    mine = bool(logs)  # else this rank had no data
    own = (frozen or metrics.own_states(model)) if mine else None
    has_state = metrics.merge(model, process_set, what, own)
    result: Any = make() if mine else None
    is_from_step = mine and result is logs  # not from metrics
    if all(has_state):
        return metrics.average_logs(result, process_set, what) if is_from_step else result
    everyone = allgather_object((result, is_from_step), name=f"the logs of {what}", process_set=process_set)
    found = [(logs, averaged) for (logs, averaged), has in zip(everyone, has_state, strict=True) if has]
    if not found:
        return make()
    return metrics.average([logs for logs, _ in found]) if found[0][1] else found[0][0]


def _stop_training(model: Any, own: bool) -> bool:
    """Return `model.stop_training`; in a shared `fit`, the value on which all ranks agreed."""
    run = running_calls().run_of(model)
    return own if run is None else run.stops_now(own)


def exact_logs(model: Any) -> set[str]:
    """Return the names of logs in the running `fit` that cover the data of all ranks; automatic names vary by rank."""
    run = running_calls().run_of(model)
    return set() if run is None else run.exact

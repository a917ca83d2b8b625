"""What Keras's `fit` and `evaluate` do in multi-rank jobs.

`init()` has Keras call these functions, and `shutdown()` undoes that (`hvkeras.compat.patches`). In `fit`, the ranks
agree on steps, compare their weights and stop together (`hvkeras.training.fit_run`). The logs of `fit` and `evaluate`
cover the data of all ranks (`hvkeras.training.metrics`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hvkeras import compat
from hvkeras.collectives.broadcasts import allgather_object
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
from hvkeras.training import losses, metrics, moving_statistics
from hvkeras.training.fit_account import FitAccount, account_for, present_share
from hvkeras.training.fit_callbacks import followed
from hvkeras.training.fit_run import FitRun, flat
from hvkeras.training.sync_batch_norm import moments_over_ranks

# The parameters of these methods, in the order that all versions of Keras 3 and tf_keras share.
_EVALUATE = ("x", "y", "batch_size", "verbose", "sample_weight", "steps", "callbacks")
_PREDICT = ("x", "batch_size", "verbose", "steps", "callbacks")


@dataclass(frozen=True)
class _FitCall:
    """A running call: `fit`, its own `validation`, or `evaluate`; with what follows it, where ranks share it."""

    kind: str
    run: FitRun | None = None
    account: FitAccount | None = None


class RunningCalls:
    """The calls of `fit` and `evaluate` that are running in this process."""

    def __init__(self) -> None:
        self._stack: list[_FitCall] = []  # the innermost is last
        self._alone = 0
        self._in_train_step = False  # whether Keras's own training step is being traced or run
        self._ranks: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # with whom models were traced
        detach_in_children(self)

    @property
    def alone(self) -> bool:
        """Whether this rank makes its calls alone."""
        return self._alone > 0

    @contextlib.contextmanager
    def made_alone(self) -> Iterator[None]:
        """A scope in which this rank makes its calls alone."""
        self._alone += 1
        try:
            yield
        finally:
            self._alone -= 1

    def in_child(self) -> None:
        """Lets a process that a rank has forked make its calls alone; one forked before may become a rank."""
        if is_initialized() and current_session().topology.size > 1:
            self._alone += 1

    @contextlib.contextmanager
    def running(self, call: _FitCall) -> Iterator[None]:
        """A scope in which a call runs."""
        self._stack.append(call)
        try:
            yield
        finally:
            self._stack.pop()

    @contextlib.contextmanager
    def in_train_step(self) -> Iterator[None]:
        """A scope in which Keras's own training step is traced or run."""
        before, self._in_train_step = self._in_train_step, True
        try:
            yield
        finally:
            self._in_train_step = before

    @property
    def innermost(self) -> _FitCall | None:
        """The innermost call; None if none is running."""
        return self._stack[-1] if self._stack else None

    @property
    def trains(self) -> bool:
        """Whether a loss that is computed now is one of training."""
        return self._in_train_step or bool(self._stack and self._stack[-1].kind == "fit")

    def run_of(self, model: Any) -> FitRun | None:
        """Returns the innermost running `fit` of a model that ranks share; None if there is none."""
        return next((call.run for call in reversed(self._stack) if call.run is not None and call.run.model is model),
                    None)

    def ranks(self) -> ProcessSet | None:
        """Returns the ranks of the innermost `fit`, or of the job in a custom loop; None if this rank trains alone."""
        if self.alone or not _has_ranks() or current_session().topology.size == 1:
            return None
        fit = self._innermost_fit()
        return global_process_set if fit is None else None if fit.run is None else fit.run.process_set

    def data_ready(self, data: Any) -> None:
        """Hands data that were prepared for iteration to what follows the calls."""
        fit = self._innermost_fit()
        if fit is not None and fit.account is not None:
            fit.account.data_ready(data)
        if fit is not None and fit is self.innermost and fit.run is not None:
            fit.run.data_ready(data)

    def forget_other_ranks(self, model: Any, process_set: ProcessSet | None) -> None:
        """Makes Keras trace a step again that was traced with other ranks, or before this worker had joined."""
        number = current_session().number if is_initialized() else 0
        ranks = (number, None if process_set is None else process_set.ranks)
        known = self._ranks.get(model)
        if known != ranks and (known is not None or getattr(model, "train_function", None) is not None):
            compat.forget_train_function(model)
        self._ranks[model] = ranks

    def _innermost_fit(self) -> _FitCall | None:
        return next((call for call in reversed(self._stack) if call.kind == "fit"), None)


def running_calls() -> RunningCalls:
    """Returns the calls that are running in this process."""
    return this_process().part(RunningCalls)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Lets this rank call `fit` and `evaluate` alone: nothing in the body waits for other ranks.

    Otherwise the ranks share every `fit` and `evaluate`: the metrics cover the data of all ranks, so all ranks must
    make the call.

    Example:
        if hvd.rank() == 0:
            with hvd.alone():
                print(model.evaluate(x_test, y_test))
    """
    with running_calls().made_alone():
        yield


def install() -> None:
    """Changes every Keras loaded in this process; called by `init()` in multi-rank jobs, or when recording."""
    install_hooks()
    patches.install(patches.TRAINING, patches.TrainingBehaviour(
        fit=_around_fit, evaluate=_around_evaluate, predict=_around_predict, reset_metrics=_around_reset,
        logs=_around_logs, data=running_calls().data_ready, stop_training=_stops, step=activity.counting,
        train_step=_around_train_step, compute_loss=_around_compute_loss, weigh=losses.weigh_by_mask,
        combine=losses.combine, moments=_around_moments, orbax=_around_orbax))
    for sentence in patches.newly_hidden():
        job = current_session()
        if job.topology.rank == 0 and prints_at(job.settings, "WARNING"):
            say(sentence)


def shared_by(model: Any) -> ProcessSet | None:
    """Returns the ranks that use this model together; None if this rank uses it alone."""
    if running_calls().alone or not _has_ranks() or current_session().topology.size == 1:
        return None
    if graphs.spans_workers(graphs.reducing_strategy(model)):
        return None
    part = distributed_part(getattr(model, "optimizer", None))
    process_set = global_process_set if part is None else part.exchange.process_set
    return process_set if len(process_set.members()) > 1 and process_set.included() else None


def _has_ranks() -> bool:
    """Whether this process is a rank: not before `init()`, and not while it waits to join an elastic job."""
    return is_initialized() and current_session().backend.has_ranks


def _around_fit(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs `fit`: by a callback that runs it, if there is one (`hvd.elastic.ElasticCallback`)."""
    given = compat.fit_arguments(args, kwargs)

    def run(**changed: Any) -> Any:
        by_index, by_name = compat.with_arguments(args, kwargs, changed)
        return _fit(original, model, given | changed, *by_index, **by_name)

    elastic = next((callback for callback in flat(given["callbacks"]) if hasattr(callback, "run_fit")), None)
    return run() if elastic is None else elastic.run_fit(run, model, given)


def _fit(original: Callable[..., Any], model: Any, given: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Runs `fit` with arguments that are also `given` by name."""
    process_set = shared_by(model)
    running_calls().forget_other_ranks(model, process_set)
    account = account_for(model, given) if _has_ranks() and not running_calls().alone else None
    changed = present_share({"validation_data": given["validation_data"]})
    if account is not None:
        changed |= account.arguments()
    run = None
    if process_set is not None:
        if graphs.reducing_strategy(model) is not None:
            strategies.require_scaled_loss()
        run = FitRun(model, process_set, given | changed)
    args, kwargs = compat.with_arguments(
        args, kwargs, {**changed, "callbacks": followed(model, given["callbacks"], run, account)})
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


def _around_evaluate(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    run = None if running_calls().alone else running_calls().run_of(model)
    given = {**dict.fromkeys(_EVALUATE), **dict(zip(_EVALUATE, args, strict=False)), **kwargs}
    changed = {"callbacks": followed(model, given["callbacks"])}
    if not running_calls().alone:
        changed |= present_share({name: given[name] for name in ("x", "y") if given[name] is not None})
    args, kwargs = compat.with_arguments(args, kwargs, changed, _EVALUATE)
    # For its own validation within fit, Keras asks to cache the dataset.
    kind = "validation" if "_use_cached_eval_dataset" in kwargs else "evaluate"
    if run is not None:
        run.average_statistics(kind)
    elif (process_set := shared_by(model)) is not None:
        _average_renewed_statistics(model, process_set)
    # An evaluation by one rank alone, during a fit that ranks share, must not enter that fit's metrics.
    is_apart = running_calls().alone and running_calls().run_of(model) is not None
    untouched_metrics = metrics.untouched(model) if is_apart else contextlib.nullcontext()
    with (running_calls().running(_FitCall(kind)), untouched_metrics, recording().evaluating(),
          activity.running(activity.TEST, model)):
        return original(model, *args, **kwargs)


def _average_renewed_statistics(model: Any, process_set: ProcessSet) -> None:
    """Averages moving statistics that the ranks have computed again since they trained a model together."""
    part, settings = distributed_part(getattr(model, "optimizer", None)), current_session().settings
    if part is not None and settings.guard and settings.average_statistics and compat.step_counter(part.optimizer) > 0:
        moving_statistics.average_if_renewed(model, process_set, part.local_keys(), "evaluate")


def _around_predict(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    given = {"callbacks": None, **dict(zip(_PREDICT, args, strict=False)), **kwargs}
    args, kwargs = compat.with_arguments(args, kwargs, {"callbacks": followed(model, given["callbacks"])}, _PREDICT)
    with recording().evaluating(), activity.running(activity.PREDICT, model):
        return original(model, *args, **kwargs)


def _around_train_step(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    with running_calls().in_train_step():
        return original(model, *args, **kwargs)


def _around_compute_loss(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Computes training losses over all ranks; evaluation losses are left as they are.

    Under --as-horovod, training losses stay as in Horovod: scripts have tuned their learning rates to them.
    """
    if as_horovod.is_installed():
        return original(model, *args, **kwargs)
    part = distributed_part(getattr(model, "optimizer", None)) if running_calls().trains else None
    averages = part is not None and part.exchange.op == Average
    run = running_calls().run_of(model)
    with losses.averaged_over(shared_by(model) if averages else None, run is not None and run.by_rows):
        return original(model, *args, **kwargs)


def _around_moments(own: Callable[[], Any], inputs: Any, axes: Any, keep_dims: bool, mask: Any) -> Any:
    """Computes the moments of a synchronized BatchNormalization over all ranks that train together.

    A strategy over several processes reduces over all of them by itself.
    """
    process_set = running_calls().ranks()
    if process_set is None or graphs.spans_workers(graphs.reducing_strategy()):
        return own()
    return moments_over_ranks(inputs, axes, keep_dims, mask, process_set)


def _around_orbax(original: Callable[..., Any], callback: Any, *args: Any, **kwargs: Any) -> None:
    """Saves on the first of the ranks that train a model; Keras distinguishes processes of JAX alone.

    Raises:
        UnsupportedError: The model was created under a strategy over several processes, all of which Keras would have
            to involve.
    """
    model = callback.model
    if graphs.spans_workers(graphs.reducing_strategy(model)):
        raise UnsupportedError(explain("OrbaxCheckpoint cannot save a model of a strategy over several processes",
                                       "use hvd.callbacks.ModelCheckpoint", directory=callback.directory))
    process_set = shared_by(model)
    if process_set is None or current_session().topology.rank == process_set.ranks[0]:
        original(callback, *args, **kwargs)


def _around_reset(original: Callable[..., Any], model: Any) -> None:
    original(model)
    metrics.forget_merged(model)
    run = running_calls().run_of(model)
    if run is not None and not running_calls().alone:
        run.frozen = None


def _around_logs(original: Callable[..., Any], model: Any, logs: Any) -> Any:
    """Computes the logs of an epoch or an evaluation from the metrics of all ranks."""
    call = running_calls().innermost
    if call is None:
        return original(model, logs)
    activity.end_steps()
    kind, run, outer = call.kind, call.run, running_calls().run_of(model)
    what = "fit" if kind == "fit" else "evaluate" if outer is None else "validation"
    process_set = shared_by(model)
    if process_set is None:
        result = original(model, logs)
    else:
        if run is not None:
            run.average_statistics("fit")  # before validation, and before callbacks that save
        result = _shared_logs(lambda: original(model, logs), logs, model, process_set, kind, run)
        if outer is not None and isinstance(result, dict):
            outer.exact |= {f"val_{name}" if what == "validation" else name for name in result}
    if what == "evaluate" and not running_calls().alone and isinstance(result, dict):
        recording().record_logs(what, result)
    if what == "fit":
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
    from_step = mine and result is logs  # not from metrics
    if all(has_state):
        return metrics.average_logs(result, process_set, what) if from_step else result
    everyone = allgather_object((result, from_step), name=f"the logs of {what}", process_set=process_set)
    found = [(logs, averaged) for (logs, averaged), has in zip(everyone, has_state, strict=True) if has]
    if not found:
        return make()
    return metrics.average([logs for logs, _ in found]) if found[0][1] else found[0][0]


def _stops(model: Any, own: bool) -> bool:
    """Returns the value of `model.stop_training`; in a `fit` that ranks share, the one that all agreed on."""
    run = running_calls().run_of(model)
    return own if run is None else run.stops_now(own)


def exact_logs(model: Any) -> set[str]:
    """Returns the names of logs in the running `fit` that cover all ranks' data; automatic names vary by rank."""
    run = running_calls().run_of(model)
    return set() if run is None else run.exact

"""Hooks that wrap Keras `fit` and `evaluate` in multi-rank jobs.

`init()` installs the hooks, and `shutdown()` removes them. In `fit`, the ranks agree on steps, compare their weights
and stop together (`hvkeras.training.fit_run`). The logs of `fit` and `evaluate` cover the data of all ranks
(`hvkeras.training.metrics`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from hvkeras import as_horovod, compat
from hvkeras.collectives.broadcasts import allgather_object
from hvkeras.collectives.operations import Average
from hvkeras.compat import graphs, strategies
from hvkeras.errors import UnsupportedError, explain
from hvkeras.gradients import distributed
from hvkeras.gradients.distributed import distributed_part
from hvkeras.host.console import prints_at, say
from hvkeras.host.forks import call_in_children
from hvkeras.job.process_sets import ProcessSet, global_process_set
from hvkeras.job.state import current_job, is_initialized, job_number
from hvkeras.profiling import recorder, timeline
from hvkeras.progress import activity
from hvkeras.training import losses, metrics, moving_statistics
from hvkeras.training.fit_account import FitAccount, account_for, present_share
from hvkeras.training.fit_run import FitRun, flat, with_callback
from hvkeras.training.sync_batch_norm import moments_over_ranks


class _Calls:
    """The calls that are running."""

    alone = 0
    # Whether Keras's own training step is being traced or run.
    in_train_step = False
    # The running calls of fit (with None if ranks do not share it), of evaluate, and of fit's own validation; the
    # innermost call is last.
    stack: list[tuple[str, FitRun | None]] = []  # noqa: RUF012 - one per process on purpose
    accounts: list[FitAccount | None] = []  # noqa: RUF012 - of the running calls of fit


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
    _Calls.alone += 1
    try:
        yield
    finally:
        _Calls.alone -= 1


def _in_child() -> None:
    """Lets a process that a rank has forked call `fit` and `evaluate` alone; one forked before may become a rank."""
    if is_initialized() and current_job().topology.size > 1:
        _Calls.alone += 1


call_in_children(_in_child)


def install() -> None:
    """Hooks every Keras loaded in this process; called by `init()` in multi-rank jobs, or when recording."""
    hooks = compat.TrainingHooks(_around_fit, _around_evaluate, _around_predict, _around_reset, _around_logs,
                                 _around_data, _stops, activity.around_callbacks, activity.counting)
    for family in compat.loaded_families():
        distributed.install_hooks(family)
        compat.hook_losses(family, _around_train_step, _around_compute_loss, losses.weigh_by_mask, losses.combine)
        compat.hook_moments(family, _around_moments)
        if family == compat.KERAS:
            compat.hook_orbax(_around_orbax)
        missing = compat.hook_training(family, hooks)
        job = current_job()
        if missing and job.topology.rank == 0 and prints_at(job.settings, "WARNING"):
            say(f"this version of {family} hides {', '.join(missing)}: hvkeras cannot handle that part")


def shared_by(model: Any) -> ProcessSet | None:
    """Returns the ranks that use this model together; None if this rank uses it alone."""
    if _Calls.alone or not _has_ranks() or current_job().topology.size == 1:
        return None
    if graphs.spans_workers(graphs.reducing_strategy(model)):
        return None
    part = distributed_part(getattr(model, "optimizer", None))
    process_set = global_process_set if part is None else part.exchange.process_set
    return process_set if len(process_set.members()) > 1 and process_set.included() else None


def _has_ranks() -> bool:
    """Whether this process is a rank: not before `init()`, and not while it waits to join an elastic job."""
    return is_initialized() and current_job().backend.has_ranks


def _around_fit(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs `fit`: by a callback that runs it, if there is one (`hvd.elastic.ElasticCallback`)."""
    given = compat.fit_arguments(args, kwargs)

    def run(**changed: Any) -> Any:
        by_place, by_name = compat.with_arguments(args, kwargs, changed)
        return _fit(original, model, given | changed, *by_place, **by_name)

    elastic = next((callback for callback in flat(given["callbacks"]) if hasattr(callback, "run_fit")), None)
    return run() if elastic is None else elastic.run_fit(run, model, given)


def _fit(original: Callable[..., Any], model: Any, given: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Runs `fit` with arguments that are also `given` by name."""
    process_set = shared_by(model)
    _forget_other_ranks(model, process_set)
    run = None
    account = account_for(model, given) if _has_ranks() and not _Calls.alone else None
    changed = present_share({"validation_data": given["validation_data"]})
    callbacks = given["callbacks"]
    if account is not None:
        changed |= account.arguments()
        callbacks = with_callback(callbacks, account.callback())
    given |= {**changed, "callbacks": callbacks}
    if process_set is not None:
        if graphs.reducing_strategy(model) is not None:
            strategies.require_scaled_loss()
        run = FitRun(model, process_set, given)
        callbacks = run.callbacks(callbacks)
    if changed or run is not None or account is not None:
        args, kwargs = compat.with_arguments(args, kwargs, {**changed, "callbacks": callbacks})
    _Calls.accounts.append(account)
    _Calls.stack.append(("fit", run))
    timed = timeline.is_on()
    if timed:
        compat.forget_train_function(model)
    try:
        with activity.running(activity.TRAIN, model):
            history = original(model, *args, **kwargs)
    finally:
        _Calls.stack.pop()
        _Calls.accounts.pop()
        if run is not None:
            run.end()
        if timed:
            compat.forget_train_function(model)
    if not _Calls.alone:
        recorder.recording().note_logs("fit", {name: values[-1] for name, values in history.history.items() if values})
    return history


def _forget_other_ranks(model: Any, process_set: ProcessSet | None) -> None:
    """Makes Keras trace the training step again if it was traced with other ranks, or before this worker had joined."""
    ranks = (job_number(), None if process_set is None else process_set.ranks)
    if model.__dict__.get("_hvkeras_ranks", ranks) != ranks or (
            "_hvkeras_ranks" not in model.__dict__ and getattr(model, "train_function", None) is not None):
        compat.forget_train_function(model)
    model.__dict__["_hvkeras_ranks"] = ranks


def _around_evaluate(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    run = None if _Calls.alone else _run_of(model)
    if not _Calls.alone:
        given = dict(zip(("x", "y"), args, strict=False))
        given |= {name: kwargs[name] for name in ("x", "y") if name in kwargs}
        args, kwargs = compat.with_arguments(args, kwargs, present_share(given))
    # For its own validation within fit, Keras asks to cache the dataset.
    kind = "validation" if "_use_cached_eval_dataset" in kwargs else "evaluate"
    if run is not None:
        run.average_statistics(kind)
    elif (process_set := shared_by(model)) is not None:
        _average_renewed_statistics(model, process_set)
    _Calls.stack.append((kind, None))
    try:
        # An evaluation by one rank alone, during a fit that ranks share, must not enter that fit's metrics.
        is_apart = _Calls.alone and _run_of(model) is not None
        untouched_metrics = metrics.untouched(model) if is_apart else contextlib.nullcontext()
        with untouched_metrics, recorder.recording().evaluating(), activity.running(activity.TEST, model):
            return original(model, *args, **kwargs)
    finally:
        _Calls.stack.pop()


def _average_renewed_statistics(model: Any, process_set: ProcessSet) -> None:
    """Averages moving statistics that the ranks have computed again since they trained a model together."""
    part, settings = distributed_part(getattr(model, "optimizer", None)), current_job().settings
    if part is not None and settings.guard and settings.average_statistics and compat.step_counter(part.optimizer) > 0:
        moving_statistics.average_if_renewed(model, process_set, part.local_keys(), "evaluate")


def _around_predict(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    with recorder.recording().evaluating(), activity.running(activity.PREDICT, model):
        return original(model, *args, **kwargs)


def _around_train_step(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    before, _Calls.in_train_step = _Calls.in_train_step, True
    try:
        return original(model, *args, **kwargs)
    finally:
        _Calls.in_train_step = before


def _around_compute_loss(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Computes training losses over all ranks; evaluation losses are left as they are.

    Under --as-horovod, training losses stay as in Horovod: scripts have tuned their learning rates to them.
    """
    if as_horovod.is_installed():
        return original(model, *args, **kwargs)
    trains = _Calls.in_train_step or bool(_Calls.stack and _Calls.stack[-1][0] == "fit")
    part = distributed_part(getattr(model, "optimizer", None)) if trains else None
    averages = part is not None and part.exchange.op == Average
    run = _run_of(model)
    with losses.averaged_over(shared_by(model) if averages else None, run is not None and run.by_rows):
        return original(model, *args, **kwargs)


def _around_moments(own: Callable[[], Any], inputs: Any, axes: Any, keep_dims: bool, mask: Any) -> Any:
    """Computes the moments of a synchronized BatchNormalization over all ranks that train together.

    A strategy over several processes reduces over all of them by itself.
    """
    process_set = _ranks_of_training()
    if process_set is None or graphs.spans_workers(graphs.reducing_strategy()):
        return own()
    return moments_over_ranks(inputs, axes, keep_dims, mask, process_set)


def _ranks_of_training() -> ProcessSet | None:
    """Returns the ranks of the innermost `fit`, or of the job in a training loop; None if this rank trains alone."""
    if _Calls.alone or not _has_ranks() or current_job().topology.size == 1:
        return None
    fits = [run for kind, run in _Calls.stack if kind == "fit"]
    return global_process_set if not fits else None if fits[-1] is None else fits[-1].process_set


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
    if process_set is None or current_job().topology.rank == process_set.ranks[0]:
        original(callback, *args, **kwargs)


def _around_reset(original: Callable[..., Any], model: Any) -> None:
    original(model)
    metrics.forget_merged(model)
    run = _run_of(model)
    if run is not None and not _Calls.alone:
        run.frozen = None


def _around_logs(original: Callable[..., Any], model: Any, logs: Any) -> Any:
    """Computes the logs of an epoch or an evaluation from the metrics of all ranks."""
    if not _Calls.stack:
        return original(model, logs)
    kind, run = _Calls.stack[-1]
    outer = _run_of(model)
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
    if what == "evaluate" and not _Calls.alone and isinstance(result, dict):
        recorder.recording().note_logs(what, result)
    if what == "fit":
        recorder.recording().note_epoch(result)
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


def _around_data(data: Any) -> None:
    if _Calls.accounts and _Calls.accounts[-1] is not None:
        _Calls.accounts[-1].data_ready(data)
    if _Calls.stack and _Calls.stack[-1][1] is not None:
        _Calls.stack[-1][1].data_ready(data)


def _stops(model: Any, own: bool) -> bool:
    """Returns the value of `model.stop_training`; in a `fit` that ranks share, the one that all agreed on."""
    run = _run_of(model)
    return own if run is None else run.stops_now(own)


def exact_logs(model: Any) -> set[str]:
    """Returns the names of logs in the running `fit` that cover all ranks' data; automatic names vary by rank."""
    run = _run_of(model)
    return set() if run is None else run.exact


def _run_of(model: Any) -> FitRun | None:
    """Returns the innermost running `fit` of this model that ranks share; None if there is none."""
    return next((run for _, run in reversed(_Calls.stack) if run is not None and run.model is model), None)

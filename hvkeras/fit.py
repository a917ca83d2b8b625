"""What stands around Keras's `fit` and `evaluate` on several ranks.

`init()` hooks them, `shutdown()` takes the hooks away. In `fit` the ranks agree on the steps of an
epoch (`hvkeras.steps`), compare their weights (`hvkeras.guard`) and stop together; the logs of
`fit` and `evaluate` are those of all ranks' data (`hvkeras.metrics`).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hvkeras import compat, context, graphs, metrics, optimizer, recording
from hvkeras.errors import UsageError, explain
from hvkeras.functions import allgather_object
from hvkeras.guard import Guard
from hvkeras.joining import joining
from hvkeras.optimizer import distributed_part
from hvkeras.output import prints_at, say
from hvkeras.process_sets import ProcessSet, global_process_set
from hvkeras.steps import Decision, Facts, Together, decide

# How messages name a call that one rank may make alone by mistake.
_SHARED_CALLS = {"evaluate": "evaluate, which all ranks must call (for one rank alone: with hvd.alone())"}


class _Calls:
    """Which calls are running, and how many there were."""

    alone = 0
    fits = 0
    # The running calls of fit (None for one that is not shared) and of evaluate, the innermost last.
    stack: list[tuple[str, FitRun | None]] = []  # noqa: RUF012 - one per process on purpose


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Lets this rank use `fit` and `evaluate` by itself: nothing in it waits for other ranks.

    Without it the ranks share every `fit` and `evaluate`: the metrics are those of all ranks' data, so
    all ranks must make the call.

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


def install() -> None:
    """Hooks every Keras that this process has; called by `init()` on several ranks, or when recording."""
    hooks = compat.TrainingHooks(_around_fit, _around_evaluate, _around_reset, _around_logs, _around_data, _stops)
    for family in compat.loaded_families():
        optimizer.install_hooks(family)
        missing = compat.hook_training(family, hooks)
        job = context.current()
        if missing and job.topology.rank == 0 and prints_at(job.settings, "WARNING"):
            say(f"this version of {family} hides {', '.join(missing)}: hvkeras cannot look after that part")


class FitRun:
    """One call of `fit` that the ranks share.

    Args:
        model: The model.
        process_set: The ranks that train it.
        arguments: What `fit` was called with, by name.
    """

    def __init__(self, model: Any, process_set: ProcessSet, arguments: dict[str, Any]) -> None:
        _Calls.fits += 1
        self.model, self.process_set = model, process_set
        self.stops = False  # agreed
        model.__dict__["stop_training"] = False
        self.frozen: Any = None  # states of the metrics before steps without weight
        self._arguments = arguments
        self._decision: Decision | None = None
        self._together: Together | None = None
        self._own_batches: int | None = None
        self._steps = self._checked = 0
        settings = context.current().settings
        self._every = settings.guard_steps
        self._guard = Guard(model, process_set, self._local(), self._broadcasts()) if settings.guard else None

    def callbacks(self, given: Any) -> Any:
        """The user's callbacks, with ours last."""
        watch = _watch(self)
        if hasattr(given, "append") and hasattr(given, "set_model"):  # a CallbackList
            given.append(watch)
            return given
        if given is None:
            return [watch]
        return [*given, watch] if isinstance(given, (list, tuple)) else [given, watch]

    def data_ready(self, data: Any) -> None:
        """Agrees on the steps of an epoch, once the data is known, and brings it to them."""
        if self._decision is not None:  # that of validation
            return
        job = context.current()
        given = self._arguments
        facts = Facts(data.steps, data.batches, data.last_rows, given["epochs"], given["initial_epoch"],
                      given["validation_data"] is not None or bool(given["validation_split"]), _fingerprint(given["x"]))
        everyone = allgather_object(facts, name="the start of fit", process_set=self.process_set)
        decision = self._decision = decide(self.process_set.ranks, everyone, job.settings.uneven)
        if job.topology.rank == self.process_set.ranks[0] and prints_at(job.settings, "WARNING"):
            for warning in decision.warnings:
                say(warning)
        self._own_batches = data.batches
        if decision.steps is not None:
            data.take_steps(decision.steps)
        if decision.together:
            self._end_together(data)
        elif decision.batches is not None and decision.joined:
            self._join(data, decision.batches)
        elif decision.batches is not None and decision.batches != data.batches:
            data.pass_by_pass(lambda dataset: dataset.take(decision.batches), decision.batches)

    def begin(self) -> None:
        """Before the first step."""
        if self._guard is not None:
            self._guard.start()
        if self._together is not None:
            self._together.armed = True

    def before_step(self, step: int) -> None:
        """Before each call of the train function; `step` counts within the epoch."""
        if self._decision is not None and self._decision.joined and self._own_batches is not None:
            if step == self._own_batches:
                self.frozen = metrics.states_of(self.model)
            joining.weigh(step < self._own_batches)
        if step == 0:
            return
        if self._checked == 0:
            self._first_step_done(step)
        elif self._steps + step - self._checked >= self._every:
            self._check(self._steps + step)

    def epoch_end(self, steps: int) -> None:
        """After each epoch, when all other callbacks had their say."""
        self._steps += steps
        if self._checked == 0:
            metrics.check(self.model)
        self._check(self._steps)

    def end(self) -> None:
        """After the last epoch, while Keras still holds the data, and after an error."""
        if self._together is not None:
            self._together.armed = False
        if self._decision is not None and self._decision.joined:
            joining.stop()
            compat.forget_train_function(self.model)

    def _first_step_done(self, step: int) -> None:
        metrics.check(self.model)
        self._check(self._steps + step)

    def _check(self, steps: int) -> None:
        """Compares the weights, and stops all ranks if one wants to."""
        wish = bool(self.model.__dict__.get("stop_training", False))
        self._checked = steps
        if self._guard is not None:
            stops = self._guard.check(steps, wish)
        else:
            stops = any(allgather_object(wish, name="stop_training", process_set=self.process_set))
        if stops and not self.stops:
            self.stops = True
            everyone = allgather_object(wish, name="who stops", process_set=self.process_set)
            ranks = [rank for rank, stop in zip(self.process_set.ranks, everyone, strict=True) if stop]
            job = context.current()
            if job.topology.rank == self.process_set.ranks[0] and len(ranks) < len(everyone) and prints_at(
                    job.settings, "WARNING"):
                say(f"stop_training was set on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} alone: all"
                    f" ranks stop after {steps} steps")

    def _end_together(self, data: Any) -> None:
        if self.process_set.ranks != global_process_set.ranks:
            raise UsageError(explain("Data of unknown length needs all ranks of the job in fit", "tell the length:"
                                     " dataset.apply(tf.data.experimental.assert_cardinality(batches))",
                                     process_set=self.process_set))
        self._together = Together(_Calls.fits)
        data.change(self._together.wrap, None)

    def _join(self, data: Any, batches: int) -> None:
        if compat.steps_per_execution(self.model) > 1:
            raise UsageError(explain("HVKERAS_UNEVEN=join needs one step in each execution", "compile with"
                                     " steps_per_execution=1, or set HVKERAS_UNEVEN=trim",
                                     steps_per_execution=compat.steps_per_execution(self.model)))
        joining.start()
        compat.forget_train_function(self.model)
        own = data.batches
        data.pass_by_pass(lambda dataset: dataset.take(own).repeat().take(batches), batches)

    def _local(self) -> set[Any]:
        """The variables that may differ: those that the optimizer or the broadcast leaves to each rank."""
        part = distributed_part(self.model.optimizer)
        found = set(part.__dict__.get("_hvkeras_local", ())) if part is not None else set()
        for callback in _flat(self._arguments["callbacks"]):
            found |= set(getattr(callback, "local_keys", ()))  # of BroadcastGlobalVariablesCallback
        return found

    def _broadcasts(self) -> bool:
        return any(hasattr(callback, "broadcast_done") for callback in _flat(self._arguments["callbacks"]))


def _watch(run: FitRun) -> Any:
    """The callback through which a run follows `fit`.

    It has no hook at the end of a batch: with one, Keras would wait for each step's logs.
    """
    base: Any = compat.callback_class(run.model)

    class Watch(base):  # type: ignore[misc]  # Keras ships no types
        def __init__(self) -> None:
            super().__init__()
            self._supports_tf_logs = True
            self._last = 0

        def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
            run.begin()

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
            self._last = batch
            run.before_step(batch)

        def on_train_end(self, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
            run.end()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - Keras's signature
            run.epoch_end(self._last + 1)

    return Watch()


def shared_by(model: Any) -> ProcessSet | None:
    """The ranks that use this model together; None where this rank uses it by itself."""
    if _Calls.alone or not context.is_initialized() or context.current().topology.size == 1:
        return None
    if graphs.reducing_strategy() is not None:
        return None
    part = distributed_part(getattr(model, "optimizer", None))
    process_set = global_process_set if part is None else part._hvkeras_exchange.process_set
    return process_set if process_set.included() and process_set.size() > 1 else None


def _around_fit(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    process_set = shared_by(model)
    run = None
    if process_set is not None:
        bound = compat.bound_fit(model, args, kwargs)
        run = FitRun(model, process_set, bound.arguments)
        bound.arguments["callbacks"] = run.callbacks(bound.arguments["callbacks"])
        args, kwargs = bound.args[1:], bound.kwargs
    _Calls.stack.append(("fit", run))
    try:
        history = original(model, *args, **kwargs)
    finally:
        _Calls.stack.pop()
        if run is not None:
            run.end()
    if not _Calls.alone:
        recording.note_logs("fit", {name: values[-1] for name, values in history.history.items() if values})
    return history


def _around_evaluate(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    _Calls.stack.append(("evaluate", None))
    try:
        return original(model, *args, **kwargs)
    finally:
        _Calls.stack.pop()


def _around_reset(original: Callable[..., Any], model: Any) -> None:
    original(model)
    metrics.forget_merged()


def _around_logs(original: Callable[..., Any], model: Any, logs: Any) -> Any:
    """Makes the logs of an epoch or an evaluation from the metrics of all ranks."""
    if not _Calls.stack:
        return original(model, logs)
    kind, run = _Calls.stack[-1]
    in_fit = any(one is not None and one.model is model for _, one in _Calls.stack)
    what = "fit" if kind == "fit" else "validation" if in_fit else "evaluate"
    process_set = shared_by(model)
    if process_set is None:
        result = original(model, logs)
    else:
        result = _shared_logs(lambda: original(model, logs), logs, model, process_set, what, run)
    if what == "evaluate" and not _Calls.alone and isinstance(result, dict):
        recording.note_logs(what, result)
    return result


def _shared_logs(make: Callable[[], Any], logs: Any, model: Any, process_set: ProcessSet, what: str,
                 run: FitRun | None) -> Any:
    frozen = run.frozen if run is not None else None
    if run is not None:
        run.frozen = None
    what = _SHARED_CALLS.get(what, what)
    mine = bool(logs)  # else this rank had no data
    own = (frozen or metrics.states_of(model)) if mine else None
    there = metrics.merge(model, process_set, what, own)
    result = make() if mine else None
    from_step = mine and result is logs  # not from metrics
    if all(there):
        return metrics.average_logs(result, process_set, what) if from_step else result
    everyone = allgather_object((result, from_step), name=f"the logs of {what}", process_set=process_set)
    found = [(logs, averaged) for (logs, averaged), has in zip(everyone, there, strict=True) if has]
    if not found:
        return make()
    return metrics.average([logs for logs, _ in found]) if found[0][1] else found[0][0]


def _around_data(data: Any) -> None:
    if _Calls.stack and _Calls.stack[-1][1] is not None:
        _Calls.stack[-1][1].data_ready(data)


def _stops(model: Any, own: bool) -> bool:
    """What `model.stop_training` is: what all ranks agreed on, in a `fit` that they share."""
    for _, run in reversed(_Calls.stack):
        if run is not None and run.model is model:
            return run.stops
    return own


def _fingerprint(data: Any) -> Any:
    """Stands for the content of arrays: their shapes and some rows; None for other data."""
    import tensorflow as tf

    leaves = tf.nest.flatten(data) if isinstance(data, (dict, list, tuple)) else [data]
    digest = hashlib.sha256()
    for leaf in leaves:
        if not hasattr(leaf, "shape") or not hasattr(leaf, "__array__") or not len(leaf.shape):
            return None
        count = int(leaf.shape[0])
        places = np.linspace(0, max(count - 1, 0), min(count, 16)).astype(int)
        rows = leaf.iloc[places] if hasattr(leaf, "iloc") else [np.asarray(leaf[place]) for place in places.tolist()]
        digest.update(repr(tuple(leaf.shape)).encode() + np.ascontiguousarray(rows).tobytes())
    return digest.hexdigest()


def _flat(callbacks: Any) -> list[Any]:
    given = getattr(callbacks, "callbacks", callbacks)
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]

"""One call of `fit` that several ranks share: its steps, when it stops, and its divergence check."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvkeras import compat
from hvkeras.collectives.broadcasts import allgather_object, gather_objects
from hvkeras.collectives.global_batch import global_batch
from hvkeras.compat import graphs
from hvkeras.data.consistency import fingerprint
from hvkeras.data.datasets import common_sources, keeps_elements_whole
from hvkeras.data.sequences import Share
from hvkeras.errors import UsageError, explain, summary
from hvkeras.gradients.optimizer import gather_optimizer
from hvkeras.gradients.optimizer_classes import distributed_part, state_of
from hvkeras.gradients.tape import local_sources
from hvkeras.gradients.weighting import joining
from hvkeras.host.console import format_ranks, prints_at, say
from hvkeras.job.process_sets import ProcessSet, global_process_set
from hvkeras.job.session import current_session, is_initialized, this_process
from hvkeras.training import metrics, model_description, moving_statistics
from hvkeras.training.added_logs import AddedLogs
from hvkeras.training.divergence_check import DivergenceCheck
from hvkeras.training.epoch_length import (
    DATA,
    CommonEnd,
    Decision,
    FitFacts,
    Length,
    decide,
    decide_again,
    gather_timeout,
    require_same_data_to_share,
)
from hvkeras.training.fit_record import names_of_changing, partial_callbacks
from hvkeras.training.shared_files import SharedFiles, files_of

# Keras's callbacks that do not save models.
_SAVES_NOTHING = frozenset({
    "BaseLogger", "CSVLogger", "EarlyStopping", "History", "LearningRateScheduler", "ProgbarLogger",
    "ReduceLROnPlateau", "RemoteMonitor", "TensorBoard", "TerminateOnNaN",
})
# Keras's callbacks that save models, on any rank.
_SAVES = frozenset({"BackupAndRestore", "ModelCheckpoint"})


class FitRun:
    """One call of `fit` that several ranks share.

    Args:
        arguments: The arguments of `fit`, by name.
    """

    _count = 0  # number of runs so far in this process

    def __init__(self, model: Any, process_set: ProcessSet, arguments: dict[str, Any]) -> None:
        FitRun._count += 1
        self.model: Any = model
        self.process_set: ProcessSet = process_set
        self.stops: bool = False  # as agreed by all ranks
        self.exact: set[str] = set()  # names of logs that cover the data of all ranks
        model.__dict__["stop_training"] = False
        self.by_rows: bool = False  # whether losses are weighted by the number of rows of each rank in a step
        self.frozen: Any = None  # metric states before the steps with zero weight
        self._arguments = arguments
        self._decision: Decision | None = None
        self._common_end: CommonEnd | None = None
        self._own_batches: int | None = None
        self._data: Any = None
        self._lengths: list[int] = []  # batches of all ranks in the last epoch; empty if they cannot change
        self._compares_lengths_at_begin = False  # whether lengths are compared in on_epoch_begin
        self._should_log_changes, self._begun = True, False
        self._timers: list[Any] = []  # TensorBoard callbacks that every rank has
        self._steps = self._checked = self._step = 0
        self._fit = ""  # key of this fit, the same on all ranks
        self._savers: list[int] = []  # ranks with callbacks that may save the model
        self._number = 0  # index of this fit on rank 0: new ranks of an elastic job have made fewer calls
        settings = current_session().settings
        self._every = settings.guard_steps
        self._has_global_batches = global_batch().started
        # With the batches of all ranks, the states are those of one process after every step.
        self._averages_statistics = settings.average_statistics and not self._has_global_batches
        self._has_new_steps = False  # since the last averaging
        self._divergence_check = DivergenceCheck(
            model, process_set, self._local, self._broadcasts(), self._averages_statistics,
            one_step=arguments["steps_per_epoch"] == arguments["epochs"] == 1) if settings.guard else None
        told = {} if self._divergence_check is None else self._divergence_check.record.logs
        self._added_logs = AddedLogs(process_set, told)

    def data_ready(self, data: Any) -> None:
        """Agree on the number of steps per epoch when the data is known, and adapt the data to it."""
        if self._decision is not None:  # this is validation data
            return
        session = current_session()
        given = self._arguments
        unbuilt = self._build(data)
        layers = self._layers()
        facts = FitFacts(data.steps, data.batches, data.last_rows, given["epochs"], given["initial_epoch"],
                      given["validation_data"] is not None or bool(given["validation_split"]), self._fingerprint(),
                      len(self._local_timers()), FitRun._count, unbuilt, model_description.arguments_of(self.model),
                      model_description.digest_of(layers), any(map(self._may_save, flat(given["callbacks"]))),
                      keeps_elements_whole(given["x"]), data.source is not None,
                      # With --data-parallel, rank 0 alone writes.
                      () if self._has_global_batches else files_of(flat(given["callbacks"])),
                      names_of_changing(flat(given["callbacks"])))
        everyone = gather_objects(facts, self.process_set, "the start of fit", metrics.missing_call_hint("fit"))
        self._number = everyone[0].number
        self._fit = f"fit {everyone[0].number} of ranks {list(self.process_set.ranks)}"
        if len({fact.model for fact in everyone}) > 1:
            model_description.require_same_model(self.process_set.ranks, allgather_object(
                layers, name="the layers at the start of fit", process_set=self.process_set))
        if self._divergence_check is not None:
            self._divergence_check.record.partial = partial_callbacks(self.process_set.ranks,
                                                                      [fact.callbacks for fact in everyone])
        self._savers = [rank for rank, facts in zip(self.process_set.ranks, everyone, strict=True) if facts.saves]
        model_description.require_equal_arguments(self.process_set.ranks, [fact.compiled for fact in everyone])
        if len({fact.timers for fact in everyone}) == 1:
            self._timers = self._local_timers()
        self.by_rows = any(fact.by_rows for fact in everyone)
        if self.by_rows:
            compat.forget_train_function(self.model)
        self._data = data
        self._say(this_process().part(SharedFiles).warnings(self.process_set.ranks, [fact.files for fact in everyone]))
        self._apply_decision(decide(self.process_set.ranks, everyone, session.settings.uneven,
                                    self._has_global_batches))
        if any(fact.may_change for fact in everyone) and self._common_end is None:
            self._lengths = [fact.batches or 0 for fact in everyone]
            self._compares_lengths_at_begin = not data.at_each_pass(self._decide_again)

    def _apply_decision(self, decision: Decision) -> None:
        """Adapt the data to the first decision."""
        data, self._decision, self._own_batches = self._data, decision, self._data.batches
        self._say(decision.warnings)
        if decision.steps is not None:
            data.take_steps(decision.steps)
        if decision.common_end:
            self._use_common_end()
        elif decision.batches is not None and (decision.joined or decision.batches != data.batches):
            self._adapt_length(decision)

    def _say(self, warnings: Sequence[str]) -> None:
        session = current_session()
        if session.topology.rank == self.process_set.ranks[0] and prints_at(session.settings, "WARNING"):
            for warning in warnings:
                say(warning)

    def _decide_again(self) -> None:
        """Agree on the number of steps again if numbers of batches have changed since the last epoch."""
        data, before = self._data, self._decision
        assert before is not None
        if before.common_end or data.is_mid_pass:
            return
        is_share = isinstance(data.source, Share)
        if is_share:
            data.source.renew()
        own = Length(data.count() or 0, data.source.count if is_share else None, data.renews)
        lengths = allgather_object(own, name="the numbers of batches", process_set=self.process_set)
        require_same_data_to_share(self.process_set.ranks, lengths)
        batches = [length.batches for length in lengths]
        if batches == self._lengths:
            return
        self._lengths = batches
        decision = decide_again(self.process_set.ranks, lengths, before, current_session().settings.uneven,
                                data.steps is not None)
        if decision is before:
            return
        if self._should_log_changes:
            self._say(decision.warnings)
        self._should_log_changes = self._should_log_changes and not decision.warnings
        self._decision, self._own_batches = decision, own.batches
        self._adapt_length(decision, not before.joined)

    def _adapt_length(self, decision: Decision, starts_joining: bool = True) -> None:
        batches, own = decision.batches, self._own_batches
        if decision.joined:
            if starts_joining:
                self._start_joining()
            self._data.pass_by_pass(lambda dataset: dataset.take(own).repeat().take(batches), batches)
        else:
            self._data.pass_by_pass(lambda dataset: dataset.take(batches), batches)

    def _build(self, data: Any) -> str:
        """Build the model before the first step if its weights are to be broadcast; return the error, or ""."""
        model = self.model
        # Under a strategy, Keras 3 builds the model itself before the callbacks begin.
        if not self._broadcasts() or compat.is_built(model) or graphs.reducing_strategy(model) is not None:
            return ""
        try:
            compat.build_for(model, data.element_spec)
        except Exception as error:  # noqa: BLE001  # a user's model may raise anything
            return "" if compat.is_built(model) else summary(error)
        return ""

    def begin(self) -> None:
        """Start the run; called before the first step."""
        if self._divergence_check is not None:
            self._divergence_check.start()
        self._begun = True
        if self._common_end is not None:
            self._common_end.armed = True
        if (state := state_of_model(self.model)) is not None:
            state.forget()
        for timer in self._timers:
            timer.gathers = True

    def begin_epoch(self) -> None:
        """Start an epoch; called before it reads its first batch."""
        if self._compares_lengths_at_begin:
            self._decide_again()

    def before_step(self, step: int) -> None:
        """Prepare a step, given by its index within the epoch; called before each call of the train function."""
        self._step = step
        control = current_session().control
        if self._fit and control is not None:
            control.stop_of(self._fit).begin()
        metrics.forget_merged(self.model)  # of an evaluation during the epoch; its samples count in the logs
        self._has_new_steps = True
        if self._decision is not None and self._decision.joined and self._own_batches is not None:
            if step >= self._own_batches and self.frozen is None:
                self.frozen = metrics.own_states(self.model)
            joining().set_weight(step < self._own_batches)
        if step and (self._checked == 0 or self._steps + step - self._checked >= self._every):
            self._check(self._steps + step)

    def stops_now(self, stop_requested: bool) -> bool:
        """Return whether all ranks stop after the current step of this rank; Keras calls this after each step.

        Args:
            stop_requested: Whether `stop_training` is set on this rank.
        """
        session = current_session()
        if self.stops or not self._fit or session.control is None:
            return self.stops
        control, fit, ranks = session.control, self._fit, self.process_set.ranks
        stop = control.stop_of(fit)
        self.stops = stop.now(stop_requested, lambda: control.ask_to_stop(fit, ranks), control.raise_if_ended,
                              gather_timeout(session.settings.stall_shutdown))
        if self.stops:
            self._report_stopping_ranks(stop.wishes, self._steps + self._step + compat.steps_per_execution(self.model))
        return self.stops

    def average_statistics(self, what: str) -> None:
        """Average the moving statistics; called when all ranks are between the same two steps."""
        if self._averages_statistics and self._has_new_steps:
            moving_statistics.average(self.model, self.process_set, self._local(), what)
        self._has_new_steps = False

    def epoch_end(self, epoch: int, steps: int, logs: Any) -> None:
        """End an epoch; called after all other callbacks, which may have added to its logs."""
        self._steps += steps
        self._check(self._steps, at_end=True, logs=logs)
        if self._timers:
            everyone = allgather_object([timer.rank_times() for timer in self._timers], name="the times of TensorBoard",
                                        process_set=self.process_set)
            for index, timer in enumerate(self._timers):
                timer.write_rank_times(epoch, {rank: times[index] for rank, times in
                                               zip(self.process_set.ranks, everyone, strict=True)})

    def compare_at_end(self) -> None:
        """Compare the state of all ranks once more; called after all other callbacks have ended."""
        if self._divergence_check is not None:
            self._divergence_check.end(self._steps)

    def gather_state(self, at_end: bool) -> None:
        """Gather the state of a sharded optimizer, before callbacks that save.

        Args:
            at_end: Whether training has ended, after which the first rank may save the model itself.
        """
        savers = sorted({*self._savers, self.process_set.ranks[0]} if at_end else self._savers)
        if savers:
            gather_optimizer(self.model, savers)

    def _may_save(self, callback: Any) -> bool:
        """Return whether a callback of this rank may save the model at the end of an epoch.

        A user's callback may do so on the first rank. Others hardly ever save, and gathering the state would cost
        memory there; one that does save gets an error with a hint.
        """
        is_first = current_session().topology.rank == self.process_set.ranks[0]
        if type(callback).__module__.startswith("hvkeras."):
            # These save on the first rank, and gather themselves for more frequent saves.
            return hasattr(callback, "save_freq") and is_first
        if any(base.__name__ in _SAVES for base in type(callback).__mro__):
            return True
        return is_first and type(callback).__name__ not in _SAVES_NOTHING and _has_end_hooks(callback)

    def end(self) -> None:
        """End the run; called after the last epoch, while Keras still holds the data, and after an error."""
        if is_initialized() and (control := current_session().control) is not None:
            control.forget_stop(self._fit)
            self._fit = ""
        if self._common_end is not None:
            self._common_end.armed = False
        if self._decision is not None and self._decision.joined:
            joining().stop()
        if self.by_rows or (self._decision is not None and self._decision.joined):
            compat.forget_train_function(self.model)

    def _check(self, steps: int, at_end: bool = False, logs: Any = None) -> None:
        """Compare the weights, and stop all ranks if any rank requests it; the first call also checks the metrics."""
        if self._has_global_batches:
            global_batch().require_same_batches()
        elif self._checked == 0:
            metrics.check(self.model)
        stop_requested = bool(self.model.__dict__.get("stop_training", False))
        self._checked = steps
        if self._divergence_check is not None:
            mark = 0 if self._has_global_batches else self._added_logs.mark(logs, self.exact)
            stops, same_logs = self._divergence_check.check(steps, stop_requested, at_end, mark)
            if not same_logs:
                self._say(self._added_logs.differences())
        else:
            stops = any(allgather_object(stop_requested, name="stop_training", process_set=self.process_set))
        if stops and not self.stops:
            self.stops = True
            everyone = allgather_object(stop_requested, name="the ranks that set stop_training",
                                        process_set=self.process_set)
            stopping = [rank for rank, stop in zip(self.process_set.ranks, everyone, strict=True) if stop]
            self._report_stopping_ranks(stopping, steps)

    def _report_stopping_ranks(self, ranks: Sequence[int], steps: int) -> None:
        session, all_ranks = current_session(), self.process_set.ranks
        is_first = session.topology.rank == all_ranks[0]
        if is_first and len(ranks) < len(all_ranks) and prints_at(session.settings, "WARNING"):
            say(f"stop_training was set on {format_ranks(ranks)} alone: all ranks stop after {steps} steps")

    def _use_common_end(self) -> None:
        if self.process_set.ranks != global_process_set.ranks:
            raise UsageError(explain("Data of unknown length needs all ranks of the job in fit", "set the length:"
                                     " dataset.apply(tf.data.experimental.assert_cardinality(batches))",
                                     process_set=self.process_set))
        self._common_end = CommonEnd(self._number)
        self._data.change(self._common_end.wrap, None)

    def _start_joining(self) -> None:
        if compat.steps_per_execution(self.model) > 1:
            raise UsageError(explain("HVKERAS_UNEVEN=join needs one step in each execution", "compile with"
                                     " steps_per_execution=1, or set HVKERAS_UNEVEN=trim",
                                     steps_per_execution=compat.steps_per_execution(self.model)))
        joining().start()
        compat.forget_train_function(self.model)
        if self._begun:
            compat.make_train_function(self.model)

    def _local(self) -> set[Any]:
        """Return the keys of variables that may differ: those that are local in the optimizer or the broadcast."""
        part = distributed_part(getattr(self.model, "optimizer", None))  # Keras rejects an uncompiled model
        found = local_sources().keys | (set(part.local_keys()) if part is not None else set())
        for callback in flat(self._arguments["callbacks"]):
            found |= set(getattr(callback, "local_keys", ()))  # of BroadcastGlobalVariablesCallback
        return found

    def _fingerprint(self) -> Any:
        """Return the fingerprint of the data; with the batches of all ranks, of all arguments that hold data."""
        given = self._arguments
        if not self._has_global_batches:
            sources = common_sources(given["x"]) if given["steps_per_epoch"] is None else []
            return _fingerprint(sources or given["x"])
        return {name: _fingerprint(given[name]) for name in DATA if given[name] is not None}

    def _layers(self) -> list[model_description.Layer]:
        """Describe the layers that must be equal on all ranks; none if the weights are not compared either.

        Layers that learn from data are left to the broadcast, since the shapes of others depend on their vocabularies.
        """
        if self._divergence_check is None or compat.learned_layers(self.model):
            return []
        part = distributed_part(getattr(self.model, "optimizer", None))
        local = part.layers if part is not None else ()
        return model_description.layers_of(self.model, self._local(), local)

    def _local_timers(self) -> list[Any]:
        return [callback for callback in flat(self._arguments["callbacks"])
                if hasattr(callback, "write_rank_times") and callback.rank_scalars]

    def _broadcasts(self) -> bool:
        return any(hasattr(callback, "broadcast_done") for callback in flat(self._arguments["callbacks"]))


def state_of_model(model: Any) -> Any:
    """Return the sharded state of a model's optimizer; None if it is not sharded."""
    return state_of(getattr(model, "optimizer", None))


def shares_update(model: Any) -> bool:
    """Return whether ranks shard the update of a model's optimizer, once it is built."""
    part = distributed_part(getattr(model, "optimizer", None))
    return part is not None and bool(part.options.shard_kind)


def _fingerprint(data: Any) -> Any:
    """Return the lengths of arrays and their fingerprint; None for other data."""
    import tensorflow as tf

    leaves = tf.nest.flatten(data) if isinstance(data, (dict, list, tuple)) else [data]
    if not all(hasattr(leaf, "shape") and hasattr(leaf, "__array__") and len(leaf.shape) for leaf in leaves):
        return None
    return [int(leaf.shape[0]) for leaf in leaves], fingerprint(data)


def flat(callbacks: Any) -> list[Any]:
    """Return the callbacks given to `fit` as a list."""
    given = getattr(callbacks, "callbacks", callbacks)
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _has_end_hooks(callback: Any) -> bool:
    for hook in ("on_epoch_end", "on_train_end"):
        owner = next((base for base in type(callback).__mro__ if hook in vars(base)), None)
        if hook in vars(callback) or (owner is not None and owner.__name__ != "Callback"):
            return True
    return False

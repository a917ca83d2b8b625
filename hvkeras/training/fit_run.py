"""One call of `fit` that several ranks share: its steps, its stops and its divergence check."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvkeras import compat
from hvkeras.collectives.broadcasts import allgather_object, gather_objects
from hvkeras.compat import graphs
from hvkeras.data.datasets import keeps_elements_whole
from hvkeras.data.sequences import Share
from hvkeras.errors import UsageError, explain
from hvkeras.gradients.optimizer import gather_optimizer
from hvkeras.gradients.optimizer_classes import distributed_part, state_of
from hvkeras.gradients.weighting import joining
from hvkeras.host.console import format_ranks, prints_at, say
from hvkeras.job.process_sets import ProcessSet, global_process_set
from hvkeras.job.session import current_session, is_initialized
from hvkeras.training import metrics, model_description, moving_statistics
from hvkeras.training.divergence_check import DivergenceCheck
from hvkeras.training.epoch_length import (
    CommonEnd,
    Decision,
    FitFacts,
    Length,
    decide,
    decide_again,
    gather_timeout,
    require_same_data_to_share,
)

# Keras's callbacks that do not save models.
_SAVES_NOTHING = frozenset({
    "BaseLogger", "CSVLogger", "EarlyStopping", "History", "LearningRateScheduler", "ProgbarLogger",
    "ReduceLROnPlateau", "RemoteMonitor", "TensorBoard", "TerminateOnNaN",
})
# Those that do, on whichever rank they are.
_SAVES = frozenset({"BackupAndRestore", "ModelCheckpoint"})


class FitRun:
    """One call of `fit` that several ranks share.

    Args:
        model: The model.
        process_set: The ranks that train it.
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
        self.by_rows: bool = False  # whether losses are weighted by the rows that each rank has in a step
        self.frozen: Any = None  # metric states before the steps with zero weight
        self._arguments = arguments
        self._decision: Decision | None = None
        self._common_end: CommonEnd | None = None
        self._own_batches: int | None = None
        self._data: Any = None
        self._lengths: list[int] = []  # batches of all ranks when the last epoch began; none if they cannot change
        self._exchanges_at_begin = False  # whether lengths are compared in on_epoch_begin
        self._logs_changes, self._begun = True, False
        self._timers: list[Any] = []  # TensorBoard callbacks that every rank has
        self._steps = self._checked = self._step = 0
        self._fit = ""  # name of this fit, the same on all ranks
        self._savers: list[int] = []  # ranks with callbacks that may save the model
        self._number = 0  # its number among rank 0's, which new ranks of an elastic job have called fewer of
        settings = current_session().settings
        self._every = settings.guard_steps
        self._averages, self._stepped = settings.average_statistics, False  # no step since the last averaging
        self._divergence_check = (DivergenceCheck(model, process_set, self._local, self._broadcasts(), self._averages)
                                  if settings.guard else None)

    def data_ready(self, data: Any) -> None:
        """Agrees on the number of steps per epoch once the data is known, and adjusts the data to it."""
        if self._decision is not None:  # this is validation data
            return
        session = current_session()
        given = self._arguments
        unbuilt = self._build(data)
        layers = self._layers()
        facts = FitFacts(data.steps, data.batches, data.last_rows, given["epochs"], given["initial_epoch"],
                      given["validation_data"] is not None or bool(given["validation_split"]), _fingerprint(given["x"]),
                      len(self._own_timers()), FitRun._count, unbuilt, model_description.arguments_of(self.model),
                      model_description.digest_of(layers), any(map(self._may_save, flat(given["callbacks"]))),
                      keeps_elements_whole(given["x"]), data.source is not None)
        everyone = gather_objects(facts, self.process_set, "the start of fit", metrics.must_call("fit"))
        self._number = everyone[0].number
        self._fit = f"fit {everyone[0].number} of ranks {list(self.process_set.ranks)}"
        if len({fact.model for fact in everyone}) > 1:
            model_description.require_same_model(self.process_set.ranks, allgather_object(
                layers, name="the layers at the start of fit", process_set=self.process_set))
        self._savers = [rank for rank, facts in zip(self.process_set.ranks, everyone, strict=True) if facts.saves]
        model_description.require_equal_arguments(self.process_set.ranks, [fact.compiled for fact in everyone])
        if len({fact.timers for fact in everyone}) == 1:
            self._timers = self._own_timers()
        self.by_rows = any(fact.by_rows for fact in everyone)
        if self.by_rows:
            compat.forget_train_function(self.model)
        self._data = data
        self._follow(decide(self.process_set.ranks, everyone, session.settings.uneven))
        if any(fact.may_change for fact in everyone) and self._common_end is None:
            self._lengths = [fact.batches or 0 for fact in everyone]
            self._exchanges_at_begin = not data.at_each_pass(self._agree_again)

    def _follow(self, decision: Decision) -> None:
        """Adjusts the data to the first decision."""
        data, self._decision, self._own_batches = self._data, decision, self._data.batches
        self._warn(decision)
        if decision.steps is not None:
            data.take_steps(decision.steps)
        if decision.common_end:
            self._use_common_end()
        elif decision.batches is not None and (decision.joined or decision.batches != data.batches):
            self._adapt_length(decision)

    def _warn(self, decision: Decision) -> None:
        session = current_session()
        if session.topology.rank == self.process_set.ranks[0] and prints_at(session.settings, "WARNING"):
            for warning in decision.warnings:
                say(warning)

    def _agree_again(self) -> None:
        """Agrees on the number of steps again if ranks have other numbers of batches than in the last epoch."""
        data, before = self._data, self._decision
        assert before is not None
        if before.common_end or data.is_amid_pass:
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
        if self._logs_changes:
            self._warn(decision)
        self._logs_changes = self._logs_changes and not decision.warnings
        self._decision, self._own_batches = decision, own.batches
        self._adapt_length(decision, not before.joined)

    def _adapt_length(self, decision: Decision, begins_to_join: bool = True) -> None:
        """Gives the data as many batches per epoch as all ranks have agreed on."""
        batches, own = decision.batches, self._own_batches
        if decision.joined:
            if begins_to_join:
                self._begin_to_join()
            self._data.pass_by_pass(lambda dataset: dataset.take(own).repeat().take(batches), batches)
        else:
            self._data.pass_by_pass(lambda dataset: dataset.take(batches), batches)

    def _build(self, data: Any) -> str:
        """Builds the model before the first step if its weights are to be broadcast; returns why that failed, or ""."""
        model = self.model
        # Under a strategy, Keras 3 builds the model itself before the callbacks begin.
        if not self._broadcasts() or compat.is_built(model) or graphs.reducing_strategy(model) is not None:
            return ""
        try:
            compat.build_for(model, data.element_spec)
        except Exception as error:  # noqa: BLE001  # a user's model may raise anything
            return "" if compat.is_built(model) else _cause_of(error)
        return ""

    def begin(self) -> None:
        """Starts the run; called before the first step."""
        if self._divergence_check is not None and self._divergence_check.start():
            self.average_renewed_statistics("the start of fit")
        self._begun = True
        if self._common_end is not None:
            self._common_end.armed = True
        if (state := state_of_model(self.model)) is not None:
            state.forget()
        for timer in self._timers:
            timer.gathers = True

    def begin_epoch(self) -> None:
        """Starts an epoch; called before it reads its first batch."""
        if self._exchanges_at_begin:
            self._agree_again()

    def before_step(self, step: int) -> None:
        """Prepares a step; called before each call of the train function. `step` counts within the epoch."""
        self._step = step
        control = current_session().control
        if self._fit and control is not None:
            control.stop_of(self._fit).begin()
        metrics.forget_merged(self.model)  # of an evaluation during the epoch; its samples count in the logs
        self._stepped = True
        if self._decision is not None and self._decision.joined and self._own_batches is not None:
            if step >= self._own_batches and self.frozen is None:
                self.frozen = metrics.own_states(self.model)
            joining().set_weight(step < self._own_batches)
        if step and (self._checked == 0 or self._steps + step - self._checked >= self._every):
            self._check(self._steps + step)

    def stops_now(self, wish: bool) -> bool:
        """Returns whether all ranks stop after the step that this rank has reached; Keras asks after each step.

        Args:
            wish: Whether `stop_training` is set on this rank.
        """
        session = current_session()
        if self.stops or not self._fit or session.control is None:
            return self.stops
        control, fit, ranks = session.control, self._fit, self.process_set.ranks
        stop = control.stop_of(fit)
        self.stops = stop.now(wish, lambda: control.ask_to_stop(fit, ranks), control.raise_if_ended,
                              gather_timeout(session.settings.stall_shutdown))
        if self.stops:
            self._report_who_stops(stop.wishes, self._steps + self._step + compat.steps_per_execution(self.model))
        return self.stops

    def average_statistics(self, what: str) -> None:
        """Averages the moving statistics; called when all ranks are between the same steps."""
        if self._averages and self._stepped:
            moving_statistics.average(self.model, self.process_set, self._local(), what)
        self._stepped = False

    def average_renewed_statistics(self, what: str) -> None:
        """Averages moving statistics that callbacks, or the program since the last `fit`, have computed again."""
        if self._averages and self._divergence_check is not None:
            moving_statistics.average_if_renewed(self.model, self.process_set, self._local(), what)

    def epoch_end(self, epoch: int, steps: int) -> None:
        """Ends an epoch; called after all other callbacks."""
        self._steps += steps
        self._check(self._steps, at_end=True)
        if self._timers:
            everyone = allgather_object([timer.rank_times() for timer in self._timers], name="the times of TensorBoard",
                                        process_set=self.process_set)
            for index, timer in enumerate(self._timers):
                timer.write_rank_times(epoch, {rank: times[index] for rank, times in
                                               zip(self.process_set.ranks, everyone, strict=True)})

    def gather_state(self, at_end: bool) -> None:
        """Gathers the state of an optimizer whose update the ranks share, for callbacks that save; before they run.

        Args:
            at_end: Whether training is over, after which the first rank may save the model by itself.
        """
        savers = sorted({*self._savers, self.process_set.ranks[0]} if at_end else self._savers)
        if savers:
            gather_optimizer(self.model, savers)

    def _may_save(self, callback: Any) -> bool:
        """Whether a callback of this rank may save the model at the end of an epoch.

        A user's own may do so on the first rank. On others, where hardly any saves, it would cost each of them memory
        for the whole state; one that does save there gets an error that says how.
        """
        is_first = current_session().topology.rank == self.process_set.ranks[0]
        if type(callback).__module__.startswith("hvkeras."):
            # Those of ours that save do so on the first rank, and gather for more frequent saves by themselves.
            return hasattr(callback, "save_freq") and is_first
        if any(base.__name__ in _SAVES for base in type(callback).__mro__):
            return True
        return is_first and type(callback).__name__ not in _SAVES_NOTHING and _acts_at_ends(callback)

    def end(self) -> None:
        """Ends the run; called after the last epoch, while Keras still holds the data, and after an error."""
        if is_initialized() and (control := current_session().control) is not None:
            control.forget_stop(self._fit)
            self._fit = ""
        if self._common_end is not None:
            self._common_end.armed = False
        if self._decision is not None and self._decision.joined:
            joining().stop()
        if self.by_rows or (self._decision is not None and self._decision.joined):
            compat.forget_train_function(self.model)

    def _check(self, steps: int, at_end: bool = False) -> None:
        """Compares the weights, and stops all ranks if any rank wants to; the first call also checks the metrics."""
        if self._checked == 0:
            metrics.check(self.model)
        wish = bool(self.model.__dict__.get("stop_training", False))
        self._checked = steps
        if self._divergence_check is not None:
            stops = self._divergence_check.check(steps, wish, at_end)
        else:
            stops = any(allgather_object(wish, name="stop_training", process_set=self.process_set))
        if stops and not self.stops:
            self.stops = True
            everyone = allgather_object(wish, name="who stops", process_set=self.process_set)
            self._report_who_stops([rank for rank, stop in zip(self.process_set.ranks, everyone, strict=True) if stop],
                                   steps)

    def _report_who_stops(self, ranks: Sequence[int], steps: int) -> None:
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

    def _begin_to_join(self) -> None:
        if compat.steps_per_execution(self.model) > 1:
            raise UsageError(explain("HVKERAS_UNEVEN=join needs one step in each execution", "compile with"
                                     " steps_per_execution=1, or set HVKERAS_UNEVEN=trim",
                                     steps_per_execution=compat.steps_per_execution(self.model)))
        joining().start()
        compat.forget_train_function(self.model)
        if self._begun:
            compat.make_train_function(self.model)

    def _local(self) -> set[Any]:
        """Returns the keys of variables that may differ: those that the optimizer or broadcast leaves to each rank."""
        part = distributed_part(getattr(self.model, "optimizer", None))  # Keras itself rejects an uncompiled model
        found = set(part.local_keys()) if part is not None else set()
        for callback in flat(self._arguments["callbacks"]):
            found |= set(getattr(callback, "local_keys", ()))  # of BroadcastGlobalVariablesCallback
        return found

    def _layers(self) -> list[model_description.Layer]:
        """Describes the layers that all ranks must have alike; none if the ranks' weights are not compared either.

        Nor where layers learn from data: others' shapes follow from their vocabularies, which the broadcast compares.
        """
        if self._divergence_check is None or compat.learned_layers(self.model):
            return []
        part = distributed_part(getattr(self.model, "optimizer", None))
        local = part.layers if part is not None else ()
        return model_description.layers_of(self.model, self._local(), local)

    def _own_timers(self) -> list[Any]:
        """Returns the callbacks that write the times of all ranks."""
        return [callback for callback in flat(self._arguments["callbacks"])
                if hasattr(callback, "write_rank_times") and callback.rank_scalars]

    def _broadcasts(self) -> bool:
        return any(hasattr(callback, "broadcast_done") for callback in flat(self._arguments["callbacks"]))


def state_of_model(model: Any) -> Any:
    """Returns the state of a model's optimizer that ranks share; None if they share none."""
    return state_of(getattr(model, "optimizer", None))


def shares_update(model: Any) -> bool:
    """Whether ranks share the update of a model's optimizer, once that is built."""
    part = distributed_part(getattr(model, "optimizer", None))
    return part is not None and bool(part.options.shard_kind)


def _cause_of(error: Exception) -> str:
    """Returns the cause of an error in one line.

    The messages of Keras and AutoGraph begin with the location, and contain colour codes.
    """
    text = re.sub(r"\x1b\[\d*m", "", str(error))
    causes = re.findall(r"^\s*(\w+(?:Error|Exception): (?!Exception encountered).+)$", text, re.MULTILINE)
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    if not causes:
        number = 1 if lines[0].startswith("Exception enc") and lines[1:] else 0
        causes = [f"{type(error).__name__}: {lines[number]}"]
    return str(causes[-1])


def _fingerprint(data: Any) -> Any:
    """Returns a digest of the shapes and some rows of arrays; None for other data."""
    import tensorflow as tf

    leaves = tf.nest.flatten(data) if isinstance(data, (dict, list, tuple)) else [data]
    digest = hashlib.sha256()
    for leaf in leaves:
        if not hasattr(leaf, "shape") or not hasattr(leaf, "__array__") or not len(leaf.shape):
            return None
        count = int(leaf.shape[0])
        indices = np.linspace(0, max(count - 1, 0), min(count, 16)).astype(int)
        rows = leaf.iloc[indices] if hasattr(leaf, "iloc") else [np.asarray(leaf[index]) for index in indices.tolist()]
        digest.update(repr(tuple(leaf.shape)).encode() + np.ascontiguousarray(rows).tobytes())
    return digest.hexdigest()


def flat(callbacks: Any) -> list[Any]:
    """Returns the callbacks given to `fit` as a list."""
    given = getattr(callbacks, "callbacks", callbacks)
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _acts_at_ends(callback: Any) -> bool:
    """Whether a callback does anything at the ends of epochs or of training."""
    for hook in ("on_epoch_end", "on_train_end"):
        owner = next((base for base in type(callback).__mro__ if hook in vars(base)), None)
        if hook in vars(callback) or (owner is not None and owner.__name__ != "Callback"):
            return True
    return False

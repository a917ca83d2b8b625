"""Divergence check: verify that all ranks hold the same weights and the same non-trainable state."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from hvkeras import compat
from hvkeras.collectives.broadcasts import allgather_object
from hvkeras.errors import DivergenceError, explain
from hvkeras.gradients.optimizer_classes import distributed_part
from hvkeras.gradients.tape import local_sources
from hvkeras.horovod import as_horovod
from hvkeras.host.console import prints_at, say
from hvkeras.job.process_sets import ProcessSet
from hvkeras.job.session import current_session, this_process
from hvkeras.training import moving_statistics
from hvkeras.training.fit_record import FitRecord, FitRecords
from hvkeras.training.shared_state import Difference, SharedState, gather_sketches

_UNEQUAL_START = "that the ranks did not start from the same weights"
_DEPENDS_ON_RANK = "a layer or an assignment that depends on the rank"
_STRATEGIES = ("MultiWorkerMirroredStrategy", "CollectiveAllReduceStrategy")
_BROADCAST = "add hvd.callbacks.BroadcastGlobalVariablesCallback(0) to fit's callbacks"
_KEEP_STATE = ("if it is a moving average, let fit average it with hvd.register_statistic(layer); otherwise assign the"
               " result of hvd.allreduce, or register it as local to each rank with"
               " optimizer.register_local_var(variable)")
_BROADCAST_NOW = "give all ranks the weights of rank {root}: hvd.broadcast_variables(model.variables, root_rank={root})"


class DivergenceCheck:
    """Comparison of the variables of a model across the ranks during training.

    Args:
        local: Returns the keys of variables that may differ between ranks.
        broadcasts: Whether a callback broadcasts the initial weights.
        averages: Whether `fit` averages moving statistics; otherwise they are local to each rank.
        one_step: Whether `fit` has only one step: scripts for `elastic` build a model so, before they broadcast it.
    """

    def __init__(self, model: Any, process_set: ProcessSet, local: Callable[[], Collection[Any]], broadcasts: bool,
                 averages: bool, one_step: bool) -> None:
        self._model, self._process_set, self._local = model, process_set, local
        self._broadcasts, self._averages, self._one_step = broadcasts, averages, one_step
        records = this_process().part(FitRecords)
        self._before, self.record = records.of(model), records.begin(model)
        self._equal_at_start: bool | None = None
        self._diverged_at_start: set[Any] = set()  # keys of non-trainable variables that differed before the first step
        self._accepts_divergence = False

    def start(self) -> None:
        """Compare the weights and the learned state of layers before the first step, and average moving statistics.

        Unequal weights raise no error yet, since a broadcast may still follow.

        Raises:
            DivergenceError: The ranks' models have different variables, or layers with different learned state.
        """
        state = self._state()
        found = state.compare(self._report_learned, "the weights at the start of fit")
        if found is None:
            return
        left = self._average_statistics(state, found[0], "the start of fit")
        self._equal_at_start = not any(map(state.is_weight, left))
        self._diverged_at_start = {state.untrained[index - len(state.trained)].key for index in left
                                   if not state.is_weight(index)}

    def check(self, steps: int, flag: bool, at_end: bool, mark: int = 0) -> tuple[bool, bool]:
        """Compare the weights; all ranks must call this at the same step.

        Args:
            steps: Steps since the start.
            flag: A flag of this rank, reduced over all ranks in the same collective.
            at_end: Whether this is the end of an epoch, where non-trainable state must be equal as well.
            mark: A number of at most 24 bits, compared in the same collective.

        Returns:
            Whether any rank set the flag, and whether all ranks have the same mark.

        Raises:
            DivergenceError: A variable differs between ranks.
        """
        state = self._state()
        diverged, mine, (flagged, highest, lowest) = state.spread(
            "the divergence check of fit", steps, [float(flag), float(mark), -float(mark)], untrained=at_end)
        if diverged and not self._accepts_divergence:
            index = diverged[0]
            found = state.difference(index, gather_sketches(mine[index].numpy(), self._process_set))
            if state.is_weight(index):
                self._raise_diverged(steps, found)
            else:
                self._raise_untrained_diverged(steps, found, state.untrained[index - len(state.trained)].key)
        return bool(flagged), highest == -lowest

    def end(self, steps: int) -> None:
        """Compare once more after all callbacks, which may change weights when training ends; all ranks must call this.

        Moving statistics that the callbacks have recomputed are averaged. Other differences are no error, since one
        rank may still save its own model.

        Args:
            steps: Steps since the start.
        """
        if self._accepts_divergence:
            return
        state = self._state()
        diverged, mine, _ = state.spread("the weights at the end of fit", steps)
        left = self._average_statistics(state, diverged, "the end of fit")
        if not left:
            return
        found = state.difference(left[0], gather_sketches(mine[left[0]].numpy(), self._process_set))
        if self.record.warned:  # of untrained state, with --as-horovod
            return
        cause, hint = self.record.cause()
        together = "" if as_horovod.is_installed() else ", as evaluate and hvd.predict of all ranks need the same model"
        self._warn(f"after fit, {found.name} differs between {found.between} (by {found.distance:.2g} of its"
                   f" norm): each rank has a model of its own; the likely cause is {cause or _DEPENDS_ON_RANK}\nHINT: "
                   + (hint or _BROADCAST_NOW.format(root=self._process_set.ranks[0])) + together)

    def _state(self) -> SharedState:
        self.record.local = frozenset(self._local())
        return SharedState(self._model, self._process_set, self._local(), self._averages)

    def _average_statistics(self, state: SharedState, diverged: Sequence[int], what: str) -> Sequence[int]:
        return _left_after_averaging(self._model, self._process_set, self._local(), state, diverged, what)

    def _report_learned(self, found: Difference) -> None:
        report_learned(self._process_set, found)

    def _raise_diverged(self, steps: int, found: Difference) -> None:
        numbers = self._different_numbers(found.ranks)
        cause, hint = self._cause()
        if cause == _UNEQUAL_START and not numbers and as_horovod.is_installed():
            self._accept_divergence()
            return
        if numbers:
            callback, hint = self.record.cause(of_rates=True)
            cause = f"{numbers}: {callback or 'a callback or an assignment that depends on the rank'}"
            hint = hint or "set it alike on every rank"
        raise DivergenceError(explain(
            f"All ranks must hold the same weights, but after {steps} step{'s' * (steps != 1)} of fit {found.name}"
            f" differs between {found.between}; the likely cause is {'that ' * bool(numbers)}{cause}", hint,
            variable=found.name, relative_difference=found.distance))

    def _different_numbers(self, between: tuple[int, int]) -> str:
        """Name the first number of the optimizer, such as its learning rate, that differs between two ranks."""
        everyone = allgather_object(compat.numbers_of(self._model.optimizer), name="the numbers of the optimizer",
                                    process_set=self._process_set)
        first, other = (everyone[self._process_set.ranks.index(rank)] for rank in between)
        for name, value in first.items():
            if name in other and abs(value - other[name]) > 1e-6 * max(abs(value), abs(other[name])):
                return f"{name} is {value:.6g} on rank {between[0]} and {other[name]:.6g} on rank {between[1]}"
        return ""

    def _raise_untrained_diverged(self, steps: int, found: Difference, key: Any) -> None:
        if as_horovod.is_installed():
            if not self.record.warned:
                self._warn(f"the state {found.name} of the layer {found.layer} ({found.layer_class}) differs between"
                           f" {found.between}: a file saved by one rank does not match the others (an error"
                           " without --as-horovod)")
            self.record.warned = True
            return
        differed = key in self._diverged_at_start and not self._broadcasts
        raise DivergenceError(explain(
            f"All ranks must hold the same state, but after {steps} step{'s' * (steps != 1)} of fit {found.name}, which"
            f" the layer {found.layer} ({found.layer_class}) updates outside the optimizer, differs between"
            f" {found.between}" + f", as it did before the first step; the likely cause is {_UNEQUAL_START}" * differed,
            _BROADCAST if differed else _KEEP_STATE, variable=found.name, layer=found.layer,
            relative_difference=found.distance))

    def _accept_divergence(self) -> None:
        """Let this `fit` continue, as in Horovod."""
        self._accepts_divergence = self.record.warned = True
        if not self._one_step:
            self._warn("the ranks did not start this fit from the same weights, and train different models (an error"
                       f" without --as-horovod)\nHINT: {_BROADCAST}")

    def _warn(self, text: str) -> None:
        _warn(self._process_set, text)

    def _cause(self) -> tuple[str, str]:
        """Return the likely cause and the hint."""
        if distributed_part(self._model.optimizer) is None:
            if type(getattr(self._model, "distribute_strategy", None)).__name__ in _STRATEGIES:
                return "a strategy that has this rank as its only worker", (
                    'create it by hvd.strategy("multi_worker_mirrored"), or start the script with hvkeras run'
                    " --tf-config")
            if compat.steps_by_itself(self._model):
                hint = "compile with hvd.DistributedOptimizer(optimizer)"
            else:
                hint = ("average the gradients in your train_step: compile with hvd.DistributedOptimizer(optimizer), or"
                        " use hvd.DistributedGradientTape")
            return "an optimizer that is not distributed", hint + ("" if self._broadcasts else f", and {_BROADCAST}")
        if self._equal_at_start is False or (self._equal_at_start is None and not self._broadcasts):
            before, hint = self._before.cause()
            return _UNEQUAL_START + f", after a fit with {before}" * bool(before), (
                f"{hint}, or " * bool(hint) + _BROADCAST
                + "; or, if this fit only builds the model for hvd.elastic, remove it" * self._one_step)
        callback, hint = self.record.cause()
        if callback:
            return callback, hint
        return _DEPENDS_ON_RANK, ("update weights through the optimizer alone and alike on every rank, or register"
                                  " those that are meant to differ with optimizer.register_local_var(variable)")


def require_same_state(model: Any, process_set: ProcessSet, what: str, hint: str) -> bool:
    """Verify that ranks that evaluate or predict together hold the same state, and average moving statistics.

    All ranks must call this.

    Args:
        what: The call of all ranks, for messages.
        hint: What to do if not all ranks make this call.

    Returns:
        False if a rank has not built its model yet, so that nothing could be compared.

    Raises:
        DivergenceError: The ranks hold different state; with --as-horovod, a line is printed instead.
    """
    settings = current_session().settings
    if not settings.guard or not tf.executing_eagerly() or not hasattr(type(model), "trainable_variables"):
        return True
    part, record = distributed_part(getattr(model, "optimizer", None)), this_process().part(FitRecords).of(model)
    local = {*record.local, *local_sources().keys, *(part.local_keys() if part is not None else ())}
    averages = part is not None and settings.average_statistics and compat.step_counter(part.optimizer) > 0
    state = SharedState(model, process_set, local, averages)
    found = state.compare(functools.partial(report_learned, process_set), f"the weights of {what}", hint)
    if found is None:
        return False
    diverged, everyone = found
    left = _left_after_averaging(model, process_set, local, state, diverged, what)
    if left:
        _report(process_set, what, record, state.difference(left[0], everyone[:, left[0]]))
    return True


def report_learned(process_set: ProcessSet, found: Difference) -> None:
    """Raise an error for layers that have learned different state; with --as-horovod, print a line."""
    if as_horovod.is_installed():
        _warn(process_set, f"the layer {found.name} has learned different state on {found.between}, which compute"
                           " different functions (an error without --as-horovod)")
        return
    tokens = {f"tokens_on_rank_{rank}": count for rank, count in zip(found.ranks, found.tokens, strict=False)}
    raise DivergenceError(explain(
        f"All ranks must compute the same function, but the layer {found.name} has learned different state on"
        f" {found.between}", "adapt it to the data of all ranks together with hvd.adapt(layer, data), or give all ranks"
        " the root's with hvd.callbacks.BroadcastGlobalVariablesCallback(0)", layer=found.layer, **tokens))


def _report(process_set: ProcessSet, what: str, record: FitRecord, found: Difference) -> None:
    """Raise an error for different state before a call of all ranks; with --as-horovod, print a line once."""
    cause, hint = record.cause()
    cause = cause or (f"{_DEPENDS_ON_RANK}, since the last fit" if record.trained else _UNEQUAL_START)
    hint = f"{hint}, or " * bool(hint) + _BROADCAST_NOW.format(root=process_set.ranks[0])
    if found.layer:
        hint += f"; if the layer {found.layer} updates it: {_KEEP_STATE}"
    if not as_horovod.is_installed():
        raise DivergenceError(explain(
            f"All ranks must hold the same weights in {what}, but {found.name} differs between {found.between}; the"
            f" likely cause is {cause}", hint, variable=found.name, relative_difference=found.distance))
    if not record.warned:
        _warn(process_set, f"in {what}, {found.name} differs between {found.between}: the result is a mixture of"
                           f" different models (an error without --as-horovod); the likely cause is {cause}\nHINT:"
                           f" {hint}")
    record.warned = True


def _left_after_averaging(model: Any, process_set: ProcessSet, local: Collection[Any], state: SharedState,
                          diverged: Sequence[int], what: str) -> Sequence[int]:
    """Average the moving statistics if they differ and the weights do not; return the variables that still differ.

    If the weights differ, for example after one rank has loaded its best ones, the mean would match none of them.
    """
    statistics = [index for index in diverged if state.is_statistic(index)]
    if not statistics or any(map(state.is_weight, diverged)):
        return diverged
    moving_statistics.average(model, process_set, local, what)
    return [index for index in diverged if index not in statistics]


def _warn(process_set: ProcessSet, text: str) -> None:
    session = current_session()
    if session.topology.rank == process_set.ranks[0] and prints_at(session.settings, "WARNING"):
        say(text)

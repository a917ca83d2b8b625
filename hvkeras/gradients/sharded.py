"""Optimizers whose update the ranks share: what they are built on, and what of Keras's steps needs all parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras import compat
from hvkeras.compat import graphs
from hvkeras.errors import UnsupportedError, UsageError, explain
from hvkeras.gradients import shard_step
from hvkeras.gradients.distributed import UPDATE, Distributed
from hvkeras.gradients.parts import by_elements, by_variables
from hvkeras.gradients.shard_state import Noted, ShardedState
from hvkeras.gradients.shards import Shards, extent_of
from hvkeras.job.state import current_job, is_initialized

_SHARDS, _STATE, _NOTES = "_hvkeras_shards", "_hvkeras_state", "_hvkeras_notes"
_AVERAGES = "_model_variables_moving_average"


class Sharded(Distributed):
    """A distributed optimizer that is built on this rank's parts of the variables, and so holds their slots alone."""

    def build(self, variables: Any) -> None:
        """Creates the slots of this rank's parts of the variables."""
        plain: Any = super().build  # type: ignore[misc]  # the optimizer's
        if _is_built(self) or _NOTES in self.__dict__:
            plain(variables)
            return
        shards = self._hvkeras_deal(list(variables))
        self.__dict__[_SHARDS] = shards
        if shards is None:
            plain(list(variables))
            return
        notes: dict[Any, int] = {}
        with compat.attribute(self, _NOTES, notes):
            plain(Noted(self, shards, notes))
        self.__dict__[_STATE] = ShardedState(self, shards, notes, self._hvkeras_exchange.process_set)

    def _hvkeras_deal(self, variables: Sequence[Any]) -> Shards | None:
        """Deals variables to the ranks; None where there is nobody to share them with."""
        process_set = self._hvkeras_exchange.process_set
        if not is_initialized() or not current_job().backend.has_ranks or not variables:
            return None
        ranks = process_set.members()
        if len(ranks) == 1 or not process_set.included():
            return None
        if any(isinstance(compat.native(variable), tf.distribute.DistributedValues) for variable in variables):
            raise UnsupportedError(explain("shard_update=True needs variables that belong to one device of each rank",
                                           "leave it out where a strategy of tf.distribute keeps copies of the model"))
        local = self._hvkeras_local_keys()
        extents = {number: extent_of(variable, self._hvkeras_kind == "elements")
                   for number, variable in enumerate(variables)
                   if compat.variable_key(variable) not in local and not compat.is_overwritten(variable)}
        dealt = (by_elements(list(extents.values()), len(ranks), current_job().settings.bucket_size)
                 if self._hvkeras_kind == "elements" else by_variables(list(extents.values()), len(ranks)))
        bounds = dict(zip(extents, dealt, strict=True))
        return Shards(variables, [bounds.get(number) for number in range(len(variables))], ranks,
                      ranks.index(current_job().topology.rank))

    def _hvkeras_shards_for(self, optimizer: Any, variables: Sequence[Any]) -> Shards | None:
        compat.build_optimizer(optimizer, variables)
        if _SHARDS not in self.__dict__:
            with tf.init_scope():
                self._hvkeras_share_state(variables)
        shards: Shards | None = self.__dict__[_SHARDS]
        if shards is not None and not tf.executing_eagerly() and not graphs.of_functions():
            raise UnsupportedError(explain("shard_update=True works in eager mode and in functions, not in sessions of"
                                           " TensorFlow 1", "leave it out"))
        return shards

    def _hvkeras_share_built(self) -> None:
        """Does so now if the optimizer is built, and has kept the variables."""
        if _is_built(self) and self.__dict__.get("_trainable_variables"):
            self._hvkeras_share_state([])

    def _hvkeras_share_state(self, variables: Sequence[Any]) -> None:
        """Keeps this rank's parts of the slots of an optimizer that was built before it was distributed."""
        plain: Any = super()
        values = [np.asarray(compat.native(variable)) for variable in plain.variables]
        trained = list(self.__dict__.get("_trainable_variables") or variables)
        compat.forget_slots(self)
        self.build(trained)
        if (state := self.__dict__.get(_STATE)) is not None:
            for variable, value in zip(self.variables, values, strict=True):
                variable.assign(value)
            state.forget()

    def _hvkeras_deal_again(self, variables: Sequence[Any] = ()) -> None:
        """Deals the variables to the ranks that the job has now; parts of slots are forgotten, whole values stay.

        Args:
            variables: The model's trainable variables, for an optimizer that does not know them.
        """
        values = [None if getattr(one, "is_whole_of_parts", False) else np.asarray(compat.native(one))
                  for one in self.variables]
        shards: Shards | None = self.__dict__.get(_SHARDS)
        trained = shards.variables if shards is not None else self.__dict__.get("_trainable_variables") or variables
        for name in (_SHARDS, _STATE, UPDATE):
            self.__dict__.pop(name, None)
        compat.forget_slots(self)
        self.build(list(trained))
        for variable, value in zip(self.variables, values, strict=True):
            if value is not None:
                variable.assign(value)

    def _hvkeras_is_dealt_for(self, ranks: int, rank: int) -> bool:
        """Whether the variables are dealt to so many ranks, of which this is one."""
        shards: Shards | None = self.__dict__.get(_SHARDS)
        return ranks == 1 if shards is None else shards.is_for(ranks, rank)

    def _hvkeras_trained(self) -> list[Any]:
        shards: Shards | None = self.__dict__.get(_SHARDS)
        return super()._hvkeras_trained() if shards is None else shards.variables

    # What Keras itself calls.

    @property
    def variables(self) -> Any:
        """The optimizer's variables; those of which each rank holds a part are `WholeVariable`s."""
        found: Any = super().variables  # type: ignore[misc]  # the optimizer's
        state: ShardedState | None = self.__dict__.get(_STATE)
        return found if state is None else type(found)(state.variables(found))

    def set_weights(self, weights: Any) -> None:
        """Assigns values to all variables."""
        variables = list(self.variables)
        if len(weights) != len(variables):
            raise UsageError(explain("set_weights takes a value for each variable of the optimizer",
                                     values=len(weights), variables=len(variables)))
        for variable, value in zip(variables, weights, strict=True):
            variable.assign(value)

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        """Refuses checkpoints of TensorFlow, which would hold parts; what Keras 3 exports has no optimizer."""
        if self.__dict__.get(_STATE) is None:
            found: dict[str, Any] = super()._trackable_children(save_type, **kwargs)  # type: ignore[misc]
            return found
        if save_type != "checkpoint" and compat.family_of(self) == compat.KERAS:
            return {}
        raise UnsupportedError(explain(
            "TensorFlow's own checkpoints and SavedModels would hold only a part of an optimizer with"
            " shard_update=True",
            'save a file of Keras instead: model.save("model.keras") or save_weights("model.weights.h5")',
            optimizer=type(self).__name__))

    def _use_weight_decay(self, variable: Any) -> bool:
        """Asks for the variable that a part belongs to, which users have named."""
        shards: Shards | None = self.__dict__.get(_SHARDS)
        if shards is not None:
            whole = shards.variable_of(variable)
            variable = compat.native(whole) if compat.native(variable) is variable else whole
        return bool(super()._use_weight_decay(variable))  # type: ignore[misc]  # the optimizer's

    def _clip_gradients(self, grads: Any) -> Any:
        """Clips by norms of whole gradients, of which this rank has parts."""
        over = self.__dict__.get("_hvkeras_over")
        if over is None or not shard_step.clips_by_norm(self):
            return super()._clip_gradients(grads)  # type: ignore[misc]  # the optimizer's
        return shard_step.clip(self, list(grads), over)

    def _update_model_variables_moving_average(self, variables: Any) -> None:
        """Averages this rank's parts, each with its own average, whichever of them a step updates."""
        plain: Any = super()._update_model_variables_moving_average  # type: ignore[misc]  # the optimizer's
        parts, averages = self._hvkeras_with_averages(variables)
        with compat.attribute(self, _AVERAGES, averages):
            plain(parts)

    def _overwrite_model_variables_with_average_value(self, variables: Any) -> None:
        """Overwrites this rank's parts, which are gathered afterwards."""
        plain: Any = super()._overwrite_model_variables_with_average_value  # type: ignore[misc]  # the optimizer's
        parts, averages = self._hvkeras_with_averages(variables)
        with compat.attribute(self, _AVERAGES, averages):
            plain(parts)

    def _hvkeras_with_averages(self, variables: Any) -> tuple[list[Any], list[Any]]:
        """Returns this rank's parts of the model's variables, or those given that are parts; and their averages."""
        given, averages = list(variables), getattr(self, _AVERAGES, [])
        shards: Shards | None = self.__dict__.get(_SHARDS)
        if shards is None:
            return given, averages
        numbers: Sequence[int | None] = shards.places_of(given) or [shards.number_of(one) for one in given]
        mine = [number for number in numbers if number is not None and shards.is_mine(number)]
        return [shards.parts[number] for number in mine], [averages[number] for number in mine]

    def finalize_variable_values(self, var_list: Any) -> None:
        """Ends training: with averages of the weights, these become the weights, on all ranks."""
        super().finalize_variable_values(var_list)  # type: ignore[misc]  # the optimizer's
        if self.__dict__.get(_SHARDS) is not None and getattr(self, "use_ema", False):
            self._hvkeras_gather_weights()

    def _hvkeras_gather_weights(self) -> None:
        """Gives all ranks the weights of which each has its part."""
        shards: Shards = self.__dict__[_SHARDS]
        shard_step.gather(self, shards, [number for number in range(len(shards.parts))
                                         if shards.bounds[number] is not None], {})

    def _hvkeras_swap_averages(self) -> None:
        """Exchanges the model's weights and their averages, on all ranks together."""
        for part, average in self._hvkeras_parts_and_averages():
            value = tf.identity(part)
            part.assign(average)
            average.assign(value)
        self._hvkeras_gather_weights()

    def _hvkeras_begin_averages(self) -> None:
        """Gives the averages the values that the model's weights have."""
        for part, average in self._hvkeras_parts_and_averages():
            average.assign(part)

    def _hvkeras_parts_and_averages(self) -> list[tuple[Any, Any]]:
        shards: Shards = self.__dict__[_SHARDS]
        pairs = zip(*self._hvkeras_with_averages(shards.variables), strict=True)
        return [(compat.native(part), compat.native(average)) for part, average in pairs]


def swap_averages(original: Callable[[Any], Any], callback: Any) -> None:
    """Does what Keras's `SwapEMAWeights` does, which would exchange this rank's parts alone.

    Args:
        original: Keras's own method.
        callback: The callback.
    """
    sharded = _with_averages(callback.model.optimizer)
    if sharded is None:
        original(callback)
    else:
        sharded._hvkeras_swap_averages()


def begin_averages(original: Callable[[Any], Any], callback: Any) -> None:
    """Does what `SwapEMAWeights` does at the end of training, when averages have become the weights.

    Args:
        original: Keras's own method.
        callback: The callback.
    """
    sharded = _with_averages(callback.model.optimizer)
    if sharded is None:
        original(callback)
    else:
        sharded._hvkeras_begin_averages()


def _with_averages(optimizer: Any) -> Sharded | None:
    """The optimizer, or that inside it, if ranks share its averages of weights."""
    for candidate in (optimizer, compat.inner_optimizer(optimizer)):
        if isinstance(candidate, Sharded) and candidate.__dict__.get(_SHARDS) is not None:
            return candidate if getattr(candidate, "use_ema", False) else None
    return None


def _is_built(optimizer: Any) -> bool:
    return bool(getattr(optimizer, "built", getattr(optimizer, "_built", False)))


def gather_optimizer(model_or_optimizer: Any, to: Sequence[int] = (0,)) -> None:
    """Gathers the state of an optimizer with `shard_update=True`, so that it can be read or saved.

    All ranks call it, at the same step. `fit` does so by itself before callbacks that save, and at its end. What was
    gathered is that of the step, and is let go when training goes on. It does nothing for other optimizers.

    Example:
        for step, batch in enumerate(dataset):
            train_step(batch)
            if step % 1000 == 0:
                hvd.gather_optimizer(model)
                if hvd.rank() == 0:
                    model.save("model.keras")

    Args:
        model_or_optimizer: A compiled model, or an optimizer.
        to: The global ranks that are to have the whole state, in host memory.

    Raises:
        NotInitializedError: `init()` was not called.
        UsageError: A rank is not one of those that share the state.
    """
    current_job()
    state = state_of(getattr(model_or_optimizer, "optimizer", model_or_optimizer))
    if state is not None:
        state.gather(to)


def state_of(optimizer: Any) -> ShardedState | None:
    """Returns the state that ranks share of an optimizer, or of that inside it; None if they share none."""
    for candidate in (optimizer, compat.inner_optimizer(optimizer)):
        if isinstance(candidate, Sharded):
            found: ShardedState | None = candidate.__dict__.get(_STATE)
            return found
    return None

"""Sharding of one optimizer's update: assignment of variables to ranks, slots of parts, and averages of weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras import compat
from hvkeras.collectives.buckets import bucket_size
from hvkeras.compat import graphs
from hvkeras.errors import UnsupportedError, explain
from hvkeras.gradients.options import Options
from hvkeras.gradients.sharded_state import ShardedState
from hvkeras.gradients.sharded_update import gather
from hvkeras.gradients.shards import Shards, by_elements, by_variables, extent_of
from hvkeras.job.session import current_session, is_initialized

_AVERAGES = "_model_variables_moving_average"  # Keras's attribute


class Sharding:
    """Sharding of an optimizer, which is built on this rank's parts of the variables and holds only their slots.

    Args:
        options: The options of the distributed optimizer.
        local_keys: Returns the keys of the local variables, which are not sharded.

    Attributes:
        shards: The variables and this rank's parts; None if the optimizer is not built, or if there is only one rank.
        state: The sharded slots; None under the same conditions.
    """

    def __init__(self, optimizer: Any, options: Options, local_keys: Callable[[], Collection[Any]]) -> None:
        self._optimizer, self._options, self._local_keys = optimizer, options, local_keys
        self._is_assigned = False
        self.shards: Shards | None = None
        self.state: ShardedState | None = None

    def build(self, plain: Callable[[Any], Any], variables: Any) -> None:
        """Create the slots of this rank's parts of the variables, once.

        Args:
            plain: Keras's own `build`.
        """
        if self._is_assigned or _is_built(self._optimizer):
            plain(variables)
            return
        self.shards, self._is_assigned = self._assigned(list(variables)), True
        try:
            plain(list(variables) if self.shards is None else [*self.shards.parts, self.shards.placeholder])
            if self.shards is not None:
                self.state = ShardedState(self._optimizer, self._options, self.shards)
        except BaseException:
            self._reset()
            raise

    def _reset(self) -> None:
        self.shards, self.state, self._is_assigned = None, None, False

    def _assigned(self, variables: Sequence[Any]) -> Shards | None:
        """Assign parts of variables to the ranks; return None if there is only one rank."""
        process_set, kind = self._options.exchange.process_set, self._options.shard_kind
        if not is_initialized() or not current_session().backend.has_ranks or not variables:
            return None
        ranks = process_set.members()
        if len(ranks) == 1 or not process_set.included():
            return None
        if any(isinstance(compat.as_tf_variable(variable), tf.distribute.DistributedValues) for variable in variables):
            raise UnsupportedError(explain("shard_update=True needs variables that belong to one device of each rank",
                                           "remove it under a strategy of tf.distribute with copies of the model"))
        local = self._local_keys()
        extents = {number: extent_of(variable, kind == "elements") for number, variable in enumerate(variables)
                   if compat.variable_key(variable) not in local and not compat.is_overwritten(variable)}
        assigned = (by_elements(list(extents.values()), len(ranks), bucket_size(current_session().settings))
                    if kind == "elements" else by_variables(list(extents.values()), len(ranks)))
        bounds = dict(zip(extents, assigned, strict=True))
        return Shards(variables, [bounds.get(number) for number in range(len(variables))], ranks,
                      ranks.index(current_session().topology.rank))

    def shards_for(self, outer: Any, variables: Sequence[Any]) -> Shards | None:
        """Return the parts of variables of the sharded update; None if the update is not sharded.

        Args:
            outer: The outermost optimizer, which is built if it is not built yet.
            variables: The variables to build it for.

        Raises:
            UnsupportedError: A session of TensorFlow 1 will run the step.
        """
        compat.build_optimizer(outer, variables)
        if not self._is_assigned:
            with tf.init_scope():
                self._shard_built(variables)
        if self.shards is not None and not tf.executing_eagerly() and not graphs.from_function_graphs():
            raise UnsupportedError(explain("shard_update=True works in eager mode and in functions, not in sessions of"
                                           " TensorFlow 1", "remove it"))
        return self.shards

    def share_if_built(self) -> None:
        """Shard the slots, if the optimizer is built and has stored the variables."""
        if _is_built(self._optimizer) and self._optimizer.__dict__.get("_trainable_variables"):
            self._shard_built([])

    def _shard_built(self, variables: Sequence[Any]) -> None:
        """Shard the slots of an optimizer that was built before it was distributed."""
        optimizer = self._optimizer
        values = [np.asarray(compat.as_tf_variable(variable)) for variable in optimizer.variables]
        trained = list(optimizer.__dict__.get("_trainable_variables") or variables)
        compat.forget_slots(optimizer)
        optimizer.build(trained)
        if self.state is not None:
            for variable, value in zip(optimizer.variables, values, strict=True):
                variable.assign(value)
            self.state.forget()

    def reshard(self, variables: Sequence[Any] = ()) -> None:
        """Assign the variables to the current ranks of the job. Sharded slots are reset; other slots keep their values.

        Args:
            variables: The model's trainable variables, for an optimizer that does not store them.
        """
        optimizer = self._optimizer
        values = [None if getattr(variable, "is_whole_of_shards", False)
                  else np.asarray(compat.as_tf_variable(variable)) for variable in optimizer.variables]
        trained = (self.shards.variables if self.shards is not None
                   else optimizer.__dict__.get("_trainable_variables") or variables)
        self._reset()
        compat.forget_slots(optimizer)
        optimizer.build(list(trained))
        for variable, value in zip(optimizer.variables, values, strict=True):
            if value is not None:
                variable.assign(value)

    def is_for(self, ranks: int, rank: int) -> bool:
        """Return whether the variables are assigned to this number of ranks, with this rank as `rank`."""
        return ranks == 1 if self.shards is None else self.shards.is_for(ranks, rank)

    # Averages of weights.

    @property
    def has_averages(self) -> bool:
        """True if the optimizer has sharded averages of the weights."""
        return self.shards is not None and bool(getattr(self._optimizer, "use_ema", False))

    @contextlib.contextmanager
    def parts_with_averages(self, variables: Any) -> Iterator[Sequence[Any]]:
        """Yield this rank's parts of variables, and set Keras's attribute with the averages to those of the parts.

        Keras iterates over the variables and this attribute in parallel.

        Args:
            variables: The variables over which Keras would iterate: the model's, or parts.
        """
        parts, averages = self._with_averages(variables)
        with compat.attribute(self._optimizer, _AVERAGES, averages):
            yield parts

    def _with_averages(self, variables: Any) -> tuple[list[Any], list[Any]]:
        given, averages, shards = list(variables), getattr(self._optimizer, _AVERAGES, []), self.shards
        if shards is None:
            return given, averages
        numbers: Sequence[int | None] = shards.numbers_of(given) or [shards.number_of(part) for part in given]
        mine = [number for number in numbers if number is not None and shards.has_part(number)]
        return [shards.parts[number] for number in mine], [averages[number] for number in mine]

    def gather_weights(self) -> None:
        """Gather the sharded weights on all ranks."""
        if self.shards is not None:
            gather(self._options.exchange, self.shards, self.shards.shared_numbers(), {})

    def swap_averages(self) -> None:
        """Swap the model's weights and their averages. Called by all ranks at the same time."""
        for part, average in self._parts_and_averages():
            value = tf.identity(part)
            part.assign(average)
            average.assign(value)
        self.gather_weights()

    def begin_averages(self) -> None:
        """Set the averages to the model's weights."""
        for part, average in self._parts_and_averages():
            average.assign(part)

    def _parts_and_averages(self) -> list[tuple[Any, Any]]:
        pairs = zip(*self._with_averages([] if self.shards is None else self.shards.variables), strict=True)
        return [(compat.as_tf_variable(part), compat.as_tf_variable(average)) for part, average in pairs]


def _is_built(optimizer: Any) -> bool:
    return bool(getattr(optimizer, "built", getattr(optimizer, "_built", False)))

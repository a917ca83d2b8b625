"""Sharded state of an optimizer, which is read, saved, loaded and sent as complete variables."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras import compat
from hvkeras.collectives.broadcasts import allgather_object
from hvkeras.collectives.scattering import alltoall
from hvkeras.compat import graphs
from hvkeras.errors import UnsupportedError, UsageError, explain
from hvkeras.gradients.options import Options
from hvkeras.gradients.shards import Bounds, Shards
from hvkeras.job.session import current_session

PLACEHOLDER = -1  # instead of the number of a variable, for slots of the placeholder


@dataclass(frozen=True)
class SharedSlot:
    """A sharded slot.

    Attributes:
        slot: The variable with this rank's part.
        index: The slot's index in the optimizer's list of variables.
        shape: The shape of the complete slot.
        bounds: The i-th rank of the process set has the elements `[bounds[i], bounds[i + 1])`.
    """

    slot: Any
    index: int
    shape: tuple[int, ...]
    bounds: Bounds


class ShardedStateVariable:
    """A sharded variable of an optimizer's state, with the interface of the complete variable.

    Args:
        slot: The variable with this rank's part.
        number: The number of the model's variable that it belongs to.
    """

    trainable = False
    is_whole_of_shards = True  # for `broadcast_variables`

    def __init__(self, state: ShardedState, slot: Any, number: int) -> None:
        self._state = state
        self.slot: Any = slot
        self.number: int = number
        self._unique_id = f"{compat.variable_key(slot)} as a whole"
        self.name: str = slot.name
        self.path: str = compat.variable_name(slot)
        self.dtype: Any = slot.dtype
        self.constraint: None = None

    @property
    def shape(self) -> Any:
        """Shape of the complete variable."""
        return self._state.shape_of(self.slot, self.number)

    @property
    def has_known_shape(self) -> bool:
        """False if only the owner knows the shape of the complete variable, and has not sent it yet."""
        return self._state.knows_shape(self.slot, self.number)

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def numpy(self) -> Any:
        """Return the value as an array, if it was gathered or assigned since the last step.

        Raises:
            UsageError: It was not.
        """
        return self._state.value_of(self.slot, self.number)

    def read_value(self) -> Any:
        """Return the value as a tensor; see `numpy`."""
        return tf.convert_to_tensor(self.numpy())

    def value(self) -> Any:
        """Return the value as a tensor; see `numpy`."""
        return self.read_value()

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.asarray(self.numpy(), dtype)

    def assign(self, value: Any) -> None:
        """Assign this rank's part of a value. All ranks must assign the value, or broadcast it afterwards."""
        self._state.assign(self.slot, self.number, value)

    @property
    def assigned(self) -> Any:
        """Value that this rank has assigned since the last step, as an array; None if it has not."""
        return self._state.assigned_to(self.slot)

    def __repr__(self) -> str:
        return f"<{self.name}, of which each rank holds a part, shape={tuple(self.shape)}>"


class ShardedState:
    """Sharded slots of an optimizer: each rank holds the slots of its parts of the model's variables.

    Args:
        options: The options of the distributed optimizer.
        shards: The model's variables and this rank's parts.

    Raises:
        UnsupportedError: The optimizer does not store its slots in lists or dictionaries with one entry per variable.
    """

    def __init__(self, optimizer: Any, options: Options, shards: Shards) -> None:
        self._optimizer, self._options, self._shards = optimizer, options, shards
        self._process_set = options.exchange.process_set
        self._numbers = self._numbers_of_slots()
        self._sharded_variables: dict[Any, ShardedStateVariable] = {}
        self._shapes: dict[Any, tuple[int, ...]] = {}  # of slots whose shape differs from their variable's
        # For each slot, the step at which it was gathered or assigned, and the other ranks' elements if it was
        # gathered, or the complete value if it was assigned.
        self._values: dict[Any, tuple[int, Any]] = {}
        self._assigned: set[Any] = set()
        self._gathered: tuple[int, list[int]] | None = None  # the step, and the receiving ranks

    def _numbers_of_slots(self) -> dict[Any, int]:
        """Return the number of the variable of each slot that the optimizer has just created, by the slot's key."""
        parts = self._shards.parts  # the optimizer was built for these and, at the end, the placeholder
        found = {compat.variable_key(slot): number if number < len(parts) else PLACEHOLDER
                 for number, slot in compat.numbered_slots(self._optimizer, len(parts) + 1)}
        shapes = {tuple(part.shape) for part in parts if tuple(part.shape)}
        for slot in self._own():
            if tuple(slot.shape) in shapes and compat.variable_key(slot) not in found:
                raise UnsupportedError(explain(
                    "shard_update=True needs an optimizer that keeps its slots in lists or dictionaries with one entry"
                    " per variable, in the order of the variables", "change the optimizer, or remove shard_update=True",
                    slot=str(slot.name), optimizer=type(self._optimizer).__name__))
        return found

    def variables(self, own: Sequence[Any]) -> list[Any]:
        """Return the optimizer's variables, with `ShardedStateVariable`s and without slots of the placeholder.

        Args:
            own: The optimizer's variables on this rank.
        """
        found = []
        for variable in own:
            number = self._numbers.get(compat.variable_key(variable))
            if number is None or (number != PLACEHOLDER and self._shards.bounds[number] is None):
                found.append(variable)
            elif number != PLACEHOLDER:
                key = compat.variable_key(variable)
                found.append(self._sharded_variables.setdefault(key, ShardedStateVariable(self, variable, number)))
        return found

    def shared_slots(self, variables: Sequence[Any]) -> list[SharedSlot]:
        """Return the sharded slots. Called by all ranks of the process set at the same time.

        Args:
            variables: The optimizer's variables, with `ShardedStateVariable`s for sharded slots.
        """
        with graphs.eagerly():
            self._send_shapes(self._shared())
        found = []
        for index, variable in enumerate(variables):
            if isinstance(variable, ShardedStateVariable):
                slot, number = variable.slot, variable.number
                shape = tuple(self.shape_of(slot, number))
                bounds = self._shards.bounds[number] or ()
                if not self._is_like_variable(slot, number):
                    count = math.prod(shape)
                    bounds = tuple(count if bound else 0 for bound in bounds)
                found.append(SharedSlot(slot, index, shape, bounds))
        return found

    def _own(self) -> list[Any]:
        return list(self._optimizer._variables)

    def _shared(self) -> list[tuple[Any, int]]:
        """Return the sharded slots, with the numbers of their variables."""
        found = [(slot, self._numbers.get(compat.variable_key(slot), PLACEHOLDER)) for slot in self._own()]
        return [(slot, number) for slot, number in found
                if number != PLACEHOLDER and self._shards.bounds[number] is not None]

    def _is_like_variable(self, slot: Any, number: int) -> bool:
        return tuple(slot.shape) == tuple(self._shards.parts[number].shape)

    def shape_of(self, slot: Any, number: int) -> Any:
        """Return the shape of a complete slot; that of this rank's part if only the owner knows it."""
        if self._is_like_variable(slot, number):
            return self._shards.variables[number].shape
        return self._shapes.get(compat.variable_key(slot), tuple(slot.shape))

    def knows_shape(self, slot: Any, number: int) -> bool:
        """Return whether this rank knows the shape of a complete slot."""
        return (self._is_like_variable(slot, number) or self._shards.has_all(number)
                or compat.variable_key(slot) in self._shapes)

    def value_of(self, slot: Any, number: int) -> Any:
        """Return the value of a complete slot.

        Raises:
            UsageError: It was not gathered or assigned since the last step.
        """
        key = compat.variable_key(slot)
        steps, value = self._values.get(key, (None, None))
        if self._shards.has_all(number):
            return compat.as_tf_variable(slot).numpy()
        if value is not None and steps == self._steps():
            return value if key in self._assigned else self._completed(slot, number, value)
        raise UsageError(explain(
            "The state of an optimizer with shard_update=True must be gathered before it is read or saved"
            + ("; training has continued since the last time" if value is not None else ""),
            "call hvd.gather_optimizer(model) on all ranks first, with to=[...] if other ranks than 0 read the state",
            variable=str(slot.name), rank=current_session().topology.rank))

    def _completed(self, slot: Any, number: int, others: Any) -> Any:
        """Insert this rank's part into the elements of the other ranks."""
        shape = tuple(self.shape_of(slot, number))
        if not self._is_like_variable(slot, number) or not self._shards.has_part(number):
            return others.reshape(shape)
        start, _ = self._shards.range_of(number)
        own = compat.as_tf_variable(slot).numpy().reshape(-1)
        return np.concatenate([others[:start], own, others[start:]]).reshape(shape)

    def _steps(self) -> int:
        return compat.step_counter(self._optimizer)

    def assigned_to(self, slot: Any) -> Any:
        """Return the value that was assigned to a complete slot since the last step; None if none was."""
        key = compat.variable_key(slot)
        steps, value = self._values.get(key, (None, None))
        return value if key in self._assigned and steps == self._steps() else None

    def assign(self, slot: Any, number: int, value: Any) -> None:
        """Assign this rank's part of a complete value, which is stored until the next step, for broadcasts.

        Raises:
            UsageError: The value has another shape.
        """
        array = np.asarray(value)
        is_like = self._is_like_variable(slot, number)
        expected = tuple(self._shards.variables[number].shape) if is_like else array.shape
        if array.shape != expected:
            raise UsageError(explain("A value must have the shape of its variable", variable=str(slot.name),
                                     shape=array.shape, expected=expected))
        with graphs.eagerly():
            if is_like:
                part = self._shards.cut(number, tf.convert_to_tensor(array))
                if self._shards.has_part(number):
                    slot.assign(tf.cast(part, compat.as_tf_variable(slot).dtype))
            elif self._shards.has_all(number):
                slot.assign(array)
        key = compat.variable_key(slot)
        self._shapes[key] = array.shape
        self._values[key] = (self._steps(), array)
        self._assigned.add(key)

    def forget(self) -> None:
        """Discard gathered and assigned values."""
        self._values.clear()
        self._assigned.clear()
        self._gathered = None

    def gather(self, to: Collection[int]) -> None:
        """Gather the complete state on some ranks, one variable at a time.

        Called by all ranks of the process set at the same time. The receiving ranks store the parts of the others, in
        host memory.
        """
        shards, me = self._shards, current_session().topology.rank
        if unknown := set(to) - set(shards.ranks):
            raise UsageError(explain("The state must be gathered on ranks of the optimizer's process set",
                                     rank=sorted(unknown), ranks=list(shards.ranks)))
        if self.is_gathered(to):
            return
        self.forget()
        with graphs.eagerly(), tf.device("CPU:0"):
            shared, steps = self._shared(), self._steps()
            self._gathered = (steps, sorted(to))
            self._send_shapes(shared)
            receivers = np.array([rank in to and rank != me for rank in shards.ranks], np.int64)
            for index, (slot, number) in enumerate(shared):
                sends = shards.has_part(number) if self._is_like_variable(slot, number) else shards.has_all(number)
                flat = tf.reshape(compat.as_tf_variable(slot).read_value(), [-1])
                count = int(flat.shape[0]) if sends else 0
                sent = tf.tile(flat[:count], [int(receivers.sum())])
                received, _ = alltoall(sent, splits=receivers * count, name=f"optimizer state {index}",
                                       process_set=self._process_set)
                if me in to and not shards.has_all(number):
                    self._values[compat.variable_key(slot)] = (steps, received.numpy())

    def is_gathered(self, to: Collection[int]) -> bool:
        """Return whether the complete state was gathered on these ranks since the last step."""
        steps, ranks = self._gathered or (-1, [])
        return steps == self._steps() and set(to) <= set(ranks)

    def _send_shapes(self, shared: Sequence[tuple[Any, int]]) -> None:
        """Send the shapes of slots that differ from their variables' from the owners to all ranks."""
        others = {index: tuple(slot.shape) for index, (slot, number) in enumerate(shared)
                  if not self._is_like_variable(slot, number)}
        if self._options.shard_kind != "variables":
            return
        own = {index: shape for index, shape in others.items() if self._shards.has_all(shared[index][1])}
        for received in allgather_object(own, name="shapes of the optimizer's state", process_set=self._process_set):
            for index, shape in received.items():
                self._shapes[compat.variable_key(shared[index][0])] = shape

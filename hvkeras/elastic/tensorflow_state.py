"""States of TensorFlow variables and Keras models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvkeras import compat
from hvkeras.collectives.broadcasts import allgather_object, broadcast_object, broadcast_variables
from hvkeras.collectives.operations import Max
from hvkeras.collectives.reductions import allreduce
from hvkeras.elastic.shared_slots import SharedSlots
from hvkeras.elastic.snapshot import Snapshot, SnapshotReader
from hvkeras.elastic.state import ObjectState
from hvkeras.errors import UnsupportedError, UsageError, explain
from hvkeras.gradients.optimizer_classes import distributed_part
from hvkeras.job.process_sets import global_process_set
from hvkeras.job.queries import rank
from hvkeras.training.learned_state import broadcast_learned
from hvkeras.typing import ModelLike, OptimizerLike, VariableLike


class _VariableState(ObjectState):
    """What states of TensorFlow's variables have in common."""

    _session: Any = None  # that holds the variables, for TensorFlow 1 graphs

    def __init__(self, **kwargs: Any) -> None:
        self._from_root: Any = None
        self._values = Snapshot([])
        self._reader = SnapshotReader([])
        super().__init__(broadcast_object, rank, **kwargs)
        self._save_values()

    def save(self) -> None:
        """Keeps the variables' values, as a `Snapshot`, and copies of the attributes."""
        self._save_values()
        super().save()

    def _save_values(self) -> None:
        variables = self._tracked()
        if self._session is not None:
            self._values = Snapshot(self._session.run(variables))
            return
        if not self._reader.reads(variables):
            self._reader = SnapshotReader(variables)
        self._values = self._reader.snapshot()

    def restore(self) -> None:
        """Restores the variables and attributes that were saved last."""
        for variable, value in zip(self._saved_variables(), self._values.values(), strict=True):
            if self._session is not None:
                variable.load(value, self._session)
            else:
                compat.as_tf_variable(variable).assign(value)
        super().restore()

    def sync(self) -> None:
        """Broadcasts rank 0's current variables and its last saved attributes to every rank."""
        if self._session is None:
            broadcast_variables(self._tracked(), 0)
        else:
            if self._from_root is None:
                with self._session.graph.as_default():
                    self._from_root = broadcast_variables(self._tracked(), 0)
            self._session.run(self._from_root)
        self._save_values()
        super().sync()

    @property
    def must_restart(self) -> bool:
        """Whether the program must restart when the ranks change, as a session's graph cannot be traced again."""
        return self._session is not None

    def saved(self) -> tuple[object, ...]:
        """Returns the values and attributes that were saved last."""
        return self._values, super().saved()

    def take(self, saved: Any) -> None:
        """Takes over what another process had saved.

        Args:
            saved: What `saved` returned in that process.

        Raises:
            UsageError: The saved state has other attributes, or variables of other shapes.
        """
        values, attributes = saved
        kept = values if isinstance(values, Snapshot) else Snapshot(values)
        shapes = [list(value.shape) for value in kept.values()]
        own = [list(one.shape) if getattr(one, "has_known_shape", True) else None for one in self._saved_variables()]
        if len(shapes) != len(own) or any(mine not in (None, shape) for mine, shape in zip(own, shapes, strict=True)):
            raise UsageError(explain("A commit must have the state's variables", "remove HVKERAS_ELASTIC_DIR, or give"
                                     " each job one of its own", commit=shapes, state=own))
        super().take(attributes)
        self._values = kept

    def _tracked(self) -> list[Any]:
        """The variables that are saved."""
        raise NotImplementedError

    def _saved_variables(self) -> list[Any]:
        """The variables whose values were saved last."""
        return self._tracked()


class TensorFlowState(_VariableState):
    """A state of TensorFlow variables, with Python objects as attributes.

    Example:
        state = hvd.elastic.TensorFlowState([weights, steps], epoch=0)

    Args:
        variables: The variables; by default all global variables of a TensorFlow 1 graph.
        session: The session that holds the variables, for TensorFlow 1 graphs.
        **kwargs: As for `ObjectState`.

    Raises:
        UsageError: There are no variables, or an attribute cannot be copied.
    """

    def __init__(self, variables: Sequence[VariableLike] | None = None, session: Any = None, **kwargs: Any) -> None:
        self.variables: list[Any] = list(tf.compat.v1.global_variables() if variables is None else variables)
        self._session = session
        if not self.variables:
            raise UsageError(explain("A TensorFlowState needs variables", "pass model.variables, or use ObjectState",
                                     variables=variables))
        super().__init__(**kwargs)

    @property
    def session(self) -> Any:
        """The session that holds the variables; None without one."""
        return self._session

    def _tracked(self) -> list[Any]:
        return self.variables


class TensorFlowKerasState(_VariableState):
    """A state of a Keras model and its optimizer, with Python objects as attributes.

    The state includes weights, moving statistics, what layers have learned from data (such as vocabularies), and the
    optimizer's variables; it does not include metrics and random seeds.

    Example:
        state = hvd.elastic.TensorFlowKerasState(model, epoch=0, batch=0)

    Args:
        model: The model, which must have its weights.
        optimizer: The optimizer; by default the one that the model is compiled with.
        backend: Accepted for compatibility with Horovod, and kept as an attribute.
        **kwargs: As for `ObjectState`.

    Raises:
        UsageError: The model has no weights yet, or an attribute cannot be copied.
        UnsupportedError: The ranks of a process set share the update of the optimizer (`shard_update=True`).
    """

    def __init__(self, model: ModelLike, optimizer: OptimizerLike | None = None,
                 backend: object = None, **kwargs: Any) -> None:
        self.model: Any = model
        self.backend: Any = backend
        self._given = optimizer
        if not _weights(model):
            raise UsageError(explain("A state needs a model with its weights", "build the model or call it on a batch"
                                     " first", model=getattr(model, "name", model)))
        self._learned: list[Any] = []
        self._slots: SharedSlots | None = None
        self._shared_indices: frozenset[int] = frozenset()  # in the optimizer's list of variables
        self._staying: Sequence[int] = ()  # ranks, while others are about to leave
        self._shared_slots()  # refuses what it must before an optimizer is built
        super().__init__(**kwargs)

    @property
    def optimizer(self) -> Any:
        """The optimizer: the one that was given, or else the one that the model is compiled with; None without one."""
        return self._given if self._given is not None else getattr(self.model, "optimizer", None)

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        self._given = optimizer

    def save(self) -> None:
        """Keeps the values of all variables, and copies of the attributes.

        All ranks call it together if they share the update of the optimizer: each also keeps the part of another one.
        """
        slots = self._shared_slots()
        if slots is not None:
            slots.save(self._survives, self._staying)
        super().save()

    def _save_values(self) -> None:
        super()._save_values()
        self._shared_indices = frozenset(
            index for index, one in enumerate(self._optimizer_variables()) if _is_shared(one))
        self._learned = [compat.learned_state(layer) for layer in compat.learned_layers(self.model)]

    def restore(self) -> None:
        """Restores the model, optimizer and attributes that were saved last."""
        super().restore()
        if (slots := self._shared_slots()) is not None and self._shared_indices:
            slots.restore()
        layers = compat.learned_layers(self.model)
        if len(layers) != len(self._learned):
            raise UsageError(explain("A commit must be of the state's model", "remove HVKERAS_ELASTIC_DIR, or give each"
                                     " job one of its own", layers_that_learn=len(self._learned),
                                     of_the_model=len(layers)))
        for layer, state in zip(layers, self._learned, strict=True):
            compat.take_learned_state(layer, state)
        if layers:
            compat.retrace(self.model)

    def steps_made(self) -> int | None:
        """Returns the steps that the optimizer has counted."""
        optimizer = self.optimizer
        return None if optimizer is None else compat.step_counter(optimizer)

    def reset(self) -> None:
        """Makes Keras retrace the model's functions, which contain the number of ranks."""
        compat.retrace(self.model)

    def sync(self) -> None:
        """Broadcasts rank 0's current model and optimizer, and its last saved attributes, to every rank.

        Where ranks share the update of the optimizer, each gets its part of what was saved last.

        Raises:
            LostPartsError: Nobody has some part.
        """
        broadcast_learned(self.model, 0)
        slots = self._shared_slots()
        is_assigned = slots is not None and slots.sync(self.model.trainable_variables)
        if slots is not None and not is_assigned:
            broadcast_variables([one for one in self._optimizer_variables() if _is_shared(one)], 0)
        super().sync()
        if slots is not None:
            slots.save(self._survives)

    def reshard(self) -> None:
        """Gives up what ranks have kept of an optimizer whose update they share, before a whole commit is restored."""
        if (slots := self._shared_slots()) is not None:
            slots.reshard(self.model.trainable_variables)

    def prepare_change(self, leaves: bool) -> None:
        """Makes those who stay have the whole state, before other ranks leave; all ranks call it together.

        Args:
            leaves: Whether this rank leaves.
        """
        slots = self._shared_slots()
        if slots is None:
            return
        told = allgather_object(leaves, name="who leaves")
        self._staying = [rank for rank, is_leaving in enumerate(told) if not is_leaving]
        if self._staying and self.steps_made() != self.steps_at_commit:
            self.note_commit()
        elif self._staying and not slots.is_safe_with(self._staying):
            slots.save(True, self._staying)
        self._staying = ()

    @property
    def is_shared(self) -> bool:
        """Whether no rank has all of the state."""
        return self._shared_slots() is not None

    def whole(self, is_wanted: bool) -> object:
        """Returns what was saved last, whole, to be written to a file; the ranks that share it call this together.

        Args:
            is_wanted: Whether this rank wants it: rank 0, if anybody.

        Returns:
            What `take` takes; None if this rank does not want it.
        """
        slots = self._shared_slots()
        if slots is None or not self._shared_indices:
            return super().whole(is_wanted)
        wanted = allreduce(tf.constant([int(is_wanted)]), op=Max, name="whether a commit is written")
        if not int(wanted[0]):
            return None
        count = len(compat.model_weights(self.model))
        values = self._values.values()
        optimizer = slots.whole(values[count:])
        if optimizer is None or not is_wanted:
            return None
        return Snapshot([*values[:count], *optimizer]), ObjectState.saved(self), self._learned

    def memory_of_parts(self) -> tuple[int, int]:
        """The bytes of this rank's part of the optimizer's state in the last commit, and of the parts of others.

        Both are 0 where ranks do not share the update of the optimizer.
        """
        return (0, 0) if self._slots is None else self._slots.memory()

    def saved(self) -> tuple[object, ...]:
        """Returns the values, attributes and learned state of layers that were saved last, and this rank's parts."""
        parts = () if self._slots is None or not self._shared_indices else (self._slots.saved(),)
        return *super().saved(), self._learned, *parts

    def take(self, saved: Any) -> None:
        """Takes over what another process had saved.

        Args:
            saved: What `saved` returned in that process.

        Raises:
            UsageError: The saved state has other attributes, or variables of other shapes.
        """
        values, attributes, learned, *parts = saved
        slots = self._shared_slots()
        before, self._shared_indices = self._shared_indices, frozenset(parts[0]["assignment"]["indices"] if parts
                                                                       else ())
        try:
            super().take((values, attributes))
        except UsageError:
            self._shared_indices = before
            raise
        if slots is not None and parts:
            slots.take(parts[0])
        self._learned = learned

    def _tracked(self) -> list[Any]:
        return compat.model_weights(self.model) + [one for one in self._optimizer_variables() if not _is_shared(one)]

    def _saved_variables(self) -> list[Any]:
        return compat.model_weights(self.model) + [
            one for index, one in enumerate(self._optimizer_variables()) if index not in self._shared_indices]

    def _optimizer_variables(self) -> list[Any]:
        optimizer = self.optimizer
        if optimizer is None:
            return []
        compat.build_optimizer(optimizer, self.model.trainable_variables)
        return compat.optimizer_variables(optimizer)

    def _shared_slots(self) -> SharedSlots | None:
        """What this rank keeps of an optimizer whose update ranks share; None for any other."""
        optimizer = self.optimizer
        part = None if optimizer is None else distributed_part(optimizer)
        if part is None or part.sharding is None:
            return None
        if part.exchange.process_set is not global_process_set:
            raise UnsupportedError(explain(
                "Process sets end when ranks are lost, so an elastic state needs an optimizer whose update all ranks"
                " share", "leave out process_set or shard_update=True", optimizer=type(optimizer).__name__))
        if self._slots is None or self._slots.optimizer is not optimizer:
            compat.build_optimizer(optimizer, self.model.trainable_variables)
            self._slots = SharedSlots(optimizer, part)
        return self._slots


def _weights(model: Any) -> list[Any]:
    """Returns the model's weights; none if it has not created them, for which tf_keras raises an error."""
    try:
        return compat.model_weights(model)
    except ValueError:
        return []


def _is_shared(variable: Any) -> bool:
    return bool(getattr(variable, "is_whole_of_shards", False))


class KerasState(TensorFlowKerasState):
    """`TensorFlowKerasState` under its name in `horovod.keras.elastic`.

    Args:
        model: As for `TensorFlowKerasState`.
        optimizer: As for `TensorFlowKerasState`.
        **kwargs: As for `TensorFlowKerasState`.
    """

    def __init__(self, model: ModelLike, optimizer: OptimizerLike | None = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, tf.keras.backend, **kwargs)

"""Elastic states of TensorFlow variables and Keras models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
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
from hvkeras.gradients.rounding_errors import rounding_errors
from hvkeras.job.process_sets import global_process_set
from hvkeras.job.queries import rank
from hvkeras.training.learned_state import broadcast_learned
from hvkeras.typing import ModelLike, OptimizerLike, VariableLike


class _VariableState(ObjectState):
    """Base class of states with TensorFlow variables."""

    _session: Any = None  # of TensorFlow 1, for variables of a graph

    def __init__(self, **kwargs: Any) -> None:
        self._broadcast_op: Any = None  # for TensorFlow 1 graphs
        self._values = Snapshot([])
        self._reader = SnapshotReader([])
        super().__init__(broadcast_object, rank, **kwargs)
        self._save_values()

    def save(self) -> None:
        """Save a `Snapshot` of the variables, and copies of the attributes."""
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
        """Restore the variables and attributes that were saved last."""
        for variable, value in zip(self._saved_variables(), self._values.values(), strict=True):
            if self._session is not None:
                variable.load(value, self._session)
            else:
                compat.as_tf_variable(variable).assign(value)
        super().restore()

    def sync(self) -> None:
        """Broadcast rank 0's current variables and its last saved attributes to every rank."""
        if self._session is None:
            broadcast_variables(self._tracked(), 0)
        else:
            if self._broadcast_op is None:
                with self._session.graph.as_default():
                    self._broadcast_op = broadcast_variables(self._tracked(), 0)
            self._session.run(self._broadcast_op)
        self._save_values()
        super().sync()

    @property
    def must_restart(self) -> bool:
        """Return whether the program must restart when the ranks change: graphs of TensorFlow 1 cannot be retraced."""
        return self._session is not None

    def saved(self) -> tuple[object, ...]:
        """Return the values and attributes that were saved last."""
        return self._values, super().saved()

    def take(self, saved: Any) -> None:
        """Load a state that another process saved.

        Args:
            saved: Return value of `saved` in that process.

        Raises:
            UsageError: The saved state has different attributes, or variables of different shapes.
        """
        values, attributes = saved
        snapshot = values if isinstance(values, Snapshot) else Snapshot(values)
        shapes = [list(value.shape) for value in snapshot.values()]
        own = [list(one.shape) if getattr(one, "has_known_shape", True) else None for one in self._saved_variables()]
        if len(shapes) != len(own) or any(mine not in (None, shape) for mine, shape in zip(own, shapes, strict=True)):
            raise UsageError(explain("A commit must have the state's variables", "remove HVKERAS_ELASTIC_DIR, or use"
                                     " a different one for each job", commit=shapes, state=own))
        super().take(attributes)
        self._values = snapshot

    def _tracked(self) -> list[Any]:
        raise NotImplementedError

    def _saved_variables(self) -> list[Any]:
        return self._tracked()


class TensorFlowState(_VariableState):
    """Elastic state of TensorFlow variables, with Python objects as attributes.

    Example:
        state = hvd.elastic.TensorFlowState([weights, steps], epoch=0)

    Args:
        variables: Variables; by default all global variables of a TensorFlow 1 graph.
        session: Session that holds the variables, for TensorFlow 1 graphs.
        **kwargs: Attributes and their initial values, which must be picklable.

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
        """The TensorFlow 1 session that holds the variables, or None."""
        return self._session

    def _tracked(self) -> list[Any]:
        return self.variables


class TensorFlowKerasState(_VariableState):
    """Elastic state of a Keras model and its optimizer, with Python objects as attributes.

    The state includes weights, moving statistics, the optimizer's variables, and the adapted state of preprocessing
    layers, such as vocabularies. It does not include metrics and random seeds.

    Example:
        state = hvd.elastic.TensorFlowKerasState(model, epoch=0, batch=0)

    Args:
        model: Built model.
        optimizer: Optimizer; by default the one that the model is compiled with.
        backend: Accepted for compatibility with Horovod, and stored as an attribute.
        **kwargs: Attributes and their initial values, which must be picklable.

    Raises:
        UsageError: The model has no weights yet, or an attribute cannot be copied.
        UnsupportedError: The optimizer has a process set and `shard_update=True`.
    """

    def __init__(self, model: ModelLike, optimizer: OptimizerLike | None = None,
                 backend: object = None, **kwargs: Any) -> None:
        self.model: Any = model
        self.backend: Any = backend
        self._optimizer = optimizer
        if not _weights(model):
            raise UsageError(explain("A state needs a model whose weights exist", "build the model, or call it on a"
                                     " batch first", model=getattr(model, "name", model)))
        self._learned: list[Any] = []
        self._errors: list[Any] = []  # of compressed gradients, on this host
        self._slots: SharedSlots | None = None
        self._shared_indices: frozenset[int] = frozenset()  # in the optimizer's list of variables
        self._staying: Sequence[int] = ()  # ranks that stay, while others are about to leave
        self._shared_slots()  # raises UnsupportedError before an optimizer is built
        super().__init__(**kwargs)

    @property
    def optimizer(self) -> Any:
        """Optimizer that was passed, or else the one that the model is compiled with, or None."""
        return self._optimizer if self._optimizer is not None else getattr(self.model, "optimizer", None)

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def save(self) -> None:
        """Save a snapshot of all variables, and copies of the attributes.

        With `shard_update=True`, all ranks must call it together, as ranks exchange backups of their shards.
        """
        slots = self._shared_slots()
        if slots is not None:
            slots.save(self._survives, self._staying)
        if (errors := rounding_errors()) is not None:
            self._errors = errors.of(self.model.trainable_variables)
        super().save()

    def _save_values(self) -> None:
        super()._save_values()
        self._shared_indices = frozenset(
            index for index, one in enumerate(self._optimizer_variables()) if _is_shared(one))
        self._learned = [compat.learned_state(layer) for layer in compat.learned_layers(self.model)]

    def restore(self) -> None:
        """Restore the model, optimizer and attributes that were saved last."""
        super().restore()
        if (slots := self._shared_slots()) is not None and self._shared_indices:
            slots.restore()
        self._restore_errors()
        layers = compat.learned_layers(self.model)
        if len(layers) != len(self._learned):
            raise UsageError(explain("A commit must belong to the state's model", "remove HVKERAS_ELASTIC_DIR, or use a"
                                     " different one for each job", layers_that_learn=len(self._learned),
                                     of_the_model=len(layers)))
        for layer, state in zip(layers, self._learned, strict=True):
            compat.take_learned_state(layer, state)
        if layers:
            compat.retrace(self.model)

    def steps_made(self) -> int | None:
        """Return the optimizer's step count; None if unknown."""
        optimizer = self.optimizer
        return None if optimizer is None else compat.step_counter(optimizer)

    def reset(self) -> None:
        """Make Keras retrace the model's functions, because their graphs contain the number of ranks."""
        compat.retrace(self.model)

    def sync(self) -> None:
        """Broadcast rank 0's current model and optimizer, and its last saved attributes, to every rank.

        With `shard_update=True`, each rank restores its shard of the last commit.

        Raises:
            LostShardsError: No rank holds a copy of some shard.
        """
        broadcast_learned(self.model, 0)
        slots = self._shared_slots()
        is_assigned = slots is not None and slots.sync(self.model.trainable_variables)
        if slots is not None and not is_assigned:
            broadcast_variables([one for one in self._optimizer_variables() if _is_shared(one)], 0)
        super().sync()
        self._restore_errors()  # each host has its own
        if slots is not None:
            slots.save(self._survives)

    def _restore_errors(self) -> None:
        errors = rounding_errors()
        if errors is not None and any(one is not None for one in self._errors):
            errors.restore(self.model.trainable_variables, self._errors)

    def reshard(self) -> None:
        """Reshard the optimizer over the current ranks, and discard its last commit, before a full one is restored."""
        if (slots := self._shared_slots()) is not None:
            slots.reshard(self.model.trainable_variables)

    def prepare_change(self, leaves: bool) -> None:
        """Ensure that the remaining ranks hold the full state before others leave; all ranks call it together.

        Args:
            leaves: Whether this rank leaves.
        """
        slots = self._shared_slots()
        if slots is None:
            return
        leaving = allgather_object(leaves, name="leaving ranks")
        self._staying = [rank for rank, is_leaving in enumerate(leaving) if not is_leaving]
        if self._staying and self.steps_made() != self.steps_at_commit:
            self.record_commit()
        elif self._staying and not slots.is_recoverable_from(self._staying):
            slots.save(True, self._staying)
        self._staying = ()

    @property
    def is_shared(self) -> bool:
        """Return whether the optimizer's state is sharded over ranks."""
        return self._shared_slots() is not None

    def gather_full_state(self, is_wanted: bool) -> object:
        """Gather the full state that was saved last, to be written to a file; all ranks call it together.

        Args:
            is_wanted: Whether to gather it on this rank; True at most on rank 0.

        Returns:
            Argument for `take`; None unless `is_wanted`.
        """
        slots = self._shared_slots()
        if slots is None or not self._shared_indices:
            return super().gather_full_state(is_wanted)
        wanted = allreduce(tf.constant([int(is_wanted)]), op=Max, name="whether a commit is written")
        if not int(wanted[0]):
            return None
        count = len(compat.model_weights(self.model))
        values = self._values.values()
        optimizer = slots.gather(values[count:])
        if optimizer is None or not is_wanted:
            return None
        return Snapshot([*values[:count], *optimizer]), ObjectState.saved(self), [self._learned, []]

    def memory_of_shards(self) -> tuple[int, int]:
        """Return the bytes of this rank's shard of the optimizer's state, and of its backups of other ranks' shards.

        Both are 0 without `shard_update=True`.
        """
        return (0, 0) if self._slots is None else self._slots.memory()

    def saved(self) -> tuple[object, ...]:
        """Return the last saved values, attributes and learned state of layers, and this rank's shards."""
        parts = () if self._slots is None or not self._shared_indices else (self._slots.saved(),)
        errors = [None if one is None else np.asarray(one) for one in self._errors]
        return *super().saved(), [self._learned, errors], *parts

    def take(self, saved: Any) -> None:
        """Load a state that another process saved.

        Args:
            saved: Return value of `saved` in that process.

        Raises:
            UsageError: The saved state has different attributes, or variables of different shapes.
        """
        values, attributes, (learned, errors), *parts = saved
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
        self._learned, self._errors = learned, errors

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
        """Return the commits of an optimizer's sharded state; None unless it has `shard_update=True`."""
        optimizer = self.optimizer
        part = None if optimizer is None else distributed_part(optimizer)
        if part is None or part.sharding is None:
            return None
        if part.exchange.process_set is not global_process_set:
            raise UnsupportedError(explain(
                "An elastic state with shard_update=True must shard the optimizer over all ranks, as process sets end"
                " when ranks are lost", "leave out process_set or shard_update=True",
                optimizer=type(optimizer).__name__))
        if self._slots is None or self._slots.optimizer is not optimizer:
            compat.build_optimizer(optimizer, self.model.trainable_variables)
            self._slots = SharedSlots(optimizer, part)
        return self._slots


def _weights(model: Any) -> list[Any]:
    """Return the model's weights; an empty list if it is not built, for which tf_keras raises an error."""
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

"""States of TensorFlow variables and Keras models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvkeras import compat
from hvkeras.collectives.broadcasts import broadcast_object, broadcast_variables
from hvkeras.elastic.snapshot import Reader, Snapshot
from hvkeras.elastic.state import ObjectState
from hvkeras.errors import UnsupportedError, UsageError, explain
from hvkeras.gradients.optimizer import distributed_part
from hvkeras.job.queries import rank
from hvkeras.training.learned_state import broadcast_learned
from hvkeras.typing import ModelLike, OptimizerLike, VariableLike


class TensorFlowState(ObjectState):
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
        self._variables = list(tf.compat.v1.global_variables() if variables is None else variables)
        self._session = session
        self._from_root: Any = None
        self._values = Snapshot([])
        self._reader = Reader([])
        super().__init__(broadcast_object, rank, **kwargs)
        if not self._tracked():
            raise UsageError(explain("A TensorFlowState needs variables", "pass model.variables, or use ObjectState",
                                     variables=variables))
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
            self._reader = Reader(variables)
        self._values = self._reader.snapshot()

    def restore(self) -> None:
        """Restores the variables and attributes that were saved last."""
        for variable, value in zip(self._tracked(), self._values.values(), strict=True):
            if self._session is not None:
                variable.load(value, self._session)
            else:
                compat.native(variable).assign(value)
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
        shapes, own = [list(value.shape) for value in kept.values()], [list(value.shape) for value in self._tracked()]
        if shapes != own:
            raise UsageError(explain("A commit must have the state's variables", "remove HVKERAS_ELASTIC_DIR, or give"
                                     " each job one of its own", commit=shapes, state=own))
        super().take(attributes)
        self._values = kept

    def _tracked(self) -> list[Any]:
        return self._variables


class TensorFlowKerasState(TensorFlowState):
    """A state of a Keras model and its optimizer, with Python objects as attributes.

    The state includes weights, moving statistics, what layers have learned from data (such as vocabularies), and the
    optimizer's variables; it does not include metrics and random seeds.

    Example:
        state = hvd.elastic.TensorFlowKerasState(model, epoch=0, batch=0)

    Args:
        model: The model, which must have its weights.
        optimizer: The optimizer; by default the one that the model is compiled with.
        backend: Accepted for compatibility with Horovod.
        **kwargs: As for `ObjectState`.

    Raises:
        UsageError: The model has no weights yet, or an attribute cannot be copied.
        UnsupportedError: Ranks share the update of the optimizer (`shard_update=True`).
    """

    def __init__(self, model: ModelLike, optimizer: OptimizerLike | None = None,
                 backend: object = None,  # noqa: ARG002 - Horovod's parameter
                 **kwargs: Any) -> None:
        self.model = model
        self.optimizer = optimizer
        if not compat.model_weights(model):
            raise UsageError(explain("A state needs a model with its weights", "build the model or call it on a batch"
                                     " first", model=getattr(model, "name", model)))
        self._learned: list[Any] = []
        super().__init__([], **kwargs)

    def _save_values(self) -> None:
        super()._save_values()
        self._learned = [compat.learned_state(layer) for layer in compat.learned_layers(self.model)]

    def restore(self) -> None:
        """Restores the model, optimizer and attributes that were saved last."""
        super().restore()
        layers = compat.learned_layers(self.model)
        if len(layers) != len(self._learned):
            raise UsageError(explain("A commit must be of the state's model", "remove HVKERAS_ELASTIC_DIR, or give each"
                                     " job one of its own", layers_that_learn=len(self._learned),
                                     of_the_model=len(layers)))
        for layer, state in zip(layers, self._learned, strict=True):
            compat.take_learned_state(layer, state)
        if layers:
            compat.retrace(self.model)

    def steps(self) -> int | None:
        """Returns the steps that the optimizer has counted."""
        optimizer = self._optimizer()
        return None if optimizer is None else compat.step_counter(optimizer)

    def reset(self) -> None:
        """Makes Keras retrace the model's functions, which contain the number of ranks."""
        compat.retrace(self.model)

    def sync(self) -> None:
        """Broadcasts rank 0's current model and optimizer, and its last saved attributes, to every rank."""
        broadcast_learned(self.model, 0)
        super().sync()

    def saved(self) -> tuple[object, ...]:
        """Returns the values, attributes and learned state of layers that were saved last."""
        return *super().saved(), self._learned

    def take(self, saved: Any) -> None:
        """Takes over what another process had saved.

        Args:
            saved: What `saved` returned in that process.

        Raises:
            UsageError: The saved state has other attributes, or variables of other shapes.
        """
        *values, learned = saved
        super().take(tuple(values))
        self._learned = learned

    def _tracked(self) -> list[Any]:
        optimizer = self._optimizer()
        weights = compat.model_weights(self.model)
        if optimizer is None:
            return weights
        compat.build_optimizer(optimizer, self.model.trainable_variables)
        if distributed_part(optimizer) is not None and distributed_part(optimizer)._hvkeras_kind:
            raise UnsupportedError(explain(
                "A lost rank would take its part of the optimizer's state with it, so an elastic state needs an"
                " optimizer of which each rank holds the whole state", "leave out shard_update=True, or set"
                " HVKERAS_SHARD_UPDATE=0", optimizer=type(optimizer).__name__))
        return weights + compat.optimizer_variables(optimizer)

    def _optimizer(self) -> Any:
        return self.optimizer if self.optimizer is not None else getattr(self.model, "optimizer", None)


class KerasState(TensorFlowKerasState):
    """`TensorFlowKerasState` under its name in `horovod.keras.elastic`.

    Args:
        model: As for `TensorFlowKerasState`.
        optimizer: As for `TensorFlowKerasState`.
        **kwargs: As for `TensorFlowKerasState`.
    """

    def __init__(self, model: ModelLike, optimizer: OptimizerLike | None = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, **kwargs)

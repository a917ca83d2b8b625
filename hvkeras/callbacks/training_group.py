"""Processes that train a model together, and broadcasts from their chief."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras import compat
from hvkeras.callbacks.base import is_chief, spanning_strategy
from hvkeras.collectives.broadcasts import broadcast_object, broadcast_variables
from hvkeras.collectives.compression import Compression
from hvkeras.gradients.optimizer_classes import distributed_part
from hvkeras.gradients.rounding_errors import RoundingErrors
from hvkeras.job.process_sets import ProcessSet
from hvkeras.job.session import current_session
from hvkeras.training.fit_hooks import shared_by
from hvkeras.training.learned_state import broadcast_learned

_CHUNK = 2**23  # elements per all-reduce of a strategy
_NAME = "the state of BackupAndRestore, which every rank needs"


class TrainingGroup:
    """Group of a single process that trains a model.

    Attributes:
        is_chief: Whether this process is the chief.
        size: The number of processes with separate data; 1 if a strategy partitions the data.
        workers: The number of processes.
        ranks: Their ranks; empty for one process, None for workers of a strategy.
    """

    size = workers = 1
    ranks: Sequence[int] | None = ()

    def __init__(self, is_chief: bool) -> None:
        self.is_chief = is_chief

    def broadcast(self, thing: Any) -> Any:
        """Return the chief's object on every process; all processes must call this."""
        return thing

    def broadcast_variables(self, variables: Sequence[Any]) -> None:
        """Assign the chief's values to variables on every process; all processes must call this."""

    def broadcast_learned_state(self, model: Any) -> None:
        """Set the chief's learned state of layers on ranks that have their own model."""

    def rounding_errors(self, model: Any) -> Any:  # noqa: ARG002 - there are none
        """Return the sum of all hosts' rounding errors of compressed gradients; all processes must call this."""
        return None

    def restore_rounding_errors(self, model: Any, errors: Any) -> None:
        """Add rounding errors to this process's next gradients."""


class _Ranks(TrainingGroup):
    """Ranks of hvkeras, with the collectives of a backend."""

    def __init__(self, is_chief: bool, process_set: ProcessSet) -> None:
        super().__init__(is_chief)
        self._set, self._root = process_set, process_set.ranks[0]
        self.ranks = process_set.ranks
        self.size = self.workers = len(process_set.ranks)

    def broadcast(self, thing: Any) -> Any:
        return broadcast_object(thing, self._root, name=_NAME, process_set=self._set)

    def broadcast_variables(self, variables: Sequence[Any]) -> None:
        broadcast_variables(variables, self._root, self._set)

    def broadcast_learned_state(self, model: Any) -> None:
        broadcast_learned(model, self._root, process_set=self._set)

    def rounding_errors(self, model: Any) -> Any:
        part = distributed_part(model.optimizer)
        if part is None or part.exchange.compression is not Compression.int8:
            return None
        return current_session().part(RoundingErrors).total(model.trainable_variables, self._set)

    def restore_rounding_errors(self, model: Any, errors: Any) -> None:
        if errors is not None:
            current_session().part(RoundingErrors).restore(model.trainable_variables, errors)


class _Workers(TrainingGroup):
    """Workers of a strategy, which broadcast as the sum of the chief's value and zeros."""

    def __init__(self, is_chief: bool, strategy: Any) -> None:
        super().__init__(is_chief)
        self._strategy, self.ranks = strategy, None
        self.workers = strategy.num_replicas_in_sync // len(strategy.extended.worker_devices)

        def sum_up(values: Any) -> Any:
            replica = tf.distribute.get_replica_context()
            first = replica.replica_id_in_sync_group == 0
            return replica.all_reduce(tf.distribute.ReduceOp.SUM, tf.where(first, values, tf.zeros_like(values)))

        self._broadcast_sum = tf.function(sum_up, autograph=False)

    def broadcast(self, thing: Any) -> Any:
        data = np.frombuffer(pickle.dumps(thing), np.uint8).astype(np.int64)
        length = int(self._from_chief(np.asarray([data.size]))[0])
        received = self._from_chief(data if self.is_chief else np.zeros(length, np.int64))
        return thing if self.is_chief else pickle.loads(received.astype(np.uint8).tobytes())

    def broadcast_variables(self, variables: Sequence[Any]) -> None:
        parts = [compat.local_parts(variable) for variable in variables]
        for sent in (np.float32, np.float64, np.int64):
            matching = [local for local in parts if _transfer_dtype(local[0].dtype) is sent]
            if matching:
                flat = np.concatenate([local[0].numpy().astype(sent).ravel() for local in matching])
                flat = np.concatenate([self._from_chief(flat[begin : begin + _CHUNK])
                                       for begin in range(0, flat.size, _CHUNK)])
                for local in matching:
                    count = int(local[0].shape.num_elements())
                    values, flat = flat[:count], flat[count:]
                    for part in local:
                        part.assign(tf.cast(tf.reshape(values, part.shape), part.dtype))

    def _from_chief(self, values: Any) -> Any:
        results = self._strategy.run(self._broadcast_sum, args=(tf.constant(values),))
        return self._strategy.experimental_local_results(results)[0].numpy()


def group_of(model: Any) -> TrainingGroup:
    """Return the processes that train a model together."""
    strategy, process_set = spanning_strategy(model), shared_by(model)
    if strategy is not None:
        return _Workers(is_chief(model), strategy)
    return TrainingGroup(is_chief(model)) if process_set is None else _Ranks(is_chief(model), process_set)


def _transfer_dtype(dtype: Any) -> Any:
    """Return the dtype for a lossless sum of values of a dtype over the workers."""
    if dtype == tf.float64:
        return np.float64
    return np.float32 if dtype.is_floating else np.int64

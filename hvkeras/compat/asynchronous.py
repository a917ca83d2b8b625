"""Keras 3's training step for asynchronous workers that share a model: local state, and updates of shared state.

Keras updates a variable by reading it, adding to it, and assigning the result, so concurrent workers overwrite each
other's updates. Metrics are therefore kept out of the shared variables, and counters are incremented in one operation.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from hvkeras.compat.optimizers import inner_optimizer, step_counter_variable
from hvkeras.compat.variables import as_tf_variable


class OwnState(keras.StatelessScope):  # type: ignore[misc]  # Keras ships no types
    """Scope in which some variables have local values; updates of others are shared, those of counters atomic.

    Args:
        own: Keras variables with local values, and their initial values.
        counters: Shared variables that count up by one.
    """

    def __init__(self, own: Sequence[tuple[Any, Any]], counters: Sequence[Any]) -> None:
        super().__init__(state_mapping=own, collect_losses=True)
        self._own = {id(variable) for variable, _ in own}
        self._counters = {id(variable) for variable in counters}

    def get_current_value(self, variable: Any) -> Any:
        """Return the local value, or the shared variable."""
        value = super().get_current_value(variable)
        return variable._value if value is None else value

    def add_update(self, update: tuple[Any, Any]) -> None:
        """Store the new value of a local variable, or assign it to a shared one."""
        variable, value = update
        if id(variable) in self._own:
            super().add_update(update)
        elif id(variable) in self._counters:
            as_tf_variable(variable).assign_add(tf.ones([], as_tf_variable(variable).dtype))
        else:
            as_tf_variable(variable).assign(tf.cast(value, as_tf_variable(variable).dtype))

    def values(self, variables: Sequence[Any]) -> list[Any]:
        """Return the current values of local variables."""
        return [self.get_current_value(variable) for variable in variables]


def build_like(model: Any, spec: Any) -> None:
    """Create the variables of a compiled model, its loss, metrics and optimizer, for batches like `spec`."""
    model._symbolic_build(data_batch=spec)
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def seed_states(model: Any) -> list[Any]:
    """Return the random seed states of a model's layers, each of the form [seed, number of draws]."""
    states = [generator.state for layer in model._flatten_layers() for generator in layer._seed_generators]
    return list({id(state): state for state in states}.values())


def step_counters(optimizer: Any) -> list[Any]:
    """Return the variables that count an optimizer's steps."""
    return [step_counter_variable(inner_optimizer(optimizer) or optimizer)]


@contextlib.contextmanager
def reset_object_names() -> Iterator[None]:
    """Context manager in which Keras names layers and metrics as in a fresh process, so that names are reproducible."""
    from keras.src.backend.common import global_state

    before = global_state.get_global_attribute("object_name_uids")
    global_state.set_global_attribute("object_name_uids", collections.defaultdict(int))
    try:
        yield
    finally:
        global_state.set_global_attribute("object_name_uids", before)

"""States of random generators: the global ones of Python, NumPy, TensorFlow and Keras, and those of layers."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context as eager_context
from tensorflow.python.ops import stateful_random_ops

from hvkeras import compat


def capture() -> dict[str, Any]:
    """Return the states of the global generators; None for an unused generator."""
    seeds = getattr(eager_context.context(), "_rng", None)  # eager operations draw from it after tf.random.set_seed
    generator, keras_seed = stateful_random_ops.global_generator, compat.global_seed()
    numpy_state: Any = np.random.get_state(legacy=False)
    if numpy_state["bit_generator"] == "MT19937":
        inner = numpy_state["state"]
        numpy_state = {**numpy_state, "state": {"key": inner["key"].tolist(), "pos": int(inner["pos"])}}
    else:  # NumPy's functions use another generator
        numpy_state = None
    return {
        "python": _listed(random.getstate()),
        "numpy": numpy_state,
        "tensorflow": None if seeds is None else _listed(seeds.getstate()),
        "generator": None if generator is None else [int(generator.algorithm), generator.state.numpy().tolist()],
        "keras": None if keras_seed is None else compat.value_of(keras_seed).tolist(),
    }


def restore(states: Mapping[str, Any]) -> None:
    """Restore the global generators from states of `capture`; generators without a state are unchanged."""
    if states.get("keras"):  # first, since creating it draws from Python's generator
        compat.global_seed(make=True).assign(states["keras"])
    if states.get("python"):
        random.setstate(_tupled(states["python"]))
    if states.get("numpy"):
        numpy_state = states["numpy"]
        key = np.asarray(numpy_state["state"]["key"], np.uint32)
        np.random.set_state({**numpy_state, "state": {**numpy_state["state"], "key": key}})
    if states.get("tensorflow"):
        seeds = getattr(eager_context.context(), "_rng", None)
        if seeds is not None:
            seeds.setstate(_tupled(states["tensorflow"]))
    if states.get("generator"):
        algorithm, state = states["generator"]
        tf.random.set_global_generator(tf.random.Generator.from_state(state, algorithm))


def shared_states(states: Mapping[str, Any], own: Mapping[str, Any], chief: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states to restore in this process: of the generators with the same seed as on the chief.

    Processes with different seeds must not draw the same numbers afterwards.

    Args:
        states: The saved states of the chief.
        own: The states of this process after its restart.
        chief: The states of the chief after its restart.
    """
    return {name: state for name, state in states.items() if own.get(name) == chief.get(name)}


def layer_seeds(model: Any) -> list[list[int]]:
    """Return the seed and the number of draws of each layer with a seed."""
    return [compat.value_of(variable).tolist() for variable in compat.seed_variables(model)]


def restore_layer_seeds(model: Any, saved: list[list[int]], chief: list[list[int]]) -> None:
    """Restore the layers' seeds; a seed that differs from the chief's stays, with the saved number of draws.

    Args:
        model: The model.
        saved: The saved states of the chief.
        chief: The states of the chief after its restart.
    """
    variables = compat.seed_variables(model)
    for variable, (seed, draws), (seed_of_chief, _) in zip(variables, saved, chief, strict=True):
        own = int(compat.value_of(variable)[0])
        variable.assign([seed if own == seed_of_chief else own, draws])


def _listed(state: Any) -> Any:
    # JSON has no tuples.
    return [_listed(one) for one in state] if isinstance(state, tuple) else state


def _tupled(state: Any) -> Any:
    return tuple(_tupled(one) for one in state) if isinstance(state, list) else state

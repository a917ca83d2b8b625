"""State of layers that learn from data before training (`adapt`): converted to arrays, and loaded from them.

Variables hold only a part of this state, if any: the vocabulary of a lookup layer is in a table, the boundaries of a
discretization are a list, and a normalization computes with constants that `finalize_state` derives from its variables.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras.compat.families import TF_KERAS, loaded_families
from hvkeras.compat.models import model_weights
from hvkeras.compat.variables import native

LOOKUP, TEXT, MOMENTS, QUANTILES, SPACE, OTHER = "lookup", "text", "moments", "quantiles", "feature space", "other"
_CLASSES = {"StringLookup": LOOKUP, "IntegerLookup": LOOKUP, "TextVectorization": TEXT, "Normalization": MOMENTS,
            "Discretization": QUANTILES}
# State that does not affect a layer's outputs.
_BESIDE = ("shape", "count", "summary", "own_mean", "own_variance")

# The exported content of tables, which do not change once they have tokens.
_exported: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def kind_of_learning(layer: Any) -> str | None:
    """Returns what a layer learns from data, as one of the constants above; None if it does not learn.

    OTHER stands for a user-defined layer that implements Keras's protocol (`adapt`, `finalize_state`).
    """
    for family in loaded_families():
        keras: Any = sys.modules[family]
        for name, kind in _CLASSES.items():
            if isinstance(layer, getattr(keras.layers, name)):
                return kind
        if isinstance(layer, getattr(keras.utils, "FeatureSpace", ())):
            return SPACE
    keeps_to_protocol = all(callable(getattr(layer, name, None)) for name in ("adapt", "finalize_state"))
    return OTHER if keeps_to_protocol else None


def is_of_tf_keras(layer: Any) -> bool:
    """Whether a layer is a tf_keras layer."""
    return TF_KERAS in loaded_families() and isinstance(layer, sys.modules[TF_KERAS].layers.Layer)


def lookup_of(layer: Any) -> Any:
    """Returns the lookup layer inside a text vectorization, or any other layer unchanged."""
    return getattr(layer, "_lookup_layer", layer)


def learned_layers(model: Any) -> list[Any]:
    """Returns the layers of a model, including nested ones, that learn from data, in the same order on all ranks.

    The list is empty in the graph of a TensorFlow 1 session, where layers cannot learn.
    """
    if not tf.executing_eagerly() or not hasattr(model, "_flatten_layers"):
        return []
    found = {id(layer): layer for layer in model._flatten_layers(include_self=False)}
    for layer in list(found.values()):
        if kind_of_learning(layer) == TEXT:
            found.pop(id(lookup_of(layer)), None)
    return [layer for layer in found.values() if kind_of_learning(layer) not in (None, SPACE)]


def learned_state(layer: Any) -> dict[str, Any]:
    """Returns what a layer has learned, as arrays of numbers by name, without what it has not learned yet."""
    kind = kind_of_learning(layer)
    if kind in (LOOKUP, TEXT):
        return _vocabulary(lookup_of(layer))
    if kind == MOMENTS:
        return _moments(layer)
    if kind == QUANTILES:
        return _boundaries(layer)
    return {f"variable {place}": np.asarray(variable) for place, variable in enumerate(model_weights(layer))}


def learned_function(state: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of a state on which the layer's outputs depend."""
    return {name: array for name, array in state.items() if name not in _BESIDE}


def take_learned_state(layer: Any, state: dict[str, Any]) -> None:
    """Loads the learned state of another layer into a layer, and finalizes it.

    Args:
        layer: A layer with the same configuration.
        state: The result of `learned_state` for the other layer.
    """
    kind = kind_of_learning(layer)
    if kind in (LOOKUP, TEXT):
        _take_vocabulary(lookup_of(layer), state)
    elif kind == MOMENTS:
        _take_moments(layer, state)
    elif kind == QUANTILES:
        _take_boundaries(layer, state)
    else:
        for place, variable in enumerate(model_weights(layer)):
            native(variable).assign(state.get(f"variable {place}", native(variable)))
        layer.finalize_state()


def is_dynamic(weight: Any) -> bool:
    """Whether a tf_keras layer's weight is a vocabulary instead of a variable, or a variable without a fixed shape."""
    weight = native(weight)
    return _is_vocabulary(weight) or (isinstance(weight, tf.Variable) and not weight.shape.is_fully_defined())


def dynamic_value(weight: Any) -> Any:
    """Returns the value of a weight for which `is_dynamic` is True."""
    return _vocabulary(weight._layer) if _is_vocabulary(weight) else native(weight).numpy()


def set_dynamic(weight: Any, value: Any) -> None:
    """Sets a weight for which `is_dynamic` is True."""
    if _is_vocabulary(weight):
        _take_vocabulary(weight._layer, value)
    else:
        native(weight).assign(value)


def _is_vocabulary(weight: Any) -> bool:
    return hasattr(getattr(weight, "_layer", None), "lookup_table")


def fixed_width(layer: Any) -> int | None:
    """Returns the output width that Keras fixes once a layer's vocabulary was set; None if it may change."""
    lookup = lookup_of(layer)
    if kind_of_learning(layer) not in (LOOKUP, TEXT) or lookup.output_mode == "int" or lookup.pad_to_max_tokens:
        return None
    return None if lookup._frozen_vocab_size is None else int(lookup._frozen_vocab_size)


def token_count(layer: Any, state: dict[str, Any]) -> int:
    """Returns the output width that a vocabulary results in, including special tokens."""
    return len(state.get("lengths", state["tokens"])) + int(lookup_of(layer)._token_start_index())


def pack_tokens(tokens: Any) -> dict[str, Any]:
    """Packs tokens into arrays of numbers: int64, or the bytes of all tokens and the length of each."""
    if tokens.dtype != object:
        return {"tokens": tokens.astype(np.int64)}
    return {"tokens": np.frombuffer(b"".join(tokens), np.uint8),
            "lengths": np.fromiter(map(len, tokens), np.int64, len(tokens))}


def unpack_tokens(packed: dict[str, Any], dtype: Any) -> Any:
    """Returns tokens from `pack_tokens` as a tensor."""
    if "lengths" not in packed:
        return tf.constant(packed["tokens"], dtype)
    ends, data = np.cumsum(packed["lengths"]), packed["tokens"].tobytes()
    return tf.constant([data[end - length : end] for end, length in zip(ends, packed["lengths"], strict=True)],
                       tf.string, shape=(len(ends),))


def build_for_learning(layer: Any, shape: Any) -> None:
    """Builds a layer for inputs of a given shape as `adapt` does, if it is not built yet."""
    if layer.built:
        return
    if is_of_tf_keras(layer):
        layer._adapt_maybe_build(np.zeros([1 if size is None else size for size in shape], np.float32))
    else:
        layer.build(tuple(shape))


def kept_shape(layer: Any) -> list[int | None]:
    """Returns the shape of a normalization's inputs, with None for each axis that it averages over."""
    return [size if axis in layer._keep_axis else None for axis, size in enumerate(layer._broadcast_shape)]


def retrace(model: Any) -> None:
    """Makes Keras retrace a model's functions, which hold the former constants and tables; also works during `fit`."""
    if getattr(model, "train_function", None) is not None:
        model.make_train_function(force=True)
    for name in ("test_function", "predict_function"):
        if getattr(model, name, None) is not None:
            setattr(model, name, None)


def _vocabulary(lookup: Any) -> dict[str, Any]:
    table = lookup.lookup_table
    state = _exported.get(table)
    if state is None and int(table.size()) == 0:  # an empty table cannot be exported
        state = pack_tokens(np.zeros(0, object if lookup.vocabulary_dtype == "string" else np.int64))
    elif state is None:
        keys, values = (part.numpy() for part in table.export())
        tokens, places = (values, keys) if lookup.invert else (keys, values)
        state = _exported[table] = pack_tokens(tokens[np.argsort(places)])
    weights = getattr(lookup, "idf_weights_const", None)
    return {**state, "idf": weights.numpy()} if len(state["tokens"]) and weights is not None else dict(state)


def _take_vocabulary(lookup: Any, state: dict[str, Any]) -> None:
    if not len(state["tokens"]):
        lookup.lookup_table = lookup._uninitialized_lookup_table()
        return
    lookup.lookup_table = lookup._lookup_table_from_tokens(unpack_tokens(state, lookup.vocabulary_dtype))
    lookup._record_vocabulary_size()
    if "idf" in state:
        known = getattr(lookup, "idf_weights", None)
        if known is not None and known.shape.is_compatible_with(state["idf"].shape):
            known.assign(state["idf"])
        else:
            lookup.idf_weights = tf.Variable(state["idf"], trainable=False)
        lookup.idf_weights_const = lookup.idf_weights.value()
    if lookup.input_vocabulary is not None:  # a saved model is recreated from these
        lookup.input_vocabulary = lookup.get_vocabulary(include_special_tokens=False)
        if "idf" in state:
            start = lookup._token_start_index()
            lookup.input_idf_weights = state["idf"][start : start + len(lookup.input_vocabulary)].tolist()


def _moments(layer: Any) -> dict[str, Any]:
    state: dict[str, Any] = {}
    if layer.input_mean is not None:
        state |= {"given_mean": np.asarray(layer.input_mean, np.float64),
                  "given_variance": np.asarray(layer.input_variance, np.float64)}
    elif layer.built:
        state |= {"own_mean": np.asarray(layer.adapt_mean), "own_variance": np.asarray(layer.adapt_variance),
                  "count": np.asarray(layer.count)}
    if layer.built:
        state |= {"mean": np.asarray(layer.mean), "variance": np.asarray(layer.variance),
                  "shape": np.asarray([-1 if size is None else size for size in kept_shape(layer)], np.int64)}
    return state


def _take_moments(layer: Any, state: dict[str, Any]) -> None:
    if "shape" in state:
        build_for_learning(layer, [None if size < 0 else int(size) for size in state["shape"]])
    if "given_mean" in state:
        layer.input_mean, layer.input_variance = state["given_mean"], state["given_variance"]
        if layer.built and "mean" in state:
            layer.mean = tf.constant(state["mean"], layer.compute_dtype)
            layer.variance = tf.constant(state["variance"], layer.compute_dtype)
    elif "own_mean" in state:
        set_moments(layer, state["own_mean"], state["own_variance"], state["count"])


def set_moments(layer: Any, mean: Any, variance: Any, count: Any) -> None:
    """Sets the mean and variance of a built normalization.

    Args:
        layer: The layer, which learns them from data.
        mean: One number for each position on the axes that the layer does not average over.
        variance: As many numbers as `mean` has.
        count: The number of samples behind them; Keras 3 leaves it at 0.
    """
    for variable, value in ((layer.adapt_mean, mean), (layer.adapt_variance, variance), (layer.count, count)):
        target = native(variable)
        target.assign(np.asarray(value).astype(target.dtype.as_numpy_dtype))
    layer.finalize_state()


def _boundaries(layer: Any) -> dict[str, Any]:
    state: dict[str, Any] = {}
    if layer.bin_boundaries is not None and (len(layer.bin_boundaries) or layer.num_bins is None):
        state["boundaries"] = np.asarray(layer.bin_boundaries, np.float64)
    if getattr(layer, "summary", None) is not None:
        state["summary"] = np.asarray(layer.summary)
    return state


def _take_boundaries(layer: Any, state: dict[str, Any]) -> None:
    if "summary" in state and layer.num_bins is not None:
        set_summary(layer, state["summary"])
    if "boundaries" in state:
        layer.bin_boundaries = state["boundaries"].tolist()
        if getattr(layer, "input_bin_boundaries", None) is not None:
            layer.input_bin_boundaries = layer.bin_boundaries


def set_summary(layer: Any, summary: Any) -> None:
    """Sets the values of a discretization and their weights.

    Args:
        layer: The layer, which learns its boundaries.
        summary: Array of shape `[2, values]`: the values in ascending order, and the weight of each.
    """
    if is_of_tf_keras(layer):
        build_for_learning(layer, (None,))
        layer.summary.assign(np.asarray(summary, np.float32))
    else:
        layer.summary = np.asarray(summary, np.float32)


"""Preprocessing layers that learn from data before training (`adapt`): learning over ranks, and state as arrays.

Variables hold at most a part of this state. The vocabulary of a lookup layer is in a table, the boundaries of a
discretization are a list, and a normalization computes with constants that `finalize_state` derives from its variables.
Learning runs Keras's own algorithm except for its last step, so that the ranks' results can be merged.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras.compat.families import TF_KERAS, loaded_families
from hvkeras.compat.models import model_weights
from hvkeras.compat.variables import as_tf_variable

LOOKUP, TEXT, MOMENTS, QUANTILES, SPACE, OTHER = "lookup", "text", "moments", "quantiles", "feature space", "other"
_CLASSES = {"StringLookup": LOOKUP, "IntegerLookup": LOOKUP, "TextVectorization": TEXT, "Normalization": MOMENTS,
            "Discretization": QUANTILES}
# State that does not affect a layer's outputs.
_IRRELEVANT = ("shape", "count", "summary", "own_mean", "own_variance")

# Exported content by table; tables with tokens do not change.
_exported: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def kind_of_learning(layer: Any) -> str | None:
    """Return the kind of state that a layer learns from data, one of the constants above; None if it does not learn.

    OTHER is a user-defined layer that implements Keras's protocol (`adapt`, `finalize_state`).
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
    """Return whether a layer is a tf_keras layer."""
    return TF_KERAS in loaded_families() and isinstance(layer, sys.modules[TF_KERAS].layers.Layer)


def lookup_of(layer: Any) -> Any:
    """Return the lookup layer inside a text vectorization, or any other layer unchanged."""
    return getattr(layer, "_lookup_layer", layer)


def learned_layers(model: Any) -> list[Any]:
    """Return a model's layers that learn from data, including nested ones, in the same order on all ranks.

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
    """Return the learned state of a layer as numeric arrays by name; state not learned yet has no entry."""
    kind = kind_of_learning(layer)
    if kind in (LOOKUP, TEXT):
        return _vocabulary(lookup_of(layer))
    if kind == MOMENTS:
        return _moments(layer)
    if kind == QUANTILES:
        return _boundaries(layer)
    return {f"variable {index}": np.asarray(variable) for index, variable in enumerate(model_weights(layer))}


def learned_function(state: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a state on which the layer's outputs depend."""
    return {name: array for name, array in state.items() if name not in _IRRELEVANT}


def take_learned_state(layer: Any, state: dict[str, Any]) -> None:
    """Load the learned state of another layer into a layer, and finalize the layer.

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
        for index, variable in enumerate(model_weights(layer)):
            as_tf_variable(variable).assign(state.get(f"variable {index}", as_tf_variable(variable)))
        layer.finalize_state()


def is_dynamic(weight: Any) -> bool:
    """Return whether a tf_keras layer's weight is a vocabulary, or a variable without a fixed shape."""
    weight = as_tf_variable(weight)
    return _is_vocabulary(weight) or (isinstance(weight, tf.Variable) and not weight.shape.is_fully_defined())


def dynamic_value(weight: Any) -> Any:
    """Return the value of a weight for which `is_dynamic` is True."""
    return _vocabulary(weight._layer) if _is_vocabulary(weight) else as_tf_variable(weight).numpy()


def set_dynamic(weight: Any, value: Any) -> None:
    """Set a weight for which `is_dynamic` is True."""
    if _is_vocabulary(weight):
        _take_vocabulary(weight._layer, value)
    else:
        as_tf_variable(weight).assign(value)


def _is_vocabulary(weight: Any) -> bool:
    return hasattr(getattr(weight, "_layer", None), "lookup_table")


def fixed_width(layer: Any) -> int | None:
    """Return the output width that Keras has fixed with a layer's vocabulary; None if it may change."""
    lookup = lookup_of(layer)
    if kind_of_learning(layer) not in (LOOKUP, TEXT) or lookup.output_mode == "int" or lookup.pad_to_max_tokens:
        return None
    return None if lookup._frozen_vocab_size is None else int(lookup._frozen_vocab_size)


def token_count(layer: Any, state: dict[str, Any]) -> int:
    """Return the output width for a vocabulary, including special tokens."""
    return len(state.get("lengths", state["tokens"])) + int(lookup_of(layer)._token_start_index())


def pack_tokens(tokens: Any) -> dict[str, Any]:
    """Pack tokens into numeric arrays: int64 tokens, or the bytes of all tokens and the length of each."""
    if tokens.dtype != object:
        return {"tokens": tokens.astype(np.int64)}
    return {"tokens": np.frombuffer(b"".join(tokens), np.uint8),
            "lengths": np.fromiter(map(len, tokens), np.int64, len(tokens))}


def unpack_tokens(packed: dict[str, Any], dtype: Any) -> Any:
    """Return packed tokens as a tensor."""
    if "lengths" not in packed:
        return tf.constant(packed["tokens"], dtype)
    ends, data = np.cumsum(packed["lengths"]), packed["tokens"].tobytes()
    return tf.constant([data[end - length : end] for end, length in zip(ends, packed["lengths"], strict=True)],
                       tf.string, shape=(len(ends),))


def build_for_learning(layer: Any, shape: Any) -> None:
    """Build a layer for inputs of a given shape, as `adapt` does, unless it is built."""
    if layer.built:
        return
    if is_of_tf_keras(layer):
        layer._adapt_maybe_build(np.zeros([1 if size is None else size for size in shape], np.float32))
    else:
        layer.build(tuple(shape))


def kept_shape(layer: Any) -> list[int | None]:
    """Return a normalization's input shape, with None for the axes that it averages over."""
    return [size if axis in layer._keep_axis else None for axis, size in enumerate(layer._broadcast_shape)]


def retrace(model: Any) -> None:
    """Have Keras retrace a model's functions, which contain the previous constants and tables; also during `fit`."""
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
        tokens, indices = (values, keys) if lookup.invert else (keys, values)
        state = _exported[table] = pack_tokens(tokens[np.argsort(indices)])
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
    if lookup.input_vocabulary is not None:  # saved in the configuration
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
    """Set the mean and variance of a built normalization.

    Args:
        mean: Means; the shape consists of the axes that the layer does not average over.
        variance: Variances, of the same shape.
        count: The number of samples; always 0 in Keras 3.
    """
    for variable, value in ((layer.adapt_mean, mean), (layer.adapt_variance, variance), (layer.count, count)):
        target = as_tf_variable(variable)
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
    """Set the summary from which a discretization derives its boundaries.

    Args:
        summary: Array of shape `[2, values]`: the values in ascending order, and the weight of each.
    """
    if is_of_tf_keras(layer):
        build_for_learning(layer, (None,))
        layer.summary.assign(np.asarray(summary, np.float32))
    else:
        layer.summary = np.asarray(summary, np.float32)


_MOST_ELEMENTS = 2**22  # of an array that is processed at once


def is_without_data(data: Any) -> bool:
    """Return whether data are empty, as far as this can be determined without reading them."""
    if isinstance(data, tf.data.Dataset):
        return int(data.cardinality()) == 0
    if isinstance(data, tf.RaggedTensor):
        return int(data.nrows()) == 0
    shape = getattr(data, "shape", None)
    if shape is not None and len(shape):
        return bool(shape[0] == 0)
    return data is None or (hasattr(data, "__len__") and len(data) == 0)


def count_tokens(layer: Any, data: Any, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Count the tokens in data with Keras's algorithm, without updating the layer's vocabulary.

    Args:
        layer: A lookup or a text vectorization.
        data: The data for the layer's `adapt`; may be None or empty.
        options: Other arguments of `adapt`.

    Returns:
        Tokens and counts of each of Keras's count tables as arrays; for TF-IDF, the last also has the number of
        documents.
    """
    if is_without_data(data):
        layer.reset_state()
    else:
        with _without_finalizing(layer):
            type(layer).adapt(layer, data, **options)
    found = []
    for table in _tables(layer):
        tokens, counts = (part.numpy() for part in table.export())
        found.append({**pack_tokens(tokens), "counts": counts})
    if len(found) > 1:
        found[-1]["documents"] = np.asarray(lookup_of(layer).num_documents)
    return found


def learn_tokens(layer: Any, counted: list[list[dict[str, Any]]]) -> None:
    """Build a layer's vocabulary from the counts of all ranks, with Keras's own algorithm.

    Args:
        layer: A lookup or a text vectorization.
        counted: The results of `count_tokens` on each rank.
    """
    layer.reset_state()
    lookup = lookup_of(layer)
    for found in counted:
        for table, part in zip(_tables(layer), found, strict=True):
            tokens = unpack_tokens(part, lookup.vocabulary_dtype)
            table.insert(tokens, part["counts"] + table.lookup(tokens))
            if "documents" in part:
                lookup.num_documents.assign_add(part["documents"])
    finish(layer)


def batches_to_learn(layer: Any, data: Any, batch_size: int | None, steps: int | None) -> Iterator[Any]:
    """Yield arrays from data in any form that a layer's `adapt` accepts.

    Args:
        data: An array, a tensor, a dataset, or batches.
        batch_size: Rows per batch, for tf_keras.
        steps: The number of batches; all by default.
    """
    if is_without_data(data):
        return
    if is_of_tf_keras(layer):
        found = _of_tf_keras(data, batch_size, steps)
    elif hasattr(data, "shape"):
        found = iter([data])
    elif isinstance(data, (list, tuple)) and not any(np.ndim(part) for part in data):
        found = iter([np.asarray(data)])
    elif hasattr(data, "__getitem__") and hasattr(data, "num_batches"):  # a PyDataset
        found = (data[index] for index in range(len(data)))
    else:
        found = iter(data)
    for batch in itertools.islice(found, steps):
        values = np.asarray(batch[0] if isinstance(batch, tuple) else batch)
        rows = max(1, _MOST_ELEMENTS * len(values) // max(values.size, 1)) if values.ndim else 1
        if len(values) <= rows:
            yield values
        else:
            yield from (values[start : start + rows] for start in range(0, len(values), rows))


def is_empty_dataset(data: Any) -> bool:
    """Return whether a dataset has no elements; may read the first element."""
    return is_without_data(data) or not any(True for _ in data.take(1))


def features_to_learn(space: Any, data: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each layer of a `FeatureSpace` that learns, and the data of its feature.

    The `adapt` of the `FeatureSpace` does the same, but Keras 3.16 no longer calls that of its layers.

    Args:
        space: The `FeatureSpace`.
        data: A dataset, or a dict of arrays; None without data.
    """
    whole = tf.data.Dataset.from_tensor_slices(data) if isinstance(data, dict) else data
    for name in space._list_adaptable_preprocessors():
        part = whole
        if whole is not None:
            part = whole.map(lambda row, name=name: row[name])
            rank = len(next(iter(part)).shape)
            part = part.batch(32) if rank == 0 else part
            part = part.map(lambda values: tf.expand_dims(values, -1)) if rank < 2 else part
        yield space.preprocessors[name], part


def finish_space(space: Any) -> None:
    """Complete the `adapt` of a `FeatureSpace` after its layers have learned."""
    space._is_adapted = True
    space.get_inputs()
    space.built = True


def is_customized(layer: Any) -> bool:
    """Return whether a layer's class overrides any of Keras's learning methods."""
    def is_of_keras(name: str) -> bool:
        method = getattr(type(layer), name, None)
        return method is None or method.__module__.split(".")[0] in ("keras", "tf_keras")

    return not all(is_of_keras(name) for name in ("adapt", "update_state", "finalize_state"))


def finish(layer: Any) -> None:
    """Finalize a layer that has learned, and mark it as adapted."""
    layer.finalize_state()
    if hasattr(layer, "_is_adapted"):  # in tf_keras
        layer._is_adapted = True


def _tables(layer: Any) -> list[Any]:
    lookup = lookup_of(layer)
    return [lookup.token_counts] + ([lookup.token_document_counts] if lookup.output_mode == "tf_idf" else [])


def _of_tf_keras(data: Any, batch_size: int | None, steps: int | None) -> Iterator[Any]:
    from tf_keras.src.engine import data_adapter

    handler = data_adapter.DataHandler(data, batch_size=batch_size, steps_per_epoch=steps, epochs=1, distribute=False)
    for _, iterator in handler.enumerate_epochs():
        with handler.catch_stop_iteration():
            for _ in handler.steps():
                yield next(iterator)


@contextlib.contextmanager
def _without_finalizing(layer: Any) -> Iterator[None]:
    with _replaced(layer, "finalize_state", lambda: None):
        yield


@contextlib.contextmanager
def _replaced(layer: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    attributes = vars(layer)
    former = attributes.get(name)
    attributes[name] = function
    try:
        yield
    finally:
        if former is None:
            del attributes[name]
        else:
            attributes[name] = former

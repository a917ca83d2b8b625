"""Learning of layers from data: Keras's own algorithm up to its last step, so that the ranks' results can be merged."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras.compat.learned import is_of_tf_keras, lookup_of, pack_tokens, unpack_tokens

_ROWS = 2**22  # array elements that are processed together


def is_without_data(data: Any) -> bool:
    """Whether there is nothing to learn from, as far as this can be determined without reading the data."""
    if isinstance(data, tf.data.Dataset):
        return int(data.cardinality()) == 0
    if isinstance(data, tf.RaggedTensor):
        return int(data.nrows()) == 0
    shape = getattr(data, "shape", None)
    if shape is not None and len(shape):
        return bool(shape[0] == 0)
    return data is None or (hasattr(data, "__len__") and len(data) == 0)


def count_tokens(layer: Any, data: Any, options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Counts the tokens of data as Keras does, without giving the layer a new vocabulary.

    Args:
        layer: A lookup or a text vectorization.
        data: The data for the layer's `adapt`, or nothing.
        options: Other arguments of its `adapt`.

    Returns:
        The tokens and counts of each table of counts, as arrays; for TF-IDF, the last also has the number of documents.
    """
    if is_without_data(data):
        layer.reset_state()
    else:
        with _unfinished(layer):
            type(layer).adapt(layer, data, **options)
    found = []
    for table in _tables(layer):
        tokens, counts = (part.numpy() for part in table.export())
        found.append({**pack_tokens(tokens), "counts": counts})
    if len(found) > 1:
        found[-1]["documents"] = np.asarray(lookup_of(layer).num_documents)
    return found


def learn_tokens(layer: Any, counted: list[list[dict[str, Any]]]) -> None:
    """Builds a layer's vocabulary from the counts of all ranks, with Keras's own algorithm.

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
    """Yields arrays from the data that a layer's `adapt` takes.

    Args:
        layer: The layer.
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
        found = (data[place] for place in range(len(data)))
    else:
        found = iter(data)
    for batch in itertools.islice(found, steps):
        values = np.asarray(batch[0] if isinstance(batch, tuple) else batch)
        rows = max(1, _ROWS * len(values) // max(values.size, 1)) if values.ndim else 1
        if len(values) <= rows:
            yield values
        else:
            yield from (values[start : start + rows] for start in range(0, len(values), rows))


def is_empty_dataset(data: Any) -> bool:
    """Whether a dataset has no elements; it may be necessary to read the first element."""
    return is_without_data(data) or not any(True for _ in data.take(1))


@contextlib.contextmanager
def adapting_by(space: Any, adapt: Callable[[Any, Any], None]) -> Iterator[list[Any]]:
    """A scope in which the layers of a `FeatureSpace` learn through one of our functions.

    Args:
        space: The `FeatureSpace`.
        adapt: Called with a layer and data instead of the layer's `adapt`.

    Returns:
        The layers that learn.
    """
    layers = [space.preprocessors[name] for name in space._list_adaptable_preprocessors()]
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(_instead(layer, "adapt", lambda data, layer=layer: adapt(layer, data)))
        yield layers


def finish_space(space: Any) -> None:
    """Completes the `adapt` of a `FeatureSpace` after its layers have learned."""
    space._is_adapted = True
    space.get_inputs()
    space.built = True


def is_customized(layer: Any) -> bool:
    """Whether a layer's class overrides any of Keras's learning methods."""
    def written_by_keras(name: str) -> bool:
        method = getattr(type(layer), name, None)
        return method is None or method.__module__.split(".")[0] in ("keras", "tf_keras")

    return not all(written_by_keras(name) for name in ("adapt", "update_state", "finalize_state"))


def finish(layer: Any) -> None:
    """Derives the values that a layer computes with from what it has learned."""
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
def _unfinished(layer: Any) -> Iterator[None]:
    """A scope in which `adapt` omits its last step."""
    with _instead(layer, "finalize_state", lambda: None):
        yield


@contextlib.contextmanager
def _instead(layer: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """A scope in which a function replaces a layer's method."""
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

"""Input waits: when this rank's training fetched batches from a `tf.data.Dataset`, eagerly and in functions."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras import compat
from hvkeras.compat import graphs
from hvkeras.profiling.collective_times import CAPACITY, Array, Content, Stamps

_METHODS = ("__next__", "get_next", "get_next_as_optional")


class Fetches:
    """Records when each batch is fetched, except for those of `evaluate` and `predict`.

    Functions traced while recording is on record their fetches whenever they run.
    """

    def __init__(self) -> None:
        self._eager: collections.deque[tuple[float, float]] = collections.deque(maxlen=CAPACITY)
        self._stamps: Stamps | None = None
        self._on = True
        self._others = 0  # running calls of evaluate and predict
        iterator = graphs.iterator_class()
        for method in _METHODS:
            compat.hook(iterator, method, self._around)

    def stop(self) -> None:
        """Stops recording in eager mode and in functions traced from now on."""
        self._on = False

    @contextlib.contextmanager
    def of_others(self) -> Iterator[None]:
        """Marks the fetches in its body as not part of training."""
        self._others += 1
        try:
            yield
        finally:
            self._others -= 1

    def rows(self) -> Array:
        """The latest fetches, ordered by end: float64, [fetches, 2], start and end in seconds since the epoch."""
        eager = np.array(self._eager.copy(), np.float64).reshape(-1, 2)
        rows = eager if self._stamps is None else np.concatenate([eager, self._stamps.rows()[0]])
        return rows[np.argsort(rows[:, 1], kind="stable")]

    def _around(self, original: Callable[..., Any], iterator: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._on or self._others or graphs.compiled_by_xla() or not graphs.of_functions():
            return original(iterator, *args, **kwargs)
        if tf.executing_eagerly():
            began = time.time()
            batch = original(iterator, *args, **kwargs)
            self._eager.append((began, time.time()))
            return batch
        if self._stamps is None:
            self._stamps = Stamps(Content("fetches", "fetch", None))
        began = graphs.now()
        with tf.control_dependencies([began]):
            batch = original(iterator, *args, **kwargs)
        optional = isinstance(batch, tf.experimental.Optional)  # empty at the end of the data
        parts = [batch.has_value()] if optional else tf.nest.flatten(batch, expand_composites=True)
        count = tf.cast(parts[0], tf.int64) if optional else tf.constant(1, tf.int64)
        with tf.control_dependencies(parts):  # create no constant here: constant folding would drop the dependencies
            self._stamps.end(began, count)
        return batch

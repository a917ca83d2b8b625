"""Local gradient accumulation: several backward passes per reduction and update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvkeras import compat


class Accumulation:
    """Accumulator that sums gradients on this rank, and releases the sums on every `passes`-th pass.

    Sparse gradients are summed in dense accumulators. For overwrites of variables (`compat.is_overwritten`), the
    maximum is released, as in Keras.

    Args:
        passes: The number of backward passes per update.
        average: Whether the sum is divided by `passes`.
    """

    def __init__(self, passes: int, average: bool) -> None:
        self._passes, self._average = passes, average
        self._sums: dict[Any, Any] = {}
        self._count: Any = None

    def step(
        self, gradients: Sequence[Any], variables: Sequence[Any], update: Callable[[list[Any]], Any],
        wait: Callable[[], Any],
    ) -> None:
        """Add one pass.

        Args:
            gradients: This pass's gradients; None stays None.
            variables: Their variables.
            update: Called with the sums on every `passes`-th pass.
            wait: Called on all other passes.
        """
        sums, due = self._add(gradients, variables)

        def finish() -> None:
            update(self._results(sums, gradients, variables))
            self._reset(sums)

        where_due(due, finish, wait)

    def collect(
        self, gradients: Sequence[Any], variables: Sequence[Any], reduce: Callable[[list[Any]], list[Any]],
    ) -> tuple[list[Any], Any]:
        """Add one pass, for callers that apply the result later, and only when an update is due.

        Args:
            gradients: This pass's gradients; None stays None.
            variables: Their variables.
            reduce: Called with the sums on every `passes`-th pass.

        Returns:
            Dense gradients, and a boolean tensor that is true if they are to be applied. The gradients are the result
            of `reduce` on every `passes`-th pass, and this pass's gradients on all other passes.
        """
        sums, due = self._add(gradients, variables)
        indices = [index for index, gradient in enumerate(gradients) if gradient is not None]
        results: list[Any] = [None] * len(sums)

        def finish() -> Any:
            reduced = reduce(self._results(sums, gradients, variables))
            self._reset(sums)
            return [tf.convert_to_tensor(reduced[index]) for index in indices]

        def postpone() -> Any:
            return [tf.convert_to_tensor(gradients[index]) for index in indices]

        for index, result in zip(indices, tf.cond(due, finish, postpone), strict=True):
            results[index] = result
        return results, due

    def _add(self, gradients: Sequence[Any], variables: Sequence[Any]) -> tuple[list[Any], Any]:
        """Add one pass to the sums. Return the sums, and whether an update is due."""
        sums = [None if gradient is None else self._sum_of(variable)
                for gradient, variable in zip(gradients, variables, strict=True)]
        gradient: Any
        total: Any
        for gradient, total, variable in zip(gradients, sums, variables, strict=True):
            if gradient is not None and compat.is_overwritten(variable):
                total.assign(tf.maximum(total, gradient))
            elif isinstance(gradient, tf.IndexedSlices):
                total.scatter_add(tf.IndexedSlices(tf.cast(gradient.values, total.dtype), gradient.indices))
            elif gradient is not None:
                total.assign_add(tf.cast(gradient, total.dtype))
        return sums, tf.equal(self._counter().assign_add(1) % self._passes, 0)

    def _results(self, sums: Sequence[Any], gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the sums or means in the dtypes of the gradients."""
        factor = 1.0 / self._passes if self._average else 1.0

        def scaled(total: Any, variable: Any) -> Any:
            return total if compat.is_overwritten(variable) else total * tf.constant(factor, total.dtype)

        return [None if total is None else tf.cast(scaled(total, variable), gradient.dtype)
                for total, gradient, variable in zip(sums, gradients, variables, strict=True)]

    def _reset(self, sums: Sequence[Any]) -> None:
        for total in sums:
            if total is not None:
                total.assign(tf.zeros_like(total))

    def _counter(self) -> Any:
        if self._count is None:
            with tf.init_scope():
                self._count = tf.Variable(0, dtype=tf.int64, trainable=False, name="hvkeras_passes")
        return self._count

    def _sum_of(self, variable: Any) -> Any:
        key = compat.variable_key(variable)
        if key not in self._sums:
            with tf.init_scope():
                reference = compat.as_tf_variable(variable)
                self._sums[key] = tf.Variable(tf.zeros(reference.shape, reference.dtype), trainable=False,
                                              name="hvkeras_sum")
        return self._sums[key]


def where_due(due: Any, update: Callable[[], Any], wait: Callable[[], Any]) -> None:
    """Call `update` on passes in which an update is due, and `wait` on all others.

    Args:
        update: Called if `due` is true.
        wait: Called if `due` is false.
    """

    def finish() -> Any:
        update()
        return tf.constant(True)

    def postpone() -> Any:
        wait()
        return tf.constant(False)

    tf.cond(due, finish, postpone)

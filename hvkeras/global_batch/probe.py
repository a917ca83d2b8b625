"""Check of a user's training step: whether the ranks' gradients for their rows combine to those of one process.

They do if the step computes means over rows, each from its own row. Losses that compare rows with each other, and sums
over a batch, do not. So in its second call, the step runs a few more times on some rows of the batch, eagerly and
without an effect: on all of them in this process, and on this rank's rows of them. A step that draws random numbers
cannot be checked, because they differ from run to run.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras import compat
from hvkeras.collectives.operations import Sum
from hvkeras.collectives.reductions import allreduce
from hvkeras.collectives.row_share import RowShare, global_batch
from hvkeras.compat import graphs
from hvkeras.diagnostics.recorder import recording
from hvkeras.errors import UsageError, explain
from hvkeras.global_batch.rows import block_of, cut
from hvkeras.job.session import current_session

_ROWS_OF_RANK = 4
# Relative differences of gradients, as root mean squares: above what rounding causes, below what another loss causes.
_TOLERANCES = {"float64": 1e-6, "float32": 1e-3}
_COARSE = 0.05  # for float16 and bfloat16
_LEAST = 1e-3  # of the largest array: smaller ones are compared as if they were of this size


class Probe:
    """Check of one step; `running` while it runs."""

    def __init__(self) -> None:
        self.running = False
        self._gradients: list[Any] = []
        self._states: dict[int, tuple[Any, Any]] = {}
        self._offset = 0
        self._combined: set[int] = set()

    def check(self, model: Any, step: Callable[[Any], Any], batch: Any, combined: Sequence[Any]) -> None:
        """Check the training step of a model.

        Args:
            step: The step, which takes a batch.
            batch: A batch.
            combined: Variables whose changes are combined in another way than as means over rows: states of metrics.

        Raises:
            UsageError: The gradients of the ranks do not combine to those of one process.
        """
        topology, self._combined = current_session().topology, {id(variable) for variable in combined}
        try:
            batch = _some_rows(batch, _ROWS_OF_RANK * topology.size)
            block = block_of(tf.nest.flatten(batch), topology.rank, topology.size)
        except UsageError:  # the arrays of zipped datasets have different numbers of rows
            return
        if block is None:
            return

        entries = _collectives()
        try:
            whole = self._run(step, batch, None, 0)
        except Exception:  # noqa: BLE001 - a step may fail eagerly, or on a few rows
            return
        if _collectives() != entries:
            return  # the step knows of ranks
        again = self._run(step, batch, None, 1)
        tolerance = _tolerance(model)
        if max(_differences(whole, again).values(), default=0.0) > tolerance:
            return  # it draws random numbers
        share = block.share(trains=True, reduces=True)
        cut_rows = self._run(step, cut(batch, block), share, 0)
        for name, difference in _differences(whole, cut_rows).items():
            if difference > tolerance:
                raise UsageError(explain(
                    f"{type(model).__name__}.train_step must compute means over the rows of its batch, each from its"
                    f" own row, but on {topology.size} ranks {name} differ from those of one process",
                    "gather what rows are compared by, embeddings = hvd.allgather(embeddings), in the loss; divide sums"
                    " over rows by the number of rows of the batch; or train on one process (docs/data-parallel.md)",
                    difference=f"{difference:.2g}"))

    def fails(self, step: Callable[[Any], Any], batch: Any, rows: RowShare) -> bool:
        """Return whether a step fails on this rank's rows, as it makes tensors of a constant number of rows.

        The step runs eagerly and without an effect, except that it may build layers.

        Args:
            batch: This rank's rows.
        """
        numpy_state, seeds = np.random.get_state(), graphs.eager_seeds()
        self.running = True
        try:
            with global_batch().computing(rows), recording().paused():
                step(batch)
        except (TypeError, ValueError, tf.errors.InvalidArgumentError):
            return True
        finally:
            self.running = False
            np.random.set_state(numpy_state)
            graphs.set_eager_seeds(seeds)
        return False

    def _run(self, step: Callable[[Any], Any], batch: Any, rows: RowShare | None, offset: int) -> list[tuple[str, Any]]:
        """Run the step without an effect, and return the gradients and the changes of states, by name."""
        self._gradients, self._states, self._offset = [], {}, offset
        self.running = True
        try:
            with global_batch().computing(rows), _same_randomness(), recording().paused():
                step(batch)
        finally:
            self.running = False
        states = []
        for variable, value in self._states.values():
            state = tf.cast(value, tf.float64)
            if rows is not None:
                state = allreduce(rows.times_share(state), op=Sum, name="a state of the checked step")
            states.append((f"the values of {variable.path}", state.numpy()))
        gradients = [(f"the gradients of {compat.variable_name(variable)}", _as_array(gradient))
                     for gradient, variable in self._gradients]
        return [*gradients, *states]

    def note_gradients(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Note gradients that the running step has computed."""
        self._gradients += [pair for pair in zip(gradients, variables, strict=True) if pair[0] is not None]

    def note_state(self, variable: Any, value: Any) -> None:
        """Note the value that the running step assigns to a variable that does not train."""
        if not variable.trainable and id(variable) not in self._combined and tf.as_dtype(variable.dtype).is_floating:
            self._states[id(variable)] = variable, value

    @property
    def offset(self) -> int:
        """Offset of the seeds of random operations of Keras."""
        return self._offset if self.running else 0


def _some_rows(batch: Any, count: int) -> Any:
    leaves = tf.nest.flatten(batch)
    block = block_of(leaves, 0, 1)
    if block is None or int(block.total) <= count:
        return batch
    return tf.nest.map_structure(lambda leaf: leaf[:count] if tf.is_tensor(leaf) and leaf.shape.rank else leaf, batch)


def _collectives() -> int:
    return sum(count for count, _ in current_session().entries.snapshot().values())


@contextlib.contextmanager
def _same_randomness() -> Iterator[None]:
    """Enter a scope after which Python, NumPy and TensorFlow draw the numbers that they would have drawn before it."""
    states = random.getstate(), np.random.get_state(), graphs.eager_seeds()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        graphs.set_eager_seeds(states[2])


def _as_array(gradient: Any) -> Any:
    return np.asarray(tf.convert_to_tensor(gradient), np.float64)


def _differences(ones: Sequence[tuple[str, Any]], others: Sequence[tuple[str, Any]]) -> dict[str, float]:
    """Return the root mean square of each array's difference, relative to that of the array.

    Gradients that cancel out, such as that of a bias before a normalization, are rounding errors of larger ones.
    """
    scales = [_magnitude(one) for _, one in ones]
    least = _LEAST * max(scales, default=0.0)
    found = {}
    for (name, one), (_, other), scale in zip(ones, others, scales, strict=True):
        difference = _magnitude(one - other) if one.shape == other.shape else float("inf")
        found[name] = difference / max(scale, least) if difference else 0.0
    return found


def _magnitude(array: Any) -> float:
    return float(np.sqrt(np.mean(np.square(array)))) if array.size else 0.0


def _tolerance(model: Any) -> float:
    dtypes = {str(layer.compute_dtype) for layer in model._flatten_layers()}
    return max(_TOLERANCES.get(dtype, _COARSE) for dtype in dtypes or {"float32"})

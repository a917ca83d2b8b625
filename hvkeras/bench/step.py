"""Training steps of Keras models on every engine, compared with the same steps on one process."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import hvkeras
from hvkeras import compat
from hvkeras.backends.capabilities import objection_to_xla
from hvkeras.bench.models import MODELS, Model
from hvkeras.bench.participant import Participant
from hvkeras.bench.plan import ONE, Plan, Stage, without_rate
from hvkeras.bench.ranks import Ranks, WrongResultError
from hvkeras.bench.row import APART, ONE_PROCESS, PEER, REFERENCE, Row, title_of
from hvkeras.errors import explain

VERIFIED = 3  # number of steps after which weights are compared
RATE = 0.01  # learning rate of SGD
TOLERANCE = 0.01  # of the distance that weights have moved; a different summation order stays far below it
ROUNDING_FACTOR = 10  # tolerance for models that amplify rounding: this many times the effect of changing the last bits
LAST_BITS = 1e-7  # relative change in the last bits of a float32
XLA = ", XLA"

Gradient = Callable[[Any, Any, Sequence[Any]], Sequence[Any]]


class Task:
    """A model with its initial weights and the weights expected after `VERIFIED` steps.

    The single-process job computes the expected weights and saves them for the jobs of the engines.

    Args:
        model: The model.
        plan: The plan of this job.
        rank: This rank.
    """

    def __init__(self, model: Model, plan: Plan, rank: int) -> None:
        self.model = model
        self.data = model.data(rank)
        path = Path(plan.shared) / f"{model.name}.npz"
        if plan.backend == ONE:
            compat.default_keras().utils.set_random_seed(1)
            built = model.build()
            self.start = [np.array(each) for each in built.get_weights()]
            begun = _trainable(built)
            self.expected, other = self._on_one_process(built, plan.ranks)
            self.rounding = self.difference(other, begun)
            _save(path, start=self.start, expected=self.expected, rounding=[np.float64(self.rounding)])
        else:
            found = _load(path)
            self.start, self.expected, self.rounding = found["start"], found["expected"], float(found["rounding"][0])
        self.bytes = sum(each.nbytes for each in self.expected)

    def _on_one_process(self, built: Any, ranks: int) -> tuple[list[Any], list[Any]]:
        """Trains on the batches of all ranks: the mean gradient of equally large batches is that of the joint batch.

        Returns:
            The final weights, and those reached from initial weights that differ in the last bits.
        """
        batches = [self.model.data(rank) for rank in range(ranks)]
        optimizer = compat.default_keras().optimizers.SGD(RATE)
        variables = built.trainable_variables

        @tf.function(autograph=False)  # type: ignore[untyped-decorator]  # TensorFlow ships no types
        def gradients(samples: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = _loss(built, samples, labels)
            return tape.gradient(loss, variables)

        def trained(start: Sequence[Any]) -> list[Any]:
            built.set_weights(start)
            for _ in range(VERIFIED):
                each = [gradients(*map(tf.constant, batch)) for batch in batches]
                means = [tf.add_n(parts) / len(batches) for parts in zip(*each, strict=True)]
                optimizer.apply_gradients(zip(means, variables, strict=True))
            return _trainable(built)

        random = np.random.default_rng(0)
        moved = [(each * (1 + LAST_BITS * random.standard_normal(each.shape))).astype(each.dtype)
                 for each in self.start]
        return trained(self.start), trained(moved)

    def difference(self, weights: Sequence[Any], start: Sequence[Any]) -> float:
        """The largest difference from the expected weights, divided by the largest distance that those have moved."""
        moved = max(float(abs(goal - first).max()) for goal, first in zip(self.expected, start, strict=True))
        off = max(float(abs(goal - one).max()) for goal, one in zip(self.expected, weights, strict=True))
        return off / moved


class Training(Participant):
    """A custom training loop, as a user would write it.

    Args:
        row: Its row.
        task: What to train.
        gradient: Computes a tape's gradients of the loss with respect to the variables, reduced over the ranks.
        ranks: The ranks.
        strategy: The `tf.distribute` strategy, or None.
        jit: Whether the step is compiled by XLA.
    """

    def __init__(self, row: Row, task: Task, gradient: Gradient, ranks: Ranks, strategy: Any = None,
                 jit: bool = False) -> None:
        self.row, self._task, self._gradient, self._ranks = row, task, gradient, ranks
        self._strategy, self._jit = strategy, jit
        self._reduces = row.kind != REFERENCE
        row.bytes, row.samples, row.rounding = task.bytes, task.model.batch * ranks.size, task.rounding
        self._loss = 0.0

    def prepare(self) -> None:
        """Builds the model and the step, takes a few steps, and compares the weights."""
        with self._strategy.scope() if self._strategy is not None else contextlib.nullcontext():
            self._model = self._task.model.build()
            self._model.set_weights(self._task.start)
            self._optimizer = compat.default_keras().optimizers.SGD(RATE)
            compat.build_optimizer(self._optimizer, self._model.trainable_variables)
            start = _trainable(self._model)
            self._step = self._traced(*map(tf.constant, self._task.data))
            self.run(VERIFIED)
        self.check()
        if self._reduces:
            self._compare(start)

    def run(self, calls: int) -> None:
        """Takes `calls` steps."""
        for _ in range(calls):
            self._loss = float(self._step())

    def check(self) -> None:
        """Verifies that the loss is finite.

        Raises:
            WrongResultError: It is not.
        """
        if not np.isfinite(self._loss):
            raise WrongResultError(explain("The loss must stay finite", engine=self.row.name, model=self.row.work,
                                           loss=self._loss))

    def digest(self) -> str:
        """A hash of the weights, which must be bitwise identical on all ranks."""
        if not self._reduces:
            return ""
        return hashlib.sha256(b"".join(weight.tobytes() for weight in _trainable(self._model))).hexdigest()

    def _traced(self, samples: Any, labels: Any) -> Callable[[], Any]:
        model, optimizer, variables = self._model, self._optimizer, self._model.trainable_variables

        def step(samples: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = _loss(model, samples, labels)
            gradients = self._gradient(tape, loss, variables)
            optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return loss

        def everywhere(samples: Any, labels: Any) -> Any:
            return self._strategy.run(step, args=(samples, labels))

        function = tf.function(step if self._strategy is None else everywhere, autograph=False,
                               jit_compile=True if self._jit else None)
        return lambda: function(samples, labels)

    def _compare(self, start: Sequence[Any]) -> None:
        weights = _trainable(self._model)
        if self._ranks.rank == 0:
            self.row.difference = self._task.difference(weights, start)
            if not self.row.difference <= max(TOLERANCE, ROUNDING_FACTOR * self._task.rounding):
                raise WrongResultError(explain(
                    f"After {VERIFIED} steps the weights must be those of one process on all ranks' batches",
                    engine=self.row.name, model=self.row.work, difference=f"{self.row.difference:.2g} of the way",
                    first=_first_wrong(weights, self._task.expected, self._model)))


def _save(path: Path, **lists: Sequence[Any]) -> None:
    """Writes lists of arrays."""
    arrays = {f"{name} {place}": each for name, arrays in lists.items() for place, each in enumerate(arrays)}
    np.savez(path, allow_pickle=False, **arrays)


def _load(path: Path) -> dict[str, list[Any]]:
    """Reads a file that `_save` wrote."""
    lists: dict[str, list[Any]] = {}
    with np.load(path) as file:
        for key in file.files:  # in the order of writing
            lists.setdefault(key.split()[0], []).append(file[key])
    return lists


def _first_wrong(weights: Sequence[Any], expected: Sequence[Any], model: Any) -> str:
    """A description of the first weight that differs by more than rounding."""
    for weight, goal, variable in zip(weights, expected, model.trainable_variables, strict=True):
        wrong = ~np.isclose(weight, goal, rtol=1e-4, atol=1e-6)
        if wrong.any():
            place = tuple(int(each) for each in np.argwhere(wrong)[0])
            return f"{compat.variable_name(variable)}{list(place)} is {weight[place]:g} instead of {goal[place]:g}"
    return "none by more than rounding"


def _loss(model: Any, samples: Any, labels: Any) -> Any:
    logits = model(samples, training=True)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


def _trainable(model: Any) -> list[Any]:
    return [np.array(compat.native(variable)) for variable in model.trainable_variables]


def _plain(tape: Any, loss: Any, variables: Sequence[Any]) -> Sequence[Any]:
    found: Sequence[Any] = tape.gradient(loss, variables)
    return found


def _distributed(tape: Any, loss: Any, variables: Sequence[Any]) -> Sequence[Any]:
    found: Sequence[Any] = hvkeras.DistributedGradientTape(tape).gradient(loss, variables)
    return found


def participants(stage: Stage, name: str) -> list[Participant]:
    """The training loops of one job.

    Args:
        stage: The job's plan, ranks and peer.
        name: The model.
    """
    plan, ranks, peer = stage.plan, stage.ranks, stage.peer
    task = Task(MODELS[without_rate(name)], plan, ranks.rank)
    if plan.backend in (ONE, ""):
        row_name = ONE_PROCESS if plan.backend else APART
        description = "no communication" if plan.backend else f"{ranks.size} processes side by side, no communication"
        suffixes = ["", XLA] if plan.jit else [""]
        return [Training(Row(name, row_name + suffix, REFERENCE, description), task, _plain, ranks, jit=suffix == XLA)
                for suffix in suffixes]
    backend = ranks.job.backend
    suffixes = ["", XLA] if plan.jit and not objection_to_xla(backend) else [""]
    made: list[Participant] = [
        Training(Row(name, backend.name + suffix, engine=backend.engine, memory=stage.memory), task, _distributed,
                 ranks, jit=suffix == XLA) for suffix in suffixes]
    if peer is not None:
        row = Row(name, title_of(backend.name), PEER, peer.engine, peer.reason)
        made.append(Training(row, task, peer.gradient or _plain, ranks, peer.strategy))
    return made

"""Training steps of Keras models on every engine, compared with the same steps on one process."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import hvkeras
from hvkeras import compat
from hvkeras.backends.capabilities import CompressesBetweenHosts, objection_to_xla
from hvkeras.bench.models import MODELS, OPTIMIZERS, ModelSpec
from hvkeras.bench.participant import Participant
from hvkeras.bench.plan import ONE, BenchmarkPlan, Stage, without_rate
from hvkeras.bench.ranks import BenchmarkRanks, WrongResultError
from hvkeras.bench.row import FORWARD_BACKWARD, LOCAL_ONLY, ONE_PROCESS, PEER, REFERENCE, UPDATE, BenchmarkRow, title_of
from hvkeras.errors import explain
from hvkeras.gradients.optimizer_classes import apply_locally, distributed_part

VERIFIED = 3  # number of steps after which weights are compared
COMPRESSED_TOLERANCE = 0.1  # with compressed gradients
TOLERANCE = 0.01  # fraction of the distance that weights moved; effects of the summation order are far below
ROUNDING_FACTOR = 10  # tolerance for models that amplify rounding errors, as a multiple of the effect of `LAST_BITS`
SMALL = 1e-6  # standard deviation of gradients for updates in isolation
LAST_BITS = 1e-7  # relative change in the last bits of a float32
XLA, PLAIN, SHARED = ", XLA", ", plain update", ", shared update"

Wrap = Callable[[Any], Any]
Gradient = Callable[[Any, Any, Sequence[Any]], Sequence[Any]]


class StepTask:
    """A model with its initial weights, and the weights that are expected after `VERIFIED` steps.

    The single-process job computes the expected weights, and saves them for the jobs of the engines.

    Args:
        plan: Plan of this job.
    """

    def __init__(self, model: ModelSpec, plan: BenchmarkPlan, rank: int) -> None:
        self.model, self.optimizer = model, OPTIMIZERS[plan.optimizer]
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
        """Train on the batches of all ranks with their mean gradients.

        Returns:
            The final weights, and those after a change of the last bits of the initial weights.
        """
        batches = [self.model.data(rank) for rank in range(ranks)]
        variables = built.trainable_variables

        @tf.function(autograph=False)  # type: ignore[untyped-decorator]  # TensorFlow ships no types
        def gradients(samples: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = _loss(built, samples, labels)
            return tape.gradient(loss, variables)

        def trained(start: Sequence[Any]) -> list[Any]:
            built.set_weights(start)
            optimizer = self.optimizer.build()
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
        """Return the distance to the expected weights, as a fraction of the distance that those moved.

        The distance is the maximum over all weights. For an optimizer that normalises gradients, and so amplifies the
        rounding errors of small ones, it is the root mean square.
        """
        size = _largest if self.optimizer.is_linear else _root_mean_square
        return size(self.expected, weights) / size(self.expected, start)


def _largest(some: Sequence[Any], others: Sequence[Any]) -> float:
    return max(float(abs(one - other).max()) for one, other in zip(some, others, strict=True))


def _root_mean_square(some: Sequence[Any], others: Sequence[Any]) -> float:
    squares = [np.square(one - other, dtype=np.float64) for one, other in zip(some, others, strict=True)]
    return float(np.sqrt(sum(map(np.sum, squares)) / sum(one.size for one in some)))


class Training(Participant):
    """A custom training loop, as a user would write it.

    Args:
        row: Row for the results.
        task: Model and expected weights.
        gradient: Computes a tape's gradients of the loss with respect to the variables, of this rank or of all ranks.
        wrap: Wraps the optimizer to reduce gradients, if `gradient` does not.
        strategy: The `tf.distribute` strategy, or None.
        jit: Whether XLA compiles the step.
        rounds: Whether gradients are compressed, which changes the weights.
    """

    def __init__(self, row: BenchmarkRow, task: StepTask, ranks: BenchmarkRanks, gradient: Gradient | None = None,
                 wrap: Wrap | None = None, strategy: Any = None, jit: bool = False, rounds: bool = False) -> None:
        self.row, self._task, self._ranks = row, task, ranks
        self._gradient, self._wrap = gradient or _plain, wrap or (lambda optimizer: optimizer)
        self._strategy, self._jit, self._tolerance = strategy, jit, COMPRESSED_TOLERANCE if rounds else TOLERANCE
        self._reduces = row.kind != REFERENCE
        self._parts: dict[str, Callable[[], Any]] = {}
        row.bytes, row.samples, row.rounding = task.bytes, task.model.batch * ranks.size, task.rounding
        self._loss = 0.0

    def prepare(self) -> None:
        """Build the model and the step, run `VERIFIED` steps, and compare the weights."""
        with self._strategy.scope() if self._strategy is not None else contextlib.nullcontext():
            self._model = self._task.model.build()
            self._model.set_weights(self._task.start)
            self._optimizer = self._wrap(self._task.optimizer.build())
            compat.build_optimizer(self._optimizer, self._model.trainable_variables)
            start = _trainable(self._model)
            self._step = self._traced(*map(tf.constant, self._task.data))
            begun = time.perf_counter()
            self.run(1)
            self.row.first = time.perf_counter() - begun
            self.run(VERIFIED - 1)
        self.check()
        if self._reduces:
            self._compare(start)
        if self._strategy is None and not self._jit:
            self._parts = self._traced_parts(*map(tf.constant, self._task.data))
            self.row.parts = {part: [] for part in self._parts}

    def run(self, calls: int) -> None:
        """Run `calls` steps."""
        for _ in range(calls):
            self._loss = float(self._step())

    def run_part(self, part: str, calls: int) -> None:
        """Run a part of a step `calls` times; updates change the optimizer's state, but not the weights."""
        compat.set_learning_rate(self._optimizer, 0.0)
        for _ in range(calls):
            float(self._parts[part]())
        compat.set_learning_rate(self._optimizer, self._task.optimizer.rate)

    def check(self) -> None:
        """Verify that the loss is finite.

        Raises:
            WrongResultError: The loss is not finite.
        """
        if not np.isfinite(self._loss):
            raise WrongResultError(explain("The loss must stay finite", engine=self.row.name, model=self.row.work,
                                           loss=self._loss))

    def digest(self) -> str:
        """Return a hash of the weights, which must be bitwise identical on all ranks."""
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

    def _traced_parts(self, samples: Any, labels: Any) -> dict[str, Callable[[], Any]]:
        model, optimizer, variables = self._model, self._optimizer, self._model.trainable_variables

        @tf.function(autograph=False)  # type: ignore[untyped-decorator]  # TensorFlow ships no types
        def forward_backward(samples: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = _loss(model, samples, labels)
            return loss, tape.gradient(loss, variables)  # otherwise TensorFlow would not compute the gradients

        @tf.function(autograph=False)  # type: ignore[untyped-decorator]  # TensorFlow ships no types
        def update(*gradients: Any) -> Any:
            if distributed_part(optimizer) is not None:
                apply_locally(optimizer, gradients, variables)
            else:
                optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return tf.constant(0.0)

        gradients = [tf.random.stateless_normal(variable.shape, (0, index), stddev=SMALL)
                     for index, variable in enumerate(variables)]
        return {FORWARD_BACKWARD: lambda: forward_backward(samples, labels)[0], UPDATE: lambda: update(*gradients)}

    def _compare(self, start: Sequence[Any]) -> None:
        weights = _trainable(self._model)
        if self._ranks.rank == 0:
            self.row.difference = self._task.difference(weights, start)
            if not self.row.difference <= max(self._tolerance, ROUNDING_FACTOR * self._task.rounding):
                raise WrongResultError(explain(
                    f"After {VERIFIED} steps the weights must be those of one process on all ranks' batches",
                    engine=self.row.name, model=self.row.work, difference=f"{self.row.difference:.2g} of the way",
                    first=_first_wrong(weights, self._task.expected, self._model)))


def _save(path: Path, **lists: Sequence[Any]) -> None:
    arrays = {f"{name} {index}": each for name, arrays in lists.items() for index, each in enumerate(arrays)}
    np.savez(path, allow_pickle=False, **arrays)


def _load(path: Path) -> dict[str, list[Any]]:
    lists: dict[str, list[Any]] = {}
    with np.load(path) as file:
        for key in file.files:  # in the order of `_save`
            lists.setdefault(key.split()[0], []).append(file[key])
    return lists


def _first_wrong(weights: Sequence[Any], expected: Sequence[Any], model: Any) -> str:
    for weight, goal, variable in zip(weights, expected, model.trainable_variables, strict=True):
        wrong = ~np.isclose(weight, goal, rtol=1e-4, atol=1e-6)
        if wrong.any():
            index = tuple(int(each) for each in np.argwhere(wrong)[0])
            return f"{compat.variable_name(variable)}{list(index)} is {weight[index]:g} instead of {goal[index]:g}"
    return "none by more than rounding"


def _loss(model: Any, samples: Any, labels: Any) -> Any:
    logits = model(samples, training=True)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


def _trainable(model: Any) -> list[Any]:
    return [np.array(compat.as_tf_variable(variable)) for variable in model.trainable_variables]


def _plain(tape: Any, loss: Any, variables: Sequence[Any]) -> Sequence[Any]:
    found: Sequence[Any] = tape.gradient(loss, variables)
    return found


def participants(stage: Stage, name: str) -> list[Participant]:
    """Return the training loops of one job.

    Args:
        stage: Plan, ranks and peer of the job.
    """
    plan, ranks, peer = stage.plan, stage.ranks, stage.peer
    task = StepTask(MODELS[without_rate(name)], plan, ranks.rank)
    if plan.backend in (ONE, ""):
        row_name = ONE_PROCESS if plan.backend else LOCAL_ONLY
        description = "no communication" if plan.backend else f"{ranks.size} processes side by side, no communication"
        suffixes = ["", XLA] if plan.jit else [""]
        return [Training(BenchmarkRow(name, row_name + suffix, REFERENCE, description), task, ranks, jit=suffix == XLA)
                for suffix in suffixes]
    backend = ranks.session.backend
    compressed = {f", {name}": getattr(hvkeras.Compression, name) for name in plan.compressions
                  if name != "int8" or isinstance(backend, CompressesBetweenHosts)}
    suffixes = ["", *([PLAIN] if plan.plain else []), *([SHARED] if plan.shard else []), *compressed]
    suffixes += [XLA] if plan.jit and not objection_to_xla(backend) else []
    made: list[Participant] = []
    for suffix in suffixes:
        row = BenchmarkRow(name, backend.name + suffix, engine=backend.engine, memory=stage.memory)
        wrap = functools.partial(hvkeras.DistributedOptimizer, compile_update=False if suffix == PLAIN else "auto",
                                 shard_update=suffix == SHARED,
                                 compression=compressed.get(suffix, hvkeras.Compression.none))
        made.append(Training(row, task, ranks, wrap=wrap, jit=suffix == XLA, rounds=suffix in compressed))
    if peer is not None:
        row = BenchmarkRow(name, title_of(backend.name), PEER, peer.engine, peer.reason)
        made.append(Training(row, task, ranks, peer.gradient, strategy=peer.strategy))
    return made

"""Training steps of Keras models on every engine, against the same step on one process."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import hvkeras
from hvkeras import compat, context
from hvkeras.bench import peers
from hvkeras.bench.engines import Engine
from hvkeras.bench.models import Model
from hvkeras.bench.ranks import Ranks, WrongResultError
from hvkeras.bench.rounds import Contestant, Effort, compete
from hvkeras.bench.row import ONE_PROCESS, PEER, REFERENCE, Row
from hvkeras.errors import explain

BLOCK = 0.2  # seconds
VERIFIED = 3  # steps after which weights are compared
RATE = 0.01  # of learning, by SGD
TOLERANCE = 0.01  # of the distance that weights have moved; other orders of summation stay far below it
XLA = ", XLA"

Gradient = Callable[[Any, Any, Sequence[Any]], Sequence[Any]]


class Task:
    """A model with its start and the weights that it should have after `VERIFIED` steps.

    Args:
        model: The model.
        ranks: The ranks; only rank 0 computes the expected weights.
    """

    def __init__(self, model: Model, ranks: Ranks) -> None:
        self.model, self.ranks = model, ranks
        self.data = model.data(ranks.rank)
        compat.default_keras().utils.set_random_seed(1)
        built = model.build()
        self.start = [np.array(each) for each in built.get_weights()]
        self.bytes = sum(each.nbytes for each in _trainable(built))
        self.expected = self._on_one_process(built) if ranks.rank == 0 else []

    def _on_one_process(self, built: Any) -> list[Any]:
        """Trains on the batches of all ranks: the mean of the gradients of equal batches is that of the joint one."""
        batches = [self.model.data(rank) for rank in range(self.ranks.size)]
        optimizer = compat.default_keras().optimizers.SGD(RATE)
        variables = built.trainable_variables

        @tf.function(autograph=False)  # type: ignore[untyped-decorator]  # TensorFlow ships no types
        def gradients(samples: Any, labels: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = _loss(built, samples, labels)
            return tape.gradient(loss, variables)

        for _ in range(VERIFIED):
            each = [gradients(*map(tf.constant, batch)) for batch in batches]
            means = [tf.add_n(parts) / len(batches) for parts in zip(*each, strict=True)]
            optimizer.apply_gradients(zip(means, variables, strict=True))
        return _trainable(built)

    def difference(self, weights: Sequence[Any], start: Sequence[Any]) -> float:
        """The largest difference to the expected weights, over the largest distance that those have moved."""
        moved = max(float(abs(goal - first).max()) for goal, first in zip(self.expected, start, strict=True))
        off = max(float(abs(goal - one).max()) for goal, one in zip(self.expected, weights, strict=True))
        return off / moved


class Training(Contestant):
    """A training loop of one's own, as a user would write it.

    Args:
        row: Its row.
        task: What to train.
        gradient: Computes a tape's gradients of the loss by the variables, reduced over the ranks.
        engine: The engine of hvkeras, or None.
        strategy: The `tf.distribute` strategy, or None.
        jit: Whether the step is compiled by XLA.
    """

    def __init__(self, row: Row, task: Task, gradient: Gradient, engine: Engine | None = None, strategy: Any = None,
                 jit: bool = False) -> None:
        self.row, self._task, self._gradient = row, task, gradient
        self._engine, self._strategy, self._jit = engine, strategy, jit
        self.alone = row.kind == REFERENCE
        row.bytes, row.samples = task.bytes, task.model.batch * (1 if self.alone else task.ranks.size)
        self._loss = 0.0

    def prepare(self) -> None:
        """Builds the model and the step, takes a few steps, and compares the weights."""
        with contextlib.ExitStack() as stack:
            if self._engine is not None:
                stack.enter_context(context.served_by(self._engine.backend))
            if self._strategy is not None:
                stack.enter_context(self._strategy.scope())
            self._model = self._task.model.build()
            self._model.set_weights(self._task.start)
            self._optimizer = compat.default_keras().optimizers.SGD(RATE)
            compat.build_optimizer(self._optimizer, self._model.trainable_variables)
            start = _trainable(self._model)
            self._step = self._traced(*map(tf.constant, self._task.data))
            self.run(VERIFIED)
        self.check()
        if not self.alone:
            self._compare(start)

    def accompany(self) -> None:
        """Builds a model as well, since Keras numbers layers, and Horovod alone wants equal names on all ranks."""
        self._task.model.build()

    def run(self, calls: int) -> None:
        """Takes so many steps."""
        for _ in range(calls):
            self._loss = float(self._step())

    def check(self) -> None:
        """Makes sure that training goes on."""
        if not np.isfinite(self._loss):
            raise WrongResultError(explain("The loss must stay finite", engine=self.row.name, model=self.row.work,
                                           loss=self._loss))

    def digest(self) -> str:
        """A hash of the weights."""
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
        if self._task.ranks.rank == 0:
            self.row.difference = self._task.difference(weights, start)
            if not self.row.difference <= TOLERANCE:
                raise WrongResultError(explain(
                    f"After {VERIFIED} steps the weights must be those of one process on all ranks' batches",
                    engine=self.row.name, model=self.row.work, difference=f"{self.row.difference:.2g} of the way",
                    first=_first_wrong(weights, self._task.expected, self._model)))


def _first_wrong(weights: Sequence[Any], expected: Sequence[Any], model: Any) -> str:
    """The first weight that is off by more than rounding."""
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


def measure(models: Sequence[Model], engines: Sequence[Engine], ranks: Ranks, effort: Effort, with_peers: bool,
            jit: bool, done: Callable[[list[Row]], None]) -> None:
    """Measures training steps.

    Args:
        models: What to train.
        engines: The engines.
        ranks: The ranks.
        effort: How long to measure each model.
        with_peers: Whether Horovod and `tf.distribute` are used directly as well.
        jit: Whether steps are also compiled by XLA, on engines that can.
        done: Given the rows of each model once they are known.
    """
    found = peers.find(engines, ranks, with_peers)
    for number, model in enumerate(models):
        def show(share: float, what: str, number: int = number) -> None:
            ranks.show((number + share) / len(models), what)

        show(0.0, f"{model.name}: one process computes what should come out")
        tasks: list[Task] = []
        _, reason, _ = ranks.together(lambda: tasks.append(Task(model, ranks)))  # noqa: B023  # called at once
        if reason:
            done([Row(model.name, ONE_PROCESS, REFERENCE, reason=reason)])
            continue
        contestants = _contestants(tasks[0], engines, found, jit)
        compete(contestants, ranks, effort, show)
        for one in contestants:
            _check_ranks(one, ranks)
        done([one.row for one in contestants])


def _contestants(task: Task, engines: Sequence[Engine], found: peers.Peers, jit: bool) -> list[Training]:
    name = task.model.name
    made = [Training(Row(name, ONE_PROCESS, REFERENCE, "no communication"), task, _plain)]
    if jit:
        made.append(Training(Row(name, ONE_PROCESS + XLA, REFERENCE, "no communication"), task, _plain, jit=True))
    for engine in engines:
        words = "" if engine.reason else engine.backend.engine
        row = Row(name, engine.name, engine=words, reason=engine.reason, memory=engine.memory)
        made.append(Training(row, task, _distributed, engine))
        if jit and engine.backend.supports_xla:
            row = Row(name, engine.name + XLA, engine=words, reason=engine.reason, memory=engine.memory)
            made.append(Training(row, task, _distributed, engine, jit=True))
    for title, peer in found.items():
        row = Row(name, title, PEER, peer.engine, peer.reason)
        made.append(Training(row, task, peer.gradient or _plain, strategy=peer.strategy))
    return made


def _check_ranks(one: Training, ranks: Ranks) -> None:
    """Makes sure that all ranks hold the same weights at the end, to the last bit."""
    if one.alone or one.row.reason:
        return
    digests, reason, _ = ranks.together(one.digest)
    if not reason and len(set(digests)) > 1:
        other = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
        reason = explain("All ranks must hold the same weights after training", engine=one.row.name,
                         model=one.row.work, differs=f"rank {other} from rank 0")
        one.row.wrong = True
    one.row.reason = reason
    if reason:
        one.row.blocks = []

"""A function beside what the ranks make of it together: each rank has variables of its own, as in a job.

The ranks' functions are in one graph, or each is in a graph of its own and runs in a thread; then tensors travel in
queues, and a rank that waits in vain fails the test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any

import tensorflow as tf

from hvkeras.partition.collectives import Collectives, Lanes, Simulated
from hvkeras.partition.partitioning import Partitioned
from hvkeras.partition.rules import RULES


class Ranks:
    """A function and its partitioned form.

    Args:
        function: The function.
        specs: What it is given, `tf.TensorSpec`.
        rows: Numbers of the operands that have rows.
        size: Number of ranks.
        separate: Whether each rank's function is in a graph of its own.
        copies: For a resource other than a variable that the function uses, by the identity of its handle, the handle
            of each rank.
        effects: See `Partitioned`.
        job: If this process is one of the ranks of a job, its rank and the collectives; the others are elsewhere.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        specs: Sequence[Any] = (),
        rows: Sequence[int] = (0,),
        size: int = 3,
        separate: bool = False,
        copies: Mapping[int, Sequence[Any]] | None = None,
        effects: str = "all",
        job: tuple[int, Collectives] | None = None,
    ) -> None:
        self.whole: Any = tf.function(function).get_concrete_function(*specs)
        self.size, self._job = size, job
        self._here = here = range(size) if job is None else (job[0],)  # the ranks whose functions this process runs
        self.variables: list[list[Any]] = [
            [variable, *(tf.Variable(variable, trainable=False, shape=variable.shape) for _ in here)]
            for variable in self.whole.variables
        ]
        self._copies = {id(variable.handle): [copy.handle for copy in own] for variable, *own in self.variables}
        self._copies |= dict(copies or {})
        self.partitioned = Partitioned(self.whole.graph, {"rows": rows} if rows else {}, RULES, effects)
        self._queues = [[tf.queue.FIFOQueue(1000, [tf.string]) for _ in range(size)] for _ in range(size)]
        groups = [[rank] for rank in here] if separate else [list(here)]
        self._functions = [
            tf.function(self._created(ranks), autograph=False).get_concrete_function(
                *(spec for spec in specs for _ in ranks)
            )
            for ranks in groups
        ]

    def _created(self, ranks: Sequence[int]) -> Callable[..., list[Lanes]]:
        def run(*tensors: tf.Tensor) -> list[Lanes]:
            given = [list(tensors[first : first + len(ranks)]) for first in range(0, len(tensors), len(ranks))]
            given += [
                [self._copies.get(id(tensor), [tensor] * self.size)[self._here.index(rank)] for rank in ranks]
                for tensor in self.whole.captured_inputs
            ]
            return self.partitioned.create(given, ranks, self.size, self._collectives(ranks))

        return run

    def _collectives(self, ranks: Sequence[int]) -> Collectives:
        if self._job is not None:
            return self._job[1]
        return Simulated() if len(ranks) == self.size else Queued(ranks[0], self._queues)

    def run(self, *tensors: Any, of_rank: Callable[[int], Sequence[Any]] | None = None) -> list[list[Any]]:
        """Run the ranks' functions.

        Args:
            tensors: What each is given.
            of_rank: A function that returns what a rank is given, if ranks are given different tensors.

        Returns:
            The results, of each rank.
        """
        given = [
            [tf.convert_to_tensor(tensor) for tensor in (tensors if of_rank is None else of_rank(rank))]
            for rank in self._here
        ]
        if len(self._functions) == 1:
            found = self._functions[0](*(tensor for lanes in zip(*given, strict=True) for tensor in lanes))
            return [[lanes[place] for lanes in found] for place in range(len(self._here))]
        pool = futures.ThreadPoolExecutor(self.size)
        calls = [pool.submit(function, *own) for function, own in zip(self._functions, given, strict=True)]
        waiting = futures.wait(calls, 20).not_done
        for queue in (queue for queues in self._queues for queue in queues) if waiting else ():
            queue.close(cancel_pending_enqueues=True)
        pool.shutdown()
        assert not waiting, f"Ranks wait for others: {[call.exception() for call in calls]}"
        return [call.exception() or [lanes[0] for lanes in call.result()] for call in calls]

    def check(self, *tensors: Any) -> None:
        """Compare all ranks' results and variables with those of the function."""
        wanted = tf.nest.flatten(self.whole(*map(tf.convert_to_tensor, tensors)))
        for results in self.run(*tensors):
            for result, want in zip(results, wanted, strict=True):
                same(result, want)
        for variable, *own in self.variables:
            for copy in own:
                same(copy, variable)


def same(result: Any, wanted: Any) -> None:
    """Compare two tensors; what is not a number equals itself."""
    if isinstance(result, Exception):
        raise result
    result, wanted = tf.convert_to_tensor(result), tf.convert_to_tensor(wanted)
    assert result.dtype == wanted.dtype
    assert result.shape == wanted.shape
    if wanted.dtype.is_floating:
        tf.debugging.assert_equal(tf.math.is_nan(result), tf.math.is_nan(wanted))
        result, wanted = (tf.where(tf.math.is_nan(tensor), 0, tensor) for tensor in (result, wanted))
        tf.debugging.assert_near(tf.where(result == wanted, 0, result), tf.where(result == wanted, 0, wanted))
    else:
        tf.debugging.assert_equal(result, wanted)


class Queued:
    """Collectives of one rank whose function is in a graph of its own.

    As collectives of a job, they run in the order in which they were created, also beside other stateful operations.

    Args:
        rank: The rank.
        queues: The queue from each rank to each rank.
    """

    are_compiled = False

    def __init__(self, rank: int, queues: Sequence[Sequence[Any]]) -> None:
        self._rank, self._queues = rank, queues

    def _exchanged(self, kind: str, tensors: Sequence[Lanes]) -> list[list[tf.Tensor]]:
        """Return the tensors of all ranks, of each tensor."""
        with tf.control_dependencies([_stateful()]):
            message = tf.stack([tf.constant(kind), *(tf.io.serialize_tensor(lane) for (lane,) in tensors)])
        sent = [queue.enqueue(message) for queue in self._queues[self._rank]]
        with tf.control_dependencies(sent):
            received = [queues[self._rank].dequeue() for queues in self._queues]
        with tf.control_dependencies(
            [
                _stateful(received),
                *(
                    tf.debugging.assert_equal(other[0], kind, "The ranks must take part in the same collective")
                    for other in received
                ),
            ]
        ):
            return [
                [
                    tf.ensure_shape(tf.io.parse_tensor(other[place + 1], lane.dtype), [None] * lane.shape.rank)
                    for other in received
                ]
                for place, (lane,) in enumerate(tensors)
            ]

    def reduce(self, reduction: str, tensors: Sequence[Lanes]) -> list[Lanes]:
        """See `Collectives.reduce`."""
        return [[lanes[0]] for lanes in Simulated().reduce(reduction, self._exchanged(reduction, tensors))]

    def gather(self, tensors: Sequence[Lanes]) -> list[Lanes]:
        """See `Collectives.gather`."""
        return [[lanes[0]] for lanes in Simulated().gather(self._exchanged("gather", tensors))]

    def of_first(self, tensors: Sequence[Lanes]) -> list[Lanes]:
        """See `Collectives.of_first`."""
        return [[lanes[0]] for lanes in Simulated().of_first(self._exchanged("of_first", tensors))]


def _stateful(after: Sequence[tf.Tensor] = ()) -> tf.Operation:
    """Return an operation that TensorFlow runs in the order in which stateful operations were created."""
    with tf.control_dependencies(after):
        return tf.raw_ops.Empty(shape=[0], dtype=tf.int32, init=False).op

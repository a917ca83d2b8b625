"""Participation in other ranks' collectives that this rank's script does not call itself.

There are two cases. In the first, the rank has called `join()`: it has no more data, and participates in the other
ranks' collectives until all ranks have joined. In the second, ranks have entered mismatched collectives
(`hvkeras.collectives.mismatch`): each rank participates in the other's collective so that both complete, and then
raises.

From the counts of entered plans (`hvkeras.job.plans`), the control server determines which collective waits for which
rank. It sends this rank the plans to enter, with their calls. The rank makes the same calls with neutral values: zeros
in a sum, no rows in a gather.
"""

from __future__ import annotations

import collections
import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from hvkeras.backends.interface import Reduction
from hvkeras.compat import graphs
from hvkeras.control.messages import AllJoined, CallDescriptions, Participate
from hvkeras.errors import UnsupportedError, explain
from hvkeras.job.plans import Plan
from hvkeras.job.session import Session, current_session

TICK = 0.5  # seconds between checks for the end of the job


def join() -> int:
    """Signal that this rank has no more data, and participate in collectives until all ranks have joined.

    This rank contributes zeros to the other ranks' sums (averages still divide by the total number of ranks) and no
    rows to their gathers. It does not affect minima and maxima. Until all ranks have joined, each collective takes
    about 20 ms.

    Example:
        for batch in batches:        # not as many on every rank
            train_step(batch)
        last = hvd.join()

    Returns:
        The rank that joined last.

    Raises:
        NotInitializedError: `init()` was not called.
        UnsupportedError: The other ranks enter a collective in which a joined rank cannot participate: a broadcast
            from this rank, or a collective of tensors whose shapes are unknown at trace time.
        PeerError: A rank failed, or left the job without joining.
    """
    session = current_session()
    if session.control is None:
        return 0
    session.control.start_join()
    proxy = session.part(ProxyCollectives)
    last: int | None = None
    while last is None:
        session.control.raise_if_ended()
        proxy.raise_failure()
        try:
            last = proxy.last.get(timeout=TICK)
        except queue.Empty:
            continue
    proxy.finish(session.control.raise_if_ended)
    return last


class ProxyCollectives:
    """Proxy for collectives that other ranks wait for, each in its own thread because their order is unknown.

    Attributes:
        last: Receives the rank that joined last, once all ranks have joined.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self.last: queue.Queue[int] = queue.Queue()
        self._functions: dict[tuple[str, bool], tuple[Plan, Any, list[Any]]] = {}
        self._locks: dict[str, threading.Lock] = collections.defaultdict(threading.Lock)
        self._threads: set[threading.Thread] = set()
        self._failures: list[BaseException] = []
        self._is_closed = False

    def close(self) -> None:
        """Close the session's part; later failures of collectives are ignored."""
        self._is_closed = True

    def on_message(self, message: Participate | AllJoined) -> None:
        """Handle a message from the control server; called from the channel's thread."""
        if isinstance(message, AllJoined):
            self.last.put(message.last)
        else:
            self._start(message)

    def finish(self, check: Callable[[], None]) -> None:
        """Wait for outstanding collectives.

        Args:
            check: Raises if the job has ended.
        """
        for thread in self._threads:
            while thread.is_alive():
                thread.join(TICK)
                check()
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise the error of a failed collective, if any."""
        if self._failures:
            raise self._failures.pop()

    def _start(self, message: Participate) -> None:
        thread = threading.Thread(target=self._participate, args=(message,), name="hvkeras-join", daemon=True)
        self._threads = {one for one in self._threads if one.is_alive()} | {thread}
        thread.start()

    def _participate(self, message: Participate) -> None:
        try:
            with graphs.eagerly(), self._locks[message.key]:
                # A rank can be the root of a refused broadcast, but not of a broadcast after it has joined.
                function_key = message.key, message.refused
                if function_key not in self._functions:
                    plan = Plan.described(message.plan)
                    self._functions[function_key] = plan, *_collectives(
                        self._session, plan, message.calls, message.refused)
                plan, function, neutral = self._functions[function_key]
                for _ in range(message.times):
                    with self._session.entries.entering(plan):
                        function(*neutral)
        except Exception as error:
            control = self._session.control
            if self._is_closed or (control is not None and control.cause is not None):
                return  # the job and its engine have ended
            if message.refused:
                raise  # no rank called join(); the job ends if the refused collective cannot complete
            self._failures.append(error)


def _collectives(session: Session, plan: Plan, calls: CallDescriptions, refused: bool) -> tuple[Any, list[Any]]:
    """Return a function that runs a plan's calls, and its neutral arguments.

    The function is a graph if the first rank has entered the plan in a graph, where the plan's calls run concurrently.
    Other ranks may enter the plan in eager mode.
    """
    steps: list[tuple[str, list[Any], int, bool]] = []
    neutral: list[Any] = []
    for call in calls:
        arguments = [_argument(argument) for argument in call["arguments"]]
        if call["operation"] == "broadcast" and arguments[0] == session.topology.rank and not refused:
            raise UnsupportedError(explain("The root of a broadcast must not have called join()",
                                           "broadcast from another rank, or before join()", collective=plan.label))
        reduction = next((each for each in arguments if isinstance(each, Reduction)), Reduction.SUM)
        several = isinstance(call["data"], list)
        own = [_neutral(tensor, reduction, call["operation"] in ("allgather", "alltoall"), plan)
               for tensor in (call["data"] if several else [call["data"]])]
        steps.append((call["operation"], arguments, len(own), several))
        neutral += own

    def make(*tensors: Any) -> list[Any]:
        results, rest = [], list(tensors)
        for operation, arguments, count, several in steps:
            own, rest = rest[:count], rest[count:]
            results.append(getattr(session.backend, operation)(own if several else own[0], *arguments))
        return results

    if all(call["eager"] for call in calls):
        return make, neutral
    specs = [tf.TensorSpec.from_tensor(tensor) for tensor in neutral]
    return tf.function(make, autograph=False).get_concrete_function(*specs), neutral


def _argument(argument: Any) -> Any:
    if isinstance(argument, dict) and "reduction" in argument:
        return Reduction(argument["reduction"])
    if isinstance(argument, dict):  # the splits of an alltoall
        return tf.zeros(argument["shape"], argument["dtype"])
    return tuple(argument) if isinstance(argument, list) else argument


def _neutral(tensor: dict[str, Any], reduction: Reduction, no_rows: bool, plan: Plan) -> Any:
    """Return a tensor that does not affect the result of a collective."""
    dtype, shape = tf.as_dtype(tensor["dtype"]), tensor["shape"]
    if shape is not None and no_rows:
        shape = [0, *shape[1:]]
    if shape is None or None in shape:
        raise UnsupportedError(explain("Ranks can participate for others only in collectives with known shapes",
                                       "give tensors shapes that are known when the function is traced",
                                       collective=plan.label, shape=shape))
    if reduction is Reduction.PRODUCT:
        return tf.ones(shape, dtype)
    if reduction in (Reduction.MIN, Reduction.MAX):
        highest, lowest = (np.inf, -np.inf) if dtype.is_floating else (dtype.max, dtype.min)
        return tf.fill(shape, tf.constant(highest if reduction is Reduction.MIN else lowest, dtype))
    return tf.zeros(shape, dtype)

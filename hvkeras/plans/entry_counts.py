"""How often this rank entered each plan (`hvkeras.plans.plan`).

Just before a collective runs, the rank counts that it enters the plan. The counts travel with the heartbeats of the
control channel, and its server sees who waits for whom in what: it names ranks that run different plans, ranks that
are late, and ranks that have left (`hvkeras.control.waits`).
"""

from __future__ import annotations

import collections
import contextlib
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from hvkeras.compat import graphs
from hvkeras.compat.tensorflow_errors import DuplicateNameError
from hvkeras.errors import explain
from hvkeras.plans.plan import Call, Plan
from hvkeras.progress.user_code import call_site, innermost

if TYPE_CHECKING:
    from hvkeras.backends.interface import Backend


OWED_WITHIN = 20.0  # seconds that a refused plan takes to end, at most (hvkeras.control.join)


class EntryCounts:
    """How often this rank entered each plan.

    Counted in graphs by a variable, in eager mode and in sessions of TensorFlow 1 by a number, and in what XLA compiles
    by the engine.
    """

    def __init__(self) -> None:
        self.backend: Backend | None = None  # the engine, which counts in what XLA compiles
        self._lock = threading.Lock()
        self._plans: dict[str, Plan] = {}
        self._eager: dict[str, int] = {}
        self._graph: dict[str, graphs.FunctionCounter] = {}
        self._compiled: dict[str, Backend] = {}
        self._in_sessions: set[str] = set()
        self._refusable: set[str] = set()
        self._stuck: set[str] = set()
        self._flying: set[str] = set()
        self._owed: set[str] = set()
        self._for_others: collections.Counter[str] = collections.Counter()
        self._left = threading.Condition(self._lock)
        self._calls: dict[str, list[dict[str, Any]]] = {}
        self._sites: dict[str, str] = {}

    @contextlib.contextmanager
    def entering(self, plan: Plan, calls: Sequence[Call] | None = None, can_raise: bool = True) -> Iterator[None]:
        """Counts one entry of `plan`, now or whenever the graph under construction runs, before the body's ops.

        Example:
            call = Call("allgather", tensor, plan.key, plan.ranks)
            with current_job().entries.entering(plan, [call]):
                gathered = call.run(backend)

        Args:
            plan: What the collectives belong to.
            calls: All that the body makes, which a rank that has joined makes as well; an empty list where they have
                plans of their own. None if this rank takes part for others, who have described them.
            can_raise: Whether the body ends where others make these calls for it; else the job ends if ranks enter
                different plans.

        Raises:
            DuplicateNameError: Another thread is in the same plan, in eager mode.
        """
        if not can_raise:
            self._stuck.add(plan.key)
        if tf.executing_eagerly():
            with self._in_flight(plan, calls):
                self._count(plan.key)
                yield
            return
        if graphs.compiled_by_xla():
            backend = self.backend
            assert backend is not None, "a job counts with its engine"
            with self._lock:
                self._know(plan, calls)
                self._compiled[plan.key] = backend
            backend.enter(plan.key)
            yield
            return
        if graphs.of_functions():
            counted = self._count_in_function(plan, calls)
        else:
            with self._lock:
                self._know(plan, calls)
                self._in_sessions.add(plan.key)
            counted = tf.numpy_function(functools.partial(self._count, plan.key), [], [])
        with tf.control_dependencies([counted]):
            yield

    def _know(self, plan: Plan, calls: Sequence[Call] | None) -> None:
        """Keeps what a plan consists of, and where this rank enters it; called under the lock."""
        if plan.key not in self._plans:
            self._plans[plan.key] = plan
        if calls is None:
            return
        if plan.key not in self._calls:
            self._calls[plan.key] = [call.describe() for call in calls]
        traced = graphs.traced_stack()
        self._sites[plan.key] = call_site() if traced is None else innermost(traced)

    def forget(self, counts: Mapping[str, int]) -> list[str]:
        """Forgets plans that this rank has entered so often and no more, and that no graph enters.

        Args:
            counts: How often, by the plan's key.

        Returns:
            The keys of those forgotten; whoever enters one again describes it anew, and counts from zero.
        """
        with self._lock:
            busy = {*self._graph, *self._compiled, *self._in_sessions, *self._flying, *self._owed,
                    *(+self._for_others)}
            gone = [key for key, count in counts.items() if key not in busy and self._eager.get(key, 0) == count]
            for key in gone:
                for kept in (self._plans, self._eager, self._calls, self._sites, self._for_others):
                    kept.pop(key, None)
            return gone

    @contextlib.contextmanager
    def _in_flight(self, plan: Plan, calls: Sequence[Call] | None) -> Iterator[None]:
        """Keeps other threads out of the plan meanwhile: nobody could tell the two apart on other ranks.

        A thread that takes part for other ranks is waited for, since it will not be long.
        """
        for_others = calls is None
        with self._left:
            if for_others:
                self._for_others[plan.key] += 1
            else:
                self._left.wait_for(lambda: not self._for_others[plan.key] and plan.key not in self._owed, OWED_WITHIN)
                self._owed.discard(plan.key)
                if plan.key in self._flying:
                    raise DuplicateNameError(explain(
                        "Collectives that are in flight at once must have names of their own", "pass each thread's own"
                        " name=, or call one after the other", collective=plan.label))
                self._flying.add(plan.key)
            self._know(plan, calls)
        try:
            yield
        finally:
            with self._left:
                if for_others:
                    self._for_others[plan.key] -= 1
                    self._owed.discard(plan.key)
                    self._left.notify_all()
                else:
                    self._flying.discard(plan.key)

    def _count(self, key: str) -> None:
        with self._lock:
            self._eager[key] = self._eager.get(key, 0) + 1

    def _count_in_function(self, plan: Plan, calls: Sequence[Call] | None) -> Any:
        with self._lock:
            self._know(plan, calls)
            if plan.key not in self._graph:
                self._graph[plan.key] = graphs.FunctionCounter()
            return self._graph[plan.key].count_one()

    def _close_counts(self) -> None:
        """Lets go of the counters whose functions are all gone, and keeps what they counted; called under the lock."""
        for key in [key for key, counter in self._graph.items() if not counter.is_captured]:
            self._eager[key] = self._eager.get(key, 0) + self._graph.pop(key).read()

    def site(self, key: str) -> str:
        """Where the user's code entered a plan last, or was traced to do so; "" where it did not.

        Args:
            key: The plan's key.
        """
        return self._sites.get(key, "")

    def set_refusable(self, key: str) -> None:
        """Learns that graphs raise if a plan is refused (`hvkeras.collectives.mismatch`)."""
        self._refusable.add(key)

    def set_owed(self, keys: Sequence[str]) -> None:
        """Learns the keys of plans that this rank takes part in for others, before it may enter them by itself."""
        with self._lock:
            self._owed.update(keys)

    def can_raise(self, key: str) -> bool:
        """Whether this rank raises wherever it enters a plan, if that is refused."""
        with self._lock:
            in_graphs = key in self._graph or key in self._in_sessions
            return key not in self._compiled and key not in self._stuck and (not in_graphs or key in self._refusable)

    def calls(self) -> dict[str, list[dict[str, Any]]]:
        """What this rank's plans consist of, by key; see `Call.describe`."""
        with self._lock:
            return dict(self._calls)

    def snapshot(self) -> dict[str, tuple[int, Plan]]:
        """Reads every count; called from the heartbeat thread."""
        with self._lock:
            self._close_counts()
            plans, eager = dict(self._plans), dict(self._eager)
            graph, compiled = dict(self._graph), dict(self._compiled)
        return {
            key: (eager.get(key, 0) + (graph[key].read() if key in graph else 0)
                  + (compiled[key].entered(key) if key in compiled else 0), plan)
            for key, plan in plans.items()
        }

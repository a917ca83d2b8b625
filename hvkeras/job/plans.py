"""Plans describe what ranks are about to communicate, so that a mismatch is an error and never a hang.

A `Plan` describes the tensors of one collective (or of one step's gradients). Its key is a hash of that description, so
data of different plans can never mix. `EntryCounts` counts how often this rank has entered each plan, just before the
collective runs. Heartbeats of the control channel carry the counts, so the server detects which rank waits for which
other rank, and in which plan. It reports ranks with different plans, stragglers, and ranks that have left
(`hvkeras.control.deadlocks`).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from hvkeras.backends.capabilities import CompiledByXla
from hvkeras.backends.interface import Backend, Reduction
from hvkeras.compat import graphs
from hvkeras.compat.tensorflow_errors import DuplicateNameError
from hvkeras.control.location import call_site
from hvkeras.errors import UsageError, explain
from hvkeras.frames import innermost

OUTSTANDING_WITHIN = 20.0  # maximum seconds until a rejected plan ends (hvkeras.control.join)


@dataclass(frozen=True)
class Plan:
    """Description of one collective.

    Attributes:
        operation: `allreduce`, `allgather`, `broadcast`, `gradients`, ...
        names: Names of the tensors, in the order of fusion; only for messages, since Keras numbers the names of equal
            models differently (`dense`, `dense_1`).
        dtypes: Names of the tensors' dtypes.
        shapes: Static shapes of the tensors; an unknown dimension is None, and so is an unknown shape.
        ranks: Global ranks that participate, ascending.
        label: Name in messages: `gradients of Adam`, `allreduce "loss"`.
        identity: Distinguishes collectives with equal descriptions: the name from the user, or an index among the equal
            collectives of a graph.
        how: Qualifiers of the operation, which must also match on all ranks: `sum`, `from 0`.
        hint: Fix for a collective that only one rank calls by mistake; "" for none.
        is_of_model: Whether the tensors are those of a complete model: if they differ, so do the models.
    """

    operation: str
    names: tuple[str, ...] = field(compare=False)
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int | None, ...] | None, ...]
    ranks: tuple[int, ...]
    label: str = field(compare=False)
    identity: str = ""
    how: str = ""
    hint: str = field(default="", compare=False)
    is_of_model: bool = field(default=False, compare=False)

    @classmethod
    def of(
        cls, operation: str, tensors: Sequence[Any], ranks: Sequence[int], label: str,
        names: Sequence[str] | None = None, identity: str = "", how: str = "", hint: str = "",
        is_of_model: bool = False,
    ) -> Plan:
        """Create the plan for tensors that are about to be communicated.

        Args:
            tensors: `tf.Tensor`s, eager or symbolic.
            ranks: Global ranks that participate.
            label: Name in messages.
            names: Names of the tensors; `label` by default.
            identity: Distinguishes collectives with equal descriptions.
            how: Qualifiers of the operation.
            hint: Fix for a collective that only one rank calls by mistake.
            is_of_model: Whether the tensors are those of a complete model.
        """
        return cls(
            operation,
            tuple(names if names is not None else [label] * len(tensors)),
            tuple(tensor.dtype.name for tensor in tensors),
            tuple(None if tensor.shape.rank is None else tuple(tensor.shape.as_list()) for tensor in tensors),
            tuple(ranks),
            label, identity, how, hint, is_of_model,
        )

    @property
    def text(self) -> str:
        """Operation with its qualifiers: `allreduce sum`."""
        return f"{self.operation} {self.how}".rstrip()

    @functools.cached_property
    def key(self) -> str:
        """Hash of the description: equal on all ranks if and only if their plans are equal."""
        content = json.dumps([self.text, self.identity, self.dtypes, self.shapes, self.ranks])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def describe(self) -> dict[str, Any]:
        """Return the plan as JSON-compatible data for the control channel; `kinds` are the dtypes and shapes."""
        kinds = [f"{dtype}{'[?]' if shape is None else list(shape)}"
                 for dtype, shape in zip(self.dtypes, self.shapes, strict=True)]
        return {**dataclasses.asdict(self), "ranks": list(self.ranks), "kinds": kinds}

    @classmethod
    def described(cls, text: Mapping[str, Any]) -> Plan:
        """Create a plan from the result of `describe` on another rank."""
        shapes = tuple(None if shape is None else tuple(shape) for shape in text["shapes"])
        lists = {name: tuple(text[name]) for name in ("names", "dtypes", "ranks")}
        return cls(**{**{one.name: text[one.name] for one in dataclasses.fields(cls)}, **lists, "shapes": shapes})


class Call:
    """One backend call of a plan, which can be sent to another rank.

    Args:
        operation: Name of a method of `hvkeras.backends.interface.Backend`.
        data: First argument of the method: a tensor, or a list of tensors.
        *arguments: Remaining arguments of the method.
    """

    def __init__(self, operation: str, data: Any, *arguments: Any) -> None:
        self.operation, self.data, self.arguments = operation, data, arguments

    def run(self, engine: Any) -> Any:
        """Call the method on a backend."""
        return getattr(engine, self.operation)(self.data, *self.arguments)

    @property
    def tensors(self) -> list[Any]:
        """Tensors that are communicated."""
        return self.data if isinstance(self.data, list) else [self.data]

    def on(self, tensors: list[Any]) -> Call:
        """Return the same call on other tensors, as many as before."""
        return Call(self.operation, tensors if isinstance(self.data, list) else tensors[0], *self.arguments)

    def describe(self) -> dict[str, Any]:
        """Return the call as JSON-compatible data; a tensor is represented by its dtype and static shape."""
        return {"operation": self.operation, "eager": tf.executing_eagerly(),
                "arguments": [_plain(argument) for argument in self.arguments],
                "data": [_plain(tensor) for tensor in self.data] if isinstance(self.data, list) else _plain(self.data)}


def _plain(argument: Any) -> Any:
    if isinstance(argument, Reduction):
        return {"reduction": argument.value}
    if hasattr(argument, "dtype"):
        shape = None if argument.shape.rank is None else argument.shape.as_list()
        return {"dtype": argument.dtype.name, "shape": shape}
    return list(argument) if isinstance(argument, tuple) else argument


class EntryCounts:
    """Counts of how often this rank has entered each plan.

    The counter is a variable in graphs, and a Python integer in eager mode and in sessions of TensorFlow 1. In code
    compiled by XLA, the engine counts.

    Attributes:
        backend: The engine, which counts in code compiled by XLA.
        is_stale: Whether these counts belong to a former generation of ranks.
    """

    def __init__(self) -> None:
        self.backend: Backend | None = None
        self._lock = threading.Lock()
        self._plans: dict[str, Plan] = {}
        self._eager: dict[str, int] = {}
        self._graph: dict[str, graphs.FunctionCounter] = {}
        self._compiled: dict[str, tuple[CompiledByXla, int]] = {}  # with the count at registration
        self._in_sessions: set[str] = set()
        self._raises_in_graphs: set[str] = set()
        self._cannot_raise: set[str] = set()
        self._in_flight_keys: set[str] = set()
        self._outstanding: set[str] = set()
        self._for_others: collections.Counter[str] = collections.Counter()
        self._left = threading.Condition(self._lock)
        self._calls: dict[str, list[dict[str, Any]]] = {}
        self._sites: dict[str, str] = {}
        self.is_stale = False

    @contextlib.contextmanager
    def entering(self, plan: Plan, calls: Sequence[Call] | None = None, can_raise: bool = True,
                 after: Sequence[Any] | None = None) -> Iterator[None]:
        """Count one entry to `plan` before the ops of the body, now or in every run of the graph under construction.

        Example:
            call = Call("allgather", tensor, plan.key, plan.ranks)
            with current_session().entries.entering(plan, [call]):
                gathered = call.run(backend)

        Args:
            plan: Plan of the collectives.
            calls: All backend calls of the body; joined ranks make the same calls. An empty list if the calls have
                their own plans. None if this rank participates for another rank, which has described the calls.
            can_raise: Whether the body can raise after other ranks took part in a rejected plan. Otherwise the job ends
                if ranks enter different plans.
            after: Tensors that the body depends on; those of the first call by default. A graph counts the entry after
                they are computed, since it may run out of data or wait in another plan before.

        Raises:
            DuplicateNameError: Another thread is in the same plan (in eager mode).
        """
        if not can_raise:
            self._cannot_raise.add(plan.key)
        if tf.executing_eagerly():
            with self._in_flight(plan, calls):
                self._count(plan.key)
                yield
            return
        if graphs.compiled_by_xla():
            backend = self.backend
            assert isinstance(backend, CompiledByXla), "operations.require_kernels rejects other backends"
            with self._lock:
                self._register(plan, calls)
                if plan.key not in self._compiled:
                    self._compiled[plan.key] = backend, backend.entered(plan.key)
            backend.enter(plan.key)
            yield
            return
        after = after if after is not None else calls[0].tensors if calls else ()
        with tf.control_dependencies([tensor for tensor in after if tf.is_symbolic_tensor(tensor)]):
            if graphs.from_function_graphs():
                counted = self._count_in_function(plan, calls)
            else:
                with self._lock:
                    self._register(plan, calls)
                    self._in_sessions.add(plan.key)
                counted = tf.numpy_function(functools.partial(self._count_in_session, plan.key), [], [])
        with tf.control_dependencies([counted]):
            yield

    def _register(self, plan: Plan, calls: Sequence[Call] | None) -> None:
        """Store a plan, its calls, and the call site; called with the lock held."""
        if plan.key not in self._plans:
            self._plans[plan.key] = plan
        if calls is None:
            return
        if plan.key not in self._calls:
            self._calls[plan.key] = [call.describe() for call in calls]
        traced = graphs.traced_stack()
        self._sites[plan.key] = call_site() if traced is None else innermost(traced)

    def forget(self, counts: Mapping[str, int]) -> list[str]:
        """Remove plans that this rank has entered exactly as often as given, and that no graph contains.

        Args:
            counts: Numbers of entries, by plan key.

        Returns:
            Keys of the removed plans. The next entry to such a plan registers it again and counts from zero.
        """
        with self._lock:
            busy = {*self._graph, *self._compiled, *self._in_sessions, *self._in_flight_keys, *self._outstanding,
                    *(+self._for_others)}
            removed = [key for key, count in counts.items() if key not in busy and self._eager.get(key, 0) == count]
            for key in removed:
                for table in (self._plans, self._eager, self._calls, self._sites, self._for_others):
                    table.pop(key, None)
            return removed

    @contextlib.contextmanager
    def _in_flight(self, plan: Plan, calls: Sequence[Call] | None) -> Iterator[None]:
        """Keep other threads out of the plan meanwhile, since other ranks could not distinguish the two entries.

        Wait for a thread that participates for other ranks, which does not take long.
        """
        for_others = calls is None
        with self._left:
            if for_others:
                self._for_others[plan.key] += 1
            else:
                self._left.wait_for(lambda: not self._for_others[plan.key] and plan.key not in self._outstanding,
                                    OUTSTANDING_WITHIN)
                self._outstanding.discard(plan.key)
                if plan.key in self._in_flight_keys:
                    raise DuplicateNameError(explain(
                        "Collectives that run at the same time must have different names", "pass a different name= in"
                        " each thread, or call one after the other", collective=plan.label))
                self._in_flight_keys.add(plan.key)
            self._register(plan, calls)
        try:
            yield
        finally:
            with self._left:
                if for_others:
                    self._for_others[plan.key] -= 1
                    self._outstanding.discard(plan.key)
                    self._left.notify_all()
                else:
                    self._in_flight_keys.discard(plan.key)

    def _count(self, key: str) -> None:
        with self._lock:
            self._eager[key] = self._eager.get(key, 0) + 1

    def _count_in_session(self, key: str) -> None:
        if self.is_stale:
            raise UsageError(explain(
                "A graph of a TensorFlow 1 session has the ranks for which it was built, and they have changed",
                "pass the session to hvd.elastic.TensorFlowState, or use tf.function"))
        self._count(key)

    def _count_in_function(self, plan: Plan, calls: Sequence[Call] | None) -> Any:
        with self._lock:
            self._register(plan, calls)
            if plan.key not in self._graph:
                self._graph[plan.key] = graphs.FunctionCounter()
            return self._graph[plan.key].count_one()

    def _close_counts(self) -> None:
        """Release the counters of functions that no longer exist, and keep their counts; called with the lock held."""
        for key in [key for key, counter in self._graph.items() if not counter.is_captured]:
            self._eager[key] = self._eager.get(key, 0) + self._graph.pop(key).read()

    def site(self, key: str) -> str:
        """Return the call site where the user's code last entered or traced a plan; "" if there is none."""
        return self._sites.get(key, "")

    def set_refusable(self, key: str) -> None:
        """Record that graphs raise if a plan is rejected (`hvkeras.collectives.mismatch`)."""
        self._raises_in_graphs.add(key)

    def set_outstanding(self, keys: Sequence[str]) -> None:
        """Record plans in which this rank must participate for other ranks before it enters them itself."""
        with self._lock:
            self._outstanding.update(keys)

    def settled(self, timeout: float) -> bool:
        """Wait until this rank has participated in all outstanding plans of other ranks.

        Args:
            timeout: Seconds to wait.

        Returns:
            False after a timeout.
        """
        with self._left:
            return self._left.wait_for(lambda: not self._outstanding and not any(self._for_others.values()), timeout)

    def can_raise(self, key: str) -> bool:
        """Return whether every entry of this rank to a plan raises if that plan is rejected."""
        with self._lock:
            in_graphs = key in self._graph or key in self._in_sessions
            may_raise = key not in self._compiled and key not in self._cannot_raise
            return may_raise and (not in_graphs or key in self._raises_in_graphs)

    def calls(self) -> dict[str, list[dict[str, Any]]]:
        """Return the calls of this rank's plans, by plan key; see `Call.describe`."""
        with self._lock:
            return dict(self._calls)

    def snapshot(self) -> dict[str, tuple[int, Plan]]:
        """Return all counts with their plans, by plan key; called from the heartbeat thread."""
        with self._lock:
            self._close_counts()
            plans, eager = dict(self._plans), dict(self._eager)
            graph, compiled = dict(self._graph), dict(self._compiled)
        return {
            key: (eager.get(key, 0) + (graph[key].read() if key in graph else 0)
                  + (_entered(key, *compiled[key]) if key in compiled else 0), plan)
            for key, plan in plans.items()
        }


def _entered(key: str, backend: CompiledByXla, before: int) -> int:
    return backend.entered(key) - before

"""Plans describe what ranks are about to communicate, so that a difference is an error and never a hang.

A `Plan` describes what one collective (or one step's gradients) consists of. Its key is a hash of that content, so data
of different plans can never mix. `EntryCounts` counts how often this rank has entered each plan, just before the
collective runs. The counts travel with the heartbeats of the control channel, so that the server sees which rank waits
for which other rank, and in which plan. It names ranks that run different plans, ranks that are late, and ranks that
have left (`hvkeras.control.deadlocks`).
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
from hvkeras.control.location import call_site, innermost
from hvkeras.errors import UsageError, explain

OUTSTANDING_WITHIN = 20.0  # maximum seconds until a refused plan ends (hvkeras.control.join)


@dataclass(frozen=True)
class Plan:
    """The content of one collective.

    Attributes:
        operation: What it does: `allreduce`, `allgather`, `broadcast`, `gradients`, ...
        names: The tensors' names, in the order in which they are fused; only for messages, since Keras numbers the
            names of equal models differently (`dense`, `dense_1`).
        dtypes: The names of their dtypes.
        shapes: Their static shapes; an unknown dimension is None, and so is an unknown shape.
        ranks: The global ranks that participate, ascending.
        label: Its name in messages: `gradients of Adam`, `allreduce "loss"`.
        identity: Distinguishes it from collectives with the same content: the name that the user gave it, or its
            number among the equal collectives of a graph.
        how: Qualifiers of the operation, on which ranks must agree as well: `sum`, `from 0`.
        hint: What to write instead if one rank makes it alone by mistake; "" for nothing.
        is_of_model: Whether its tensors are those of a whole model: if they differ, so do the models.
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
        """Describes tensors that are about to be communicated.

        Args:
            operation: What it does.
            tensors: `tf.Tensor`s, eager or symbolic.
            ranks: The global ranks that participate.
            label: Its name in messages.
            names: The tensors' names; `label` alone for a single unnamed tensor.
            identity: Distinguishes it from collectives with the same content.
            how: Qualifiers of the operation.
            hint: What to write instead if one rank makes it alone by mistake.
            is_of_model: Whether its tensors are those of a whole model.
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
        """The operation with its qualifiers: `allreduce sum`."""
        return f"{self.operation} {self.how}".rstrip()

    @functools.cached_property
    def key(self) -> str:
        """A hash of the content: equal on all ranks exactly when their plans are."""
        content = json.dumps([self.text, self.identity, self.dtypes, self.shapes, self.ranks])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def describe(self) -> dict[str, Any]:
        """The plan as plain data for the control channel; `kinds` holds what must be equal about the tensors."""
        kinds = [f"{dtype}{'[?]' if shape is None else list(shape)}"
                 for dtype, shape in zip(self.dtypes, self.shapes, strict=True)]
        return {**dataclasses.asdict(self), "ranks": list(self.ranks), "kinds": kinds}

    @classmethod
    def described(cls, text: Mapping[str, Any]) -> Plan:
        """Creates a plan from another rank's description.

        Args:
            text: What `describe` returned there.
        """
        shapes = tuple(None if shape is None else tuple(shape) for shape in text["shapes"])
        lists = {name: tuple(text[name]) for name in ("names", "dtypes", "ranks")}
        return cls(**{**{one.name: text[one.name] for one in dataclasses.fields(cls)}, **lists, "shapes": shapes})


class Call:
    """One of the backend calls that a plan consists of; it can be described to another rank.

    Args:
        operation: The name of a method of `hvkeras.backends.interface.Backend`.
        data: Its first argument: a tensor, or a list of them.
        *arguments: Its other arguments.
    """

    def __init__(self, operation: str, data: Any, *arguments: Any) -> None:
        self.operation, self.data, self.arguments = operation, data, arguments

    def run(self, engine: Any) -> Any:
        """Makes the call.

        Args:
            engine: The backend.
        """
        return getattr(engine, self.operation)(self.data, *self.arguments)

    @property
    def tensors(self) -> list[Any]:
        """The tensors that are communicated."""
        return self.data if isinstance(self.data, list) else [self.data]

    def on(self, tensors: list[Any]) -> Call:
        """The same call on other tensors.

        Args:
            tensors: The same number of tensors.
        """
        return Call(self.operation, tensors if isinstance(self.data, list) else tensors[0], *self.arguments)

    def describe(self) -> dict[str, Any]:
        """The call as plain data; a tensor is represented by its dtype and static shape."""
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
    """Counts how often this rank has entered each plan.

    A variable counts in graphs, a Python integer in eager mode and in sessions of TensorFlow 1, and the engine in code
    compiled by XLA.

    Attributes:
        backend: The engine, which counts in code compiled by XLA.
        is_over: Whether the ranks that these counts belong to have changed.
    """

    def __init__(self) -> None:
        self.backend: Backend | None = None
        self._lock = threading.Lock()
        self._plans: dict[str, Plan] = {}
        self._eager: dict[str, int] = {}
        self._graph: dict[str, graphs.FunctionCounter] = {}
        self._compiled: dict[str, tuple[CompiledByXla, int]] = {}  # with the count of earlier jobs of this process
        self._in_sessions: set[str] = set()
        self._refusable: set[str] = set()
        self._cannot_raise: set[str] = set()
        self._in_flight_keys: set[str] = set()
        self._outstanding: set[str] = set()
        self._for_others: collections.Counter[str] = collections.Counter()
        self._left = threading.Condition(self._lock)
        self._calls: dict[str, list[dict[str, Any]]] = {}
        self._sites: dict[str, str] = {}
        self.is_over = False

    @contextlib.contextmanager
    def entering(self, plan: Plan, calls: Sequence[Call] | None = None, can_raise: bool = True,
                 after: Sequence[Any] | None = None) -> Iterator[None]:
        """Counts one entry to `plan` before the body's ops, now or whenever the graph under construction runs.

        Example:
            call = Call("allgather", tensor, plan.key, plan.ranks)
            with current_session().entries.entering(plan, [call]):
                gathered = call.run(backend)

        Args:
            plan: The plan to which the collectives belong.
            calls: All calls that the body makes; joined ranks make them as well. An empty list if the calls have plans
                of their own. None if this rank participates on behalf of others, who have described the calls.
            can_raise: Whether the body completes if other ranks make these calls on its behalf; otherwise, the job ends
                if ranks enter different plans.
            after: The tensors without which the body cannot begin; those of the first call by default. A graph counts
                the entry after them: it may run out of data, or wait in another plan, before they are computed.

        Raises:
            DuplicateNameError: Another thread is in the same plan, in eager mode.
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
            assert isinstance(backend, CompiledByXla), "others are refused before (operations.require_kernels)"
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
        """Stores what a plan consists of, and where this rank enters it; called with the lock held."""
        if plan.key not in self._plans:
            self._plans[plan.key] = plan
        if calls is None:
            return
        if plan.key not in self._calls:
            self._calls[plan.key] = [call.describe() for call in calls]
        traced = graphs.traced_stack()
        self._sites[plan.key] = call_site() if traced is None else innermost(traced)

    def forget(self, counts: Mapping[str, int]) -> list[str]:
        """Forgets plans that this rank has entered exactly as often as given, and that no graph enters.

        Args:
            counts: The numbers of entries, by plan key.

        Returns:
            The keys of the forgotten plans; the next entry to one describes it again and counts from zero.
        """
        with self._lock:
            busy = {*self._graph, *self._compiled, *self._in_sessions, *self._in_flight_keys, *self._outstanding,
                    *(+self._for_others)}
            removed = [key for key, count in counts.items() if key not in busy and self._eager.get(key, 0) == count]
            for key in removed:
                for kept in (self._plans, self._eager, self._calls, self._sites, self._for_others):
                    kept.pop(key, None)
            return removed

    @contextlib.contextmanager
    def _in_flight(self, plan: Plan, calls: Sequence[Call] | None) -> Iterator[None]:
        """Keeps other threads out of the plan in the meantime: other ranks could not tell the two entries apart.

        It waits for a thread that participates on behalf of other ranks, since that does not take long.
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
        if self.is_over:
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
        """Releases counters whose functions are all gone, and keeps their counts; called with the lock held."""
        for key in [key for key, counter in self._graph.items() if not counter.is_captured]:
            self._eager[key] = self._eager.get(key, 0) + self._graph.pop(key).read()

    def site(self, key: str) -> str:
        """Where the user's code last entered a plan, or was traced to do so; "" if it did not.

        Args:
            key: The plan's key.
        """
        return self._sites.get(key, "")

    def set_refusable(self, key: str) -> None:
        """Records that graphs raise if a plan is refused (`hvkeras.collectives.mismatch`)."""
        self._refusable.add(key)

    def set_outstanding(self, keys: Sequence[str]) -> None:
        """Records the keys of plans in which this rank participates for others before it may enter them itself."""
        with self._lock:
            self._outstanding.update(keys)

    def settled(self, timeout: float) -> bool:
        """Waits until this rank has participated in all plans that it owes to others; returns False at the timeout.

        Args:
            timeout: Seconds to wait.
        """
        with self._left:
            return self._left.wait_for(lambda: not self._outstanding and not any(self._for_others.values()), timeout)

    def can_raise(self, key: str) -> bool:
        """Whether this rank raises everywhere it enters a plan if that plan is refused."""
        with self._lock:
            in_graphs = key in self._graph or key in self._in_sessions
            may_raise = key not in self._compiled and key not in self._cannot_raise
            return may_raise and (not in_graphs or key in self._refusable)

    def calls(self) -> dict[str, list[dict[str, Any]]]:
        """The calls that this rank's plans consist of, by plan key; see `Call.describe`."""
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
                  + (_entered(key, *compiled[key]) if key in compiled else 0), plan)
            for key, plan in plans.items()
        }


def _entered(key: str, backend: CompiledByXla, before: int) -> int:
    return backend.entered(key) - before

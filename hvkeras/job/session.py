"""State of this process in a job: the current `Session`, and the `Process`, which may have several in succession."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from hvkeras.backends import backend_class
from hvkeras.backends.refusing import ForkedBackend
from hvkeras.control.launch_environments import Launch
from hvkeras.errors import NotInitializedError, UsageError, explain
from hvkeras.host.forks import at_exit, at_script_end, detach_in_children, end_without_libraries
from hvkeras.host.program import Program
from hvkeras.host.topology import Topology, topology_from_hosts
from hvkeras.job.autograph import exclude_from_autograph
from hvkeras.job.failure import FailureHooks, FailurePolicy
from hvkeras.job.link import JobLink
from hvkeras.settings import Settings

if TYPE_CHECKING:
    from hvkeras.backends.interface import Backend
    from hvkeras.control.client import ControlClient
    from hvkeras.job.plans import EntryCounts

@dataclass(frozen=True)
class Change:
    """Membership change of an elastic job.

    Attributes:
        size: Number of ranks after the change.
        commit: Commit that training resumed from.
        repeated: Number of steps after that commit that are repeated; None if unknown.
        seconds: Seconds from the detection of the change until training resumed.
        why: The failure that caused the change; "" if workers have joined or left.
    """

    size: int
    commit: int
    repeated: int | None
    seconds: float
    why: str = ""

    def sentence(self) -> str:
        """Return a description without a subject: `resumes with 3 ranks from commit 12, 0.1 s after ...`."""
        repeats = "" if not self.repeated else f", and repeats {self.repeated} step{'s' * (self.repeated > 1)}"
        return (f"resumes with {self.size} rank{'s' * (self.size > 1)} from commit {self.commit}, {self.seconds:.1f} s"
                f" after {self.why or 'new hosts were found or others removed'}{repeats}")

    def to_message(self) -> dict[str, Any]:
        """Return the attributes as a dictionary."""
        return dataclasses.asdict(self)


def changes() -> list[Change]:
    """Return the membership changes of this process, oldest first; a resuming generation appends its own."""
    return this_process().part(_Changes)


class _Changes(list[Change]):
    """Membership changes of this process, a part of `Process`."""


Part = TypeVar("Part")
_numbers = itertools.count(1)


@dataclass(eq=False)
class Session:
    """State of this process in a job from `init()` to `shutdown()`, or in one generation of an elastic job.

    Example:
        session = Session(FakeBackend(), EntryCounts(), topology_from_hosts(0, ["a", "a"]))
        with session.made_current():
            assert hvd.size() == 2

    Attributes:
        entries: Counts of entered collectives.
        topology: Ranks and hosts.
        launch: How this process was launched.
        control: Control client; None for a single process.
        hooks: Failure hooks; None for a single process.
        gpus: Device of each rank, see `hvkeras.backends.interface.Start`; empty for a single process.
        requested: Requested backend; None for that of the settings.
        number: Sequence number of this session in this process; each generation of an elastic job has a new one.
    """

    backend: Backend
    entries: EntryCounts
    topology: Topology = field(default_factory=lambda: topology_from_hosts(0, [socket.gethostname()]))
    launch: Launch = field(default_factory=lambda: Launch("none"))
    settings: Settings = field(default_factory=Settings)
    control: ControlClient | None = None
    hooks: FailureHooks | None = None
    gpus: tuple[str, ...] = ()
    requested: str | None = None
    number: int = field(default_factory=lambda: next(_numbers))
    _parts: dict[Any, Any] = field(default_factory=dict)

    def part(self, kind: Callable[[Session], Part]) -> Part:
        """Return the session's instance of a class, created on first use.

        Args:
            kind: The class. If it has a method `close()`, this is called when the session ends.
        """
        if kind not in self._parts:
            self._parts.setdefault(kind, kind(self))
        found: Part = self._parts[kind]
        return found

    @property
    def is_standby(self) -> bool:
        """Return whether this process waits to join a running elastic job; its rank and sizes are then provisional."""
        return self.launch.rendezvous.kind == "standby"

    @contextlib.contextmanager
    def made_current(self) -> Iterator[None]:
        """Make this the current session within the `with` block, then close it."""
        before, _process.session = _process.session, self
        try:
            yield
        finally:
            self.close()
            _process.session = before

    def close(self) -> None:
        """Close the session's parts in reverse order of creation, stop the engine, and leave the job.

        `startup.shutdown` first stops the session's background tasks.
        """
        for instance in reversed(list(self._parts.values())):
            if hasattr(instance, "close"):
                instance.close()
        self._parts.clear()
        if _process.session is self:
            _process.session = None
        self.backend.stop()
        if self.hooks is not None:
            self.hooks.release()
        if self.control is not None:
            self.control.leave()


class Process:
    """State that exists once per process, across sessions.

    Attributes:
        session: Current session; None before `init()` and after `shutdown()`.
        link: Connection to the other ranks, which persists after `shutdown()`; None for a single process.
    """

    def __init__(self) -> None:
        self.session: Session | None = None
        self.link: JobLink | None = None
        self._engines: dict[str, Backend] = {}  # by name; some cannot start twice
        self._program: Program | None = None
        self._entries: EntryCounts | None = None
        self._parts: dict[Any, Any] = {}
        self._has_exit_functions = False
        self._inherited: Any = None  # in a process forked from a rank: objects that must not be freed
        detach_in_children(self)

    def part(self, kind: Callable[[], Part]) -> Part:
        """Return the process's instance of a class, created on first use."""
        if kind not in self._parts:
            self._parts.setdefault(kind, kind())
        found: Part = self._parts[kind]
        return found

    @property
    def program(self) -> Program:
        """Program and environment of this process before the first `init()`."""
        assert self._program is not None
        return self._program

    @property
    def entries(self) -> EntryCounts:
        """Counts of entered collectives, shared by all sessions of the same link."""
        from hvkeras.job.plans import EntryCounts  # noqa: PLC0415 - imports TensorFlow; settings come first

        self._entries = self._entries or EntryCounts()
        return self._entries

    def engine(self, name: str) -> Backend:
        """Return the engine with this name, created on first use."""
        if name not in self._engines:
            self._engines[name] = backend_class(name)()
        return self._engines[name]

    def remember_program(self) -> None:
        """Store the program of this process before its environment changes."""
        self._program = self._program or Program.of_this_process()

    def connect(self, launch: Launch, settings: Settings, policy: FailurePolicy) -> JobLink:
        """Return the connection to the other ranks, created on first use.

        Raises:
            UsageError: The launch differs from that of the existing link.
            HvkerasError: As for `JobLink`.
        """
        if self.link is not None:
            if launch != self.link.launch:
                raise UsageError(explain("init() must find the launch environment of its first call",
                                         "do not change the launcher's variables between init() calls",
                                         first=self.link.launch, now=launch))
            return self.link
        self.link = JobLink(launch, settings, policy)
        if not self._has_exit_functions:
            self._has_exit_functions = True
            at_exit(self._exit)
            at_script_end(self._script_ended)
        return self.link

    def disconnect(self) -> None:
        """Leave the current generation of an elastic job; unlike `shutdown()`, this closes the link as well."""
        link = self.link
        if link is not None:
            link.await_abort()
        if self.session is not None:
            self.session.close()
        if link is not None:
            link.close()
        if self._entries is not None:
            self._entries.is_stale = True
        self.link = self._entries = None

    def require_rank(self) -> None:
        """Check that this process was not forked from a rank.

        Raises:
            UsageError: It was forked from a rank.
        """
        if self._inherited is not None:
            raise UsageError(explain("Only the process of a rank can join a job, not one forked from it",
                                     "call init() and collectives in the rank's process"))

    def in_child(self) -> None:
        """Detach a forked process from the job: it can query its rank, but does not participate."""
        session = self.session
        waits_to_join = session is not None and session.is_standby
        if self._inherited is not None or (self.link is None and not waits_to_join):
            return
        end_without_libraries()
        self._inherited = self.link, self._entries, self._engines
        self.link, self._entries, self._engines = None, None, {}
        if session is not None:
            self._inherited = *self._inherited, session.backend, session.entries, session.control, session.hooks
            session.entries = type(session.entries)()
            session.entries.backend = session.backend = ForkedBackend(session.backend)
            session.control = session.hooks = None

    def _exit(self) -> None:
        link = self.link
        if link is None:
            return
        if self.session is not None and link.client.cause is None:
            self.session.backend.stop()
        link.exit()

    def _script_ended(self) -> None:
        if self.link is not None:
            self.link.script_ended()


_process = Process()


def this_process() -> Process:
    """Return the state of this process."""
    return _process


def current_session() -> Session:
    """Return the current session.

    Raises:
        NotInitializedError: `init()` has not been called, or `shutdown()` has been called.
    """
    if _process.session is None:
        raise NotInitializedError(explain("hvkeras must be initialized first", "call hvd.init() before this"))
    return _process.session


def is_initialized() -> bool:
    """Return whether `init()` has been called, and no `shutdown()` since."""
    return _process.session is not None


exclude_from_autograph(__name__)

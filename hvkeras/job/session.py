"""This process's part in a job: the `Session`, and the `Process` that has one session after another."""

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
    """A change of the ranks of an elastic job.

    Attributes:
        size: The number of ranks since then.
        commit: The commit that training went on from.
        repeated: How many steps after that commit were lost, and are repeated; None if that is not known.
        seconds: Seconds from the moment when the change was noticed until training went on.
        why: Who was lost and why; "" if workers have joined or left.
    """

    size: int
    commit: int
    repeated: int | None
    seconds: float
    why: str = ""

    def sentence(self) -> str:
        """Describes the change, without a subject: `goes on with 3 ranks from commit 12, 0.1 s after ...`."""
        repeats = "" if not self.repeated else f", and repeats {self.repeated} step{'s' * (self.repeated > 1)}"
        return (f"goes on with {self.size} rank{'s' * (self.size > 1)} from commit {self.commit}, {self.seconds:.1f} s"
                f" after {self.why or 'new hosts were found or others removed'}{repeats}")

    def to_message(self) -> dict[str, Any]:
        """Returns the attributes by name."""
        return dataclasses.asdict(self)


def changes() -> list[Change]:
    """Returns the changes that this process has gone through, the latest last; whoever goes through one appends it."""
    return this_process().part(_Changes)


class _Changes(list[Change]):
    """Those of this process."""


Part = TypeVar("Part")
_numbers = itertools.count(1)


@dataclass(eq=False)
class Session:
    """This process's part in a job, from `init()` to `shutdown()`, or in one generation of an elastic job.

    Example:
        session = Session(FakeBackend(), EntryCounts(), topology_from_hosts(0, ["a", "a"]))
        with session.made_current():
            assert hvd.size() == 2

    Attributes:
        backend: The started engine.
        entries: The counts of entered collectives.
        topology: Ranks and hosts.
        launch: How this process was launched.
        settings: The settings in force.
        control: The control client; None for a single process.
        hooks: The hooks that end the job when a rank fails; None for a single process.
        gpus: What each rank computes on, see `hvkeras.backends.interface.Start`; empty for a single process.
        requested: The backend that was asked for; None for the one that the settings say.
        number: The number of this session among those of this process; each generation of an elastic job has another.
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
        """Returns what a class keeps for this session: its one object, which is made when it is first asked for.

        Args:
            kind: The class. If it has a method `close()`, that is called when the session ends.
        """
        if kind not in self._parts:
            self._parts.setdefault(kind, kind(self))
        found: Part = self._parts[kind]
        return found

    @property
    def is_standby(self) -> bool:
        """Whether this process waits to join a running elastic job: its rank and sizes are expected ones."""
        return self.launch.rendezvous.kind == "standby"

    @contextlib.contextmanager
    def made_current(self) -> Iterator[None]:
        """Makes this the session of the process for the body, after which it is closed."""
        before, _process.session = _process.session, self
        try:
            yield
        finally:
            self.close()
            _process.session = before

    def close(self) -> None:
        """Ends what is kept for this session, the last made first; then stops the engine, and leaves the ranks.

        `startup.shutdown` first stops what accompanies the session.
        """
        for kept in reversed(list(self._parts.values())):
            if hasattr(kept, "close"):
                kept.close()
        self._parts.clear()
        if _process.session is self:
            _process.session = None
        self.backend.stop()
        if self.hooks is not None:
            self.hooks.release()
        if self.control is not None:
            self.control.leave()


class Process:
    """What this process has one of, whatever sessions it has one after the other.

    Attributes:
        session: The present session; None before `init()` and after `shutdown()`.
        link: The link to the ranks, which outlives `shutdown()`; None for a single process.
    """

    def __init__(self) -> None:
        self.session: Session | None = None
        self.link: JobLink | None = None
        self._engines: dict[str, Backend] = {}  # by name; some cannot start twice
        self._program: Program | None = None
        self._entries: EntryCounts | None = None
        self._parts: dict[Any, Any] = {}
        self._has_exit_functions = False
        self._inherited: Any = None  # in a process forked from a rank: what must not be freed
        detach_in_children(self)

    def part(self, kind: Callable[[], Part]) -> Part:
        """Returns what a class keeps for this process: its one object, which is made when it is first asked for."""
        if kind not in self._parts:
            self._parts.setdefault(kind, kind())
        found: Part = self._parts[kind]
        return found

    @property
    def program(self) -> Program:
        """What this process runs, as it was before the first `init()`."""
        assert self._program is not None
        return self._program

    @property
    def entries(self) -> EntryCounts:
        """The counts of entered collectives, of all sessions that have the same link."""
        from hvkeras.job.plans import EntryCounts  # noqa: PLC0415 - imports TensorFlow; settings come first

        self._entries = self._entries or EntryCounts()
        return self._entries

    def engine(self, name: str) -> Backend:
        """Returns the engine of this name, which is made when it is first asked for."""
        if name not in self._engines:
            self._engines[name] = backend_class(name)()
        return self._engines[name]

    def remember_program(self) -> None:
        """Remembers what this process runs, before anything changes its environment."""
        self._program = self._program or Program.of_this_process()

    def connect(self, launch: Launch, settings: Settings, policy: FailurePolicy) -> JobLink:
        """Returns the link to the ranks, and makes one if there is none.

        Raises:
            UsageError: The launch is not that of the present link.
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
        """Leaves the present ranks of an elastic job for good; unlike `shutdown()`, it gives up the link as well."""
        link = self.link
        if link is not None:
            link.await_abort()
        if self.session is not None:
            self.session.close()
        if link is not None:
            link.close()
        if self._entries is not None:
            self._entries.is_over = True
        self.link = self._entries = None

    def require_rank(self) -> None:
        """Ensures that this process was not forked from a rank.

        Raises:
            UsageError: It was.
        """
        if self._inherited is not None:
            raise UsageError(explain("Only a rank's own process can join a job, not one that it has forked",
                                     "call init() and what communicates in the rank's own process"))

    def in_child(self) -> None:
        """Makes a process that was forked from a rank none: it knows its rank, and takes no part in the job."""
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
    """Returns what this process has one of."""
    return _process


def current_session() -> Session:
    """Returns the present session, for public functions, which take none.

    Raises:
        NotInitializedError: `init()` has not been called, or `shutdown()` has.
    """
    if _process.session is None:
        raise NotInitializedError(explain("hvkeras must be initialised first", "call hvd.init() before this"))
    return _process.session


def is_initialized() -> bool:
    """Returns whether `init()` has been called and `shutdown()` has not."""
    return _process.session is not None


exclude_from_autograph(__name__)

"""Groups of ranks: their shared memory on each host, and the links between hosts."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hvkeras.backends.native.network import Link, Network
from hvkeras.backends.native.ucx import Costs
from hvkeras.errors import MachineError, explain
from hvkeras.host.machine import SHARED_MEMORY, SharedMemory

if TYPE_CHECKING:
    from hvkeras.backends.interface import Start
    from hvkeras.backends.native.engine import Engine


_OWNED = re.compile(r"(hvkeras-[0-9a-f]{16})\.owner")


# Sizes of the C++ core, in bytes: Channel, Hosts and Matching in backends/native/core.
_SLOT_SIZES = 64 * 1024, 512 * 1024
_SLOTS_OF_A_ROUND = 16 * 1024**2
_BUFFERS_BETWEEN_HOSTS = 7
_MATCHING = 5_300_000
_OF_A_RANK = 1024  # counters, and padding


def shared_memory_of(ranks: int, hosts: int) -> int:
    """Return the bytes of the shared memory of a group, with at most a few pages more than the core allocates.

    Args:
        ranks: The group's ranks on this host.
        hosts: The group's hosts.
    """
    smallest, largest = _SLOT_SIZES
    slot = max(smallest, min(largest, _SLOTS_OF_A_ROUND // ranks), 64 * ranks)
    between = _BUFFERS_BETWEEN_HOSTS * (slot + _OF_A_RANK + 1024 * hosts) if hosts > 1 else 0
    return _MATCHING + 2 * slot * (ranks + 1) + ranks * _OF_A_RANK + between


@contextlib.contextmanager
def owned_name() -> Iterator[str]:
    """Reserve a name for new shared memory, which this process owns within the context.

    A lock file with this name is locked until the context or the process ends. A process that acquires the lock later
    can be sure that the owner has ended, even if it was in another container.

    Yields:
        The name, such as `/hvkeras-0123456789abcdef`.

    Raises:
        MachineError: The lock file cannot be created.
    """
    while True:
        name = f"hvkeras-{secrets.token_hex(8)}"
        path = SHARED_MEMORY / f"{name}.owner"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise MachineError(explain(f"The native engine needs shared memory ({error.strerror})", "free space in"
                                       f" {SHARED_MEMORY}, or use the backend tfdist", path=str(path))) from error
        try:
            # Before the file was locked, another process may have removed it as abandoned.
            if _locks(descriptor) and path.exists():
                yield f"/{name}"
                return
        finally:
            path.unlink(missing_ok=True)
            os.close(descriptor)


def remove_abandoned() -> None:
    """Remove shared memory of this user's processes that were killed before they could unlink its name."""
    for path in SHARED_MEMORY.glob("hvkeras-*.owner"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                found, match = os.fstat(descriptor), _OWNED.fullmatch(path.name)
                if match and stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and _locks(descriptor):
                    for left in (match[1], f"{match[1]}.notifier", path.name):
                        path.with_name(left).unlink(missing_ok=True)
            finally:
                os.close(descriptor)


def _locks(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Groups:
    """Groups of one engine, by their ranks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numbers: dict[tuple[int, ...], int] = {}  # never reused, because graphs contain them
        self._open: set[tuple[int, ...]] = set()
        self._opened = 0  # since the start; the same on all ranks, unlike the numbers if the ranks have changed

    def number(self, ranks: Sequence[int]) -> int:
        """Return the number that identifies a group in graphs."""
        return self._numbers[tuple(ranks)]

    def ranks(self, number: int) -> tuple[int, ...]:
        """Return the ranks of the group of this number."""
        return next(ranks for ranks, known in self._numbers.items() if known == number)

    def open(self, ranks: Sequence[int], start: Start, network: Network | None, label: str) -> None:
        """Open a group, if it is not open yet. Called by all ranks of the job, members or not.

        The first member on each host is the host's leader. With several hosts, the leaders first connect to each other.
        Then the members on each host map the same new shared memory, whose name is unlinked afterwards.

        Args:
            start: The start parameters of the backend.
            network: The network; None if all ranks of the job are on one host.
            label: A name that is the same on all ranks, and different for each start.

        Raises:
            MachineError: There is not enough memory, or a host cannot be reached.
            PeerError: Not all ranks participated.
        """
        members = tuple(ranks)
        if members in self._open:
            return
        self._opened += 1
        opening = _Opening(self._engine, members, self._numbers.setdefault(members, len(self._numbers)), start,
                           f"{label}: number {self._opened}, of ranks {[*ranks]},")
        self._open.add(members)
        if network is not None and opening.spans_hosts:
            opening.connect(network)
        opening.map_memory()

    def close(self, ranks: Sequence[int], reason: str) -> None:
        """Close a group, if it is open. Its collectives in flight fail for this reason."""
        if tuple(ranks) in self._open:
            self._open.discard(tuple(ranks))
            self._engine.close_group(self._numbers[tuple(ranks)], reason)

    def close_all(self) -> None:
        """Close all groups."""
        for ranks in tuple(self._open):
            self.close(ranks, "the engine was shut down")
        self._opened = 0


class _Opening:
    """Steps in which all ranks open a group."""

    def __init__(self, engine: Engine, members: tuple[int, ...], number: int, start: Start, label: str) -> None:
        topology = start.topology
        self._engine, self._members, self._number, self._start = engine, members, number, start
        self._label = label
        self._rank = topology.rank
        self._costs = Costs()
        self._hosts = [topology.host_numbers[member] for member in members]
        self._here = [member for member, host in zip(members, self._hosts, strict=True)
                      if host == topology.host_numbers[self._rank]]
        self._leaders = [members[self._hosts.index(host)] for host in dict.fromkeys(self._hosts)]

    @property
    def spans_hosts(self) -> bool:
        return len(self._leaders) > 1

    def connect(self, network: Network) -> None:
        """Connect the leaders; all ranks participate in the exchanges over the control channel."""
        link = Link(network, self._number, len(self._leaders)) if self._rank in self._leaders else None
        try:
            own = [link.address, link.ports, secrets.randbits(32)] if link is not None else None
            answers = self._gather("ends", own)
            addresses, ports, marks = zip(*(answers[leader] for leader in self._leaders), strict=True)
            claims = "" if link is None else link.connect(
                self._leaders.index(self._rank), addresses, ports,
                [f"rank {leader} on {self._start.topology.hosts[leader]}" for leader in self._leaders], marks[0],
                self._start.settings.start_timeout)
            answers = self._gather("connections", claims)
            if link is not None:
                link.close_port([answers[leader] for leader in self._leaders])
            if network.costs is None:
                host = self._leaders.index(self._rank) if link is not None else -1
                network.measure_costs(link, host, f"{self._label} costs")
        except BaseException:
            if link is not None:
                link.close()
            raise

        assert network.costs is not None
        self._costs = network.costs

    def map_memory(self) -> None:
        """Map the memory that the members on a host share, and start their engines."""
        leads = self._rank in self._here[:1]
        if leads:
            remove_abandoned()
            self._require_memory()
        with owned_name() if leads else contextlib.nullcontext("") as own:
            self._map_memory_of(own)

    def _require_memory(self) -> None:
        needed = shared_memory_of(len(self._here), len(self._leaders))
        memory = SharedMemory.here()
        if objection := memory.objection(needed, len(self._here)):
            raise MachineError(explain("The native engine must have room for the shared memory of ranks"
                                       f" {[*self._members]}: {objection}", f"{memory.fix(needed)}, or use the backend"
                                       " tfdist"))

    def _map_memory_of(self, own: str) -> None:
        leads, names = own != "", self._gather("name", own)
        name = names[self._here[0]] if self._rank in self._here else ""
        try:
            if leads:
                self._open_group(name, create=True)
                if len(self._here) == 1:
                    self._engine.unlink(name)
            self._gather("made", True)
            if self._rank in self._here[1:]:
                self._open_group(name, create=False)
            self._gather("mapped", True)
        finally:
            if name:  # the surviving ranks also remove what a killed rank has created
                self._engine.unlink(name)
                remove_abandoned()

    def _open_group(self, name: str, create: bool) -> None:
        topology = self._start.topology
        oversubscribed = 0 < topology.local_cores < topology.local_size
        self._engine.open_group(self._number, name, create, self._members.index(self._rank), self._members, self._hosts,
                                oversubscribed, self._costs)

    def _gather(self, name: str, value: Any) -> list[Any]:
        control, timeout = self._start.control, self._start.settings.start_timeout
        return [value] if control is None else control.gather(f"{self._label} {name}", value, timeout)

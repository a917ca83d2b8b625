"""Driver of an elastic job: decides which workers form each generation of ranks, and when the job ends.

The driver is a state machine without clocks, threads or processes. `ElasticMembership` feeds it events, and executes
the actions that it returns. Every event has a handler in every phase (`HANDLERS`).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from hvkeras.launcher.placement import Rank, WorkerId

MAX_CONSECUTIVE_FAILED_STARTS = 3  # of newcomers; then no others are started


class Phase(enum.Enum):
    """State of the job."""

    FORMING = "the members of a generation connect to each other"
    TRAINING = "they train"
    CHANGING = "they train until their next commit, where workers join or leave"
    GATHERING = "the generation has ended, and its members become ready for the next one"
    WAITING = "too few workers are ready for the next one"
    ENDED = "the job has ended"


class Event(enum.Enum):
    """Event of a worker or of the hosts."""

    READY = "a worker is ready for the next generation"
    JOINED = "a member has connected to all others"
    LOST = "a worker has failed, was killed or is unreachable"
    DONE = "a worker has ended with exit code 0"
    HOSTS = "the hosts that may be used have changed"
    LATE = "a worker takes too long to connect, or to become ready"
    TIMEOUT = "too few workers were ready for too long"


@dataclass
class Worker:
    """State of a worker process.

    Attributes:
        host: The name of its host, as the user wrote it.
        is_local: True on the launcher's host, where the files of commits are.
        rank: Its rank in the current generation; None if it has none.
        commit: The last commit that it holds, while it is ready; None while it is not.
        has_joined: True if it has connected to all others in this generation.
        is_leaving: True if it leaves at the next commit, as its machine is being preempted.
        slot: The lowest slot that no other living worker of its host had when it was added.
    """

    number: WorkerId
    host: str
    is_local: bool = True
    rank: Rank | None = None
    commit: int | None = None
    has_joined: bool = False
    is_leaving: bool = False
    slot: int = 0


@dataclass(frozen=True)
class Form:
    """Form a generation of these workers, in rank order."""

    workers: tuple[Worker, ...]
    commit: int


@dataclass(frozen=True)
class Abort:
    """End the current generation: the remaining members leave their collectives."""


@dataclass(frozen=True)
class Announce:
    """Notify the members that workers join or leave at the next commit."""


@dataclass(frozen=True)
class StartWorkers:
    """Start the given number of workers on each host."""

    counts: Mapping[str, int]


@dataclass(frozen=True)
class Kill:
    """Kill worker processes."""

    workers: tuple[WorkerId, ...]


@dataclass(frozen=True)
class Finish:
    """End the job; with a reason, as failed."""

    reason: str = ""


Action = Form | Abort | Announce | StartWorkers | Kill | Finish


@dataclass
class Driver:
    """State machine that decides which workers form the next generation.

    Args:
        least: Minimum number of ranks.
        most: Maximum number of ranks; None for as many as there are slots.
        slots: The slots of each usable host.
        resets: Remaining number of resets: of times that another generation may follow.
        counts_changes: Count every reset, as `horovodrun` does, where a failure and the replacement of the lost worker
            are one. If False, count failures only.

    Attributes:
        actions: The actions to execute, in order; the caller empties it.
        failed_starts: Newcomers that have failed in a row before they joined, since the hosts last changed.
        full: The size of the current generation, including replacements of lost ranks.
        is_counted: True if the end of the current generation was counted as a reset.
    """

    least: int
    most: int | None
    slots: Mapping[str, int]
    resets: int
    counts_changes: bool = False
    phase: Phase = Phase.FORMING
    workers: dict[WorkerId, Worker] = field(default_factory=dict)
    actions: list[Action] = field(default_factory=list)
    failed_starts: int = 0
    full: int = 0
    is_counted: bool = False

    def handle(self, event: Event, number: WorkerId | None = None) -> None:
        """Handle an event.

        Args:
            number: The worker that it concerns, if any.
        """
        HANDLERS[self.phase, event](self, None if number is None else self.workers.get(number))

    def add(self, worker: Worker) -> None:
        """Add a started worker, in the lowest free slot of its host."""
        taken = {other.slot for other in self.workers.values() if other.host == worker.host}
        worker.slot = min(set(range(len(taken) + 1)) - taken)
        self.workers[worker.number] = worker
        if worker.rank is not None:
            self.full += 1

    @property
    def members(self) -> list[Worker]:
        """Living members of the current generation, by rank."""
        return sorted((worker for worker in self.workers.values() if worker.rank is not None),
                      key=lambda worker: worker.rank or 0)

    # Handlers.

    def ignore(self, worker: Worker | None) -> None:
        """Do nothing."""

    def offer(self, worker: Worker | None) -> None:
        """Handle a newcomer that is ready, or a member that has left the generation at a commit or after an error."""
        if worker is None:
            return
        if worker.rank is None:
            if self.phase is Phase.TRAINING:
                self._announce()
            return
        if self.phase is not Phase.CHANGING:
            if self.counts_changes and not self._may_reset():
                return
            self.actions.append(Abort())
        self.phase = Phase.GATHERING
        self.gather(worker)

    def join(self, worker: Worker | None) -> None:
        """Handle a member that has connected to all others; when all have, training starts."""
        if worker is not None:
            worker.has_joined = True
        if all(member.has_joined for member in self.members):
            self.phase = Phase.TRAINING
            if any(self._is_newcomer(other) and other.commit is not None for other in self.workers.values()):
                self._announce()
            self._start_missing()

    def lose(self, worker: Worker | None) -> None:
        """Handle the loss of a worker; that of a member ends the generation."""
        if worker is None:
            return
        del self.workers[worker.number]
        if worker.rank is None:
            self.failed_starts += 1
            self._start_missing()
            return
        if self._may_reset():
            self.actions.append(Abort())
            self.phase = Phase.GATHERING
            self.gather(None)

    def lose_ready(self, worker: Worker | None) -> None:
        """Handle the loss of a worker before the next generation is formed."""
        if worker is not None:
            del self.workers[worker.number]
            self.failed_starts += worker.rank is None
        self.gather(None)

    def leave(self, worker: Worker | None) -> None:
        """Handle the successful exit of a worker; when all members have exited, the job is done."""
        if worker is None:
            return
        del self.workers[worker.number]
        if worker.rank is not None and not self.members:
            self._finish("")

    def use_hosts(self, worker: Worker | None) -> None:  # noqa: ARG002 - the signature of handlers
        """Handle a change of the hosts: start workers on new ones; workers on removed ones leave at the next commit."""
        self.failed_starts = 0
        self.full = min(self.full, sum(self.slots.values()))
        unneeded = tuple(number for number in sorted(self._surplus()) if self.workers[number].rank is None)
        if unneeded:
            for number in unneeded:
                del self.workers[number]
            self.actions.append(Kill(unneeded))
        self._start_missing()
        if self.phase is Phase.TRAINING and any(member.number in self._surplus() for member in self.members):
            self._announce()
        elif self.phase is Phase.WAITING:  # there may be slots for enough workers now
            self.gather(None)

    def gather(self, worker: Worker | None) -> None:  # noqa: ARG002 - the signature of handlers
        """Form the next generation once all members of the last one are ready or lost."""
        if any(member.commit is None for member in self.members):
            return
        if not any(other.commit is not None and other.commit >= 0 for other in self.workers.values()):
            self._finish("no rank is left that could resume from a commit")
            return
        surplus = self._surplus()
        ready = [other for other in self.workers.values() if other.commit is not None and other.number not in surplus]
        # Rank 0 must hold the newest commit. Of several such workers, members precede newcomers, then those on the
        # launcher's host precede others, and the lowest rank decides.
        ready.sort(key=lambda other: (-(other.commit or 0), other.rank is None, not other.is_local,
                                      other.rank if other.rank is not None else other.number))
        ready = ready[: self.most]
        if len(ready) < self.least:
            self.phase = Phase.WAITING
            self._start_missing()
            if self.failed_starts >= MAX_CONSECUTIVE_FAILED_STARTS and all(
                    other.commit is not None for other in self.workers.values()):
                self._finish(f"at least {self.least} ranks are needed, {len(ready)} are left, and"
                             f" {self.failed_starts} workers in a row that should have replaced others have failed")
            return
        leaving = tuple(sorted(surplus & {number for number, other in self.workers.items()
                                          if other.commit is not None}))
        shrinks = any(self.workers[number].rank is not None for number in leaving)
        if shrinks or len(ready) > self.full:
            if self.counts_changes and not self.is_counted and not self._may_reset():
                return
            self.full = len(ready)
        for number in leaving:
            del self.workers[number]
        if leaving:
            self.actions.append(Kill(leaving))
        self._form(ready)

    def evict_straggler(self, worker: Worker | None) -> None:
        """Kill a member that the others wait for."""
        if worker is None or worker.rank is None:
            return
        if not worker.has_joined if self.phase is Phase.FORMING else worker.commit is None:
            self.actions.append(Kill((worker.number,)))

    def give_up(self, worker: Worker | None) -> None:  # noqa: ARG002 - the signature of handlers
        """End a job that has waited too long for workers."""
        ready = sum(other.commit is not None for other in self.workers.values())
        self._finish(f"at least {self.least} ranks are needed, {ready} are ready, and no others joined in time")

    # Helpers of the handlers.

    def _is_newcomer(self, worker: Worker) -> bool:
        return worker.rank is None

    def _announce(self) -> None:
        self.phase = Phase.CHANGING
        self.actions.append(Announce())

    def _may_reset(self) -> bool:
        """Count a reset; end the job if the limit is exceeded. Return whether the job may continue."""
        self.resets, self.is_counted = self.resets - 1, True
        if self.resets < 0:
            change = "have changed" if self.counts_changes else "have failed"
            self._finish(f"ranks {change} more often than --reset-limit allows")
        return self.resets >= 0

    def _finish(self, reason: str) -> None:
        self.phase = Phase.ENDED
        self.actions.append(Finish(reason))

    def _form(self, ready: list[Worker]) -> None:
        commit = ready[0].commit or 0
        if any(worker.rank is None for worker in ready):
            self.failed_starts = 0
        for rank, worker in enumerate(ready):
            worker.rank, worker.commit, worker.has_joined = Rank(rank), None, False
        self.phase, self.is_counted = Phase.FORMING, False
        self.actions.append(Form(tuple(ready), commit))
        self._start_missing()

    @property
    def leaving(self) -> set[WorkerId]:
        """Numbers of the workers that will not be in the next generation."""
        return self._surplus()

    def _surplus(self) -> set[WorkerId]:
        """Return the workers that leave, and the youngest ones of each host that has more workers than slots."""
        surplus = {number for number, worker in self.workers.items() if worker.is_leaving}
        for host in {worker.host for worker in self.workers.values()}:
            numbers = sorted(worker.number for worker in self.workers.values()
                             if worker.host == host and not worker.is_leaving)
            surplus.update(numbers[self.slots.get(host, 0):])
        return surplus

    def _start_missing(self) -> None:
        if self.phase is Phase.ENDED or self.failed_starts >= MAX_CONSECUTIVE_FAILED_STARTS:
            return
        staying = [worker for worker in self.workers.values() if worker.number not in self._surplus()]
        room = (sum(self.slots.values()) if self.most is None else self.most) - len(staying)
        counts: dict[str, int] = {}
        for host, slots in self.slots.items():
            free = slots - sum(worker.host == host for worker in staying)
            if min(free, room) > 0:
                counts[host] = min(free, room)
                room -= counts[host]
        if counts:
            self.actions.append(StartWorkers(counts))


HANDLERS = {
    (Phase.FORMING, Event.READY): Driver.offer,
    (Phase.FORMING, Event.JOINED): Driver.join,
    (Phase.FORMING, Event.LOST): Driver.lose,
    (Phase.FORMING, Event.DONE): Driver.leave,
    (Phase.FORMING, Event.HOSTS): Driver.use_hosts,
    (Phase.FORMING, Event.LATE): Driver.evict_straggler,
    (Phase.FORMING, Event.TIMEOUT): Driver.ignore,
    (Phase.TRAINING, Event.READY): Driver.offer,
    (Phase.TRAINING, Event.JOINED): Driver.ignore,
    (Phase.TRAINING, Event.LOST): Driver.lose,
    (Phase.TRAINING, Event.DONE): Driver.leave,
    (Phase.TRAINING, Event.HOSTS): Driver.use_hosts,
    (Phase.TRAINING, Event.LATE): Driver.ignore,
    (Phase.TRAINING, Event.TIMEOUT): Driver.ignore,
    (Phase.CHANGING, Event.READY): Driver.offer,
    (Phase.CHANGING, Event.JOINED): Driver.ignore,
    (Phase.CHANGING, Event.LOST): Driver.lose,
    (Phase.CHANGING, Event.DONE): Driver.leave,
    (Phase.CHANGING, Event.HOSTS): Driver.use_hosts,
    (Phase.CHANGING, Event.LATE): Driver.ignore,
    (Phase.CHANGING, Event.TIMEOUT): Driver.ignore,
    (Phase.GATHERING, Event.READY): Driver.gather,
    (Phase.GATHERING, Event.JOINED): Driver.ignore,
    (Phase.GATHERING, Event.LOST): Driver.lose_ready,
    (Phase.GATHERING, Event.DONE): Driver.lose_ready,
    (Phase.GATHERING, Event.HOSTS): Driver.use_hosts,
    (Phase.GATHERING, Event.LATE): Driver.evict_straggler,
    (Phase.GATHERING, Event.TIMEOUT): Driver.ignore,
    (Phase.WAITING, Event.READY): Driver.gather,
    (Phase.WAITING, Event.JOINED): Driver.ignore,
    (Phase.WAITING, Event.LOST): Driver.lose_ready,
    (Phase.WAITING, Event.DONE): Driver.lose_ready,
    (Phase.WAITING, Event.HOSTS): Driver.use_hosts,
    (Phase.WAITING, Event.LATE): Driver.ignore,
    (Phase.WAITING, Event.TIMEOUT): Driver.give_up,
    (Phase.ENDED, Event.READY): Driver.ignore,
    (Phase.ENDED, Event.JOINED): Driver.ignore,
    (Phase.ENDED, Event.LOST): Driver.ignore,
    (Phase.ENDED, Event.DONE): Driver.ignore,
    (Phase.ENDED, Event.HOSTS): Driver.ignore,
    (Phase.ENDED, Event.LATE): Driver.ignore,
    (Phase.ENDED, Event.TIMEOUT): Driver.ignore,
}

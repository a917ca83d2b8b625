"""The control server's view of a job's ranks, and the cause of an early end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hvkeras.control.cause import Cause, CauseKind
from hvkeras.control.handler import Member, Members
from hvkeras.control.messages import JobEnded, MayExit, Message, encode
from hvkeras.control.relayed_ranks import Relay, send_to_all


@dataclass(eq=False)
class RankState:
    """A rank that is or was connected.

    Attributes:
        relay: The relay that it is behind; None if it is connected directly.
        left: True if it has left normally.
        script_ended: True if its script has ended, so that its process is about to exit.
        failed: True if it has reported a failure.
        exit_reported: True if it has printed its exit report.
        outside: Its reported location outside TensorFlow; "" if inside, None without an answer.
        doing: What it was doing, as last reported.
    """

    member: Member
    relay: Relay | None = None
    left: bool = False
    script_ended: bool = False
    failed: bool = False
    exit_reported: bool = False
    outside: str | None = None
    doing: str = ""


class Ranks:
    """The ranks that are and were connected, and their common end.

    Args:
        size: The number of ranks to expect.
        exit_grace: Seconds that ranks have for their exit reports.
        on_end: Called once from the server's thread with the cause when the job ends early.

    Attributes:
        size: As above.
        exit_grace: Seconds that ranks have for their exit reports.
        cause: The reason why the job ends early; None while it runs.
        own: The rank of this process, once it waits for the others to exit.
    """

    def __init__(self, members: Members, size: int, exit_grace: float, on_end: Callable[[Cause], None] | None) -> None:
        self.size = size
        self.exit_grace = exit_grace
        self.cause: Cause | None = None
        self.present: dict[int, RankState] = {}
        self.lost: dict[int, RankState] = {}
        self.relays: dict[int, Relay] = {}
        self.own: int | None = None
        self._members = members
        self._on_end = on_end
        self._may_exit = False

    def broadcast(self, message: Message) -> None:
        """Send a message to all ranks."""
        send_to_all(self._members, self.relays.values(), message)

    def send(self, numbers: Iterable[int], message: Message) -> None:
        """Send a message to those of the ranks that are connected."""
        data = encode(message)
        for number in numbers:
            if number in self.present:
                self.present[number].member.write(data)

    def find(self, number: int) -> RankState | None:
        """Return a rank that is or was connected."""
        return self.present.get(number) or self.lost.get(number)

    def leavers(self) -> list[RankState]:
        """Return the ranks that have left normally."""
        known = [self.find(number) for number in range(self.size)]
        return [rank for rank in known if rank is not None and rank.left]

    def end_with(self, kind: CauseKind, member: Member, error: str) -> None:
        """End the job because of one rank.

        Args:
            error: The failure, as the end of a sentence.
        """
        self.end(Cause(kind, member.number, member.host, member.pid, error))

    def end(self, cause: Cause) -> None:
        """End the job, unless it is already ending, and send the cause to all ranks.

        Launchers terminate the other ranks as soon as one exits. No rank may therefore exit before all have printed
        their exit reports, or the grace period is over.
        """
        if self.cause is not None:
            return
        self.cause = cause
        self.broadcast(JobEnded(cause))
        if self._on_end is not None:
            self._on_end(cause)
        self._members.serving.call_later(self.exit_grace + 1.0, self._allow_exit)
        self.check_exit_reports()

    def check_exit_reports(self) -> None:
        """Allow all ranks to exit if each has printed its exit report or has left; call this when one does."""
        if self.cause is not None and all(rank.exit_reported or (rank.left and number != self.own)
                                          for number, rank in self.present.items()):
            self._allow_exit()

    def _allow_exit(self) -> None:
        if not self._may_exit:
            self._may_exit = True
            self.broadcast(MayExit())

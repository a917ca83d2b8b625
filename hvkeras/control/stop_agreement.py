"""Agreement to stop training after the same execution on all ranks, at one rank's request.

`model.stop_training = True` on one rank is such a request (`FitRun.stops_now`). An execution is one call of Keras's
train function. The rank notifies the server, which requests from all ranks that train together the execution they have
reached; their channel threads answer. All ranks stop after the latest of these executions. No rank has started a later
one, since ranks that finish an execution in the meantime wait for the decision. Steps in which no rank wants to stop
exchange nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

from hvkeras.control.messages import Message, StopAfter, StopQuestion
from hvkeras.control.relayed_ranks import as_runs
from hvkeras.errors import PeerError, explain

Request = tuple[Sequence[int], Message]
POLL_INTERVAL = 0.1  # seconds between two checks for the end of the job


class Stop:
    """This rank's side of the agreement on when one `fit` stops early.

    Attributes:
        wishes: The ranks that wanted to stop, once the decision has arrived.
    """

    def __init__(self) -> None:
        self.wishes: list[int] = []
        self._changed = threading.Condition()
        self._begun = 0  # number of executions
        self._committed = 0  # number of executions that this rank will certainly reach
        self._wanted = self._asked = False
        self._after: int | None = None

    def begin(self) -> None:
        """Record the start of an execution; call this before each one."""
        with self._changed:
            self._begun += 1
            self._committed = max(self._committed, self._begun)

    def answer(self) -> int:
        """Return the execution that this rank has reached; it then starts no later one before the decision."""
        with self._changed:
            self._asked = True
            return self._committed

    def decide(self, after: int, wishes: Sequence[int]) -> None:
        """Record the execution after which all ranks stop."""
        with self._changed:
            self._after, self.wishes = after, list(wishes)
            self._changed.notify_all()

    def now(self, wish: bool, ask: Callable[[], None], check: Callable[[], None], timeout: float) -> bool:
        """Return whether this rank stops after the execution that has just ended.

        Args:
            wish: True if it wants to stop.
            ask: Sends its request to the server.
            check: Raises if the job has ended.
            timeout: Seconds to wait for the server's decision.

        Raises:
            PeerError: The job has ended, or the ranks have not answered in time.
        """
        if wish and not self._wanted:
            self._wanted = True
            ask()
        deadline = time.monotonic() + timeout
        with self._changed:
            while (self._asked or self._wanted) and self._after is None:
                check()
                if time.monotonic() > deadline:
                    raise PeerError(explain("All ranks must agree on when to stop training"
                                            f" within {timeout:g} s", "check what the others are doing, or raise"
                                            " HVKERAS_STALL_SHUTDOWN", executions=self._begun))
                self._changed.wait(POLL_INTERVAL)
            if self._after is not None and self._begun >= self._after:
                return True
            self._committed = max(self._committed, self._begun + 1)
            return False


class Stops:
    """The server side: requests the executions of all ranks, and sends them the highest."""

    def __init__(self) -> None:
        self._waited_for: dict[str, set[int]] = {}
        self._ranks: dict[str, list[int]] = {}
        self._wishes: dict[str, list[int]] = {}
        self._most: dict[str, int] = {}

    def ask(self, rank: int, fit: str, ranks: Sequence[int]) -> Iterator[Request]:
        """Handle a rank's request to stop: query all ranks that train with it, unless that was done before.

        Args:
            fit: The identifier of the call of `fit`.
            ranks: All ranks in it.

        Yields:
            The ranks, and the message for them.
        """
        self._wishes.setdefault(fit, []).append(rank)
        if len(self._wishes[fit]) > 1:
            return
        self._waited_for[fit], self._ranks[fit], self._most[fit] = set(ranks), list(ranks), 0
        yield ranks, StopQuestion(fit)

    def receive(self, rank: int, fit: str, executions: int) -> Iterator[Request]:
        """Handle a rank's answer; after the last answer, all ranks receive the decision.

        Args:
            fit: The identifier of the call of `fit`.
            executions: The execution that it has reached.

        Yields:
            The ranks, and the message for them.
        """
        self._most[fit] = max(self._most[fit], executions)
        self._waited_for[fit].discard(rank)
        if not self._waited_for[fit]:
            del self._waited_for[fit]
            after = self._most.pop(fit)
            yield self._ranks.pop(fit), StopAfter(fit, after, as_runs(self._wishes[fit]))

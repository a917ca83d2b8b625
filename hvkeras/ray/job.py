"""The driver's side of a job on Ray: its control channel, and the results of its ranks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hvkeras.control.cause import Cause, CauseKind
from hvkeras.control.messages import Deadlines
from hvkeras.control.server import ControlServer
from hvkeras.errors import PeerError, explain
from hvkeras.host.console import say
from hvkeras.settings import Settings

POLL = 0.2  # seconds between two looks at what rank 0 has logged
CAUSE_GRACE = 5.0  # seconds to learn which rank failed first, once one has
LAST_LINES = 30  # lines of a traceback that the exception repeats


class RankError(PeerError):
    """A function failed on a rank.

    Args:
        text: The message.
        cause: What failed first.
    """

    def __init__(self, text: str, cause: Cause) -> None:
        super().__init__(text)
        self.cause = cause


class RayJob:
    """One job: the workers of an executor.

    Args:
        size: The number of ranks.
        host: The address to listen on.
        settings: The settings in force.
    """

    def __init__(self, size: int, host: str, settings: Settings) -> None:
        self.secret = secrets.token_hex(32)
        self._server = ControlServer(size, self.secret.encode(), host, 0, Deadlines.from_settings(settings),
                                     on_warning=say, on_note=say)
        self.address = "{}:{}".format(*self._server.start())

    def stop(self) -> None:
        """Ends the control channel."""
        self._server.stop()

    def results(self, calls: Sequence[Any], facts: Sequence[Mapping[str, Any]],
                on_poll: Callable[[], None] | None = None) -> list[Any]:
        """Waits for all ranks.

        Args:
            calls: Ray's references to their results, in the order of the ranks.
            facts: What is known about each rank.
            on_poll: Called several times a second; None to wait without it.

        Returns:
            The results, in the order of the ranks.

        Raises:
            RankError: The call failed on some rank; the message names it, with the cause.
        """
        import ray

        pending = {call: rank for rank, call in enumerate(calls)}
        values: dict[int, Any] = {}
        while pending:
            done, _ = ray.wait(list(pending), num_returns=1, timeout=POLL if on_poll else None)
            if on_poll is not None:
                on_poll()
            for call in done:
                rank = pending.pop(call)
                try:
                    values[rank] = ray.get(call)
                except Exception as error:  # whatever a function raises, or Ray when a worker is gone
                    raise self._failure(rank, facts[rank], error) from error
        return [values[rank] for rank in range(len(calls))]

    def _failure(self, rank: int, fact: Mapping[str, Any], error: Exception) -> RankError:
        """The error for the driver: of the rank that failed first, which need not be the one that was noticed first."""
        import ray

        text = str(error).strip()
        if self._server.cause is None and isinstance(error, ray.exceptions.RayTaskError):
            first = next((line for line in reversed(text.splitlines()) if line.strip()), type(error).__name__)
            found = Cause(CauseKind.EXCEPTION, rank, fact["host"], fact["pid"], f"failed with {first}", text)
        else:
            # A survivor only notices that its collective was aborted: the channel knows, or learns, of whom.
            deadline = time.monotonic() + CAUSE_GRACE
            while self._server.cause is None and time.monotonic() < deadline:
                time.sleep(0.05)
            found = self._server.cause or Cause(CauseKind.LOST, rank, fact["host"], fact["pid"], f"was lost: {text}")
        self._server.fail(found)  # without effect if there is a cause already
        lines = (found.traceback or text).splitlines()[-LAST_LINES:]
        said = explain(f"A function must succeed on every rank, but {found.sentence()}")
        return RankError("\n".join([said, *lines]), found)

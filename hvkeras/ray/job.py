"""Driver side of a job on Ray: the control channel, and the results of ranks."""

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

POLL = 0.2  # seconds between calls of `on_poll`
CAUSE_GRACE = 5.0  # seconds to wait for the report of the first failure
LAST_LINES = 30  # lines of the rank's traceback in the exception


class RankError(PeerError):
    """A function failed on a rank; `cause` is the first failure."""

    def __init__(self, text: str, cause: Cause) -> None:
        super().__init__(text)
        self.cause = cause


class RayJob:
    """Job of the workers of an executor."""

    def __init__(self, size: int, host: str, settings: Settings) -> None:
        self.secret = secrets.token_hex(32)
        self._server = ControlServer(size, self.secret.encode(), host, 0, Deadlines.from_settings(settings),
                                     on_warning=say, on_note=say)
        self.address = "{}:{}".format(*self._server.start())

    def stop(self) -> None:
        """Stop the control channel."""
        self._server.stop()

    def results(self, calls: Sequence[Any], facts: Sequence[Mapping[str, Any]],
                on_poll: Callable[[], None] | None = None) -> list[Any]:
        """Wait for all ranks.

        Args:
            calls: Ray's object references of the results, in rank order.
            facts: The facts of each rank's process (see `facts_of_process`).
            on_poll: Called several times per second.

        Returns:
            The results, in rank order.

        Raises:
            RankError: The call failed on a rank, which the message names with the cause.
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
                except Exception as error:  # of the function, or of Ray if a worker is lost
                    raise self._failure(rank, facts[rank], error) from error
        return [values[rank] for rank in range(len(calls))]

    def _failure(self, rank: int, fact: Mapping[str, Any], error: Exception) -> RankError:
        """Return the error of the rank that failed first, which may differ from the rank whose error arrived first."""
        import ray

        text = str(error).strip()
        if self._server.cause is None and isinstance(error, ray.exceptions.RayTaskError):
            first = next((line for line in reversed(text.splitlines()) if line.strip()), type(error).__name__)
            cause = Cause(CauseKind.EXCEPTION, rank, fact["host"], fact["pid"], f"failed with {first}", text)
        else:
            # A surviving rank only reports an aborted collective; the control channel receives the cause.
            deadline = time.monotonic() + CAUSE_GRACE
            while self._server.cause is None and time.monotonic() < deadline:
                time.sleep(0.05)
            cause = self._server.cause or Cause(CauseKind.LOST, rank, fact["host"], fact["pid"], f"was lost: {text}")
        self._server.fail(cause)  # no effect if there already is a cause
        lines = (cause.traceback or text).splitlines()[-LAST_LINES:]
        message = explain(f"A function must succeed on every rank, but {cause.sentence()}")
        return RankError("\n".join([message, *lines]), cause)

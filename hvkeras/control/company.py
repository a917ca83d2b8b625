"""The server's side of `join()`: which ranks have joined, and what the others wait for them in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hvkeras.control.waits import Waits


class Company:
    """The ranks that have joined, and what they were asked to take part in."""

    def __init__(self) -> None:
        self.joined: list[int] = []
        self._calls: dict[str, list[dict[str, Any]]] = {}
        self._asked: dict[tuple[int, str], int] = {}

    def learn(self, calls: dict[str, list[dict[str, Any]]]) -> None:
        """Learns what calls plans consist of.

        Args:
            calls: The calls by the plan's key.
        """
        self._calls.update(calls)

    def requests(self, waits: Waits) -> Iterator[tuple[int, dict[str, Any]]]:
        """Finds the plans that ranks which have joined are waited for in, and were not asked into before.

        Args:
            waits: The counts of entered plans.

        Yields:
            The rank, and what to tell it.
        """
        for rank in self.joined:
            for key, plan, count, own in waits.behind(rank):
                times = count - max(own, self._asked.get((rank, key), 0))
                if times > 0 and key in self._calls:
                    self._asked[rank, key] = count
                    yield rank, {"type": "company", "key": key, "plan": plan, "calls": self._calls[key],
                                 "times": times}

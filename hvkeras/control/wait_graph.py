"""Cycles of ranks that wait for each other, in a graph of ranks and groups.

In each group, all ranks that wait do so for all that are missing. An edge leads from a rank to the group in which it
waits, and from there to each missing rank. There are no more edges than ranks that wait or are missing, and everything
takes linear time.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple


class Group(NamedTuple):
    """Ranks that wait for others in one plan or exchange.

    Attributes:
        waiting: The waiting ranks, disjoint from the missing ones.
        missing: The ranks for which each of them waits.
    """

    key: str
    waiting: frozenset[int]
    missing: frozenset[int]


class Wait(NamedTuple):
    """One rank's wait for another."""

    waiter: int
    missing: int
    key: str


class Component(NamedTuple):
    """Ranks that all wait for each other, directly or through others, and the keys of their groups."""

    ranks: set[int]
    keys: set[str]


class Graph:
    """Graph of ranks and the groups in which they wait.

    Attributes:
        components: The ranks that wait for each other, ordered by the lowest of them.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        # A rank that does not wait, or for which no rank waits, is in no cycle.
        waiting: set[int] = set().union(*(group.waiting for group in groups))
        both = waiting.intersection(set().union(*(group.missing for group in groups)))
        self._groups = [Group(group.key, group.waiting & both, group.missing & both) for group in groups]
        self._waits_in: dict[int, list[int]] = {}
        for index, group in enumerate(self._groups):
            for rank in group.waiting:
                self._waits_in.setdefault(rank, []).append(index)
        self.components: list[Component] = sorted(self._components(), key=lambda component: min(component.ranks))

    def _following(self, node: int) -> Collection[int]:
        """Return the successors of a rank, or of a group, whose index is inverted to distinguish it from a rank."""
        return self._groups[~node].missing if node < 0 else [~index for index in self._waits_in.get(node, ())]

    def _components(self) -> Iterator[Component]:
        """Yield the strongly connected components with several ranks, by Tarjan's algorithm without recursion."""
        order: dict[int, int] = {}  # the visit number of each node
        lowest: dict[int, float] = {}  # the lowest known reachable number; infinite once in a component
        open_nodes: list[int] = []  # nodes in no component yet
        index: dict[int, int] = {}  # their indices in that list
        for root in self._waits_in:
            path = [] if root in order else [(root, iter(self._following(root)))]
            while path:
                node, following = path[-1]
                if node not in order:
                    order[node] = lowest[node] = len(order)
                    index[node] = len(open_nodes)
                    open_nodes.append(node)
                for other in following:
                    if other not in order:
                        path.append((other, iter(self._following(other))))
                        break
                    lowest[node] = min(lowest[node], lowest[other])
                else:
                    path.pop()
                    if path:
                        lowest[path[-1][0]] = min(lowest[path[-1][0]], lowest[node])
                    if lowest[node] == order[node]:
                        nodes = open_nodes[index[node]:]
                        del open_nodes[index[node]:]
                        lowest.update(dict.fromkeys(nodes, math.inf))
                        if len(nodes) > 1:  # then it has several ranks, as none waits for itself
                            yield Component({other for other in nodes if other >= 0},
                                            {self._groups[~other].key for other in nodes if other < 0})

    def shortest_cycle(self, component: Component) -> list[Wait]:
        """Find the shortest cycle of waits through the lowest rank of a component, by a breadth-first search."""
        start = min(component.ranks)
        reached_by: dict[int, Wait] = {}
        seen: set[int] = set()
        queue = collections.deque([start])
        while True:
            rank = queue.popleft()
            for index in self._waits_in.get(rank, ()):
                group = self._groups[index]
                if start in group.missing:
                    cycle = [Wait(rank, start, group.key)]
                    while cycle[-1].waiter != start:
                        cycle.append(reached_by[cycle[-1].waiter])
                    return cycle[::-1]
                if index not in seen:
                    seen.add(index)
                    new = sorted(one for one in group.missing & component.ranks if one not in reached_by)
                    reached_by.update((missing, Wait(rank, missing, group.key)) for missing in new)
                    queue += new

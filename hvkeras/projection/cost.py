"""The cost of an allreduce: Hockney's model of a message, and the algorithms built from such messages.

A message of m bytes takes latency + m / bandwidth, and adding m received bytes to local data takes m * combining. The
formulas of the algorithms are those of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH" (2005). Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations"
(2009), show that no algorithm sends less than the ring. docs/projection.md gives the formulas.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """The link between two ranks.

    Attributes:
        latency: Seconds that the shortest message takes.
        bandwidth: Bytes per second.
        combining: Seconds that a rank needs to add a received byte to its own data.
    """

    latency: float
    bandwidth: float
    combining: float = 0.0

    def message(self, size: float) -> float:
        """Seconds for a message of `size` bytes."""
        return self.latency + size / self.bandwidth


def ring(size: float, ranks: int, link: Link) -> float:
    """Each rank sends one part to the next rank, p - 1 times to reduce and p - 1 times to share the result."""
    part = size / ranks
    return (ranks - 1) * (2 * link.message(part) + part * link.combining)


def recursive_doubling(size: float, ranks: int, link: Link) -> float:
    """Pairs of ranks exchange all their data, at twice the distance each time; best for small data."""
    return _rounds(ranks) * (link.message(size) + size * link.combining) + _folding(size, ranks, link)


def halving_doubling(size: float, ranks: int, link: Link) -> float:
    """Pairs of ranks exchange halves of their data, then gather the results: Rabenseifner's algorithm."""
    core = 1 << _rounds(ranks)
    others = size * (core - 1) / core
    sent = 2 * _rounds(ranks) * link.latency + 2 * others / link.bandwidth
    return sent + others * link.combining + _folding(size, ranks, link)


def recursive(size: float, ranks: int, link: Link) -> float:
    """The faster of recursive doubling and halving-doubling."""
    return min(recursive_doubling(size, ranks, link), halving_doubling(size, ranks, link))


def hierarchical(size: float, hosts: int, ranks_per_host: int, inside: Link, between: Link) -> float:
    """The ranks of a host reduce, one of them joins a ring of the hosts, and all ranks of the host read the result.

    Within a host, ranks reduce in parts and then share them, as in a ring, so the cost is that of a ring.

    Args:
        size: Bytes on each rank.
        hosts: The number of hosts.
        ranks_per_host: The number of ranks on each host.
        inside: The link between two ranks of a host.
        between: The link between two hosts.
    """
    return ring(size, ranks_per_host, inside) + ring(size, hosts, between)


def _rounds(ranks: int) -> int:
    """The exponent of the largest power of two that does not exceed the number of ranks."""
    return ranks.bit_length() - 1


def _folding(size: float, ranks: int, link: Link) -> float:
    """The extra cost of ranks beyond a power of two: each sends its data to another rank and gets the result back."""
    if ranks == 1 << _rounds(ranks):
        return 0.0
    return 2 * link.message(size) + size * link.combining

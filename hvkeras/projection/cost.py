"""What an allreduce costs: Hockney's model of a message, and the algorithms made of such messages.

A message of m bytes takes latency + m / bandwidth, and adding m received bytes to one's own takes m * combining. The
formulas of the algorithms are those of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
Operations in MPICH" (2005); that no algorithm sends less than the ring does is shown by Patarasuk and Yuan, "Bandwidth
optimal all-reduce algorithms for clusters of workstations" (2009). docs/projection.md writes them out.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """The way between two ranks.

    Attributes:
        latency: Seconds that a message takes, however short.
        bandwidth: Bytes per second.
        combining: Seconds that a rank needs to add a received byte to its own.
    """

    latency: float
    bandwidth: float
    combining: float = 0.0

    def message(self, size: float) -> float:
        """Seconds for a message of so many bytes."""
        return self.latency + size / self.bandwidth


def ring(size: float, ranks: int, link: Link) -> float:
    """Each rank hands a part on to the next one, p - 1 times to add up and p - 1 times to share."""
    part = size / ranks
    return (ranks - 1) * (2 * link.message(part) + part * link.combining)


def recursive_doubling(size: float, ranks: int, link: Link) -> float:
    """Pairs exchange all they have, each time twice as far apart; the best for little data."""
    return _rounds(ranks) * (link.message(size) + size * link.combining) + _folding(size, ranks, link)


def halving_doubling(size: float, ranks: int, link: Link) -> float:
    """Pairs exchange halves of what they have, then gather these again: Rabenseifner's algorithm."""
    core = 1 << _rounds(ranks)
    others = size * (core - 1) / core
    sent = 2 * _rounds(ranks) * link.latency + 2 * others / link.bandwidth
    return sent + others * link.combining + _folding(size, ranks, link)


def recursive(size: float, ranks: int, link: Link) -> float:
    """The faster one of recursive doubling and of halving and doubling."""
    return min(recursive_doubling(size, ranks, link), halving_doubling(size, ranks, link))


def hierarchical(size: float, hosts: int, ranks_per_host: int, inside: Link, between: Link) -> float:
    """The ranks of a host reduce, one of them goes round a ring of the hosts, and all of the host read.

    Reducing in parts and sharing these afterwards is what a ring within the host does, so it costs as much.

    Args:
        size: Bytes that each rank has.
        hosts: How many hosts.
        ranks_per_host: Ranks on each.
        inside: What is between two ranks of a host.
        between: What is between two hosts.
    """
    return ring(size, ranks_per_host, inside) + ring(size, hosts, between)


def _rounds(ranks: int) -> int:
    """The largest power of two that is not above the number of ranks, as an exponent."""
    return ranks.bit_length() - 1


def _folding(size: float, ranks: int, link: Link) -> float:
    """Ranks beyond a power of two hand their data to another rank first, and get the result last."""
    if ranks == 1 << _rounds(ranks):
        return 0.0
    return 2 * link.message(size) + size * link.combining

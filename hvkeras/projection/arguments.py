"""The command line flags of a projection, and the parsing of their values."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hvkeras.errors import UsageError, explain
from hvkeras.projection.model import ALGORITHMS, Cluster
from hvkeras.projection.rows import Measured, Projected, projected
from hvkeras.records.record import Record
from hvkeras.settings import bandwidth_in_bytes, duration_in_seconds

RANKS_PER_HOST, LATENCY, BANDWIDTH = 8, 50e-6, 10e9 / 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags to a command."""
    group = parser.add_argument_group("projection", "How more ranks would perform, by a cost model:"
                                      " docs/projection.md.")
    group.add_argument("--project", type=rank_counts, default=(), metavar="RANKS,...", help="Numbers of ranks to"
                       " project the step time for, such as 8,64,512.")
    group.add_argument("--ranks-per-host", type=_positive, metavar="N", help="Ranks that a host has in the projection"
                       f" (default: {RANKS_PER_HOST}).")
    group.add_argument("--network-bandwidth", type=bandwidth, metavar="RATE", help="What a host can send in the"
                       " projection, such as 100Mbit or 1.25GB per second (default: 10Gbit).")
    group.add_argument("--network-latency", type=duration, metavar="TIME", help="What a short message between hosts"
                       " takes in the projection, such as 50us or 1ms (default: 50us).")
    group.add_argument("--project-algorithm", choices=ALGORITHMS, help="What the engines do among hosts in the"
                       " projection (default: what they actually do).")


def check_flags(flags: argparse.Namespace) -> None:
    """Raises UsageError if a projection's assumption is given without `--project`."""
    for name in ("ranks_per_host", "network_bandwidth", "network_latency", "project_algorithm"):
        if getattr(flags, name) is not None and not flags.project:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(explain(f"{flag} belongs to a projection", f"add --project 8,64 or leave out {flag}",
                                     **{name: getattr(flags, name)}))


def projected_by(flags: argparse.Namespace,
                 jobs: Sequence[tuple[Measured, Sequence[Record | None]]]) -> Projected | None:
    """Runs the projection that the flags ask for; returns None if they ask for none.

    Args:
        flags: The parsed command line.
        jobs: The measured jobs, each with the records of its ranks.
    """
    return projected(jobs, flags.project, cluster_of(flags), flags.project_algorithm) if flags.project else None


def cluster_of(flags: argparse.Namespace) -> Cluster:
    """The hosts and the network that the flags assume."""
    def given(value: float | None, default: float) -> float:
        return default if value is None else value

    return Cluster(int(given(flags.ranks_per_host, RANKS_PER_HOST)), given(flags.network_latency, LATENCY),
                   given(flags.network_bandwidth, BANDWIDTH))


def rank_counts(text: str) -> tuple[int, ...]:
    """Parses comma-separated numbers of ranks; returns them in ascending order without duplicates."""
    try:
        counts = sorted({int(each) for each in text.split(",")})
    except ValueError:
        counts = []
    if not counts or counts[0] < 1:
        raise argparse.ArgumentTypeError(f"it takes positive numbers between commas, such as 8,64,512, not {text!r}")
    return tuple(counts)


def bandwidth(text: str) -> float:
    """Parses a rate in bits or bytes per second; returns bytes per second."""
    try:
        return bandwidth_in_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, not {text!r}") from None


def duration(text: str) -> float:
    """Parses a time with its unit; returns seconds."""
    try:
        return duration_in_seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}, not {text!r}") from None


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"it is a positive number, not {text!r}")
    return value

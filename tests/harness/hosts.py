"""Hosts made of network namespaces on one machine; see `hvkeras.bench.namespaces`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hvkeras.bench.namespaces import CABLE, NETWORK, Host, VirtualNetwork, missing, network, remote_shell

__all__ = ["CABLE", "NETWORK", "Host", "VirtualNetwork", "missing", "network", "remote_shell", "two_hosts"]


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, ...]]:
    """Create two hosts; see `network`."""
    with network(2) as made:
        yield made.hosts

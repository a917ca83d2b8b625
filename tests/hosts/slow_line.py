"""A link between two hosts that delays and reorders packets: two TUN devices, connected by threads."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections.abc import Iterator

from harness.hosts import Host

DEVICE, ADDRESSES = "slow", ("10.198.3.1", "10.198.3.2")
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 1, 0x1000, 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def slow_line(hosts: tuple[Host, Host], delay: float, overtaken: float) -> Iterator[None]:
    """Connect two hosts by a link between the devices `DEVICE`, with the addresses `ADDRESSES`.

    Args:
        hosts: The hosts.
        delay: Delay of each packet in seconds.
        overtaken: Fraction of packets with 1.5 times the delay.
    """
    ends = [_device(host) for host in hosts]
    for host, own, other in zip(hosts, ADDRESSES, reversed(ADDRESSES), strict=True):
        for command in (["addr", "add", own, "peer", other, "dev", DEVICE], ["link", "set", DEVICE, "up"]):
            subprocess.run(["ip", "-n", host.namespace, *command], check=True, timeout=10)
    over = threading.Event()
    relays = [threading.Thread(target=_relay, args=(one, other, delay, overtaken, over))
              for one, other in (ends, reversed(ends))]
    for relay in relays:
        relay.start()
    try:
        yield
    finally:
        over.set()
        for relay in relays:
            relay.join()
        for end in ends:
            os.close(end)


def _device(host: Host) -> int:
    """Create the device in a host's network. This uses a separate thread, which enters the namespace."""
    made = []

    def create() -> None:
        with open(f"/run/netns/{host.namespace}") as namespace:
            assert _LIBC.setns(namespace.fileno(), _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
        made.append(end)

    thread = threading.Thread(target=create)
    thread.start()
    thread.join()
    return made[0]


def _relay(source: int, target: int, delay: float, overtaken: float, over: threading.Event) -> None:
    """Forward packets, each after its delay."""
    waiting: list[tuple[float, bytes]] = []
    while not over.is_set():
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.1
        if select.select([source], [], [], min(pause, 0.1))[0]:
            with contextlib.suppress(BlockingIOError):
                late = delay * (1.5 if random.random() < overtaken else 1.0)
                heapq.heappush(waiting, (time.monotonic() + late, os.read(source, 65536)))
        while waiting and waiting[0][0] <= time.monotonic():
            with contextlib.suppress(OSError):  # the queue is full: drop the packet, as real links do
                os.write(target, heapq.heappop(waiting)[1])

"""Gloo's connections in this process, which an abort breaks: Horovod would wait for its peers until Gloo's timeout."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

_FOLDER = "/proc/self/fd"


class Connections:
    """The sockets that were opened while Horovod connected ranks."""

    def __init__(self) -> None:
        self._found: dict[int, str] = {}

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """A scope in which Horovod opens connections."""
        before = _sockets()
        yield
        self._found |= {descriptor: link for descriptor, link in _sockets().items()
                        if before.get(descriptor) != link}

    def forget(self) -> None:
        """Forgets all connections, which Horovod has closed."""
        self._found.clear()

    def shut_down(self) -> None:
        """Shuts all connections down, so that whoever waits in one sees its end. Horovod closes them itself."""
        now = _sockets()
        for descriptor, link in self._found.items():
            if now.get(descriptor) == link:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as ours:
                    ours.shutdown(socket.SHUT_RDWR)


def _sockets() -> dict[int, str]:
    """Returns this process's sockets: what /proc says of each descriptor, which has the socket's number."""
    found = {}
    for name in os.listdir(_FOLDER):
        with contextlib.suppress(OSError):
            link = os.readlink(f"{_FOLDER}/{name}")
            if link.startswith("socket:"):
                found[int(name)] = link
    return found

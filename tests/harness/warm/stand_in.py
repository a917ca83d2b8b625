"""Process that a launcher starts instead of Python: request a rank from a parent, and represent it until it exits.

It runs without site-packages, so that it starts in 20 ms. Its process name is `warm-stand-in`, which distinguishes it
from ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import sys
from types import FrameType

_RANKS = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "HVKERAS_RUN_RANK")  # ranks of other launchers count as even
_FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGABRT, signal.SIGUSR1, signal.SIGUSR2,
              signal.SIGTERM)
_NAMESPACES = ("mnt", "net", "uts")  # those of a host of the tests (see `harness.hosts`)
_NO_PARENT = 98  # exit code
_NUMBER = struct.Struct("=q")


def main(folder: str, arguments: list[str]) -> None:
    """Request a rank, forward signals to it, and exit with its status."""
    with open("/proc/self/comm", "w", encoding="ascii") as name:
        name.write("warm-stand-in")
    address = os.path.join(folder, "odd" if _rank() % 2 else "even")
    namespaces = _namespaces(address)
    request = json.dumps({"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ),
                          "cores": sorted(os.sched_getaffinity(0)), "umask": _umask()}).encode()
    with socket.socket(socket.AF_UNIX) as parent:
        parent.connect(address)
        socket.send_fds(parent, [_NUMBER.pack(len(request))], [0, 1, 2, *namespaces])
        parent.sendall(request)
        for descriptor in namespaces:
            os.close(descriptor)
        rank = _read(parent)

        def forward(number: int, frame: FrameType | None) -> None:
            with contextlib.suppress(ProcessLookupError):  # it has exited, and its status will arrive
                os.kill(rank, number)

        for number in _FORWARDED:
            signal.signal(number, forward)
        status = _read(parent)
    if os.WIFSIGNALED(status):
        killer = os.WTERMSIG(status)
        if killer != signal.SIGKILL:
            signal.signal(killer, signal.SIG_DFL)
        os.kill(os.getpid(), killer)
    os._exit(os.waitstatus_to_exitcode(status))


def _rank() -> int:
    for name in _RANKS:
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    if os.environ.get("TF_CONFIG", "").startswith("{"):
        return int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])
    return 0


def _namespaces(address: str) -> list[int]:
    """Open the namespaces of this process that differ from the parent's."""
    with open(f"{address}.pid", encoding="ascii") as file:
        theirs = f"/proc/{file.read()}/ns"
    return [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in _NAMESPACES
            if os.readlink(f"/proc/self/ns/{kind}") != os.readlink(f"{theirs}/{kind}")]


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _read(parent: socket.socket) -> int:
    data = parent.recv(_NUMBER.size)
    if len(data) < _NUMBER.size:
        os._exit(_NO_PARENT)  # the parent has written the reason to standard error
    return int(_NUMBER.unpack(data)[0])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

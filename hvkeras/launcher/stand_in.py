"""Program that a launcher starts instead of a rank: has the rank forked, and represents it until it exits.

It runs without site-packages, so that it starts in 20 ms. Its process name is `hvkeras-standin`, which distinguishes it
from ranks. The rank has its environment, files, folder, umask, cores and namespaces. Without a fork server, it becomes
the rank itself.
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

_RANKS = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "HVKERAS_RUN_RANK")  # ranks of other launchers count as 0
_FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGABRT, signal.SIGUSR1, signal.SIGUSR2,
              signal.SIGTERM)
_NAMESPACES = ("mnt", "net", "uts")
_NUMBER = struct.Struct("=q")
_CREDENTIALS = struct.Struct("=iII")  # of SO_PEERCRED


def main(addresses: list[str], command: list[str]) -> None:
    """Request a rank, forward signals to it, and exit with its status.

    Args:
        addresses: Sockets of fork servers, which ranks use in turn.
        command: Command line of the rank.
    """
    with socket.socket(socket.AF_UNIX) as server:
        try:
            _connect(server, addresses[_rank() % len(addresses)])
        except OSError:
            os.execvp(command[0], command)
        with open("/proc/self/comm", "w", encoding="ascii") as name:
            name.write("hvkeras-standin")
        _send_request(server, command)
        pid = _read(server)
        why = server.recv(_read(server)).decode()
        if why:
            print(f"hvkeras: this rank is started as a new Python process: {why}", file=sys.stderr, flush=True)
        server.send(b"g")

        def forward(number: int, _: FrameType | None) -> None:
            with contextlib.suppress(ProcessLookupError):  # it has exited, and its status will arrive
                os.kill(pid, number)

        for number in _FORWARDED:
            signal.signal(number, forward)
        status = _read(server)
    if os.WIFSIGNALED(status):
        killer = os.WTERMSIG(status)
        if killer != signal.SIGKILL:
            signal.signal(killer, signal.SIG_DFL)
        os.kill(os.getpid(), killer)
    os._exit(os.waitstatus_to_exitcode(status))


def _connect(server: socket.socket, address: str) -> None:
    folder = os.open(os.path.dirname(address), os.O_RDONLY)
    try:
        server.connect(f"/proc/self/fd/{folder}/{os.path.basename(address)}")  # as a socket's path must be short
    finally:
        os.close(folder)


def _send_request(server: socket.socket, command: list[str]) -> None:
    umask = os.umask(0)
    os.umask(umask)
    request = os.memfd_create("request")
    text = memoryview(json.dumps({"command": command, "folder": os.getcwd(), "environment": dict(os.environ),
                                  "cores": sorted(os.sched_getaffinity(0)), "umask": umask}).encode())
    while text:
        text = text[os.write(request, text):]
    theirs = _CREDENTIALS.unpack(server.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0]
    namespaces = [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in _NAMESPACES
                  if os.readlink(f"/proc/self/ns/{kind}") != os.readlink(f"/proc/{theirs}/ns/{kind}")]
    socket.send_fds(server, [b"r"], [request, 0, 1, 2, *namespaces])
    for descriptor in (request, *namespaces):
        os.close(descriptor)


def _rank() -> int:
    for name in _RANKS:
        if os.environ.get(name, "").isdecimal():
            return int(os.environ[name])
    if os.environ.get("TF_CONFIG", "").startswith("{"):
        return int(json.loads(os.environ["TF_CONFIG"])["task"]["index"])
    return 0


def _read(server: socket.socket) -> int:
    data = server.recv(_NUMBER.size)
    if len(data) < _NUMBER.size:
        print("hvkeras: the fork server of this rank has ended", file=sys.stderr)
        os._exit(1)
    return int(_NUMBER.unpack(data)[0])


if __name__ == "__main__":
    main(sys.argv[1].split(os.pathsep), sys.argv[2:])

"""Program that a launcher starts instead of a rank: has the rank forked, and represents it until it exits.

It runs without site-packages, so that it starts in 20 ms. Its process name is `hvkeras-standin`, which distinguishes it
from ranks. The rank has its environment, files, folder, umask, cores and namespaces. Without a fork server, or if that
does not answer, it becomes the rank itself.
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
from typing import NoReturn

_RANKS = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "HVKERAS_RUN_RANK")  # ranks of other launchers count as 0
_FORWARDED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGABRT, signal.SIGUSR1, signal.SIGUSR2,
              signal.SIGTERM)
_NAMESPACES = ("mnt", "net", "uts")
_NUMBER = struct.Struct("=q")
_CREDENTIALS = struct.Struct("=iII")  # of SO_PEERCRED
_TIME = struct.Struct("@ll")  # of SO_RCVTIMEO: seconds and microseconds


def main(addresses: list[str], timeout: float, command: list[str]) -> None:
    """Request a rank, forward signals to it, and exit with its status.

    Args:
        addresses: Sockets of fork servers, which ranks use in turn.
        timeout: Seconds within which the rank must be forked.
        command: Command line of the rank.
    """
    with socket.socket(socket.AF_UNIX) as server:
        _set_timeout(server, timeout)
        try:
            _connect(server, addresses[_rank() % len(addresses)])
        except OSError:
            os.execvp(command[0], command)
        with open("/proc/self/comm", "w", encoding="ascii") as name:
            name.write("hvkeras-standin")
        try:
            _send_request(server, command)
            pid = _read(server)
            why = server.recv(_read(server)).decode()
        except BlockingIOError:
            number = _peer(server)
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
            _start_cold(command, f"its fork server (pid {number}) did not answer for {timeout:g} s, and was killed")
        except (EOFError, ConnectionError):  # it was killed
            _start_cold(command, "its fork server has ended")
        if why:
            _say_cold(why)
        server.send(b"g")
        _set_timeout(server, 0.0)

        def forward(number: int, _: FrameType | None) -> None:
            with contextlib.suppress(ProcessLookupError):  # it has exited, and its status will arrive
                os.kill(pid, number)

        for number in _FORWARDED:
            signal.signal(number, forward)
        try:
            status = _read(server)
        except (EOFError, ConnectionError):
            print("hvkeras: the fork server of this rank has ended", file=sys.stderr)
            os._exit(1)
    if os.WIFSIGNALED(status):
        killer = os.WTERMSIG(status)
        if killer != signal.SIGKILL:
            signal.signal(killer, signal.SIG_DFL)
        os.kill(os.getpid(), killer)
    os._exit(os.waitstatus_to_exitcode(status))


def _say_cold(why: str) -> None:
    print(f"hvkeras: this rank is started as a new Python process: {why}", file=sys.stderr, flush=True)


def _start_cold(command: list[str], why: str) -> NoReturn:
    _say_cold(why)
    os.execvp(command[0], command)


def _set_timeout(server: socket.socket, seconds: float) -> None:
    """Set the deadline of each operation, 0 for none; `settimeout` would let connections fail that must queue."""
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        server.setsockopt(socket.SOL_SOCKET, option, _TIME.pack(int(seconds), int(seconds % 1 * 1e6)))


def _peer(server: socket.socket) -> int:
    """Return the process ID of the fork server."""
    credentials = server.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[0])


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
    theirs = _peer(server)
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
        raise EOFError
    return int(_NUMBER.unpack(data)[0])


if __name__ == "__main__":
    main(sys.argv[1].split(os.pathsep), float(sys.argv[2]), sys.argv[3:])

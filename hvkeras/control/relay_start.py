"""How the ranks of a host find their relay, and how one of them starts it.

The relay (`hvkeras.control.relay`) is a process of its own, as the Python of a rank may be blocked, and a rank may
leave the job while others go on. It listens on an abstract Unix socket, whose name is derived from the job's secret and
the server's address, so that nothing has to be announced or removed. The rank that binds a second such name first
starts the relay. The kernel frees that name if the rank ends meanwhile, and another one takes its place.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

STARTED_WITHIN = 30.0  # seconds
_CODE = ("import sys; sys.path[:] = {path!r}\n"
         "from hvkeras.control.relay import main; main()")


def relay_name(server: tuple[str, int], secret: bytes) -> str:
    """Returns the name of the socket of this host's relay to a server."""
    shown = f"{os.getuid()} relay {server[0]} {server[1]}"
    return f"\0hvkeras-{hmac.new(secret, shown.encode(), hashlib.sha256).hexdigest()[:32]}"


def connect_to_relay(name: str, timeout: float) -> socket.socket:
    """Connects to a relay.

    Raises:
        OSError: There is none, or it does not accept the connection in time.
    """
    connected = socket.socket(socket.AF_UNIX)
    try:
        connected.settimeout(timeout)
        connected.connect(name)
    except BaseException:
        connected.close()
        raise
    return connected


@contextlib.contextmanager
def sole_starter(name: str) -> Iterator[None]:
    """Makes this rank the only one of its host that starts the relay.

    Args:
        name: The name of the relay's socket.

    Raises:
        OSError: Another rank is starting it.
    """
    with socket.socket(socket.AF_UNIX) as claim:
        claim.bind(f"{name}-starter")
        yield


def start_relay(name: str, server: socket.socket, secret: bytes, size: int, liveness: float) -> str:
    """Starts the relay of this host.

    Args:
        name: The name of its socket.
        server: A new connection to the server, which the relay takes over.
        secret: The job's secret.
        size: The number of ranks of the job.
        liveness: Seconds without a message from the server after which it counts as lost.

    Returns:
        "" once it listens; else why it does not.
    """
    path = [str(Path(__file__).parents[2]), *sys.path]
    order = {"name": name, "server": server.fileno(), "secret": secret.hex(), "size": size, "liveness": liveness}
    try:
        with subprocess.Popen([sys.executable, "-I", "-S", "-c", _CODE.format(path=path)], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True, cwd="/",
                              pass_fds=[server.fileno()]) as starter:
            said = starter.communicate(json.dumps(order).encode(), STARTED_WITHIN)[0].decode(errors="replace").strip()
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return "" if said == READY else (said.splitlines() or ["it ended without a word"])[-1]


READY = "ready"

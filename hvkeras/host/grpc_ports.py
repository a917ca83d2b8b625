"""Ports for TensorFlow's gRPC servers, reserved until a server has bound them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

_REUSE_PORT = "TF_GRPC_REUSE_PORT"


@contextlib.contextmanager
def held_port(host: str) -> Iterator[str]:
    """Finds a free port for a server that is started within the `with` block.

    A socket that never listens holds the port: it and the server allow sharing, and no other program can take the port.

    Args:
        host: The address to listen on.

    Yields:
        `host:port`, with brackets around an IPv6 address.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as holder, _variable(_REUSE_PORT, "true"):
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind((host, 0))
        port = holder.getsockname()[1]
        yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable within the `with` block."""
    previous = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if previous is None:
            del os.environ[name]
        else:
            os.environ[name] = previous

"""Plain TCP streams between hosts with as many bytes as an allreduce, as a reference for the network."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading

from hvkeras.bench.participant import Participant
from hvkeras.bench.ranks import BenchmarkRanks
from hvkeras.bench.row import BenchmarkRow
from hvkeras.control.wire import AuthenticationError, accept_authenticated, authenticate_to_server
from hvkeras.errors import PeerError, explain

_CHUNK = 1 << 20  # bytes
_DEADLINE = 60.0  # seconds without a byte


class Streams(Participant):
    """Simultaneous streams from the first rank of each host to the first rank of the next host.

    Args:
        row: Row for the results.
        size: Bytes of the tensor.
    """

    def __init__(self, row: BenchmarkRow, size: int, ranks: BenchmarkRanks) -> None:
        self.row, self._ranks = row, ranks
        row.bytes = size
        numbers = ranks.session.topology.host_numbers
        self._leaders = [numbers.index(host) for host in dict.fromkeys(numbers)]
        self._bytes = 2 * (len(self._leaders) - 1) * size // len(self._leaders)
        self._to: socket.socket | None = None
        self._from: socket.socket | None = None
        self._received = self._runs = 0

    def prepare(self) -> None:
        """Connect the hosts, and send the bytes once."""
        leads = self._ranks.rank in self._leaders
        with contextlib.ExitStack() as stack:
            server = None
            if leads and self._ranks.session.control is not None:
                server = stack.enter_context(socket.create_server((self._ranks.session.control.local_address, 0)))
            secret = secrets.token_hex(32)
            own = None if server is None else [*server.getsockname()[:2], secret]
            addresses = self._ranks.gather(own)
            if server is None:
                return
            following = self._leaders[(self._leaders.index(self._ranks.rank) + 1) % len(self._leaders)]
            host, port, theirs = addresses[following]
            connecting = threading.Thread(target=self._connect, args=((host, port), theirs.encode()),
                                          name="hvkeras-connect", daemon=True)
            connecting.start()  # all hosts connect and accept at the same time
            try:
                self._from = accept_authenticated(server, secret.encode(), _DEADLINE)
            finally:
                connecting.join()
            self._from.settimeout(_DEADLINE)
            if self._to is None:
                raise PeerError(explain("A stream to the next host must connect", "check the network between the hosts",
                                        host=host))
        self.run(1)
        self.check()

    def run(self, calls: int) -> None:
        """Send and receive the bytes `calls` times."""
        for _ in range(calls):
            self._runs += 1
            sending = threading.Thread(target=self._send, name="hvkeras-send", daemon=True)
            sending.start()
            self._receive()
            sending.join()

    def check(self) -> None:
        """Verify that all bytes were received.

        Raises:
            ConnectionError: Bytes are missing.
        """
        if self._from is not None and self._received != self._runs * self._bytes:
            raise ConnectionError(explain("A stream must carry all bytes", received=self._received,
                                          expected=self._runs * self._bytes))

    def _connect(self, address: tuple[str, int], secret: bytes) -> None:
        with contextlib.suppress(OSError, AuthenticationError), contextlib.ExitStack() as on_failure:
            connected = on_failure.enter_context(socket.create_connection(address, timeout=_DEADLINE))
            authenticate_to_server(connected, secret)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            on_failure.pop_all()
            self._to = connected

    def _send(self) -> None:
        chunk = memoryview(bytes(_CHUNK))
        left = self._bytes if self._to is not None else 0
        while left and self._to is not None:
            left -= self._to.send(chunk[:left])

    def _receive(self) -> None:
        buffer = bytearray(_CHUNK)
        left = self._bytes if self._from is not None else 0
        while left and self._from is not None:
            got = self._from.recv_into(buffer, min(left, _CHUNK))
            if not got:
                return
            self._received += got
            left -= got

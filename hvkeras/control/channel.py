"""The control channel of one process."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from hvkeras.control.client import ControlClient
from hvkeras.control.server import ControlServer

CAUSE_TIMEOUT = 2.0  # seconds to wait for a message from the server in the same process


@dataclass(frozen=True)
class ControlChannel:
    """The control channel of one process: its client, its server if this process runs it, and a reserved port."""

    client: ControlClient
    server: ControlServer | None
    claim: socket.socket | None = None

    def release_port(self) -> None:
        """Releases the port from TF_CONFIG for the engine; called once all ranks are connected."""
        if self.claim is not None:
            self.claim.close()

    def wait_for_exits(self, held: bool) -> None:
        """If this process runs the server, waits until ranks with finished scripts have exited or the job has ended.

        Args:
            held: Whether MPI's exit holds this process until the others end.
        """
        if self.server is not None and not self.client.detached:
            self.client.excuse_ending()
            self.server.wait_for_exits(self.client.introduction.rank, held)
            if self.server.cause is not None:
                self.client.wait_for_cause(CAUSE_TIMEOUT)

    def stop_reading(self) -> None:
        """Stops the server, but keeps this rank's connection open until its process exits."""
        self.release_port()
        if self.server is not None:
            self.server.stop()
        self.client.stop_reading()

    def close(self) -> None:
        """Closes the server and the client."""
        self.release_port()
        if self.server is not None:
            self.server.stop()
        self.client.close()

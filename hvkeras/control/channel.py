"""The control channel of one process."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from hvkeras.control.client import ControlClient
from hvkeras.control.server import ControlServer

WORD = 2.0  # seconds in which a rank hears from the server in its own process


@dataclass(frozen=True)
class ControlChannel:
    """The control channel of one process: its client, the server where this process has it, and a claimed port."""

    client: ControlClient
    server: ControlServer | None
    claim: socket.socket | None = None

    def release_port(self) -> None:
        """Gives the port that TF_CONFIG announces over to the engine; all ranks are connected."""
        if self.claim is not None:
            self.claim.close()

    def wait_for_ends(self) -> None:
        """Waits, where this process serves, until ranks whose scripts have ended have ended, or the job has."""
        if self.server is not None and not self.client.detached:
            self.client.excuse_ending()
            self.server.wait_for_ends(self.client.introduction.rank)
            if self.server.cause is not None:
                self.client.wait_for_cause(WORD)

    def let_go(self) -> None:
        """Closes the server, and leaves this rank's connection to the end of its process."""
        self.release_port()
        if self.server is not None:
            self.server.stop()
        self.client.let_go()

    def close(self) -> None:
        """Closes both ends."""
        self.release_port()
        if self.server is not None:
            self.server.stop()
        self.client.close()

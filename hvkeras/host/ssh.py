"""Commands on other hosts by ssh."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ssh:
    """Remote shell options: for ssh, or for srun on the nodes of this Slurm allocation.

    Attributes:
        port: Port of ssh (`-p`).
        identity_file: Private key of ssh (`-i`).
        timeout: Seconds after which a host counts as unreachable.
        by_srun: Whether srun starts the agents.
    """

    port: int | None = None
    identity_file: str | None = None
    timeout: float = 60.0
    by_srun: bool = False

    @property
    def program(self) -> str:
        """Program that starts agents on other hosts."""
        return "srun" if self.by_srun else "ssh"

    def command_line(self, host: str, command: str) -> list[str]:
        """Return the ssh command line that runs a shell command on a host."""
        options = ["-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(1, int(self.timeout))}",
                   "-o", "ServerAliveInterval=15"]
        options += ["-p", str(self.port)] if self.port is not None else []
        options += ["-i", self.identity_file] if self.identity_file is not None else []
        return ["ssh", *options, host, command]

"""Jobs of `hvkeras run` on hosts made of namespaces."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from harness import warm
from harness.hosts import Host, VirtualNetwork, remote_shell
from harness.launchers import BIN, clean_environment
from harness.processes import MARK, end_marked

ENDLESS = Path(__file__).parent / "workers" / "endless.py"
DEADLINE = 120.0  # seconds; a job must end within this time


def environment_for(network: VirtualNetwork, folder: Path, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a command that starts `hvkeras run` on the first host, with a substitute for ssh."""
    folder.mkdir(exist_ok=True)
    remote_shell(network.hosts, folder)
    made = clean_environment(folder) | {"HVKERAS_LIVENESS_TIMEOUT": "3"} | dict(env or {})
    return made | {"PATH": f"{folder}{os.pathsep}{made['PATH']}"}


class HostsJob:
    """A running job.

    Args:
        network: The hosts.
        slots: The number of ranks on each host.
        folder: Its working folder.
        script: The ranks' script.
        env: Further environment variables.
        cold: Whether each rank is a new Python process (see `harness.warm`), for tests of processes.
    """

    def __init__(self, network: VirtualNetwork, slots: Sequence[int], folder: Path, script: Path = ENDLESS,
                 env: Mapping[str, str] | None = None, cold: bool = False) -> None:
        self.hosts, self.slots, self._folder = network.hosts, slots, folder
        self._mark = uuid.uuid4().hex
        environment = environment_for(network, folder, env) | {MARK: self._mark}
        indices = ",".join(f"{host.address}:{count}" for host, count in zip(network.hosts, slots, strict=True) if count)
        self._process = subprocess.Popen(
            network.hosts[0].command(str(BIN / "hvkeras"), "run", "-H", indices, "--output-filename", "logs",
                                     *([sys.executable] if cold else warm.python(environment)), str(script)),
            cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, start_new_session=True)

    def text(self, rank: int, stream: str = "stdout") -> str:
        path = self._folder / "logs" / f"rank.{rank:0{len(str(sum(self.slots) - 1))}}" / stream
        return path.read_text(errors="replace") if path.exists() else ""

    def last_line(self, rank: int) -> str:
        """Return the last line of a rank's standard error, without the hint."""
        return ([line for line in self.text(rank, "stderr").splitlines() if not line.startswith("HINT: ")] or [""])[-1]

    def host_of(self, rank: int) -> Host:
        return [host for host, count in zip(self.hosts, self.slots, strict=True) for _ in range(count)][rank]

    def wait_for(self, text: str) -> None:
        """Wait until all ranks have printed a text."""
        end = time.monotonic() + DEADLINE
        while not all(text in self.text(rank) for rank in range(sum(self.slots))):
            assert self._process.poll() is None and time.monotonic() < end, self._everything()
            time.sleep(0.05)

    def pids_on(self, host: Host) -> list[int]:
        done = subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True, text=True, timeout=10)
        return [int(pid) for pid in done.stdout.split()]

    def pid(self, rank: int) -> int:
        """Return the pid of a rank that has printed it."""
        return int(re.findall(r"^pid (\d+)$", self.text(rank), re.MULTILINE)[0])

    def finish(self, deadline: float = DEADLINE) -> int:
        try:
            self.output = self._process.communicate(timeout=deadline)[0]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job did not end\n{self._everything()}") from None
        return self._process.returncode

    def _everything(self) -> str:
        logs = [f"--- rank {rank}\n{self.text(rank)[-500:]}\n{self.text(rank, 'stderr')[-3000:]}"
                for rank in range(sum(self.slots))]
        return "\n".join(logs)

    def close(self) -> list[str]:
        """Kill the remaining processes, and return them."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
        return end_marked(self._mark, grace=5.0)


@contextlib.contextmanager
def running(network: VirtualNetwork, slots: Sequence[int], folder: Path, script: Path = ENDLESS,
            env: Mapping[str, str] | None = None, cold: bool = False) -> Iterator[HostsJob]:
    job = HostsJob(network, slots, folder, script, env, cold)
    try:
        yield job
    finally:
        job.close()


def ports_of(host: Host) -> list[int]:
    """Return the listening TCP ports of a host, except on the loopback."""
    done = subprocess.run(["ip", "netns", "exec", host.namespace, "cat", "/proc/net/tcp", "/proc/net/tcp6"],
                          capture_output=True, text=True, timeout=10)
    found = re.findall(r"^\s*\d+: ([0-9A-F]+):([0-9A-F]{4}) [0-9A-F]+:[0-9A-F]{4} 0A ", done.stdout, re.MULTILINE)
    return [int(port, 16) for address, port in found if address != "0100007F"]

"""Pods of a Kubernetes Indexed Job, as network namespaces with the environment variables that the kubelet sets."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness import hosts
from harness.launchers import clean_environment

JOB, SERVICE = "train", "workers"


class Pods:
    """Pods whose containers can be restarted."""

    def __init__(self, network: hosts.VirtualNetwork) -> None:
        self._hosts = network.hosts
        self._started: list[subprocess.Popen[str]] = []

    def start(self, index: int, command: Sequence[str], folder: Path, **extra: str) -> subprocess.Popen[str]:
        """Start the container of a pod, with its output in a pipe (`stdout` of the process).

        Args:
            index: The pod's index.
            command: The command in the container.
            folder: Its working folder.
            **extra: Further environment variables.
        """
        environment = clean_environment(folder) | {
            "HOSTNAME": self._hosts[index].name, "JOB_COMPLETION_INDEX": str(index), "HVKERAS_BACKEND": "tfdist",
            "HVKERAS_KUBERNETES_SIZE": str(len(self._hosts)), "HVKERAS_KUBERNETES_SERVICE": SERVICE,
            "HVKERAS_SECRET": "not a secret outside of this test", **extra}
        process = subprocess.Popen(self._hosts[index].command(*command), env=environment, cwd=folder, text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        self._started.append(process)
        return process

    def resolve(self) -> None:
        """Make the names of the pods resolvable, as a cluster does some time after their start."""
        names = "".join(f"{host.address} {host.name}.{SERVICE}\n" for host in self._hosts)
        for host in self._hosts:
            with host.names_file.open("a") as file:
                file.write(names)

    def kill(self, index: int, pod: subprocess.Popen[str]) -> None:
        """Kill all processes in a pod, as the kubelet does."""
        done = subprocess.run(["ip", "netns", "pids", self._hosts[index].namespace], capture_output=True, text=True,
                              timeout=10, check=True)
        for pid in done.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        pod.communicate(timeout=10)

    def end(self) -> None:
        """Kill all remaining processes."""
        for process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            if process.stdout is not None and not process.stdout.closed:
                process.communicate()


@contextlib.contextmanager
def pods(count: int = 2) -> Iterator[Pods]:
    """Create the pods of a job, and remove them at the end."""
    with hosts.network(count, [f"{JOB}-{index}" for index in range(count)]) as network:
        made = Pods(network)
        try:
            yield made
        finally:
            made.end()

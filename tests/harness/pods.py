"""The pods of a Kubernetes Indexed Job, as network namespaces with the environment that the kubelet gives."""

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
    """Some pods, whose containers may be started again and again."""

    def __init__(self, network: hosts.VirtualNetwork) -> None:
        self._hosts = network.hosts
        self._started: list[subprocess.Popen[str]] = []

    def start(self, index: int, command: Sequence[str], folder: Path, **extra: str) -> subprocess.Popen[str]:
        """Starts the container of a pod; what it prints goes to its standard output.

        Args:
            index: The pod's index.
            command: What runs in it.
            folder: Its working folder.
            **extra: More environment variables.
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
        """Lets the names of the pods resolve, as the cluster does some time after it has started them."""
        names = "".join(f"{host.address} {host.name}.{SERVICE}\n" for host in self._hosts)
        for host in self._hosts:
            with host.names_file.open("a") as file:
                file.write(names)

    def kill(self, index: int, pod: subprocess.Popen[str]) -> None:
        """Kills all that runs in a pod, as the kubelet does with its container."""
        done = subprocess.run(["ip", "netns", "pids", self._hosts[index].namespace], capture_output=True, text=True,
                              timeout=10, check=True)
        for pid in done.stdout.split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        pod.communicate(timeout=10)

    def end(self) -> None:
        """Ends all that still runs."""
        for process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            if process.stdout is not None and not process.stdout.closed:
                process.communicate()


@contextlib.contextmanager
def pods(count: int = 2) -> Iterator[Pods]:
    """Makes the pods of a job; they are gone afterwards."""
    with hosts.network(count, [f"{JOB}-{index}" for index in range(count)]) as network:
        made = Pods(network)
        try:
            yield made
        finally:
            made.end()

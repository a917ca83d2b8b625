"""Real hosts on one machine: network namespaces with host names of their own, joined by a virtual cable."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ETC = Path("/etc/netns")
NETWORK = "10.199.7"  # of the cable's two ends; the namespaces see nothing else


@dataclass(frozen=True)
class Host:
    """One host.

    Attributes:
        name: Its host name.
        address: Its address on the cable.
        namespace: Its network namespace.
    """

    name: str
    address: str
    namespace: str

    def command(self, *arguments: str) -> list[str]:
        """Words a command line that runs on this host."""
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c",
                f'hostname {self.name}; exec "$@"', "sh", *arguments]


def missing() -> str:
    """What this machine lacks for making hosts, or ""."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in ("ip", "unshare") if shutil.which(tool) is None]
    if absent:
        return f"{', '.join(absent)} not found (Debian: apt-get install iproute2 util-linux)"
    probe = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=10)
    return probe.stderr.strip()


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Makes two hosts that reach each other and nothing else; they are gone afterwards."""
    mark = uuid.uuid4().hex[:6]
    hosts = (Host(f"left-{mark}", f"{NETWORK}.1", f"hvk-{mark}-a"),
             Host(f"right-{mark}", f"{NETWORK}.2", f"hvk-{mark}-b"))
    ends = (f"hvk{mark}a", f"hvk{mark}b")
    try:
        for host in hosts:
            _ip("netns", "add", host.namespace)
            # `ip netns exec` shows this folder's files in /etc: the hosts know each other by name, as they would.
            (_ETC / host.namespace).mkdir(parents=True)
            (_ETC / host.namespace / "hosts").write_text(
                "127.0.0.1 localhost\n" + "".join(f"{one.address} {one.name}\n" for one in hosts))
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for host, end in zip(hosts, ends, strict=True):
            _ip("link", "set", end, "netns", host.namespace)
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", end)
            _ip("-n", host.namespace, "link", "set", end, "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True, timeout=10)
            shutil.rmtree(_ETC / host.namespace, ignore_errors=True)


def remote_shell(hosts: tuple[Host, Host], folder: Path) -> Path:
    """Writes a stand-in for ssh that takes an address and a command, and runs it on the host that has the address."""
    script = folder / "remote-shell"
    cases = "\n".join(
        f"{host.address}) exec ip netns exec {host.namespace} unshare --uts sh -c 'hostname {host.name}; '\"$*\" ;;"
        for host in hosts)
    script.write_text(f'#!/bin/sh\naddress=$1\nshift\ncase "$address" in\n{cases}\nesac\nexit 1\n')
    script.chmod(0o755)
    return script


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=10)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")

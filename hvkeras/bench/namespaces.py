"""Hosts on one machine: network namespaces with host names of their own, joined by a virtual switch."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvkeras.errors import MachineError, explain

NETWORK = "10.199.7"  # of all hosts; the namespaces see nothing else
CABLE = "cable"  # the device of a host; the switch has one for each
_ETC = Path("/etc/netns")
_DEADLINE = 10.0  # seconds for a command


@dataclass(frozen=True)
class Host:
    """One host.

    Attributes:
        name: Its host name.
        address: Its address.
        namespace: Its network namespace.
    """

    name: str
    address: str
    namespace: str

    @property
    def names_file(self) -> Path:
        """The /etc/hosts of this host, which may be appended to while processes run there."""
        return _ETC / self.namespace / "hosts"

    def command(self, *arguments: str) -> list[str]:
        """Return a command line that runs on this host."""
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c",
                f'hostname {self.name}; exec "$@"', "sh", *arguments]


def missing() -> str:
    """What this machine lacks for making hosts, or ""."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if absent:
        return f"{', '.join(absent)} not found (Debian: apt-get install iproute2 util-linux)"
    probe = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=_DEADLINE, check=False)
    return probe.stderr.strip()


@dataclass(frozen=True)
class VirtualNetwork:
    """Hosts that reach each other, and nothing else, through a switch.

    Attributes:
        hosts: The hosts.
        switch: The network namespace of the switch.
    """

    hosts: tuple[Host, ...]
    switch: str

    def limits(self, rate: str, burst: str) -> list[list[str]]:
        """Return the command lines that give each host's cable a bandwidth, in both directions.

        Args:
            rate: As `tc` reads it, such as `100mbit`; "" removes the limit.
            burst: What may pass at once after a pause, such as `16kb`.
        """
        ends = [(host.namespace, CABLE) for host in self.hosts]
        ends += [(self.switch, f"{CABLE}{index}") for index in range(len(self.hosts))]
        if not rate:
            return [["tc", "-n", namespace, "qdisc", "del", "dev", device, "root"] for namespace, device in ends]
        return [["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", "rate", rate, "burst", burst,
                 "latency", "100ms"] for namespace, device in ends]

    def limit(self, rate: str, burst: str) -> None:
        """Give each host's cable a bandwidth; see `limits`."""
        for command in self.limits(rate, burst):
            _run(*command)


@contextlib.contextmanager
def network(count: int, names: Sequence[str] = ()) -> Iterator[VirtualNetwork]:
    """Make hosts that reach each other and nothing else; they are gone afterwards.

    Args:
        count: The number of hosts.
        names: Their names, which need not differ from those of hosts elsewhere; made up by default.

    Raises:
        MachineError: This machine cannot make them.
    """
    mark = uuid.uuid4().hex[:6]
    hosts = tuple(Host(names[index] if names else f"host{index}-{mark}", f"{NETWORK}.{index + 1}",
                       f"hvk-{mark}-{index}") for index in range(count))
    made = VirtualNetwork(hosts, f"hvk-{mark}-switch")
    try:
        _ip("netns", "add", made.switch)
        _ip("-n", made.switch, "link", "add", "switch", "type", "bridge")
        _ip("-n", made.switch, "link", "set", "switch", "up")
        for index, host in enumerate(hosts):
            _ip("netns", "add", host.namespace)
            # `ip netns exec` shows this folder's files in /etc: the hosts know each other by name, as they would.
            host.names_file.parent.mkdir(parents=True)
            host.names_file.write_text(
                "127.0.0.1 localhost\n" + "".join(f"{one.address} {one.name}\n" for one in hosts))
            port = f"{CABLE}{index}"
            _ip("-n", made.switch, "link", "add", port, "type", "veth", "peer", "name", CABLE, "netns", host.namespace)
            _ip("-n", made.switch, "link", "set", port, "master", "switch", "up")
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", CABLE)
            _ip("-n", host.namespace, "link", "set", CABLE, "up")
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            # The congestion control that most machines use, whatever this one does.
            _ip("-n", host.namespace, "route", "replace", f"{NETWORK}.0/24", "dev", CABLE, "src", host.address,
                "congctl", "cubic")
        yield made
    finally:
        for namespace in (*(host.namespace for host in hosts), made.switch):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, timeout=_DEADLINE, check=False)
            shutil.rmtree(_ETC / namespace, ignore_errors=True)


def remote_shell(hosts: Sequence[Host], folder: Path) -> Path:
    """Write a stand-in for ssh that takes an address and a command, and runs it on the host that has the address.

    It ignores ssh's options, before the address and after it, and takes the name of a host for its address, too.

    Args:
        hosts: The hosts.
        folder: Where it is written, as `ssh`.

    Returns:
        Its path.
    """
    script = folder / "ssh"
    cases = "\n".join(
        f"{host.address}|{host.name}) exec ip netns exec {host.namespace} unshare --uts sh -c"
        f" 'hostname {host.name}; '\"$*\" ;;" for host in hosts)
    script.write_text(f"""#!/bin/sh
address=
while [ $# -gt 0 ]; do
  case "$1" in
    -o|-p|-i|-l) shift 2 ;;
    -*) shift ;;
    *) [ -z "$address" ] || break; address=$1; shift ;;
  esac
done
case "$address" in
{cases}
esac
echo "no host $address" >&2
exit 255
""")
    script.chmod(0o755)
    return script


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE, check=False)
    if done.returncode:
        raise MachineError(explain(f"Hosts made of network namespaces need a command that failed:"
                                   f" {done.stderr.strip()}", "run as root, with iproute2", command=" ".join(command)))

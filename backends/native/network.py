"""Network of the native engine between hosts: UCX, and the network cards that it uses."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from hvkeras.backends.native.ports import RANGE, Ports
from hvkeras.backends.native.ucx import Costs, Ucx
from hvkeras.errors import MachineError, UsageError, explain
from hvkeras.host.console import prints_at, say
from hvkeras.host.network import interface_of, own_addresses, own_networks, shared_address

if TYPE_CHECKING:
    from hvkeras.backends.cpp_library import Library
    from hvkeras.backends.interface import Start

INSTALL = "pip install 'hvkeras[hosts]'"
_OTHERS = "the backends horovod and tfdist work between hosts as well"
_TRIES = 3  # to open UCX on a free port before another process binds it
_INFINIBAND = Path("/sys/class/infiniband")  # network cards with RDMA, on InfiniBand and on Ethernet
_FEW_HOSTS = 8  # up to which UCX receives whole messages at once, in buffers of 1 MiB instead of 64 KiB
_NAME = "libucp.so.0"
_SYSTEM = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib",
           "/opt/ucx/lib")


def ucx_folder() -> str:
    """Return the folder with UCX's libraries, without loading them; "" if there is none.

    The wheel's libraries are preferred, except on a machine with RDMA cards: the wheel's UCX was built without RDMA.
    """
    system = [*os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep), f"{sys.prefix}/lib", *_SYSTEM]
    spec = find_spec("libucx")
    wheel = [f"{folder}/lib" for folder in (spec.submodule_search_locations if spec is not None else None) or ()]
    has_rdma = _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir())
    folders = system + wheel if has_rdma else wheel + system
    return next((folder for folder in folders if folder and Path(folder, _NAME).is_file()), "")


def objection_to_hosts() -> str:
    """Return what is missing for a job on several hosts; "" if nothing is missing."""
    return "" if ucx_folder() else f"between hosts it needs UCX, which is not installed; {INSTALL}, or {_OTHERS}"


def rdma_devices(interface: str, ports: Path = Path("/sys/class/net")) -> list[str]:
    """Return UCX's names of a network card's RDMA devices, such as `mlx5_0:1`; none if it has no RDMA."""
    card = ports / interface
    devices = sorted(entry.name for entry in (card / "device" / "infiniband").glob("*"))
    try:
        port = int((card / "dev_port").read_text()) + 1
    except (OSError, ValueError):
        port = 1
    return [f"{device}:{port}" for device in devices]


class Network:
    """Network between the leaders of the hosts, over UCX. All ranks of a job create it at the same time.

    Args:
        start: The start parameters of the backend.
        label: A name that is the same on all ranks, and different for each start.

    Attributes:
        addresses: The network addresses of all hosts of the job.
        interfaces: The network interfaces that are used on this host.
        settings: UCX's settings, without the prefix `UCX_`.
        costs: Costs of messages between hosts, the same on all ranks; None until they are measured.

    Raises:
        MachineError: UCX is not installed, or cannot be loaded.
        UsageError: This host has none of the given interfaces.
        PeerError: Not all ranks participated.
    """

    def __init__(self, start: Start, library: Library, label: str) -> None:
        assert start.control is not None
        topology = start.topology
        folder = ucx_folder()
        if not folder:
            raise MachineError(explain("The native engine must reach the other hosts: " + objection_to_hosts(),
                                       hosts=sorted(set(topology.hosts))))
        self.ucx = Ucx(library, folder)
        self.costs: Costs | None = None
        self._start = start
        own = {"networks": own_networks(), "addresses": own_addresses()}
        answers = start.control.gather(f"{label} networks", own, start.settings.start_timeout)
        self.addresses: list[str] = sorted({address for answer in answers for address in answer["addresses"]})
        others = [answer["networks"] for answer, host in zip(answers, topology.host_numbers, strict=True)
                  if host != topology.host_numbers[topology.rank]]
        address = shared_address(own["networks"], others) or start.control.local_address
        self.interfaces: list[str] = _chosen(start.settings.network_interfaces) or [interface_of(address)]
        rdma = [device for interface in self.interfaces for device in rdma_devices(interface)]
        self.settings: dict[str, str] = {
            "NET_DEVICES": ",".join([*rdma, *self.interfaces]),
            "TLS": "ib,tcp" if rdma else "tcp",
            "MAX_EAGER_RAILS": str(len(self.interfaces)),
            "TCP_CONN_NB": "y",  # otherwise, connecting to a host whose firewall drops packets never times out
        }
        if not rdma:  # over TCP, a rendezvous message would be queued behind the data in flight
            self.settings["RNDV_THRESH"] = "inf"
            if len(set(topology.hosts)) <= _FEW_HOSTS:  # each connection has a buffer while data arrive
                self.settings["TCP_RX_SEG_SIZE"] = "1m"

    def measure_costs(self, link: Link | None, host: int, label: str) -> None:
        """Measure the costs of messages between hosts, or take them from rank 0's setting. Called by all ranks.

        `costs` becomes the maximum over all pairs of neighboring hosts, because a collective is as slow as its slowest
        host.

        Args:
            link: This rank's end of the connections, if it is the leader of its host.
            host: The index of that host.
            label: A name that is the same on all ranks.

        Raises:
            MachineError: A host is too slow, or can no longer be reached.
            PeerError: Not all ranks participated.
        """
        assert self._start.control is not None
        settings, gather = self._start.settings, self._start.control.gather
        given = gather(f"{label} given", settings.network_costs, settings.start_timeout)[0]
        if given is None:
            measured = link.measure(host, settings.start_timeout) if link is not None else None
            answers = gather(f"{label} measured", measured, settings.start_timeout)
            self.costs = Costs(*map(max, zip(*filter(None, answers), strict=True)))
        else:
            self.costs = Costs(latency=given[0], per_byte=1 / given[1])
        if prints_at(settings, "DEBUG") and host == 0:
            say(f"native: between hosts, a message takes {1e6 * self.costs.latency:.0f} us, a further one"
                f" {1e6 * self.costs.per_message:.1f} us, and the network carries {8e-6 / self.costs.per_byte:,.0f}"
                f" Mbit/s ({'measured' if given is None else 'HVKERAS_NETWORK_COSTS'})")

    @property
    def description(self) -> str:
        """Version of UCX, and the interfaces that it uses."""
        return f"UCX {self.ucx.version} on {', '.join(self.interfaces)}"


class Link:
    """A leader's end of the connections between the hosts of a group.

    Args:
        hosts: The number of the group's hosts.

    Attributes:
        address: UCX's address of this end, as text.

    Raises:
        MachineError: UCX cannot use the interfaces, or its ports cannot be protected from other processes.
        UsageError: The variable UCX_TCP_PORT_RANGE is not a range of ports.
    """

    def __init__(self, network: Network, group: int, hosts: int) -> None:
        self._network, self._group, self._hosts = network, group, hosts
        self._ports, self.address = self._opened()
        try:
            self._ports.admit(network.addresses)
            if not self._ports.names and network.settings["TLS"] == "tcp":
                raise MachineError(explain("UCX must listen on the port that it was given", _OTHERS,
                                           port=self._ports.number, ucx=network.ucx.version))
        except BaseException:
            self.close()
            raise

    @property
    def ports(self) -> list[str]:
        """Addresses where UCX listens here, as `address:port`."""
        return self._ports.names

    def _opened(self) -> tuple[Ports, str]:
        """Open UCX on a free port, and try again with another one if some process binds it first."""
        for tries_left in reversed(range(_TRIES)):
            ports = Ports()
            settings = self._network.settings | {RANGE.removeprefix("UCX_"): f"{ports.number}-{ports.number}"}
            try:
                return ports, self._network.ucx.open(self._group, settings, self._hosts).hex()
            except MachineError:
                if tries_left == 0 or ports.is_free:
                    raise
        raise AssertionError

    def connect(self, host: int, addresses: Sequence[str], ports: Sequence[Sequence[str]], names: Sequence[str],
                mark: int, timeout: float) -> str:
        """Connect to the other hosts, by `address` and `ports`; return this leader's claims for `close_port`."""
        self._network.ucx.connect(self._group, host, [bytes.fromhex(address) for address in addresses], names, mark,
                                  timeout)
        return self._ports.claims({name for names_of_host in ports for name in names_of_host})

    def close_port(self, claims: Sequence[str]) -> None:
        """Reject further connections, and check that only leaders have connected; `claims` are those of all leaders."""
        self._ports.close()
        self._ports.require_claimed(claims)

    def measure(self, host: int, timeout: float) -> Costs | None:
        """Measure the costs of messages between hosts; the leaders of all hosts do so at once. See `Ucx.measure`."""
        return self._network.ucx.measure(self._group, host, self._hosts, timeout)

    def close(self) -> None:
        """Close the connections, unless the engine has taken them over."""
        try:
            self._ports.close()
        finally:
            self._network.ucx.close(self._group)


def _chosen(names: tuple[str, ...]) -> list[str]:
    here = psutil.net_if_addrs()
    found = [name for name in names if name in here]
    if names and not found:
        raise UsageError(explain("A network interface of this machine must have the given name",
                                 "the interfaces here are " + ", ".join(sorted(here)), interfaces=list(names)))
    return found

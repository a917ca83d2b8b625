"""Announcement of the control channel by rank 0: its file in a private folder, and the choice of its address."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
from pathlib import Path

from hvkeras.control.launch_environments import Launch
from hvkeras.errors import MachineError, explain
from hvkeras.host.files import create_private, make_private
from hvkeras.host.network import (
    LOOPBACK,
    address_towards,
    interface_address,
    is_local,
    is_loopback,
    outward_address,
    shared_address,
    split_address,
)
from hvkeras.settings import Settings


def remove_announcement(launch: Launch, settings: Settings) -> None:
    """Remove rank 0's file from the folder; called once all ranks are connected."""
    if launch.rank == 0 and launch.rendezvous.job:
        with contextlib.suppress(OSError):
            announcement_path(launch, settings).unlink()


def is_one_host(launch: Launch) -> bool:
    """Return whether all ranks of a launch run on one host, according to the launch environment."""
    if launch.cluster:
        return all(is_local(split_address(entry)[0]) for entry in launch.cluster)
    if launch.rendezvous.kind == "address" and launch.local_size is None:
        return is_loopback(split_address(launch.rendezvous.address)[0])
    return launch.local_size == launch.size


def announcement_path(launch: Launch, settings: Settings) -> Path:
    """Return the path of rank 0's file with address and secret, in a folder of this host or one shared by hosts."""
    own = Path(tempfile.gettempdir()) / f"hvkeras-{os.getuid()}" if is_one_host(launch) else Path.home() / ".hvkeras"
    folder = Path(settings.rendezvous_dir or own)
    if reason := make_private(folder):
        fix = f"chmod 700 {folder}, or " if "mode" in reason or "write" in reason else ""
        raise MachineError(explain(f"The folder that carries the job's secret must belong to you alone, but {reason}",
                                   f"{fix}set HVKERAS_RENDEZVOUS_DIR to a folder of yours, the same for all ranks",
                                   folder=str(folder)))
    return folder / f"{launch.rendezvous.job}.json"


def write_privately(path: Path, text: str) -> None:
    """Write a file atomically that only its owner can read.

    Raises:
        MachineError: The folder is not writable.
    """
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with create_private(unfinished) as file:
            file.write(text.encode())
        unfinished.replace(path)
    except OSError as error:
        raise MachineError(explain(f"The folder that carries the job's secret must be writable ({error.strerror})",
                                   "set HVKERAS_RENDEZVOUS_DIR to a folder with free space, the same for all ranks",
                                   path=str(path))) from error


def own_address(settings: Settings, hosts: dict[str, list[str]]) -> str:
    """Choose rank 0's listening address: the loopback on a single host, else one on a network that all hosts share."""
    own = socket.gethostname()
    others = [host for host in hosts if host != own]
    if hosts and not others:
        return LOOPBACK
    shared = shared_address(hosts.get(own, []), [hosts[host] for host in others]) if others else ""
    if shared and not settings.network_interfaces:
        return shared
    if others or settings.network_interfaces:
        return own_address_towards(settings, others[0] if others else own)
    return outward_address()


def own_address_towards(settings: Settings, host: str) -> str:
    """Return this host's address for connections from another host: on the chosen interfaces, or on the route to it."""
    return interface_address(settings.network_interfaces) if settings.network_interfaces else address_towards(host)

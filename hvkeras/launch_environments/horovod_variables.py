"""A rank's numbers under the names that horovodrun gives them, since scripts read them at their top.

A variable beside them says who has set them, so that what a rank starts does not take them for horovodrun's.
"""

from __future__ import annotations

import socket

from hvkeras.host.network import split_address
from hvkeras.host.topology import Topology, topology_from_hosts
from hvkeras.launch_environments import horovodrun_gloo, tf_config
from hvkeras.launch_environments.launch import Launch

_NAMES = (horovodrun_gloo.PROCESS_ID, horovodrun_gloo.PROCESS_COUNT, horovodrun_gloo.LOCAL_PROCESS_ID,
          horovodrun_gloo.LOCAL_PROCESS_COUNT, "HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE")
HOST_NAME = "HOROVOD_HOSTNAME"


def announced(launcher: str, numbers: dict[str, str]) -> dict[str, str]:
    """Adds to numbers who has set them.

    Args:
        launcher: The launcher's printed name.
        numbers: The variables.
    """
    return {**numbers, horovodrun_gloo.SET_BY: launcher}


def named(rank: int, size: int, local_rank: int, local_size: int, cross_rank: int, cross_size: int,
          host: str) -> dict[str, str]:
    """Names a rank's numbers.

    Args:
        rank: Its number.
        size: How many ranks there are.
        local_rank: Its number on its host.
        local_size: How many ranks its host has.
        cross_rank: Its host's number among those that have a rank of this local rank.
        cross_size: How many such hosts there are.
        host: Its host's name.
    """
    numbers = (rank, size, local_rank, local_size, cross_rank, cross_size)
    return {**dict(zip(_NAMES, map(str, numbers), strict=True)), HOST_NAME: host}


def numbers_of_topology(topology: Topology) -> dict[str, str]:
    """Names the numbers of a rank whose place is known.

    Args:
        topology: The rank's place.
    """
    return named(topology.rank, topology.size, topology.local_rank, topology.local_size, topology.cross_rank,
                 topology.cross_size, topology.host)


def numbers_of_launch(launch: Launch) -> dict[str, str]:
    """Names the numbers that a launcher has announced; ranks have not met yet, so that some may be unknown.

    Args:
        launch: What the launcher has announced.

    Returns:
        The variables; none for a process that nothing launched, or horovodrun.
    """
    if launch.rendezvous.kind == "none" or launch.launcher == horovodrun_gloo.LAUNCHER:
        return {}
    if launch.launcher == tf_config.LAUNCHER:
        hosts = [split_address(each)[0] for each in launch.cluster]
        return announced(launch.launcher, numbers_of_topology(topology_from_hosts(launch.rank, hosts)))
    cross = (0, 1) if launch.local_size == launch.size else (None, None)
    numbers = zip(_NAMES, (launch.rank, launch.size, launch.local_rank, launch.local_size, *cross), strict=True)
    known = {name: str(value) for name, value in numbers if value is not None}
    return announced(launch.launcher, {HOST_NAME: socket.gethostname(), **known})

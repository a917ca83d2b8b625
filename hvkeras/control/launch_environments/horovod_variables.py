"""A rank's numbers in horovodrun's environment variables, because scripts read them as soon as they start.

An additional variable records who has set them, so that a rank's child processes do not detect horovodrun.
"""

from __future__ import annotations

import socket

from hvkeras.control.launch_environments import horovodrun_gloo, tf_config
from hvkeras.control.launch_environments.launch import Launch
from hvkeras.host.network import split_address
from hvkeras.host.topology import Topology, topology_from_hosts

_NAMES = (horovodrun_gloo.PROCESS_ID, horovodrun_gloo.PROCESS_COUNT, horovodrun_gloo.LOCAL_PROCESS_ID,
          horovodrun_gloo.LOCAL_PROCESS_COUNT, "HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE")
HOST_NAME = "HOROVOD_HOSTNAME"


def with_launcher(launcher: str, values: dict[str, str]) -> dict[str, str]:
    """Add the variable that records the launcher that has set the numbers."""
    return {**values, horovodrun_gloo.SET_BY: launcher}


def rank_variables(rank: int, size: int, local_rank: int, local_size: int, cross_rank: int, cross_size: int,
                   host: str) -> dict[str, str]:
    """Return horovodrun's variables for a rank.

    Args:
        local_size: The number of ranks on its host.
        cross_rank: Its host's index among the hosts that have a rank of this local rank.
    """
    values = (rank, size, local_rank, local_size, cross_rank, cross_size)
    return {**dict(zip(_NAMES, map(str, values), strict=True)), HOST_NAME: host}


def topology_variables(topology: Topology) -> dict[str, str]:
    """Return horovodrun's variables for a rank whose topology is known."""
    return rank_variables(topology.rank, topology.size, topology.local_rank, topology.local_size, topology.cross_rank,
                          topology.cross_size, topology.host)


def launch_variables(launch: Launch) -> dict[str, str]:
    """Return the horovodrun variables that a launch determines; before the rendezvous, some may be unknown.

    Returns:
        The variables; empty for a process started by no launcher or by horovodrun itself.
    """
    if launch.rendezvous.kind == "none" or launch.launcher == horovodrun_gloo.LAUNCHER:
        return {}
    if launch.launcher == tf_config.LAUNCHER:
        hosts = [split_address(each)[0] for each in launch.cluster]
        return with_launcher(launch.launcher, topology_variables(topology_from_hosts(launch.rank, hosts)))
    cross = (0, 1) if launch.local_size == launch.size else (None, None)
    values = zip(_NAMES, (launch.rank, launch.size, launch.local_rank, launch.local_size, *cross), strict=True)
    known = {name: str(value) for name, value in values if value is not None}
    return with_launcher(launch.launcher, {HOST_NAME: socket.gethostname(), **known})

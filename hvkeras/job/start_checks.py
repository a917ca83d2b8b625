"""The facts that ranks exchange when a job starts, and the checks before and after its engine starts."""

from __future__ import annotations

import socket
from typing import Any

from hvkeras.backends.interface import Backend
from hvkeras.control.client import ControlClient
from hvkeras.control.waiting import REPORT_EVERY, task_name
from hvkeras.errors import MachineError, explain
from hvkeras.host.console import prints_at, say
from hvkeras.host.cores import fair_share, limit_threads, usable_cores
from hvkeras.host.gpus import seen_gpus
from hvkeras.host.network import host_identity
from hvkeras.host.topology import Topology
from hvkeras.host.versions import must_agree, own_versions
from hvkeras.job.backend_choice import facts_of_rank
from hvkeras.launch_environments import Launch
from hvkeras.settings import Settings


def own_facts(requested: str, launch: Launch, settings: Settings) -> dict[str, Any]:
    """What this rank reports to the others about itself before the engine starts."""
    return {"host": socket.gethostname(), "identity": host_identity(), "cores": usable_cores(),
            "versions": own_versions(), "settings": settings.shared(), "gpus": seen_gpus(settings.gpu_placement),
            **facts_of_rank(requested, launch)}


def exchange_facts(client: ControlClient, launch: Launch, settings: Settings, session: int,
                   facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Waits for all ranks, reporting every few seconds which are missing, and returns the facts of each rank.

    Raises:
        PeerError: A rank did not come in time.
        MachineError: Ranks run different versions.
    """
    reported = [0.0]

    def on_missing(ranks: list[int], waited: float) -> None:
        if waited - reported[0] >= REPORT_EVERY and (launch.rank == 0 or launch.cluster):
            reported[0] = waited
            names = ", ".join(task_name(launch, rank) for rank in ranks)
            say(f"waiting for {names}, {waited:.0f} s of {settings.start_timeout:g} s")

    key = f"facts {session}"
    found = client.gather(key, facts, settings.start_timeout, on_missing,
                          describe=lambda ranks: ", ".join(task_name(launch, rank) for rank in ranks))
    check_versions(launch, settings, found)
    return found


def settings_of_rank_0(launch: Launch, settings: Settings, facts: list[dict[str, Any]]) -> Settings:
    """Returns this rank's settings, with those that concern the job as rank 0 has them, which says where others differ.

    Args:
        launch: How this process was launched.
        settings: The settings of this rank.
        facts: The facts of each rank.
    """
    first = facts[0]["settings"]
    if launch.rank == 0 and prints_at(settings, "WARNING"):
        for name, value in first.items():
            others = {rank: fact["settings"][name] for rank, fact in enumerate(facts)
                      if fact["settings"][name] != value}
            if others:
                values = ", ".join(f"{_in_words(other)} on rank {rank}" for rank, other in others.items())
                say(f"HVKERAS_{name.upper()} is {_in_words(value)} on rank 0, {values}; that of rank 0 counts on"
                    " all ranks")
    return settings.with_shared(first)


def _in_words(value: Any) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else f"{value:g}" if isinstance(
        value, float) else str(value)


def check_versions(launch: Launch, settings: Settings, facts: list[dict[str, Any]]) -> None:
    """Checks that all ranks have the same versions; those of TensorFlow and Keras may differ, but rank 0 says so.

    Raises:
        MachineError: The versions of hvkeras or of Python differ.
    """
    first = facts[0]["versions"]
    for rank, fact in enumerate(facts):
        own = fact["versions"]
        if must_agree(own) != must_agree(first):
            raise MachineError(explain(
                "All ranks must run the same versions of Python and hvkeras", "install the same on every host, or use"
                " one image for all", **{f"rank_0_on_{facts[0]['host']}": must_agree(first),
                                         f"rank_{rank}_on_{fact['host']}": must_agree(own)}))
        if own != first and launch.rank == 0 and prints_at(settings, "WARNING"):
            differ = ", ".join(f"{name} {first.get(name, 'none')} and {own.get(name, 'none')}"
                               for name in sorted(first.keys() | own.keys()) if first.get(name) != own.get(name))
            say(f"versions differ between rank 0 on {facts[0]['host']} and rank {rank} on {fact['host']}: {differ}")
            return


def check_local_ranks(launch: Launch, topology: Topology) -> None:
    """Compares the announced local size with the one derived from the hosts' identities."""
    if launch.local_size is not None and launch.local_size != topology.local_size:
        raise MachineError(explain(
            f"{launch.launcher} and the ranks' hosts must agree on which ranks share a host",
            "give each machine a host name of its own, and run ranks of one host in one container",
            announced_local_size=launch.local_size, counted=topology.local_size, hosts=topology.hosts))


def share_cores(settings: Settings, facts: list[dict[str, Any]], topology: Topology) -> None:
    """Limits TensorFlow to this rank's share of the host's cores, unless that is disabled."""
    if not settings.threads:
        return
    own = facts[topology.rank]
    share = fair_share(own["cores"], [fact["cores"] for fact in facts if fact["identity"] == own["identity"]])
    if not limit_threads(share) and prints_at(settings, "INFO"):
        say("TensorFlow had started before init(), so its threads stay as they are; call hvd.init() first")


def check_size(launch: Launch, engine: Backend, counted: int) -> None:
    """Rejects an engine whose number of ranks differs from what the launcher announced.

    Raises:
        MachineError: The sizes differ.
    """
    if not isinstance(counted, int):
        raise MachineError(explain(f"start() of the backend {engine.name!r} must return the number of ranks",
                                   f"return it from {type(engine).__name__}.start()", returned=counted))
    if counted != launch.size:
        raise MachineError(explain(
            f"{launch.launcher} announced {launch.size} ranks, but {engine.name} ({engine.engine}) counts {counted}",
            "the engine was built for another launcher or MPI; see hvkeras run --check-build",
            launcher_size=launch.size, engine_size=counted))

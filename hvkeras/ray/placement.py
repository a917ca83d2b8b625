"""Placement of workers: placement groups, and the assignment of ranks to workers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvkeras.control.launch_environments import hvkeras_run
from hvkeras.control.launch_environments.horovod_variables import topology_variables, with_launcher
from hvkeras.errors import MachineError, UsageError, explain
from hvkeras.host.console import say
from hvkeras.host.topology import topology_from_hosts
from hvkeras.host.versions import must_agree

REPORT_EVERY = 3.0  # seconds between reports of waiting for resources
LAUNCHER = "Ray"


@dataclass(frozen=True)
class Shape:
    """Resources of the workers, and their distribution over hosts.

    Attributes:
        hosts: The number of hosts with `workers` workers each; None to place workers individually.
        workers: The number of workers, per host if `hosts` is given.
        cpus: CPU cores per worker.
        gpus: GPUs per worker.
    """

    hosts: int | None
    workers: int
    cpus: float
    gpus: float

    @property
    def size(self) -> int:
        """Total number of workers."""
        return self.workers * (self.hosts or 1)

    @property
    def strategy(self) -> str:
        """Ray's placement strategy: workers are packed onto few hosts, or each bundle gets a separate host."""
        return "STRICT_SPREAD" if self.hosts else "PACK"

    def bundles(self) -> list[dict[str, float]]:
        """Return the bundles to reserve: one for each host, or for each worker without `hosts`."""
        count, per_bundle = (self.hosts, self.workers) if self.hosts else (self.workers, 1)
        resources = {"CPU": self.cpus * per_bundle, "GPU": self.gpus * per_bundle}
        return [{name: amount for name, amount in resources.items() if amount}] * count

    def bundle_of(self, worker: int) -> int:
        """Return the index of a worker's bundle."""
        return worker // self.workers if self.hosts else worker

    def describe(self) -> str:
        """Return the resources as text: `4 workers with 1 CPU each on 2 hosts, 2 on each`."""
        parts = [f"{amount:g} {name}{'s' * (amount != 1)}" for name, amount in (("CPU", self.cpus), ("GPU", self.gpus))
                 if amount]
        where = f" on {self.hosts} host{'s' * (self.hosts > 1)}, {self.workers} on each" if self.hosts else ""
        return f"{self.size} worker{'s' * (self.size > 1)} with {' and '.join(parts)} each{where}"


def shape_of(num_workers: int | None, num_hosts: int | None, num_workers_per_host: int, cpus_per_worker: float,
             use_gpu: bool, gpus_per_worker: float | None) -> Shape:
    """Return the shape that the arguments of an executor describe.

    Raises:
        UsageError: Arguments contradict each other, or request no resources.
    """
    if (num_workers is None) == (num_hosts is None):
        raise UsageError(explain("An executor needs either num_workers or num_hosts", "RayExecutor(settings,"
                                 " num_workers=4), or num_hosts=2 with num_workers_per_host=2",
                                 num_workers=num_workers, num_hosts=num_hosts))
    if gpus_per_worker and not use_gpu:
        raise UsageError(explain("gpus_per_worker requires use_gpu=True", "pass both, or neither",
                                 gpus_per_worker=gpus_per_worker))
    shape = Shape(num_hosts, num_workers_per_host if num_workers is None else num_workers, cpus_per_worker,
                  (gpus_per_worker or 1) if use_gpu else 0)
    if shape.workers < 1 or (shape.hosts is not None and shape.hosts < 1) or shape.cpus < 0 or \
            not (shape.cpus or shape.gpus):
        raise UsageError(explain("Numbers of workers, hosts and CPUs must be positive", "RayExecutor(settings,"
                                 " num_workers=4, cpus_per_worker=1)", num_workers=num_workers, num_hosts=num_hosts,
                                 num_workers_per_host=num_workers_per_host, cpus_per_worker=cpus_per_worker))
    return shape


def reserve(shape: Shape, timeout: float) -> Any:
    """Wait until the cluster has resources for all workers, and report progress.

    Args:
        timeout: Seconds to wait.

    Returns:
        Ray's placement group.

    Raises:
        MachineError: The cluster does not have enough resources in time.
    """
    import ray

    group = ray.util.placement_group(shape.bundles(), strategy=shape.strategy)
    started_at = time.monotonic()
    try:
        while not group.wait(min(REPORT_EVERY, max(0.1, timeout - (time.monotonic() - started_at)))):
            waited = time.monotonic() - started_at
            resources = "; ".join(f"{name} {amount}" for name, amount in _resources().items()) or "no nodes"
            if waited >= timeout:
                raise MachineError(explain(
                    f"The Ray cluster must have resources for {shape.describe()} within {timeout:g} s",
                    "add nodes, request fewer resources, or raise placement_group_timeout_s in create_settings",
                    cluster=resources))
            say(f"waiting for resources in the Ray cluster for {shape.describe()} ({resources}),"
                f" {waited:.0f} s of {timeout:g} s")
    except BaseException:
        ray.util.remove_placement_group(group)
        raise
    return group


def _resources() -> dict[str, str]:
    """Return the number of nodes, and the free and total resources of the cluster, as text."""
    import ray

    total, free = ray.cluster_resources(), ray.available_resources()
    nodes = sum(bool(node["Alive"]) for node in ray.nodes())
    amounts = {name: f"{free.get(name, 0):g} of {total[name]:g} free" for name in ("CPU", "GPU") if name in total}
    return {f"{nodes} node{'s' * (nodes != 1)}:": "", **amounts}


def check_versions(facts: Sequence[Mapping[str, Any]]) -> None:
    """Check that all nodes have the same versions.

    Raises:
        MachineError: Versions differ; the message names the nodes.
    """
    for fact in facts:
        if must_agree(fact["versions"]) != must_agree(facts[0]["versions"]):
            shown = {f"{one['host']} ({one['address']})": one["versions"] for one in (facts[0], fact)}
            raise MachineError(explain("All nodes of a Ray cluster must have the same versions", "install the same on"
                                       " each node, or use one image, or a runtime_env that has them", nodes=shown))


def in_order_of_ranks(facts: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the indices of the workers in rank order: ranks on the same host are consecutive.

    Args:
        facts: The facts of each worker's process.
    """
    hosts = list(dict.fromkeys(fact["identity"] for fact in facts))
    return sorted(range(len(facts)), key=lambda worker: hosts.index(facts[worker]["identity"]))


def variables_of_ranks(facts: Sequence[Mapping[str, Any]], address: str, secret: str) -> list[dict[str, str]]:
    """Return the environment variables of each rank.

    Args:
        facts: The facts of the workers' processes, in rank order.
        address: host:port of the control channel.
    """
    result = []
    for rank in range(len(facts)):
        topology = topology_from_hosts(rank, [fact["host"] for fact in facts], [fact["identity"] for fact in facts])
        variables = with_launcher(LAUNCHER, topology_variables(topology)) | {
            hvkeras_run.PROCESS_ID: str(rank), hvkeras_run.PROCESS_COUNT: str(topology.size),
            hvkeras_run.LOCAL_PROCESS_ID: str(topology.local_rank),
            hvkeras_run.LOCAL_PROCESS_COUNT: str(topology.local_size),
            hvkeras_run.CONTROL_ADDRESS: address, hvkeras_run.STARTED_BY: LAUNCHER, "HVKERAS_SECRET": secret}
        # As with other launchers, each rank sees all GPUs of its host's ranks, and selects one by its local rank.
        gpus = dict.fromkeys(gpu for fact in facts if fact["identity"] == facts[rank]["identity"]
                             for gpu in fact["gpus"])
        result.append(variables | ({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}))
    return result

"""TF_CONFIG: JSON that gives every process the whole cluster and its own task.

All errors in it are detected here, before anything connects.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hvkeras.control.launch_environments.launch import Launch, Rendezvous
from hvkeras.errors import UsageError, explain
from hvkeras.host.network import split_address

LAUNCHER = "TF_CONFIG"
CLUSTER = "TF_CONFIG"
EXAMPLE = '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}'
EXAMPLE_WITH_SERVERS = ('{"cluster": {"chief": ["host0:2222"], "worker": ["host1:2222"], "ps": ["host2:2222"]}, "task":'
                        ' {"type": "chief", "index": 0}}')
REUSE_PORT = "TF_GRPC_REUSE_PORT"
_NO_PROXY = "no_grpc_proxy"
_WORKER = "worker"
_TRAINING = ("chief", _WORKER)
_OTHERS = ("ps", "evaluator")
_PARAMETER_SERVERS = ("chief", "worker", "ps", "evaluator")
_PS_EXAMPLE = ('{"cluster": {"chief": ["host1:2222"], "worker": ["host2:2222"], "ps": ["host3:2222"]}, "task": {"type":'
               ' "chief", "index": 0}}')
_ADDRESS = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.%\w]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>\d{1,5})")
_SHOWN = 16  # ranks that describe_cluster lists


def detect(environ: Mapping[str, str]) -> Launch | None:
    """Read TF_CONFIG; the chief is rank 0, and the workers follow in order.

    Raises:
        UsageError: It does not have the form that TensorFlow documents, or describes a job that hvkeras does not run.
    """
    text = environ.get(CLUSTER, "")
    if not text.strip():
        return None
    config = _parsed(text)
    cluster = _cluster(config.get("cluster"))
    if cluster.get("ps"):
        raise UsageError(explain("hvd.init() trains synchronously, without parameter servers",
                                 "call hvd.parameter_server.train(...) instead of hvd.init() in a cluster with ps"
                                 ' tasks, or remove "ps" from the cluster in every TF_CONFIG and do not start those'
                                 " tasks", ps=cluster["ps"]))
    task = config.get("task")
    kind = _role(task)
    if kind in _OTHERS:
        hint = ("do not start it; rank 0 may evaluate after fit()" if kind == "evaluator"
                else "start this process as a worker, or not at all")
        raise UsageError(explain(f"hvd.init() has no role {kind}: TF_CONFIG tasks must be chief or worker", hint,
                                 type=kind))
    return _launch(cluster, _TRAINING, kind, _index(task, kind, cluster))


def detect_parameter_servers(environ: Mapping[str, str]) -> Launch:
    """Read TF_CONFIG as a cluster of a chief, workers, parameter servers and optional evaluators.

    Returns:
        The launch. The chief is rank 0; workers, parameter servers and evaluators follow. The size excludes evaluators,
        which may join and leave at any time, and which TF_CONFIG need not list.

    Raises:
        UsageError: There is no TF_CONFIG, or it describes no such cluster.
    """
    text = environ.get(CLUSTER, "")
    if not text.strip():
        raise UsageError(explain("Training with parameter servers needs TF_CONFIG, which gives each process the whole"
                                 " cluster and its own task", f"start each task with a TF_CONFIG like {_PS_EXAMPLE}",
                                 TF_CONFIG=text))
    config = _parsed(text)
    cluster = _cluster(config.get("cluster"))
    for role in _PARAMETER_SERVERS[:3]:
        if not cluster.get(role):
            raise UsageError(explain(f'A cluster with parameter servers must have a "{role}" in TF_CONFIG',
                                     f"write it like {_PS_EXAMPLE}, the same in every TF_CONFIG", **{role: []}))
    task = config.get("task")
    kind = _role(task)
    return _launch(cluster, _PARAMETER_SERVERS, kind, _index(task, kind, cluster))


def _launch(cluster: Mapping[str, list[str]], roles: tuple[str, ...], kind: str, index: int) -> Launch:
    entries = [(f"{role} {number}", address) for role in roles for number, address in enumerate(cluster.get(role, []))]
    if f"{kind} {index}" not in dict(entries):  # an unlisted evaluator
        entries.append((f"{kind} {index}", ""))
    rank = [name for name, _ in entries].index(f"{kind} {index}")
    members = [address for name, address in entries if not name.startswith("evaluator ")]
    addresses = tuple(address for _, address in entries if address)
    job = "tf-config-" + hashlib.sha256("\n".join(members).encode()).hexdigest()[:16]
    return Launch(LAUNCHER, rank, len(members), Rendezvous("tf_config", addresses[0], job), cluster=addresses,
                  tasks=tuple(name for name, _ in entries))


def describe_cluster(launch: Launch) -> str:
    """Describe a TF_CONFIG cluster in one line.

    Args:
        launch: The launch from `detect`.

    Returns:
        `TF_CONFIG names 2 ranks: 0 is chief 0 (host1:2222), 1 is worker 0 (host2:2222)`.
    """
    ranks = [f"{rank} is {task} ({address})" for rank, (task, address) in
             enumerate(zip(launch.tasks, launch.cluster, strict=True))]
    more = [f"and {len(ranks) - _SHOWN} more"] if len(ranks) > _SHOWN else []
    return (f"TF_CONFIG names {launch.size} rank{'s' * (launch.size > 1)}: "
            + ", ".join([*ranks[:_SHOWN], *more]))


def worker_variables(workers: Sequence[str], index: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make a process one worker of a TensorFlow cluster.

    Args:
        workers: `host:port` of all workers.
        index: The index of this process among the workers.
    """
    config = {"cluster": {_WORKER: list(workers)}, "task": {"type": _WORKER, "index": index}}
    direct = [environ.get(_NO_PROXY) or environ.get("no_proxy") or "", *_hosts_of(tuple(workers))]
    return {CLUSTER: json.dumps(config), REUSE_PORT: "true",
            _NO_PROXY: ",".join(dict.fromkeys(filter(None, direct)))}


@functools.lru_cache(maxsize=1)
def _hosts_of(workers: tuple[str, ...]) -> tuple[str, ...]:
    """Return the distinct hosts of `host:port`; cached, since a launcher needs the same ones for each rank."""
    return tuple(dict.fromkeys(split_address(worker)[0] for worker in workers))


def _parsed(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise UsageError(explain(f"TF_CONFIG must be JSON ({error})", f"write it like {EXAMPLE}",
                                 TF_CONFIG=text)) from None
    if not isinstance(config, dict):
        raise UsageError(explain("TF_CONFIG must be a JSON object", f"write it like {EXAMPLE}", TF_CONFIG=text))
    return config


def _cluster(cluster: Any) -> dict[str, list[str]]:
    if not isinstance(cluster, dict) or not cluster:
        raise UsageError(explain('TF_CONFIG must have a "cluster" that lists the addresses of its tasks by role',
                                 f"write it like {EXAMPLE}, or unset TF_CONFIG for a single process", cluster=cluster))
    for role, addresses in cluster.items():
        if role not in (*_TRAINING, *_OTHERS):
            raise UsageError(explain("Roles in TF_CONFIG must be chief, worker, ps or evaluator",
                                     f'rename "{role}" to "worker" in every TF_CONFIG', role=role))
        if not isinstance(addresses, list):
            raise UsageError(explain(f'The role "{role}" in TF_CONFIG must list its addresses',
                                     f'write "{role}": ["host:port", ...]', **{role: addresses}))
        for number, address in enumerate(addresses):
            _check_address(f"{role} {number}", address)
    if len(cluster.get("chief", [])) > 1:
        raise UsageError(explain("TF_CONFIG must have at most one chief",
                                 'keep one address under "chief" and list the others under "worker"',
                                 chief=cluster["chief"]))
    _check_unique({role: cluster.get(role, []) for role in _PARAMETER_SERVERS})
    return cluster


def _check_address(task: str, address: Any) -> None:
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if match is None or not 0 < int(match["port"]) < 65536:
        raise UsageError(explain(f"The address of {task} in TF_CONFIG must be host:port, with a port from 1 to 65535",
                                 'write it like "host1:2222", or "[fe80::1]:2222" for IPv6, with no scheme and no path',
                                 address=address))


def _check_unique(cluster: Mapping[str, list[str]]) -> None:
    seen: dict[str, str] = {}
    for role, addresses in cluster.items():
        for number, address in enumerate(addresses):
            task = f"{role} {number}"
            if address in seen:
                raise UsageError(explain("Every task in TF_CONFIG must have its own address, but"
                                         f" {seen[address]} and {task} share one",
                                         f"give {task} another host or port in every TF_CONFIG", address=address))
            seen[address] = task


def _role(task: Any) -> str:
    if not isinstance(task, dict) or "type" not in task or "index" not in task:
        raise UsageError(explain('TF_CONFIG must have a "task" with "type" and "index", this process\'s own task',
                                 'add "task": {"type": "worker", "index": 0}, and give each process its own index',
                                 task=task))
    kind = task["type"]
    if kind not in _PARAMETER_SERVERS:
        raise UsageError(explain("The task type in TF_CONFIG must be chief or worker, or ps or evaluator",
                                 'set "type" to "chief" or "worker"', type=kind))
    return str(kind)


def _index(task: Any, kind: str, cluster: Mapping[str, list[str]]) -> int:
    index = task["index"]
    number = int(index) if isinstance(index, str) and index.isascii() and index.isdigit() else index
    count = len(cluster.get(kind, [])) or kind == "evaluator"  # TensorFlow does not require evaluators to be listed
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < count:
        valid = f'set "index" to one of 0 to {count - 1}' if count else f'the cluster has no "{kind}"'
        raise UsageError(explain(f"The task index in TF_CONFIG must be the index of this process's own address under"
                                 f' "{kind}" in the cluster', f"{valid}, or add this process's address to the"
                                 " cluster in every TF_CONFIG", index=index, **{kind: cluster.get(kind, [])}))
    return number

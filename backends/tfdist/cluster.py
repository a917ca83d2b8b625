"""TensorFlow cluster with one worker per rank, which starts once per process and runs until the process ends."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from hvkeras.backends.interface import Start
from hvkeras.errors import MachineError, UsageError, explain
from hvkeras.host.network import LOOPBACK, held_port, split_address

_PROXY_VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy", "HTTPS_PROXY", "HTTP_PROXY", "GRPC_PROXY")
_NO_PROXY = "no_grpc_proxy"
_KEYS_OF_A_RANK = 1_000_000


class Cluster:
    """This process's gRPC server in the job's cluster.

    TensorFlow's coordination service stays disabled: hvkeras's control channel detects failures sooner, and the
    service would handle SIGTERM and terminate processes.

    Args:
        start: The start parameters of the backend.

    Raises:
        UsageError: TensorFlow has already been used in this process.
        MachineError: The server cannot start.
    """

    def __init__(self, start: Start) -> None:
        import tensorflow as tf
        from tensorflow.core.protobuf import tensorflow_server_pb2
        from tensorflow.python.eager import context as tf_context

        from hvkeras.compat import patches  # noqa: PLC0415 - imports TensorFlow

        self.rank: int = start.topology.rank
        self._size = start.topology.size
        self._context = tf_context.context()
        if self._context._context_handle is not None:
            raise UsageError(explain("TensorFlow's collectives must start before TensorFlow is used, since it sets"
                                     " them up when its first tensor, variable or dataset is created", "move"
                                     " hvd.init(), or hvd.strategy(), up, right after the imports"))
        assert start.control is not None
        nccl = uses_nccl(start)
        self.hint, self.device = ("nccl", "/GPU:0") if nccl else ("ring", "/CPU:0")
        self.description = "TensorFlow collectives: " + ("NCCL" if nccl else "ring over gRPC")
        # Distinguishes the collectives of a MirroredStrategy within this rank from those of other ranks.
        patches.install(patches.KEYS, _KEYS_OF_A_RANK * (self.rank + 1))
        with contextlib.ExitStack() as stack:
            own = self._own_address(start, stack)
            self.addresses: list[str] = start.control.gather("tfdist addresses", own, start.settings.start_timeout)
            self._bypass_proxies(self.addresses)
            self._context.configure_collective_ops(
                collective_leader="/job:worker/replica:0/task:0", device_filters=(f"/job:worker/task:{self.rank}",))
            spec = tf.train.ClusterSpec({"worker": self.addresses})
            self._context.enable_collective_ops(tensorflow_server_pb2.ServerDef(
                cluster=spec.as_cluster_def(), default_session_config=self._context.config, job_name="worker",
                task_index=self.rank, protocol="grpc"))
            try:
                self._context.ensure_initialized()
            except Exception as error:
                own = self.addresses[self.rank]
                raise MachineError(explain(f"TensorFlow's gRPC server must start at {own} ({error})",
                                           "stop the program that uses the port")) from error

    def reopen(self, start: Start) -> int:
        """Reuse the cluster of an earlier session, and return the number of workers.

        Raises:
            UsageError: The rank or the size has changed; TensorFlow cannot rebuild its cluster inside a process.
        """
        if (start.topology.rank, start.topology.size) != (self.rank, self._size):
            raise UsageError(explain("Jobs on tfdist must keep their ranks between init() calls",
                                     "start new processes", was=(self.rank, self._size),
                                     now=(start.topology.rank, start.topology.size)))
        return self._size

    def strategy(self, **options: Any) -> Any:
        """Build a `MultiWorkerMirroredStrategy` on this cluster; `options` are those of its constructor."""
        import tensorflow as tf

        from hvkeras.compat import patches  # noqa: PLC0415 - imports TensorFlow

        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec({"worker": self.addresses}), task_type="worker", task_id=self.rank, rpc_layer="grpc",
            num_accelerators={"GPU": len(tf.config.get_visible_devices("GPU"))})
        with patches.installed(patches.SERVER):  # otherwise it would start a server and the coordination service
            return tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver, **options)

    def abort(self, reason: str) -> None:
        """Fail all collectives in flight and all later ones with `reason`."""
        from tensorflow.python.framework import errors

        self._context.abort_collective_ops(errors.ABORTED, reason)

    def _own_address(self, start: Start, stack: contextlib.ExitStack) -> str:
        """Return this worker's `host:port`: that of TF_CONFIG, or a free port, reserved until the server binds it."""
        if start.launch.cluster:
            return start.launch.cluster[self.rank]
        assert start.control is not None
        return stack.enter_context(held_port(LOOPBACK if start.topology.is_one_host else start.control.local_address))

    def _bypass_proxies(self, addresses: list[str]) -> None:
        if any(os.environ.get(name) for name in _PROXY_VARIABLES):
            hosts = sorted({split_address(address)[0] for address in addresses})
            have = os.environ.get(_NO_PROXY) or os.environ.get("no_proxy") or ""
            os.environ[_NO_PROXY] = ",".join(filter(None, [have, *hosts]))


def uses_nccl(start: Start) -> bool:
    """Return whether the job's collectives use NCCL, because each rank has a separate GPU.

    Raises:
        UsageError: This is the case on some of the hosts only.
    """
    topology, devices = start.topology, start.gpus
    hosts: dict[int, list[int]] = {}
    for rank, host in enumerate(topology.host_numbers if devices else ()):
        hosts.setdefault(host, []).append(rank)
    separate = {host: all(devices[rank] and devices.count(devices[rank]) == 1 for rank in ranks)
                for host, ranks in hosts.items()}
    if len(set(separate.values())) > 1:
        examples = [next(hosts[host] for host in hosts if separate[host] is value) for value in (True, False)]
        raise UsageError(explain(
            "On tfdist, each rank must have a separate GPU on all hosts, for NCCL, or on none",
            "start as many ranks on each host as it has GPUs, hide the GPUs on all hosts with CUDA_VISIBLE_DEVICES=, or"
            " use backend native",
            **{f"rank_{ranks[0]}_on_{topology.hosts[ranks[0]]}":
               f"ranks: {len(ranks)}, GPUs: {len({devices[rank] for rank in ranks} - {''})}" for ranks in examples}))
    return any(separate.values())

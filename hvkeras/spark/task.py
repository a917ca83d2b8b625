"""GPUs that Spark has assigned to a task. `get_available_devices` has Horovod's import path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvkeras.errors import UsageError, explain
from hvkeras.host.gpus import VISIBLE
from hvkeras.spark.order import Gpus


def visible_devices(gpus: Gpus, task: int, addresses: Mapping[str, Sequence[str]], environ: Mapping[str, str]
                    ) -> str | None:
    """Return the value of CUDA_VISIBLE_DEVICES for a rank; None to leave it unchanged.

    Args:
        gpus: The GPUs that are visible to ranks.
        task: The index of the rank's task.
        addresses: The addresses that Spark has assigned to the task, by resource.
        environ: The environment. If it has CUDA_VISIBLE_DEVICES, addresses are indices of its entries.

    Raises:
        UsageError: Spark has assigned too few GPUs, or an address is not a visible device.
    """
    if gpus.hidden:
        return ""
    assigned = list(addresses.get(gpus.resource, ()))
    if not assigned and not gpus.counts:
        return None
    count = gpus.counts[task] if gpus.counts else len(assigned)
    if len(assigned) < count:
        raise UsageError(explain(f"Spark must assign as many GPUs to each task as its rank uses, {count} to this one",
                                 f"set spark.task.resource.{gpus.resource}.amount and the executors' amounts",
                                 **{gpus.resource: assigned}))
    return ",".join(_device_name(address, environ) for address in assigned[:count])


def _device_name(address: str, environ: Mapping[str, str]) -> str:
    names = [name.strip() for name in environ.get(VISIBLE, "").split(",") if name.strip()]
    if not names:
        return address
    if not address.isdecimal() or int(address) >= len(names):
        raise UsageError(explain(f"Spark's GPU addresses must be indices of the entries of {VISIBLE} if that is set",
                                 f"unset {VISIBLE} for Spark's workers, or have the discovery script print 0 to"
                                 f" {len(names) - 1}", address=address, **{VISIBLE: environ[VISIBLE]}))
    return names[int(address)]


def get_available_devices() -> list[str]:
    """Return the addresses of the GPUs that Spark has assigned to this rank's task.

    CUDA_VISIBLE_DEVICES already selects them.
    """
    from pyspark import TaskContext

    context = TaskContext.get()
    resources = {} if context is None else context.resources()
    return list(resources[Gpus().resource].addresses) if Gpus().resource in resources else []

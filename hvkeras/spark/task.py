"""Resources of a Spark task: the GPUs that Spark has assigned to it; Horovod's import path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvkeras.errors import UsageError, explain
from hvkeras.host.gpus import VISIBLE
from hvkeras.spark.order import Gpus


def visible_devices(gpus: Gpus, task: int, addresses: Mapping[str, Sequence[str]], environ: Mapping[str, str]
                    ) -> str | None:
    """Returns the value of CUDA_VISIBLE_DEVICES for a rank; None to leave it as it is.

    Args:
        gpus: Which GPUs ranks may see.
        task: The number of the rank's task.
        addresses: What Spark has given to the task, by resource.
        environ: The environment; where CUDA_VISIBLE_DEVICES is set in it, addresses count its entries.

    Raises:
        UsageError: There are too few GPUs, or an address is not among the visible ones.
    """
    if gpus.hidden:
        return ""
    given = list(addresses.get(gpus.resource, ()))
    if not given and not gpus.counts:
        return None
    count = gpus.counts[task] if gpus.counts else len(given)
    if len(given) < count:
        raise UsageError(explain(f"Spark must give the task of each rank as many GPUs as it uses, and {count} here",
                                 f"set spark.task.resource.{gpus.resource}.amount and the executors' amounts",
                                 **{gpus.resource: given}))
    return ",".join(_name(address, environ) for address in given[:count])


def _name(address: str, environ: Mapping[str, str]) -> str:
    names = [name.strip() for name in environ.get(VISIBLE, "").split(",") if name.strip()]
    if not names:
        return address
    if not address.isdecimal() or int(address) >= len(names):
        raise UsageError(explain(f"Spark's GPU addresses must count the entries of {VISIBLE} where that is set",
                                 f"unset {VISIBLE} for Spark's workers, or have the discovery script print 0 to"
                                 f" {len(names) - 1}", address=address, **{VISIBLE: environ[VISIBLE]}))
    return names[int(address)]


def get_available_devices() -> list[str]:
    """Returns the addresses of the GPUs that Spark has given to this rank's task.

    They are in CUDA_VISIBLE_DEVICES already.
    """
    from pyspark import TaskContext

    context = TaskContext.get()
    given = {} if context is None else context.resources()
    return list(given[Gpus().resource].addresses) if Gpus().resource in given else []

"""The order that the driver sends to all tasks of a job, and the tasks' failure reports inside Spark's exceptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# Spark passes the text of a task's exception to the driver, within tracebacks of Python and Java.
REPORT_BEGINS, REPORT_ENDS = "hvkeras reports: ", "\n(end of hvkeras's report)"


@dataclass(frozen=True)
class Gpus:
    """GPUs that are visible to ranks.

    Attributes:
        resource: The name of the GPU resource in Spark.
        counts: The number of GPUs of each task's rank; empty for all that Spark assigns to the task.
        hidden: Whether ranks see no GPUs at all.
    """

    resource: str = "gpu"
    counts: Sequence[int] = ()
    hidden: bool = False


@dataclass(frozen=True)
class Order:
    """Job description that the driver sends to all tasks.

    Attributes:
        call: The pickled function call of each rank (see `hvkeras.launcher.calls`).
        environment: Variables of the ranks, in addition to those of Spark's workers.
        gpus: The GPUs that are visible to ranks.
        by_host: Whether ranks on the same host are consecutive; otherwise the rank is the index of the task.
        tf_config: Whether each rank gets a TF_CONFIG in which it is a worker.
        one_result: Whether only rank 0 returns its result.
        as_horovod: Whether `import horovod` imports hvkeras.
        output: Address of the driver's `OutputServer`; None to leave output in the logs of Spark's executors.
    """

    call: bytes
    size: int
    secret: str
    environment: Mapping[str, str] = field(default_factory=dict)
    gpus: Gpus = field(default_factory=Gpus)
    by_host: bool = True
    tf_config: bool = False
    one_result: bool = False
    as_horovod: bool = False
    output: tuple[str, int] | None = None


def ranks_by_host(hosts: Sequence[str]) -> list[int]:
    """Assign consecutive ranks to the tasks on the same host; Spark distributes tasks over hosts round-robin.

    Example:
        >>> ranks_by_host(["a", "b", "a", "b"])
        [0, 2, 1, 3]

    Returns:
        The rank of each task.
    """
    firsts = {host: number for number, host in reversed(list(enumerate(hosts)))}
    order = sorted(range(len(hosts)), key=lambda task: (firsts[hosts[task]], task))
    return [order.index(task) for task in range(len(hosts))]


def marked(report: str) -> str:
    """Enclose a report in the markers that `report_in` searches for."""
    return f"{REPORT_BEGINS}{report}{REPORT_ENDS}"


def report_in(text: str) -> str:
    """Return the first report in a text that `marked` has enclosed; "" if there is none."""
    begin = text.find(REPORT_BEGINS)
    end = text.find(REPORT_ENDS, begin)
    return text[begin + len(REPORT_BEGINS) : end] if begin >= 0 and end >= 0 else ""

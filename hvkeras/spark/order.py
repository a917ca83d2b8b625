"""Orders of the driver to all tasks of a job, and their reports, which travel back inside Spark's exceptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# Spark hands the text of a task's exception to the driver, within tracebacks of Python and Java.
REPORT_BEGINS, REPORT_ENDS = "hvkeras reports: ", "\n(end of hvkeras's report)"


@dataclass(frozen=True)
class Gpus:
    """Which GPUs a rank may see.

    Attributes:
        resource: The name of Spark's resource.
        counts: How many of its addresses the rank of each task uses; empty for all that Spark gives to the task.
        hidden: Whether ranks see no GPU at all.
    """

    resource: str = "gpu"
    counts: Sequence[int] = ()
    hidden: bool = False


@dataclass(frozen=True)
class Order:
    """One job.

    Attributes:
        call: The function call of each rank (see `hvkeras.launcher.calls`).
        size: The number of ranks.
        secret: The job's secret.
        environment: Variables for the ranks, beside those of Spark's workers.
        gpus: Which GPUs ranks may see.
        by_host: Whether the ranks of a host are neighbours; otherwise ranks have the numbers of their tasks.
        tf_config: Whether each rank gets a TF_CONFIG in which it is a worker.
        one_result: Whether only rank 0's result is returned.
        as_horovod: Whether `import horovod` imports hvkeras.
        output: Where the driver receives the ranks' output; None to leave it in the logs of Spark's executors.
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
    """Numbers ranks so that those of a host are neighbours; Spark deals out tasks to hosts in turns.

    Example:
        >>> ranks_by_host(["a", "b", "a", "b"])
        [0, 2, 1, 3]

    Args:
        hosts: The host of each task.

    Returns:
        The rank of each task.
    """
    firsts = {host: number for number, host in reversed(list(enumerate(hosts)))}
    order = sorted(range(len(hosts)), key=lambda task: (firsts[hosts[task]], task))
    return [order.index(task) for task in range(len(hosts))]


def marked(report: str) -> str:
    """Marks a report, so that `report_in` finds it."""
    return f"{REPORT_BEGINS}{report}{REPORT_ENDS}"


def report_in(text: str) -> str:
    """Returns the first marked report in a text; "" if there is none."""
    begin = text.find(REPORT_BEGINS)
    end = text.find(REPORT_ENDS, begin)
    return text[begin + len(REPORT_BEGINS) : end] if begin >= 0 and end >= 0 else ""

"""Elastic jobs on Spark: the surviving ranks continue after a failure, and ranks join where Spark has a free slot.

Each task of a stage without a barrier is a slot for one rank (`hvkeras.spark.slot_task`). It reports to a launcher in a
child process of the driver, which runs the job like `hvkeras run --min-np`. Tasks without a slot wait in Spark's queue,
and join when executors become available.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hvkeras.errors import PeerError, explain
from hvkeras.horovod import as_horovod
from hvkeras.host.network import LOOPBACK
from hvkeras.launcher.reported_job import Output, ReportedJob, values_of
from hvkeras.spark.barrier_job import StageJob
from hvkeras.spark.order import Gpus, report_in
from hvkeras.spark.session import configured, is_fixed

POLL_INTERVAL = 0.2  # seconds between checks of the job
COLLECTED_WITHIN = 30.0  # seconds to collect the results after the job has ended


@dataclass(frozen=True)
class SlotOrder:
    """The order that each task of an elastic job receives.

    Attributes:
        address: host:port of the launcher.
        environment: Variables of the ranks, in addition to those of Spark's workers.
        commits: The folder of commits, which is removed when the job ends; "" for none.
        as_horovod: Whether `import horovod` imports hvkeras.
        gpus: The GPUs that are visible to ranks.
    """

    call: bytes
    address: str
    secret: str
    environment: Mapping[str, str]
    commits: str
    as_horovod: bool = False
    gpus: Gpus = field(default_factory=Gpus)


class ElasticSparkJob(StageJob):
    """Elastic job on Spark.

    Args:
        limits: The minimum and the maximum number of ranks.
        first: The number of ranks to start with.
        reset_limit: The maximum number of resets. None for no limit, except that the same error twice in a row ends the
            job.
        timeout: Seconds to wait for slots.
        environment: Variables of the ranks.
        commits: The folder of commits, which is removed when the job ends; "" for none.
        output: The target of the ranks' output.
    """

    def __init__(self, context: Any, call: bytes, limits: tuple[int, int], first: int, reset_limit: int | None,
                 timeout: float, environment: Mapping[str, str], commits: str, output: Output) -> None:
        super().__init__(context)
        self._call, self._environment, self._commits = call, environment, commits
        self._minimum, self._maximum = limits
        self._first, self._limit, self._timeout, self._output = first, reset_limit, timeout, output

    def run(self) -> list[Any]:
        """Run the job until it completes.

        Returns:
            The results of the ranks that participate at the end, in rank order.

        Raises:
            PeerError: The job failed too often, or Spark ended its tasks.
            MachineError: The launcher could not start.
        """
        host = LOOPBACK if is_fixed(self._context) else configured(self._context, "spark.driver.host", LOOPBACK)
        job = ReportedJob(self._minimum, self._maximum, self._limit, self._timeout, host, self._environment,
                          first=self._first, output=self._output)
        order = SlotOrder(self._call, job.address, job.secret, dict(self._environment), self._commits,
                          as_horovod.is_installed())
        thread = self._start(self._context.parallelize(range(self._maximum), self._maximum).mapPartitions(
            self._on_node(pickle.dumps(order), "hvkeras.spark.slot_task")))
        ended = False
        try:
            while not ended:
                ended = job.is_over(POLL_INTERVAL)
                if not thread.is_alive() and not ended:  # no more slots can become available
                    job.interrupt()
            thread.join(COLLECTED_WITHIN)
        except BaseException:
            job.interrupt()
            raise
        finally:
            self._cancel(thread)
            try:
                job.finish()
            except PeerError as error:
                if self._error is not None:
                    detail = report_in(str(self._error)) or str(self._error).splitlines()[0]
                    reason = explain(f"Spark must run the tasks of the ranks, but {detail}")
                    raise PeerError(f"{error}\n{reason}") from None
                raise
        return values_of([pickle.loads(row) for row in self._rows])

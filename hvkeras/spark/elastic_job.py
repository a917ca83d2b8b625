"""Elastic jobs on Spark: the survivors of a loss go on, and ranks join where Spark has a free slot.

Each task of a stage without a barrier is a place for one rank (`hvkeras.spark.slot_task`). It reports to a launcher
below the driver, which runs the job as `hvkeras run --min-np` does elsewhere. Tasks that have no slot yet wait in
Spark's queue, and join when executors come.
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

LOOK_EVERY = 0.2  # seconds between two looks at the job
COLLECTED_WITHIN = 30.0  # seconds for the results, once the job is over


@dataclass(frozen=True)
class SlotOrder:
    """What each task gets.

    Attributes:
        call: The pickled function call.
        address: Where the launcher listens.
        secret: The job's secret.
        environment: Variables for the ranks, beside those of Spark's workers.
        commits: A folder of the job that is removed in the end; "" for none.
        as_horovod: Whether `import horovod` imports hvkeras.
        gpus: Which GPUs ranks may see.
    """

    call: bytes
    address: str
    secret: str
    environment: Mapping[str, str]
    commits: str
    as_horovod: bool = False
    gpus: Gpus = field(default_factory=Gpus)


class ElasticSparkJob(StageJob):
    """One elastic job.

    Args:
        context: The Spark context.
        call: The pickled function call.
        limits: The fewest ranks to train with, and the most.
        first: How many there must be to begin.
        reset_limit: How often the ranks may change; None for no limit but that of an error that comes twice in a row.
        timeout: Seconds that the job waits for slots.
        environment: Variables for the ranks.
        commits: A folder of the job that is removed in the end; "" for none.
        output: Where the ranks' output goes.
    """

    def __init__(self, context: Any, call: bytes, limits: tuple[int, int], first: int, reset_limit: int | None,
                 timeout: float, environment: Mapping[str, str], commits: str, output: Output) -> None:
        super().__init__(context)
        self._call, self._environment, self._commits = call, environment, commits
        self._fewest, self._most = limits
        self._first, self._limit, self._timeout, self._output = first, reset_limit, timeout, output

    def run(self) -> list[Any]:
        """Runs the job to its end.

        Returns:
            The results of the ranks that are there at the end, in rank order.

        Raises:
            PeerError: It failed too often, or Spark has ended its tasks.
            MachineError: The launcher cannot start.
        """
        host = LOOPBACK if is_fixed(self._context) else configured(self._context, "spark.driver.host", LOOPBACK)
        job = ReportedJob(self._fewest, self._most, self._limit, self._timeout, host, self._environment,
                          first=self._first, output=self._output)
        order = SlotOrder(self._call, job.address, job.secret, dict(self._environment), self._commits,
                           as_horovod.is_installed())
        thread = self._start(self._context.parallelize(range(self._most), self._most).mapPartitions(
            self._on_node(pickle.dumps(order), "hvkeras.spark.slot_task")))
        is_over = False
        try:
            while not is_over:
                is_over = job.is_over(LOOK_EVERY)
                if not thread.is_alive() and not is_over:  # it would wait for places that do not come
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
                    why = report_in(str(self._error)) or str(self._error).splitlines()[0]
                    said = explain(f"Spark must run the tasks of the ranks, but {why}")
                    raise PeerError(f"{error}\n{said}") from None
                raise
        return values_of([pickle.loads(row) for row in self._rows])

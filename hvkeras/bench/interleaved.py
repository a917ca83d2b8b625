"""A complete benchmark: start the jobs, and measure them in turns on each piece of work."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvkeras.bench.jobs import BenchmarkJob, DescribeFailure, End, Remote, Watchdog
from hvkeras.bench.participant import Effort, run_rounds
from hvkeras.bench.plan import ONE, TCP, BenchmarkPlan
from hvkeras.bench.row import (
    ENGINE,
    LOCAL_ONLY,
    MPI_ALONE,
    ONE_PROCESS,
    PEER,
    REFERENCE,
    TCP_ALONE,
    BenchmarkRow,
    least_seconds,
    title_of,
)

BLOCK = {"allreduce": 0.1, "step": 0.2}  # seconds per block
_ORDER = {"allreduce": (ENGINE, PEER, REFERENCE), "step": (REFERENCE, ENGINE, PEER)}
_MARGIN = 60.0  # seconds after the benchmark's timeout until stopped ranks count as lost


@dataclass(frozen=True)
class LaunchMethod:
    """Launcher and environment of jobs.

    Attributes:
        suffix: Suffix of the row names, which distinguishes launchers.
        command: Returns the command line for a number of ranks; the job's folder is appended to it.
        objection: Returns why a backend cannot run in such jobs, or "".
        describe_failure: Returns the cause of a job's failure, in one line.
        end: Terminates the process that `command` started.
        mpi: Whether the ranks have MPI.
        environment: Additional environment variables.
        tcp: Whether to measure plain TCP streams between the hosts as well.
    """

    suffix: str
    command: Callable[[int], Sequence[str]]
    objection: Callable[[str], str]
    describe_failure: DescribeFailure
    end: End
    mpi: bool
    environment: Mapping[str, str] = field(default_factory=dict)
    tcp: bool = False


@dataclass
class EngineGroup:
    """A job and the names of its participants, or the reason why there is no job.

    Attributes:
        kind: Kind of the rows.
        peer: Name of the engine used without hvkeras, if this is also measured, or "".
        reason: Why there is no job, or "".
        peer_reason: Why the peer cannot participate, or "".
        suffix: Suffix of the row names.
    """

    name: str
    kind: str = ENGINE
    peer: str = ""
    job: BenchmarkJob | None = None
    reason: str = ""
    peer_reason: str = ""
    suffix: str = ""

    def participants(self, work: str) -> list[Remote]:
        """Return the participants for a piece of work; the row of one that cannot run contains the reason."""
        found = self._participants(work)
        for one in found:
            one.row.name += self.suffix
        return found

    def _participants(self, work: str) -> list[Remote]:
        reason = self.reason
        if self.job is not None and not self.job.reason:
            answer = self.job.request("work", work)
            if answer is not None and not answer[1]:
                return [Remote(BenchmarkRow.from_json(row), self.job, index) for index, row in enumerate(answer[0])]
            reason = answer[1] if answer is not None else ""
        reason = reason or (self.job.reason if self.job is not None else "")
        rows = [BenchmarkRow(work, self.name, self.kind, reason=reason)] if reason else []
        if self.peer:
            rows.append(BenchmarkRow(work, self.peer, PEER, reason=self.peer_reason))
        return [Remote(row, self.job, 0) for row in rows]


class InterleavedRun:
    """Jobs of a benchmark.

    Args:
        plan: Plan of the jobs; the backend is set for each job.
        methods: Launch methods of each backend's jobs; other jobs use the first one.
        effort: Duration of the measurement of each piece of work.
        show: Called with the completed fraction and the current activity.
        hosts: Number of hosts.
    """

    def __init__(self, plan: BenchmarkPlan, methods: Sequence[LaunchMethod], effort: Effort,
                 show: Callable[[float, str], None], hosts: int) -> None:
        self._hosts = hosts
        self._plan, self._methods, self._effort, self._show = plan, methods, effort, show
        self._deadline = time.monotonic() + plan.timeout
        self._watchdog = Watchdog()
        self._jobs: list[BenchmarkJob] = []

    def run(self, backends: Sequence[str], peers: bool, work: Sequence[str], rows: list[BenchmarkRow]) -> None:
        """Run the benchmark.

        Args:
            peers: Whether to measure Horovod and `tf.distribute` used directly as well.
            work: Sizes or models.
            rows: List to which results are appended, one piece of work after the other.

        Raises:
            BenchmarkTimeoutError: The benchmark exceeds its timeout.
        """
        groups = [self._engine_group(name, peers, method) for name in backends for method in self._methods]
        first = self._methods[0]
        if peers:
            groups += [EngineGroup("", peer=title_of(name), peer_reason=f"it shares the core of the backend {name}, so"
                                   " --backends must include that as well")
                       for name in ("horovod", "tfdist") if name not in backends]
        if self._plan.kind == "step":
            groups.insert(0, EngineGroup(ONE_PROCESS, REFERENCE, job=self._started(ONE_PROCESS, ONE, 1, False, first)))
            job = self._started(LOCAL_ONLY, "", self._plan.ranks, False, first)
            groups.insert(1, EngineGroup(LOCAL_ONLY, REFERENCE, job=job))
        else:
            groups += [EngineGroup(MPI_ALONE, REFERENCE, job=self._started(MPI_ALONE, "", self._plan.ranks, False, one))
                       for one in self._methods if one.mpi]
            if first.tcp:
                job = self._started(TCP_ALONE, TCP, self._plan.ranks, False, first)
                groups.append(EngineGroup(TCP_ALONE, REFERENCE, job=job))
        for number, item in enumerate(work):
            def show(share: float, what: str, number: int = number) -> None:
                self._show((number + share) / len(work), what)

            show(0.0, f"{item}: preparing")
            rows += self._measured(groups, item, show)

    def close(self) -> None:
        """Terminate all jobs."""
        for job in self._jobs:
            job.close()
        self._watchdog.close()

    def _measured(self, groups: Sequence[EngineGroup], item: str,
                  show: Callable[[float, str], None]) -> list[BenchmarkRow]:
        participants: list[Remote] = []
        for group in groups:
            found = group.participants(item)
            if group.name == ONE_PROCESS and found[0].row.reason:
                return [found[0].row]  # without it there are no reference weights
            participants += found
        for one in participants if self._plan.kind == "allreduce" else ():
            one.row.least = least_seconds(item, one.row.bytes, self._hosts)
        participants.sort(key=lambda one: _ORDER[self._plan.kind].index(one.row.kind))
        run_rounds(participants, self._effort, show)
        return [one.row for one in participants]

    def _engine_group(self, name: str, peers: bool, method: LaunchMethod) -> EngineGroup:
        group = EngineGroup(name, peer=title_of(name) if peers else "", reason=method.objection(name),
                            suffix=method.suffix)
        if not group.reason:
            group.job = self._started(name + method.suffix, name, self._plan.ranks, bool(group.peer), method)
            group.reason = group.job.reason
        group.peer_reason = f"it shares the core of the backend {name}, which did not start" if group.reason else ""
        return group

    def _started(self, name: str, backend: str, ranks: int, peer: bool, method: LaunchMethod) -> BenchmarkJob:
        self._show(0.0, f"starting {name}")
        folder = Path(self._plan.shared) / name.replace(" ", "-")
        job = BenchmarkJob(folder, method.command(ranks), method.describe_failure, method.end, self._deadline)
        self._jobs.append(job)
        plan = dataclasses.replace(self._plan, backend=backend, peer=peer)
        liveness = {"HVKERAS_LIVENESS_TIMEOUT": str(self._plan.timeout + _MARGIN)}
        environment = {**os.environ, **method.environment, **liveness}
        job.start(dataclasses.asdict(plan), environment, self._watchdog)
        return job

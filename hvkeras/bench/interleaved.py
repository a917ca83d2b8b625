"""A complete benchmark: starts the jobs, and measures them in turns on each piece of work."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvkeras.bench.jobs import End, Guard, Job, Remote, Words
from hvkeras.bench.plan import ONE, Plan
from hvkeras.bench.rounds import Effort, compete
from hvkeras.bench.row import APART, ENGINE, MPI_ALONE, ONE_PROCESS, PEER, REFERENCE, Row, title_of

BLOCK = {"allreduce": 0.1, "step": 0.2}  # seconds per block
_ORDER = {"allreduce": (ENGINE, PEER, REFERENCE), "step": (REFERENCE, ENGINE, PEER)}
_MARGIN = 60.0  # seconds beyond the benchmark's timeout after which stopped ranks count as lost


@dataclass(frozen=True)
class Way:
    """How jobs are started.

    Attributes:
        command: Returns the command line that starts a number of ranks; the job's folder is appended to it.
        objection: Returns why a backend cannot run in jobs started this way, or "".
        words: Returns why a job failed, in one line.
        end: Ends the process that `command` started.
        mpi: Whether the ranks have MPI.
    """

    command: Callable[[int], Sequence[str]]
    objection: Callable[[str], str]
    words: Words
    end: End
    mpi: bool


@dataclass
class Team:
    """A job and the names of its participants, or the reason why there is no job.

    Attributes:
        name: The name of its rows.
        kind: The kind of its rows.
        peer: The name of its engine used without hvkeras, if that is measured too, or "".
        job: The job.
        reason: Why there is no job, or "".
        peer_reason: Why the peer cannot participate, or "".
    """

    name: str
    kind: str = ENGINE
    peer: str = ""
    job: Job | None = None
    reason: str = ""
    peer_reason: str = ""

    def participants(self, work: str) -> list[Remote]:
        """The participants for a piece of work; the row of one that cannot run contains the reason."""
        reason = self.reason
        if self.job is not None and not self.job.reason:
            told = self.job.ask("work", work)
            if told is not None and not told[1]:
                return [Remote(Row.from_json(row), self.job, place) for place, row in enumerate(told[0])]
            reason = told[1] if told is not None else ""
        reason = reason or (self.job.reason if self.job is not None else "")
        rows = [Row(work, self.name, self.kind, reason=reason)] if reason else []
        if self.peer:
            rows.append(Row(work, self.peer, PEER, reason=self.peer_reason))
        return [Remote(row, self.job, 0) for row in rows]


class InterleavedRun:
    """The jobs of a benchmark.

    Args:
        plan: The plan of the jobs; the backend is set for each of them.
        way: How jobs are started.
        effort: How long to measure each piece of work.
        show: Called with the fraction done and the current activity.
    """

    def __init__(self, plan: Plan, way: Way, effort: Effort, show: Callable[[float, str], None]) -> None:
        self._plan, self._way, self._effort, self._show = plan, way, effort, show
        self._deadline = time.monotonic() + plan.timeout
        self._guard = Guard()
        self._jobs: list[Job] = []

    def run(self, backends: Sequence[str], peers: bool, work: Sequence[str], rows: list[Row]) -> None:
        """Runs the benchmark.

        Args:
            backends: The engines.
            peers: Whether to measure Horovod and `tf.distribute` used directly as well.
            work: Sizes or models.
            rows: The list to which results are added, one piece of work after the other.

        Raises:
            TimeIsUpError: The benchmark takes too long.
        """
        teams = [self._team(name, peers) for name in backends]
        if peers:
            teams += [Team("", peer=title_of(name), peer_reason=f"it shares the core of the backend {name}, so"
                           " --backends must name that, too") for name in ("horovod", "tfdist") if name not in backends]
        if self._plan.kind == "step":
            teams.insert(0, Team(ONE_PROCESS, REFERENCE, job=self._started(ONE_PROCESS, ONE, 1, False)))
            teams.insert(1, Team(APART, REFERENCE, job=self._started(APART, "", self._plan.ranks, False)))
        elif self._way.mpi:
            teams.append(Team(MPI_ALONE, REFERENCE, job=self._started(MPI_ALONE, "", self._plan.ranks, False)))
        for number, item in enumerate(work):
            def show(share: float, what: str, number: int = number) -> None:
                self._show((number + share) / len(work), what)

            show(0.0, f"{item}: preparing")
            rows += self._measured(teams, item, show)

    def close(self) -> None:
        """Ends all jobs."""
        for job in self._jobs:
            job.close()
        self._guard.close()

    def _measured(self, teams: Sequence[Team], item: str, show: Callable[[float, str], None]) -> list[Row]:
        participants: list[Remote] = []
        for team in teams:
            found = team.participants(item)
            if team.name == ONE_PROCESS and found[0].row.reason:
                return [found[0].row]  # without it there are no reference weights
            participants += found
        participants.sort(key=lambda one: _ORDER[self._plan.kind].index(one.row.kind))
        compete(participants, self._effort, show)
        return [one.row for one in participants]

    def _team(self, name: str, peers: bool) -> Team:
        team = Team(name, peer=title_of(name) if peers else "", reason=self._way.objection(name))
        if not team.reason:
            team.job = self._started(name, name, self._plan.ranks, bool(team.peer))
            team.reason = team.job.reason
        team.peer_reason = f"it shares the core of the backend {name}, which did not start" if team.reason else ""
        return team

    def _started(self, name: str, backend: str, ranks: int, peer: bool) -> Job:
        self._show(0.0, f"starting {name}")
        folder = Path(self._plan.shared) / name.replace(" ", "-")
        job = Job(folder, self._way.command(ranks), self._way.words, self._way.end, self._deadline)
        self._jobs.append(job)
        plan = dataclasses.replace(self._plan, backend=backend, peer=peer)
        environment = {**os.environ, "HVKERAS_LIVENESS_TIMEOUT": str(self._plan.timeout + _MARGIN)}
        job.start(dataclasses.asdict(plan), environment, self._guard)
        return job

"""The launcher, with agents that start no processes and a membership that only notes what it is asked."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

from hvkeras.control.cause import Cause, CauseKind
from hvkeras.control.messages import Deadlines
from hvkeras.diagnostics.outcome import Outcome
from hvkeras.launcher.job_spec import JobSpec
from hvkeras.launcher.launcher import Launcher
from hvkeras.launcher.membership import Exit, Workers
from hvkeras.launcher.placement import HostRanks
from hvkeras.launcher.printer import Printer

SIGTERM = Cause(CauseKind.SIGNAL, None, "", None, "the launcher received SIGTERM", "", 143)


class FakeAgent:
    """An agent whose events a test makes."""

    def __init__(self, _job: JobSpec, host: HostRanks, on_event: Callable[..., None]) -> None:
        self.host, self.host_name, self.pids = host, f"{host.name}.local", dict[int, int]()
        self.started: list[int] = []
        self.signals: list[tuple[int, list[int]]] = []
        self.is_released = self.is_awake = False
        self.stopped = False
        self._over = asyncio.Event()
        self._on_event = on_event

    def happens(self, kind: str, worker: int, **facts: Any) -> None:
        self._on_event(self, {"type": kind, "worker": worker, **facts})

    async def connect(self) -> None:
        pass

    def start(self, order: dict[str, Any]) -> None:
        for each in order["workers"]:
            self.started.append(each["worker"])
            self.pids[each["worker"]] = 70 + each["worker"]

    async def run(self, order: dict[str, Any]) -> None:
        self.start(order)
        await self._over.wait()

    def signal(self, number: int, workers: list[int]) -> None:
        self.signals.append((number, workers))
        if number == signal.SIGKILL:
            for worker in workers:
                self.happens("exit", worker, code=-number)

    def release(self) -> None:
        self.is_released = True
        self._over.set()

    def lose(self) -> None:
        self._over.set()

    async def ended(self, timeout: float) -> None:
        pass

    def is_stopped(self, seconds: float) -> bool:
        stopped, self.stopped = self.stopped, False
        return stopped

    def wake(self) -> None:
        self.is_awake = True

    async def last_errors(self) -> str:
        return "connection reset"


class FakeMembership:
    """A membership that notes what happens, and lets a test answer."""

    noun = "worker"

    def __init__(self, workers: Workers, ranks: list[int]) -> None:
        self.workers, self.ranks = workers, ranks
        self.cause: Cause | None = None
        self.may_start_workers = False
        self.resets, self.may_restart = 0, True
        self.happened: list[tuple[Any, ...]] = []
        self.on_exit: Callable[[int, Exit], None] = lambda worker, end: self.happened.append(("exit", worker, end))
        self.server = SimpleNamespace(deadlines=Deadlines(exit_grace=0.0), ever_connected=frozenset[int](),
                                      connected=frozenset[int]())

    def order(self, host: HostRanks, tf_workers: list[str]) -> dict[str, Any]:
        return {"workers": [{"worker": rank} for rank in host.ranks]}

    def with_changes(self, outcome: Outcome) -> Outcome:
        return outcome

    def on_stopped(self, worker: int) -> bool:
        return True

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self.happened.append((name, *arguments))


def run(scenario: Callable[[Launcher, FakeMembership, list[FakeAgent]], Coroutine[Any, Any, None]],
        counts: dict[str, int], ranks: list[int] | None = None) -> tuple[int, Launcher, FakeMembership]:
    """Runs a launcher, and beside it what happens to it."""
    first, hosts = 0, []
    for name, count in counts.items():
        hosts.append(HostRanks(name, tuple(range(first, first + count)), local=False))
        first += count
    agents: list[FakeAgent] = []
    printer = Printer(first, io.BytesIO(), io.BytesIO())

    def new_agent(*arguments: Any) -> Any:
        agents.append(FakeAgent(*arguments))
        return agents[-1]

    async def both() -> tuple[int, Launcher, FakeMembership]:
        membership: list[FakeMembership] = []

        def make(workers: Workers) -> Any:
            membership.append(FakeMembership(workers, list(range(first)) if ranks is None else ranks))
            return membership[0]

        launcher = Launcher(JobSpec(["train"], hosts, "/", {}), printer, make, new_agent)
        running = asyncio.ensure_future(launcher.run())
        while not all(agent.started for agent in agents):
            await asyncio.sleep(0)
        await scenario(launcher, membership[0], agents)
        return await asyncio.wait_for(running, 60), launcher, membership[0]

    return asyncio.run(both())


def test_each_end_reaches_the_membership_and_the_last_one_ends_the_run() -> None:
    async def scenario(launcher: Launcher, _: FakeMembership, agents: list[FakeAgent]) -> None:
        assert launcher.running == {0, 1, 2}
        agents[0].happens("exit", 1, code=3)
        agents[1].happens("exit", 2, code=-9)
        agents[0].happens("failed", 0, error="No such file or directory", errno=2, culprit="train", code=127)

    code, launcher, membership = run(scenario, {"a": 2, "b": 1})
    ends = {what[1]: what[2] for what in membership.happened if what[0] == "exit"}
    assert ends[1] == Exit(CauseKind.EXIT, 3, "exited with code 3", "a.local", 71)
    assert ends[2] == Exit(CauseKind.SIGNAL, -9, "was killed by SIGKILL", "b.local", 72)
    assert (ends[0].kind, ends[0].code) == (CauseKind.SETUP, 127)
    assert "The command must start on every host" in ends[0].error
    assert code == 3  # that of the first
    assert launcher.outcome.ended == {"0": "exited with code 127", "1": "exited with code 3",
                                      "2": "was killed by SIGKILL"}
    assert launcher.outcome.hosts == ["a.local", "a.local", "b.local"]


def test_workers_that_run_on_a_lost_host_are_lost_with_it() -> None:
    async def scenario(launcher: Launcher, membership: FakeMembership, agents: list[FakeAgent]) -> None:
        agents[0].happens("exit", 0, code=0)
        agents[1].lose()
        while launcher.running:
            await asyncio.sleep(0.01)

    code, _, membership = run(scenario, {"a": 1, "b": 2})
    assert [what[:2] for what in membership.happened if "exit" in what[0] or "host" in what[0]] == [
        ("exit", 0), ("on_host_lost", "b"), ("exit", 1), ("exit", 2)]
    lost = membership.happened[-2][2] if membership.happened[-1] == ("stop",) else None
    assert lost == Exit(CauseKind.LOST, -9, "was lost with its host (connection reset)", "b.local", 72)
    assert lost.cause(None).exit_code == 1
    assert code == 0  # the membership has named no cause


def test_a_membership_can_go_on_with_workers_on_another_host() -> None:
    async def scenario(launcher: Launcher, membership: FakeMembership, agents: list[FakeAgent]) -> None:
        def replace(worker: int, end: Exit) -> None:
            if end.code:
                membership.workers.discount([worker])
                membership.workers.in_background(elsewhere())

        async def elsewhere() -> None:
            await launcher.reach("b")
            launcher.start("b", {"workers": [{"worker": 1}]})
            membership.ranks, membership.may_start_workers = [1], False

        membership.on_exit, membership.may_start_workers = replace, True
        agents[0].happens("exit", 0, code=3)
        while len(agents) < 2 or not agents[1].started:
            await asyncio.sleep(0.01)
        assert launcher.running == {1}
        assert launcher.host_name(1) == "b.local"
        launcher.release("b")
        assert not agents[1].is_released  # a worker runs there
        agents[1].happens("exit", 1, code=0)
        assert agents[1].is_released

    code, launcher, _ = run(scenario, {"a": 1})
    assert code == 0
    assert launcher.outcome.hosts == ["b.local"]


def test_ranks_that_the_control_channel_reaches_have_time_to_end_by_themselves() -> None:
    async def scenario(launcher: Launcher, membership: FakeMembership, agents: list[FakeAgent]) -> None:
        membership.server.ever_connected = frozenset({1})  # rank 1 is worker 0
        launcher.end_all()
        while not agents[0].signals:
            await asyncio.sleep(0.01)
        assert agents[0].signals == [(signal.SIGTERM, [1])]
        while launcher.running:
            await asyncio.sleep(0.01)
        assert agents[0].signals[1:] == [(signal.SIGTERM, [0, 1]), (signal.SIGKILL, [0, 1])]

    code, _, _ = run(scenario, {"a": 2}, ranks=[1, 0])
    assert code == 0  # the launcher itself has ended them


def test_the_first_sigterm_terminates_and_the_second_signal_kills() -> None:
    async def scenario(launcher: Launcher, membership: FakeMembership, agents: list[FakeAgent]) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        while ("terminate", SIGTERM) not in membership.happened:
            await asyncio.sleep(0.01)
        assert agents[0].signals == []
        membership.cause = SIGTERM
        os.kill(os.getpid(), signal.SIGINT)
        while launcher.running:
            await asyncio.sleep(0.01)
        assert agents[0].signals == [(signal.SIGKILL, [0])]

    code, launcher, _ = run(scenario, {"a": 1})
    assert code == 128 + signal.SIGTERM
    assert launcher.exit_report == "hvkeras run: the launcher received SIGTERM"
    assert not launcher.may_restart


def test_stopped_agents_and_workers_are_reported() -> None:
    async def scenario(_: Launcher, membership: FakeMembership, agents: list[FakeAgent]) -> None:
        agents[0].stopped = True
        while not agents[0].is_awake:
            await asyncio.sleep(0.01)
        (stopped,) = [what for what in membership.happened if what[0] == "on_host_stopped"]
        assert stopped[1] == 0
        assert stopped[2].error == (
            "was lost with its host (the agent of hvkeras run there was stopped for 15 s)")
        agents[0].happens("stopped", 1)
        assert agents[0].signals == [(signal.SIGKILL, [1])]
        agents[0].happens("exit", 0, code=0)

    run(scenario, {"a": 2})


def test_a_host_that_is_taken_away_is_the_memberships_concern() -> None:
    async def scenario(_: Launcher, membership: FakeMembership, agents: list[FakeAgent]) -> None:
        agents[0].happens("leaving", 0)
        assert membership.happened[-1] == ("on_host_preempted", "a", Cause(
            CauseKind.SIGNAL, None, "", None, "the agent on a.local received SIGTERM", "", 143))
        agents[0].happens("exit", 0, code=0)

    run(scenario, {"a": 1})


def test_the_job_fails_if_a_part_of_the_launcher_does() -> None:
    async def scenario(launcher: Launcher, membership: FakeMembership, agents: list[FakeAgent]) -> None:
        async def part() -> None:
            raise KeyError("unexpected")

        launcher.in_background(part())
        while not (failed := [what[1] for what in membership.happened if what[0] == "fail"]):
            await asyncio.sleep(0.01)
        assert failed[0].error == "the launcher failed with KeyError: 'unexpected'"
        agents[0].happens("exit", 0, code=0)

    run(scenario, {"a": 1})

"""Memberships, with a launcher that starts no processes: what they make of it when workers and hosts come and go."""

from __future__ import annotations

import asyncio
import functools
import queue
import signal
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from typing import Any

import pytest

from hvkeras.control.cause import Cause, CauseKind
from hvkeras.control.membership_channel import MembershipClient
from hvkeras.control.messages import FunctionEntered, Ready
from hvkeras.diagnostics.outcome import Outcome
from hvkeras.errors import MachineError
from hvkeras.launcher.elastic_membership import ElasticMembership
from hvkeras.launcher.host_pool import HostPool
from hvkeras.launcher.job_spec import JobSpec
from hvkeras.launcher.membership import Exit, FixedMembership
from hvkeras.launcher.placement import HostRanks

SECRET = "of the job"
WITHIN = 30.0
A, B = "127.0.0.2", "127.0.0.3"  # other hosts


class FakeLauncher:
    """A launcher whose processes run as long as a test wants them to. Time passes only when a test says so."""

    def __init__(self, count: int) -> None:
        self.running = frozenset(range(count))
        self.orders: dict[str, list[dict[str, Any]]] = {}
        self.unreachable: set[str] = set()
        self.signals: list[tuple[int, int]] = []
        self.discounted: set[int] = set()
        self.released: list[str] = []
        self.said: list[str] = []
        self.ends: list[str | float] = []
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self._background: list[Coroutine[Any, Any, None]] = []
        self._from_threads: queue.Queue[Callable[[], None]] = queue.Queue()

    def host_name(self, worker: int) -> str:
        return f"node-of-{worker}"

    async def reach(self, host: str) -> None:
        if host in self.unreachable:
            raise MachineError("no answer")

    def start(self, host: str, order: dict[str, Any]) -> None:
        self.orders.setdefault(host, []).extend(order["workers"])
        self.running |= {each["worker"] for each in order["workers"]}

    def signal(self, number: int, workers: Iterable[int]) -> None:
        self.signals += [(number, worker) for worker in workers if worker in self.running]

    def discount(self, workers: Iterable[int]) -> None:
        self.discounted.update(workers)

    def release(self, host: str) -> None:
        self.released.append(host)

    def end_all(self) -> None:
        self.ends.append("all")

    def finish(self, seconds: float) -> None:
        self.ends.append(seconds)

    def say(self, text: str) -> None:
        self.said += [text] if text else []

    def log(self, text: str) -> None:
        pass

    warn = log

    def later(self, seconds: float, function: Callable[..., None], *arguments: Any) -> None:
        self.timers.append((seconds, functools.partial(function, *arguments)))

    def from_thread(self, function: Callable[..., None], *arguments: Any) -> None:
        self._from_threads.put(functools.partial(function, *arguments))

    def in_background(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self._background.append(coroutine)

    # What tests do.

    def work(self) -> None:
        """Runs what was to be done in the background."""
        while self._background:
            asyncio.run(self._background.pop(0))

    def take_from_thread(self) -> None:
        """Waits for the next call of a server's thread, and makes it."""
        self._from_threads.get(timeout=WITHIN)()
        self.work()

    def pass_time(self, seconds: float) -> None:
        """Lets time pass."""
        due, self.timers = [each for each in self.timers if each[0] <= seconds], [
            each for each in self.timers if each[0] > seconds]
        for _, call in due:
            call()
        self.work()

    def exit(self, membership: FixedMembership | ElasticMembership, worker: int, code: int) -> None:
        """Ends a process."""
        self.running -= {worker}
        membership.on_exit(worker, Exit(CauseKind.EXIT, code, f"exited with code {code}", "node", 7))
        self.work()


@pytest.fixture
def serving() -> Iterator[Callable[..., Any]]:
    """Starts memberships, and stops them after the test."""
    started: list[FixedMembership | ElasticMembership] = []

    def serve(kind: Callable[..., Any], *arguments: Any) -> Any:
        started.append(kind(*arguments))
        started[-1].serve()
        return started[-1]

    yield serve
    for each in started:
        each.stop()


def elastic(serving: Callable[..., Any], slots: Mapping[str, int], launcher: FakeLauncher, hosts: list[HostRanks],
            resets: int = 3, failures: int = 2, **options: Any) -> ElasticMembership:
    pool = HostPool(lambda: dict(slots), 1, None, 60, failures=failures)
    job = JobSpec(["train"], hosts, "/", {}, reset_limit=resets, pool=pool, **options)
    made: ElasticMembership = serving(ElasticMembership, job, SECRET, pool, resets, launcher)
    for rank in made.ranks:
        made.on_message(rank, FunctionEntered(1, restarts=False))
    made.on_hosts(slots)
    launcher.work()
    return made


def here(count: int) -> list[HostRanks]:
    return [HostRanks("localhost", tuple(range(count)), local=True)]


def ready(launcher: FakeLauncher, membership: ElasticMembership, worker: int, commit: int) -> None:
    membership.on_message(worker, Ready(commit, 1))
    launcher.work()


def test_the_first_failure_ends_a_job_of_fixed_ranks(serving: Callable[..., Any]) -> None:
    launcher = FakeLauncher(2)
    membership = serving(FixedMembership, JobSpec(["train"], here(2), "/", {}), SECRET, launcher)
    order = membership.order(here(2)[0], [])
    assert [(each["worker"], each["environment"]["HVKERAS_RUN_RANK"]) for each in order["workers"]] == [
        (0, "0"), (1, "1")]
    launcher.exit(membership, 0, 0)
    assert membership.cause is None
    launcher.exit(membership, 1, 3)
    launcher.take_from_thread()
    assert membership.cause == Cause(CauseKind.EXIT, 1, "node", 7, "exited with code 3", "", 3)
    assert launcher.ends == ["all"]
    assert membership.restarted(launcher.say).size == 2


def test_one_process_gets_sigterm_itself_when_its_job_is_terminated(serving: Callable[..., Any]) -> None:
    launcher = FakeLauncher(1)
    membership = serving(FixedMembership, JobSpec(["train"], here(1), "/", {}), SECRET, launcher)
    cause = Cause(CauseKind.SIGNAL, None, "", None, "the launcher received SIGTERM", "", 143)
    membership.terminate(cause)
    assert launcher.signals == [(signal.SIGTERM, 0)]
    assert membership.cause is None  # it may save what it trains
    launcher.pass_time(1e9)
    launcher.take_from_thread()
    assert membership.cause == cause


def test_survivors_form_a_generation_and_a_newcomer_is_started(serving: Callable[..., Any]) -> None:
    launcher = FakeLauncher(3)
    membership = elastic(serving, {"localhost": 3}, launcher, here(3))
    launcher.exit(membership, 1, 3)
    launcher.take_from_thread()
    assert membership.cause is None
    assert launcher.discounted == {1}
    ready(launcher, membership, 0, 5)
    ready(launcher, membership, 2, 6)
    assert membership.ranks == [2, 0]  # the newest commit is that of rank 0
    assert membership.server.size == 2
    (newcomer,) = launcher.orders["localhost"]
    assert newcomer["worker"] == 3
    assert newcomer["environment"]["HVKERAS_RUN_WORKER"] == "3"
    outcome = membership.with_changes(Outcome(2, ["node", "node"]))
    assert (outcome.size, outcome.first_size, membership.resets) == (2, 3, 1)


def test_a_worker_learns_its_rank_over_the_membership_channel(serving: Callable[..., Any]) -> None:
    launcher = FakeLauncher(2)
    membership = elastic(serving, {"localhost": 2}, launcher, here(2))
    environment = membership.order(here(2)[0], [])["workers"][1]["environment"]
    host, _, port = environment["HVKERAS_RUN_MEMBERSHIP"].partition(":")
    client = MembershipClient((host, int(port)), SECRET.encode(), 1, WITHIN)
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(client.next_generation(5, 1)))
    waiting.start()
    try:
        launcher.exit(membership, 0, 3)
        launcher.take_from_thread()
        launcher.take_from_thread()
        waiting.join(WITHIN)
    finally:
        client.close()
    assert membership.ranks == [1]
    (answer,) = answers
    assert answer.commit == 5
    assert (answer.variables["HVKERAS_RUN_RANK"], answer.variables["HVKERAS_RUN_SIZE"]) == ("0", "1")
    assert answer.variables["HVKERAS_RUN_CONTROL"] == "{}:{}".format(*membership.server.address)


def test_a_newcomer_that_fails_does_not_end_the_generation(serving: Callable[..., Any]) -> None:
    launcher = FakeLauncher(2)
    membership = elastic(serving, {"localhost": 3}, launcher, here(2))
    assert [each["worker"] for each in launcher.orders["localhost"]] == [2]  # all ranks train, and a slot is free
    launcher.exit(membership, 2, 127)
    assert launcher.said == ["hvkeras run: worker 2 on node, which was to join, exited with code 127"]
    assert [each["worker"] for each in launcher.orders["localhost"]] == [2, 3]
    assert membership.server.cause is None
    assert membership.ranks == [0, 1]


def test_a_newcomer_that_is_ended_with_the_job_is_no_failure(serving: Callable[..., Any]) -> None:
    launcher = FakeLauncher(2)
    membership = elastic(serving, {"localhost": 3}, launcher, here(2))
    for worker, code in ((0, 0), (1, 0), (2, -signal.SIGTERM)):
        launcher.exit(membership, worker, code)
    assert launcher.said == []
    assert [each["worker"] for each in launcher.orders["localhost"]] == [2]
    assert membership.cause is None


def test_workers_of_a_host_that_cannot_be_used_are_lost(serving: Callable[..., Any]) -> None:
    launcher = FakeLauncher(1)
    launcher.unreachable = {A}
    membership = elastic(serving, {"localhost": 1, A: 1}, launcher, here(1))
    assert launcher.orders == {}
    assert launcher.said[:2] == [f"hvkeras run: {A} cannot be used: no answer",
                                 f"hvkeras run: sets {A} aside, which was lost, for the rest of the job"]
    assert membership.may_start_workers


def test_too_many_failures_end_the_job_and_the_host_of_the_failed_worker_is_noted(serving: Callable[..., Any]) -> None:
    slots = {"localhost": 1, A: 1, B: 1}
    hosts = [HostRanks(name, (rank,), name == "localhost") for rank, name in enumerate(slots)]
    launcher = FakeLauncher(3)
    membership = elastic(serving, slots, launcher, hosts, resets=1, failures=1)
    launcher.exit(membership, 1, 3)
    launcher.take_from_thread()
    ready(launcher, membership, 0, 5)
    ready(launcher, membership, 2, 5)
    assert membership.ranks == [0, 2]
    membership.server.fail(Cause(CauseKind.EXIT, 1, "node", 7, "exited with code 4", "", 4))  # rank 1 is worker 2
    launcher.take_from_thread()
    assert membership.cause is not None
    assert (membership.cause.rank, membership.cause.exit_code) == (1, 4)
    assert f"hvkeras run: sets {B} aside, where a rank has failed, for the rest of the job" in launcher.said
    assert "hvkeras run: ranks have failed more often than --reset-limit allows" in launcher.said
    assert launcher.ends == [1.0]
    assert not membership.may_restart
    assert not membership.may_start_workers


def test_all_workers_start_again_where_there_are_hosts(serving: Callable[..., Any]) -> None:
    launcher = FakeLauncher(2)
    slots = {"localhost": 2}
    membership = elastic(serving, slots, launcher, here(2), ends_on_same_error=True, last_error="KeyError: 1")
    membership.server.fail(Cause(CauseKind.EXCEPTION, 1, "node", 8, "failed with ValueError: x"))
    launcher.take_from_thread()
    launcher.exit(membership, 0, 1)
    assert membership.cause is not None
    assert membership.may_restart
    slots["localhost"] = 1
    said: list[str] = []
    job = membership.restarted(said.append)
    assert (job.size, job.last_error) == (1, "failed with ValueError: x")
    assert said[-1] == "hvkeras run: 1 rank now (1 on localhost), 2 before"


def test_an_error_that_comes_twice_ends_a_job_without_a_limit(serving: Callable[..., Any]) -> None:
    launcher = FakeLauncher(2)
    membership = elastic(serving, {"localhost": 2}, launcher, here(2), ends_on_same_error=True,
                         last_error="failed with ValueError: x")
    membership.server.fail(Cause(CauseKind.EXCEPTION, 1, "node", 8, "failed with ValueError: x"))
    launcher.take_from_thread()
    assert membership.cause is not None
    assert not membership.may_restart
    assert launcher.ends == ["all"]


def test_the_workers_of_a_host_that_is_taken_away_leave_in_time(serving: Callable[..., Any]) -> None:
    slots = {"localhost": 1, A: 1}
    hosts = [HostRanks(name, (rank,), name == "localhost") for rank, name in enumerate(slots)]
    launcher = FakeLauncher(2)
    membership = elastic(serving, slots, launcher, hosts)
    membership.on_host_preempted(A, Cause(CauseKind.SIGNAL, None, "", None, "the agent on a received SIGTERM", "", 143))
    assert launcher.said == [
        "hvkeras run: worker 1 on node-of-1 received SIGTERM, and leaves at the next commit, within 25 s"]
    assert launcher.released == [A]
    ready(launcher, membership, 0, 5)
    ready(launcher, membership, 1, 5)
    assert membership.ranks == [0]
    assert launcher.signals == [(signal.SIGKILL, 1)]
    assert (membership.cause, membership.resets, launcher.orders) == (None, 0, {})


def test_sigterm_lets_all_ranks_commit_if_their_commits_outlive_the_job(serving: Callable[..., Any],
                                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = FakeLauncher(2)
    membership = elastic(serving, {"localhost": 2}, launcher, here(2))
    cause = Cause(CauseKind.SIGNAL, None, "", None, "the launcher received SIGTERM", "", 143)
    monkeypatch.setenv("HVKERAS_ELASTIC_DIR", "/commits")
    membership.terminate(cause)
    assert launcher.ends == []
    ready(launcher, membership, 0, 5)
    ready(launcher, membership, 1, 5)
    assert membership.cause is not None
    assert membership.cause.error == "the launcher received SIGTERM; all ranks have committed"
    assert launcher.ends == ["all"]


def test_an_interrupt_between_two_generations_ends_the_job(serving: Callable[..., Any]) -> None:
    launcher = FakeLauncher(2)
    membership = elastic(serving, {"localhost": 2}, launcher, here(2))
    launcher.exit(membership, 1, 3)
    launcher.take_from_thread()
    cause = Cause(CauseKind.SIGNAL, None, "", None, "the launcher was interrupted (Ctrl-C)", "", 130)
    membership.fail(cause)
    assert membership.cause == cause
    assert launcher.ends == ["all"]

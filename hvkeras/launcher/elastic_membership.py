"""Membership of an elastic job: surviving processes continue when a rank is lost, and new hosts join during training.

`Driver` decides which workers form the next generation, and when the job ends. This module sends it the events of
processes and hosts, and executes its actions. It also decides which failures end the whole job. Each generation of
ranks has its own control channel, and all workers share the membership channel.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hvkeras.control.cause import Cause, CauseKind
from hvkeras.control.launch_environments import hvkeras_run
from hvkeras.control.membership_channel import MembershipServer
from hvkeras.control.messages import (
    Assignment,
    ChangeAhead,
    FunctionDone,
    FunctionEntered,
    GenerationJoined,
    Message,
    RanksChanged,
    Ready,
    WorkerLeaving,
)
from hvkeras.control.server import ControlServer
from hvkeras.diagnostics.outcome import Outcome
from hvkeras.errors import HvkerasError
from hvkeras.host.console import some_of
from hvkeras.launcher.elastic_driver import (
    Abort,
    Action,
    Announce,
    Driver,
    Event,
    Finish,
    Form,
    Kill,
    Phase,
    StartWorkers,
    Worker,
)
from hvkeras.launcher.host_pool import FIRST_REPORT, REPORT_EVERY, HostPool
from hvkeras.launcher.job_spec import JobSpec, Order, by_machine, newcomers_order, rank_environment, start_order
from hvkeras.launcher.membership import UNWIND, Exit, Workers, control_server, listening_address, start_serving
from hvkeras.launcher.placement import THIS_HOST, HostRanks, Rank, WorkerId
from hvkeras.settings import Settings

HOST_SEARCH_INTERVAL = 1.0  # seconds between two searches for hosts
LEAVE_TIMEOUT = 60.0  # seconds within which a living member must leave a generation that has ended


class ElasticMembership:
    """Membership of an elastic job.

    Args:
        pool: The pool that hosts are taken from.
        resets: Maximum number of resets.

    Raises:
        MachineError: The control channel, or the membership channel, cannot listen.
        UsageError: The network interface does not exist.
    """

    noun: str = "worker"

    def __init__(self, job: JobSpec, secret: str, pool: HostPool, resets: int, workers: Workers) -> None:
        self._job, self._secret, self._pool, self._resets, self._workers = job, secret, pool, resets, workers
        self._settings = Settings(job.environment)
        self._driver = Driver(pool.least, pool.most, {host.name: len(host.ranks) for host in job.hosts}, resets,
                              job.counts_changes)
        self._hosts: dict[WorkerId, str] = {}  # of all workers ever started
        for host in job.hosts:
            for rank in host.ranks:
                self._add(Worker(WorkerId(rank), host.name, host.local, Rank(rank)))
        self.ranks: list[WorkerId] = sorted(self._hosts)
        self.server: ControlServer = self._control_server(0, listening_address(job))
        self._channel = MembershipServer(
            secret.encode(), self.server.address[0], lambda worker, message: workers.from_thread(
                self.on_message, WorkerId(worker), message), self._settings.liveness_timeout)
        self._channel_address = "{}:{}".format(*self._channel.address)
        self._generation = 0
        self._final: Cause | None = None  # why the job ends
        self._ending: Cause | None = None  # why the job will end when all ranks have committed
        self._last: Cause | None = None  # why the last generation ended
        self._must_end: Cause | None = None  # why the job ends immediately, whatever the ranks report
        self._last_error = job.last_error  # the exception of the last failure; "" if it was none
        self._found: Mapping[str, int] = self._driver.slots  # slots, as last found
        self._withheld: dict[str, int] = {}  # slots of leaving workers, by host
        self._lost_hosts: set[str] = set()
        self._function = 0  # the elastic function that the ranks are in
        self._joins = hvkeras_run.JOINS_AT_COMMIT  # when new workers join
        self._began = time.time()
        self._phase_began = time.monotonic()  # when the driver's phase was entered
        self._next_report = FIRST_REPORT
        self._changes: list[dict[str, Any]] = []  # of the ranks, for the report

    # Interface for the launcher.

    @property
    def cause(self) -> Cause | None:
        """Cause of an early end of the whole job."""
        return self._final

    @property
    def may_start_workers(self) -> bool:
        """True unless the job has ended early."""
        return self._final is None

    @property
    def resets(self) -> int:
        """Number of resets, by the count that is limited, without restarts of all workers."""
        used = self._resets - max(self._driver.resets, 0)
        return used - 1 if self._final is not None and used else used

    @property
    def may_restart(self) -> bool:
        """True if all workers may be restarted, as the remaining ones could not continue."""
        is_same = self._last_error != "" and self._last_error == self._job.last_error
        return self._driver.resets > 0 and not (self._job.ends_on_same_error and is_same)

    def restarted(self, say: Callable[[str], None]) -> JobSpec:
        """Return the job for a restart of all workers on the hosts available now; wait for enough hosts.

        Args:
            say: Function that prints a line.

        Raises:
            MachineError: Too few slots became available in time.
        """
        before, hosts = self._job, self._pool.restart(say)
        job = replace(before, hosts=hosts, last_error=self._last_error)
        if [(host.name, host.ranks) for host in hosts] != [(host.name, host.ranks) for host in before.hosts]:
            where = some_of([f"{len(host.ranks)} on {host.name}" for host in hosts])
            say(f"hvkeras run: {job.size} rank{'s' * (job.size > 1)} now ({where}), {before.size} before")
        return job

    def with_changes(self, outcome: Outcome) -> Outcome:
        """Return the outcome with the changes of the ranks added."""
        return replace(outcome, changes=self._changes, first_size=self._job.size, began=self._began)

    def serve(self) -> None:
        """Start the control channel of the first generation, and the membership channel."""
        start_serving(self.server, self._workers)
        self._channel.start()

    def stop(self) -> None:
        """Stop both channels."""
        self.server.stop()
        self._channel.stop()

    def order(self, host: HostRanks, tf_workers: Sequence[str]) -> Order:
        """Return the order to start the first workers of a host."""
        return start_order(self._job, host, self._secret, "{}:{}".format(*self.server.address), tf_workers,
                           self._channel_address)

    def begin(self) -> None:
        """Start to search for hosts, and to handle preempted ones."""
        if self._job.reporting is not None:
            self._job.reporting.notify_leaving(lambda host: self._workers.from_thread(self._preempt_host, host))
        self._workers.in_background(self._search_hosts())

    def on_exit(self, worker: WorkerId, end: Exit) -> None:
        """Handle the exit of a worker: the failure of a member ends the generation; a failed newcomer is replaced."""
        if self._must_end is not None and self._ending is None and self._final is None:
            self._end(self._must_end)
        ended = self._driver.workers.get(worker)
        if ended is None:
            return
        if end.code:
            self._report_failure(ended, end)
            self._workers.discount([worker])  # the job continues without it, so that its exit code does not count
        self._handle(Event.LOST if end.code else Event.DONE, worker)

    def on_stopped(self, worker: WorkerId) -> bool:
        """Return whether the worker belongs to the job: the control channel misses no heartbeats of a starting one."""
        return worker in self._driver.workers

    def on_host_stopped(self, worker: WorkerId, end: Exit) -> None:
        """Do nothing: the launcher resumes the agent, which ends its workers."""

    def on_host_lost(self, host: str) -> None:
        """Record the loss of a host; the exits of its workers follow."""
        self._lost_hosts.add(host)
        self._record_failure(host, lost=True)

    def on_host_preempted(self, host: str, cause: Cause) -> None:  # noqa: ARG002 - the signature of memberships
        """Let the workers of a preempted host leave at the next commit; the job continues."""
        self._preempt_host(host)

    def on_tick(self) -> None:
        """Evict members that the others wait for, and check the timeout of a wait for workers."""
        waited, driver = time.monotonic() - self._phase_began, self._driver
        if self._final is not None:
            return
        if driver.phase is Phase.WAITING:
            self._report_waiting(waited)
            if waited > self._pool.timeout:
                self._handle(Event.TIMEOUT)
        elif driver.phase is Phase.GATHERING or (driver.phase is Phase.FORMING and self._generation):
            silent = self.server.silent_for(self._settings.liveness_timeout) if driver.phase is Phase.GATHERING else (
                frozenset(range(self.server.size)) - self.server.connected if waited > self._settings.liveness_timeout
                else frozenset[int]())
            for member in driver.members:
                if member.rank in silent or waited > max(LEAVE_TIMEOUT, self._settings.start_timeout):
                    self._handle(Event.LATE, member.number)

    def fail(self, cause: Cause) -> None:
        """End the generation because of a failed rank; end the whole job if the cause concerns no rank."""
        if cause.rank is None:
            self._must_end = cause
        if self.server.cause is not None and self._final is None and cause.rank is None:
            self._end(cause)  # between two generations
        else:
            self.server.fail(cause)

    def terminate(self, cause: Cause) -> None:
        """End the job; with HVKERAS_ELASTIC_DIR, let the ranks commit to disk at the next step first."""
        if not Settings().elastic_dir or self._driver.phase is Phase.ENDED:
            self.fail(cause)
            return
        self._ending = cause
        self._workers.say("hvkeras run: received SIGTERM: the ranks commit at the next step, and the job ends, within"
                          f" {self._settings.leave_grace:g} s")
        if self._driver.phase is Phase.WAITING:
            self.fail(cause)
            return
        self._announce()
        self._workers.later(self._settings.leave_grace, self.fail, cause)

    # Events of workers and hosts.

    def on_message(self, number: WorkerId, message: Message) -> None:
        """Handle a message from a worker."""
        worker = self._driver.workers.get(number)
        if worker is None:
            return
        match message:
            case FunctionEntered():
                if worker.rank is not None:
                    self._function = max(self._function, message.function)
                    self._joins = hvkeras_run.JOINS_AT_START if message.restarts else hvkeras_run.JOINS_AT_COMMIT
                    self._handle(Event.JOINED, number)
            case GenerationJoined():
                self._handle(Event.JOINED, number)
            case Ready():
                if worker.rank is None and message.function < self._function:
                    self._channel.send(number, FunctionDone())
                    return
                worker.commit = message.commit
                self._handle(Event.READY, number)
            case RanksChanged():
                self._changes.append({**message.change, "time": time.time()})
            case WorkerLeaving():
                if not worker.is_leaving:
                    self._preempt(worker)

    def on_hosts(self, found: Mapping[str, int]) -> None:
        """Handle a change of the hosts.

        Args:
            found: The slots of all usable hosts.
        """
        self._found = found
        self._driver.slots = {host: max(0, slots - self._withheld.get(host, 0)) for host, slots in found.items()}
        self._handle(Event.HOSTS)

    def _preempt_host(self, host: str) -> None:
        for worker in [worker for worker in self._driver.workers.values()
                       if worker.host == host and not worker.is_leaving]:
            self._preempt(worker)
        self._workers.release(host)

    def _preempt(self, worker: Worker) -> None:
        """Let a worker leave at the next commit; its slot stays unused until its host's slots change."""
        host = self._workers.host_name(worker.number) or worker.host
        self._workers.say(f"hvkeras run: worker {worker.number} on {host} received SIGTERM, and leaves at the next"
                          f" commit, within {self._settings.leave_grace:g} s")
        worker.is_leaving = True
        self._withheld[worker.host] = self._withheld.get(worker.host, 0) + 1
        if self._driver.phase is Phase.CHANGING:
            self._announce()  # again, as the first announcement was for the next commit, not for the next step
        self.on_hosts(self._found)
        self._workers.later(self._settings.leave_grace, self._workers.signal, signal.SIGKILL, [worker.number])

    def _report_failure(self, worker: Worker, end: Exit) -> None:
        if worker.rank is None:
            if self._driver.phase is not Phase.ENDED:  # else it was ended, as the job ends
                self._workers.say(f"hvkeras run: worker {worker.number} on {end.host}, which was to join, {end.error}")
                self._record_failure(worker.host, lost=False)
        else:
            self.fail(end.cause(worker.rank))

    def _record_failure(self, host: str, lost: bool) -> None:
        """Record the failure of a rank, or the loss of a host, which may exclude the host from the job."""
        text = self._pool.note_failure(host, lost)
        self._workers.say(text)
        if text and self._pool.changes:  # after the failure itself is handled
            self._workers.later(0.0, lambda: self.on_hosts({name: slots for name, slots in self._found.items()
                                                        if name != host}))

    def _on_generation_end(self, generation: int, cause: Cause) -> None:
        if generation != self._generation:
            return
        if cause.kind is CauseKind.RESET:
            if self._must_end is not None and self._ending is None and self._final is None:
                self._end(self._must_end)
            return
        host = "" if cause.rank is None else self._hosts[self.ranks[cause.rank]]
        if host and host not in self._lost_hosts:  # else the failure was recorded
            self._record_failure(host, lost=False)
        if self._final is not None:
            return
        self._last = cause
        must_end = self._must_end is not None and self._ending is None
        if not cause.kind.leaves_others_intact or cause.rank is None or must_end:
            self._end(cause)
            return
        if cause.kind is CauseKind.EXCEPTION and self._job.ends_on_same_error and cause.error == self._last_error:
            self._end(cause)
            return
        self._last_error = cause.error if cause.kind is CauseKind.EXCEPTION else ""
        number = self.ranks[cause.rank]
        if number not in self._driver.workers:
            return
        if not generation:  # ranks that have not called hvd.init() receive no other notification
            self._workers.signal(signal.SIGTERM, [worker for rank, worker in enumerate(self.ranks)
                                                  if rank not in self.server.ever_connected])
        patience = 0.0 if cause.kind.is_unresponsive else self.server.deadlines.exit_grace + UNWIND
        self._workers.discount([number])
        self._workers.later(patience, self._workers.signal, signal.SIGKILL, [number])
        self._handle(Event.LOST, number)

    def _end(self, cause: Cause) -> None:
        self._final = cause
        self._driver.phase = Phase.ENDED
        self._workers.end_all()

    async def _search_hosts(self) -> None:
        """Search for hosts while the job runs. The user's script runs in a thread."""
        failed = ""
        while True:
            await asyncio.sleep(HOST_SEARCH_INTERVAL)
            try:
                slots, failed = await asyncio.to_thread(self._pool.usable), ""
            except HvkerasError as error:
                if str(error) != failed:
                    self._workers.say(f"hvkeras run: {error}")
                failed = str(error)
                continue
            if slots != self._found:
                for host in [host for host in self._withheld if slots.get(host) != self._found.get(host)]:
                    del self._withheld[host]
                self.on_hosts(slots)

    def _report_waiting(self, waited: float) -> None:
        if waited >= self._next_report:
            self._next_report = waited + REPORT_EVERY
            ready = sum(worker.commit is not None for worker in self._driver.workers.values())
            self._workers.say(f"hvkeras run: waiting for workers, {waited:.0f} s of {self._pool.timeout:g} s: {ready}"
                              f" of at least {self._driver.least} are ready")

    # Events for the driver, and its actions.

    def _handle(self, event: Event, number: WorkerId | None = None) -> None:
        before = self._driver.phase
        self._driver.handle(event, number)
        if self._driver.phase is not before:
            self._phase_began, self._next_report = time.monotonic(), FIRST_REPORT
            self._workers.log(f"{before.name.lower()} -> {self._driver.phase.name.lower()} ({event.name.lower()})")
        actions, self._driver.actions = self._driver.actions, []
        for action in actions:
            self._execute(action)

    def _execute(self, action: Action) -> None:
        if isinstance(action, Form):
            self._form(action)
        elif isinstance(action, StartWorkers):
            self._start_workers(action)
        elif isinstance(action, Announce):
            self._announce()
        elif isinstance(action, Abort):
            self._abort()
        elif isinstance(action, Kill):
            self._workers.signal(signal.SIGKILL, action.workers)
        elif isinstance(action, Finish):
            self._finish(action.reason)

    def _add(self, worker: Worker) -> None:
        self._driver.add(worker)
        self._hosts[worker.number] = worker.host

    def _announce(self) -> None:
        """Notify the members that workers join or leave: at the next step if a machine is being preempted."""
        soon = self._ending is not None or any(worker.is_leaving for worker in self._driver.members)
        leaving = self._driver.leaving
        for member in self._driver.members:
            self._channel.send(member.number, ChangeAhead(soon, member.number in leaving))

    def _start_workers(self, action: StartWorkers) -> None:
        numbers: dict[str, list[WorkerId]] = {}
        for host, count in action.counts.items():
            first = len(self._hosts)
            numbers[host] = [WorkerId(number) for number in range(first, first + count)]
            for number in numbers[host]:
                self._add(Worker(number, host, host == THIS_HOST))
        self._workers.in_background(self._start(numbers))

    async def _start(self, numbers: Mapping[str, list[WorkerId]]) -> None:
        await asyncio.gather(*(self._start_on(host, newcomers) for host, newcomers in numbers.items()))

    async def _start_on(self, host: str, newcomers: list[WorkerId]) -> None:
        try:
            await self._workers.reach(host)
            self._lost_hosts.discard(host)
            if remaining := [number for number in newcomers if number in self._driver.workers]:
                self._workers.start(host, self._newcomers_order(host, remaining))
        except HvkerasError as error:
            self._workers.say(f"hvkeras run: {host} cannot be used: {error}")
            self._record_failure(host, lost=True)
            for number in newcomers:
                self._handle(Event.LOST, number)

    def _newcomers_order(self, host: str, newcomers: list[WorkerId]) -> Order:
        slots_in_use = {number: worker.slot for number, worker in self._driver.workers.items() if worker.host == host}
        slots = {number: slots_in_use[number] for number in newcomers}
        local_size = max(len(slots_in_use), max(slots.values()) + 1)
        return newcomers_order(self._job, HostRanks(host, (), local=host == THIS_HOST), self._secret,
                               self._channel_address, slots, local_size,
                               max(len(self.ranks), local_size - len(newcomers)), self._joins)

    def _abort(self) -> None:
        if self.server.cause is None:
            host = self._workers.host_name(self.ranks[0])
            self.server.fail(Cause(CauseKind.RESET, len(self.ranks), host, None, "has left"))

    def _form(self, action: Form) -> None:
        """Start the control channel of a new generation, and send its members their ranks."""
        if self._ending is not None:
            self._end(replace(self._ending, error=f"{self._ending.error}; all ranks have committed"))
            return
        self._last, former = None, self.server
        self._workers.in_background(asyncio.to_thread(former.stop))
        self._generation += 1
        self.ranks = [worker.number for worker in action.workers]
        self.server = self._control_server(self._generation, former.address[0])
        address = "{}:{}".format(*self.server.start())
        by_host: dict[str, list[int]] = {}
        for rank, worker in enumerate(action.workers):
            by_host.setdefault(worker.host, []).append(rank)
        hosts = by_machine(self._job, [HostRanks(name, tuple(ranks), name == THIS_HOST)
                                       for name, ranks in by_host.items()])
        for rank, worker in enumerate(action.workers):
            self._channel.send(worker.number, Assignment(action.commit, rank_environment(hosts, rank, address)))

    def _control_server(self, generation: int, address: str) -> ControlServer:
        return control_server(len(self.ranks), self._secret, address, self._settings, self._workers,
                              lambda cause: self._on_generation_end(generation, cause))

    def _finish(self, reason: str) -> None:
        running = self._workers.running
        self._workers.discount(running)
        if reason:
            self._workers.say(f"hvkeras run: {reason}")
            self._final = self._last or Cause(CauseKind.LOST, None, "", None, reason)
            self._workers.signal(signal.SIGTERM, running)
        self._workers.finish(UNWIND if reason else 0.0)

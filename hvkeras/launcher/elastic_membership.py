"""The membership of an elastic job: survivors keep their processes when a rank is lost, and new hosts join as it runs.

`Driver` decides who belongs to the next generation, and when there can be none. This module reports to it what happens
to processes and hosts, and carries out its actions; it decides which failures end the whole job. Each generation of
ranks has a control channel of its own, and all workers share the membership channel.
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

LOOK_EVERY = 1.0  # seconds between two looks for hosts
COME_BACK_WITHIN = 60.0  # seconds that a living member may take to notice that its generation is over


class ElasticMembership:
    """The membership of one elastic job.

    Args:
        job: What to run; it has a pool of hosts.
        secret: The job's secret.
        pool: What chooses hosts.
        resets: How often a generation may be followed by another one.
        workers: The launcher.

    Raises:
        MachineError: The control channel, or the membership channel, cannot listen.
        UsageError: There is no such network interface.
    """

    noun: str = "worker"

    def __init__(self, job: JobSpec, secret: str, pool: HostPool, resets: int, workers: Workers) -> None:
        self._job, self._secret, self._pool, self._resets, self._workers = job, secret, pool, resets, workers
        self._settings = Settings(job.environment)
        self._driver = Driver(pool.least, pool.most, {host.name: len(host.ranks) for host in job.hosts}, resets,
                              job.counts_changes)
        self._hosts: dict[WorkerId, str] = {}  # of all workers that there have been
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
        self._ending: Cause | None = None  # why it is to end once all ranks have committed
        self._last: Cause | None = None  # why the last generation has ended
        self._must_end: Cause | None = None  # why it is to end at once, whatever the ranks report
        self._last_error = job.last_error  # the exception that the last failure was; "" if it was none
        self._found: Mapping[str, int] = self._driver.slots  # slots, as last found
        self._withheld: dict[str, int] = {}  # slots of workers that are to leave, by host
        self._lost_hosts: set[str] = set()
        self._function = 0  # the elastic function that the ranks are in
        self._joins = hvkeras_run.JOINS_AT_COMMIT  # when new workers join
        self._began = time.time()
        self._entered = time.monotonic()  # when the driver's phase was entered
        self._next_report = FIRST_REPORT
        self._changes: list[dict[str, Any]] = []  # of the ranks, for a report

    # What the launcher asks.

    @property
    def cause(self) -> Cause | None:
        """Why the job ends early, as a whole."""
        return self._final

    @property
    def may_start_workers(self) -> bool:
        """Whether the job has not ended early."""
        return self._final is None

    @property
    def resets(self) -> int:
        """How often the job has gone on, by the count that is limited, without starting all workers again."""
        used = self._resets - max(self._driver.resets, 0)
        return used - 1 if self._final is not None and used else used

    @property
    def may_restart(self) -> bool:
        """Whether all workers may be started again: those that are left could not go on by themselves."""
        is_same = self._last_error != "" and self._last_error == self._job.last_error
        return self._driver.resets > 0 and not (self._job.ends_on_same_error and is_same)

    def restarted(self, say: Callable[[str], None]) -> JobSpec:
        """Returns the job to start all workers of again, on the hosts that there are now; waits for hosts.

        Args:
            say: Prints a line.

        Raises:
            MachineError: There are not enough in time.
        """
        before, hosts = self._job, self._pool.restart(say)
        job = replace(before, hosts=hosts, last_error=self._last_error)
        if [(host.name, host.ranks) for host in hosts] != [(host.name, host.ranks) for host in before.hosts]:
            where = some_of([f"{len(host.ranks)} on {host.name}" for host in hosts])
            say(f"hvkeras run: {job.size} rank{'s' * (job.size > 1)} now ({where}), {before.size} before")
        return job

    def with_changes(self, outcome: Outcome) -> Outcome:
        """Returns an outcome of the job, completed with the changes of its ranks."""
        return replace(outcome, changes=self._changes, first_size=self._job.size, began=self._began)

    def serve(self) -> None:
        """Starts the control channel of the first generation, and the membership channel."""
        start_serving(self.server, self._workers)
        self._channel.start()

    def stop(self) -> None:
        """Stops both."""
        self.server.stop()
        self._channel.stop()

    def order(self, host: HostRanks, tf_workers: Sequence[str]) -> Order:
        """Returns the order to start the first workers of a host."""
        return start_order(self._job, host, self._secret, "{}:{}".format(*self.server.address), tf_workers,
                           self._channel_address)

    def begin(self) -> None:
        """Begins to look for hosts, and to notice those that are taken away."""
        if self._job.reporting is not None:
            self._job.reporting.notify_leaving(lambda host: self._workers.from_thread(self._preempt_host, host))
        self._workers.in_background(self._look_for_hosts())

    def on_exit(self, worker: WorkerId, end: Exit) -> None:
        """Ends the generation if a member has failed; a newcomer is replaced, and a rank that has ended well is not."""
        ended = self._driver.workers.get(worker)
        if ended is None:
            return
        if end.code:
            self._report_failure(ended, end)
            self._workers.discount([worker])  # its end does not decide the exit code of a job that goes on without it
        self._handle(Event.LOST if end.code else Event.DONE, worker)

    def on_stopped(self, worker: WorkerId) -> bool:
        """Returns whether it belongs to the job: one that starts gives no sign of life that could be missed."""
        return worker in self._driver.workers

    def on_host_stopped(self, worker: WorkerId, end: Exit) -> None:
        """Does nothing: the launcher wakes the agent, which ends its workers."""

    def on_host_lost(self, host: str) -> None:
        """Notes it; the ends of its workers follow."""
        self._lost_hosts.add(host)
        self._note_failure(host, lost=True)

    def on_host_preempted(self, host: str, cause: Cause) -> None:  # noqa: ARG002 - the signature of memberships
        """Lets the workers of a host leave at the next commit; the job goes on."""
        self._preempt_host(host)

    def on_tick(self) -> None:
        """Evicts members that keep the others waiting, and gives up when workers do not come."""
        waited, driver = time.monotonic() - self._entered, self._driver
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
                if member.rank in silent or waited > max(COME_BACK_WITHIN, self._settings.start_timeout):
                    self._handle(Event.LATE, member.number)

    def fail(self, cause: Cause) -> None:
        """Ends the generation because a rank has failed, or the job as a whole, if the cause is no rank's."""
        if cause.rank is None:
            self._must_end = cause
        if self.server.cause is not None and self._final is None and cause.rank is None:
            self._end(cause)  # between two generations
        else:
            self.server.fail(cause)

    def terminate(self, cause: Cause) -> None:
        """Lets the ranks commit to disk at the next step, if the user has chosen a folder, which outlives the job."""
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

    # What happens to workers and hosts.

    def on_message(self, number: WorkerId, message: Message) -> None:
        """Handles a message of a worker."""
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
        """Handles hosts that have come or gone.

        Args:
            found: The slots of all hosts that may be used.
        """
        self._found = found
        self._driver.slots = {host: max(0, slots - self._withheld.get(host, 0)) for host, slots in found.items()}
        self._handle(Event.HOSTS)

    def _preempt_host(self, host: str) -> None:
        """Lets the workers of a host leave that is being taken away; it is released when they have left."""
        for worker in [worker for worker in self._driver.workers.values()
                       if worker.host == host and not worker.is_leaving]:
            self._preempt(worker)
        self._workers.release(host)

    def _preempt(self, worker: Worker) -> None:
        """Lets a worker leave at the next commit; its slot is not used again until the script finds other hosts."""
        host = self._workers.host_name(worker.number) or worker.host
        self._workers.say(f"hvkeras run: worker {worker.number} on {host} received SIGTERM, and leaves at the next"
                          f" commit, within {self._settings.leave_grace:g} s")
        worker.is_leaving = True
        self._withheld[worker.host] = self._withheld.get(worker.host, 0) + 1
        if self._driver.phase is Phase.CHANGING:
            self._announce()  # again, as it was for a change that has more time
        self.on_hosts(self._found)
        self._workers.later(self._settings.leave_grace, self._workers.signal, signal.SIGKILL, [worker.number])

    def _report_failure(self, worker: Worker, end: Exit) -> None:
        """Ends the generation because of a member's failure, or says that a newcomer has failed."""
        if worker.rank is None:
            self._workers.say(f"hvkeras run: worker {worker.number} on {end.host}, which was to join, {end.error}")
            self._note_failure(worker.host, lost=False)
        else:
            self.fail(end.cause(worker.rank))

    def _note_failure(self, host: str, lost: bool) -> None:
        """Notes on which host a rank has failed, or that a host was lost; nothing starts on one that is set aside."""
        words = self._pool.note_failure(host, lost)
        self._workers.say(words)
        if words and self._pool.changes:  # once the failure itself is handled
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
        if host and host not in self._lost_hosts:  # else it is noted already
            self._note_failure(host, lost=False)
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
        if not generation:  # nothing else informs those that have not called hvd.init()
            self._workers.signal(signal.SIGTERM, [worker for rank, worker in enumerate(self.ranks)
                                                  if rank not in self.server.ever_connected])
        patience = 0.0 if cause.kind.is_unresponsive else self.server.deadlines.exit_grace + UNWIND
        self._workers.discount([number])
        self._workers.later(patience, self._workers.signal, signal.SIGKILL, [number])
        self._handle(Event.LOST, number)

    def _end(self, cause: Cause) -> None:
        """Ends the job as a whole."""
        self._final = cause
        self._driver.phase = Phase.ENDED
        self._workers.end_all()

    async def _look_for_hosts(self) -> None:
        """Looks for hosts as long as the job runs; runs the user's script in a thread."""
        failed = ""
        while True:
            await asyncio.sleep(LOOK_EVERY)
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

    # What the driver wants.

    def _handle(self, event: Event, number: WorkerId | None = None) -> None:
        before = self._driver.phase
        self._driver.handle(event, number)
        if self._driver.phase is not before:
            self._entered, self._next_report = time.monotonic(), FIRST_REPORT
            self._workers.log(f"{before.name.lower()} -> {self._driver.phase.name.lower()} ({event.name.lower()})")
        actions, self._driver.actions = self._driver.actions, []
        for action in actions:
            self._do(action)

    def _do(self, action: Action) -> None:
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
        """Tells the members that workers join or leave: at the next step if a machine is being taken away."""
        soon = self._ending is not None or any(worker.is_leaving for worker in self._driver.members)
        leaving = self._driver.leaving
        for member in self._driver.members:
            self._channel.send(member.number, ChangeAhead(soon, member.number in leaving))

    def _start_workers(self, action: StartWorkers) -> None:
        """Gives new workers their numbers, and starts them."""
        numbers: dict[str, list[WorkerId]] = {}
        for host, count in action.counts.items():
            first = len(self._hosts)
            numbers[host] = [WorkerId(number) for number in range(first, first + count)]
            for number in numbers[host]:
                self._add(Worker(number, host, host == THIS_HOST))
        self._workers.in_background(self._start(numbers))

    async def _start(self, numbers: Mapping[str, list[WorkerId]]) -> None:
        """Starts workers on hosts; those of a host that cannot be used are lost."""
        await asyncio.gather(*(self._start_on(host, newcomers) for host, newcomers in numbers.items()))

    async def _start_on(self, host: str, newcomers: list[WorkerId]) -> None:
        try:
            await self._workers.reach(host)
            self._lost_hosts.discard(host)
            if wanted := [number for number in newcomers if number in self._driver.workers]:
                self._workers.start(host, self._newcomers_order(host, wanted))
        except HvkerasError as error:
            self._workers.say(f"hvkeras run: {host} cannot be used: {error}")
            self._note_failure(host, lost=True)
            for number in newcomers:
                self._handle(Event.LOST, number)

    def _newcomers_order(self, host: str, newcomers: list[WorkerId]) -> Order:
        there = {number: worker.slot for number, worker in self._driver.workers.items() if worker.host == host}
        slots = {number: there[number] for number in newcomers}
        local_size = max(len(there), max(slots.values()) + 1)
        return newcomers_order(self._job, HostRanks(host, (), local=host == THIS_HOST), self._secret,
                               self._channel_address, slots, local_size,
                               max(len(self.ranks), local_size - len(newcomers)), self._joins)

    def _abort(self) -> None:
        """Makes the members leave their collectives, unless a failure has done so."""
        if self.server.cause is None:
            host = self._workers.host_name(self.ranks[0])
            self.server.fail(Cause(CauseKind.RESET, len(self.ranks), host, None, "has left"))

    def _form(self, action: Form) -> None:
        """Starts the control channel of a generation, and gives its members their ranks."""
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
        """Ends what is left once the ranks have finished, or when they cannot go on."""
        running = self._workers.running
        self._workers.discount(running)
        if reason:
            self._workers.say(f"hvkeras run: {reason}")
            self._final = self._last or Cause(CauseKind.LOST, None, "", None, reason)
            self._workers.signal(signal.SIGTERM, running)
        self._workers.finish(UNWIND if reason else 0.0)

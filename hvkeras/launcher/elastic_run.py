"""Runs an elastic job whose survivors keep their processes when a rank is lost, and which new hosts join while it runs.

`Driver` decides who belongs to the job; this module tells it what happens to processes and hosts, and does what it
says. Each generation of ranks has a control channel of its own, and all workers share the membership channel.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hvkeras.control.cause import Cause, CauseKind
from hvkeras.control.membership_channel import MembershipServer
from hvkeras.control.messages import (
    Assignment,
    ChangeAhead,
    Deadlines,
    FunctionDone,
    FunctionEntered,
    GenerationJoined,
    Message,
    RanksChanged,
    Ready,
    WorkerLeaving,
)
from hvkeras.control.server import ControlServer
from hvkeras.errors import HvkerasError, UsageError
from hvkeras.host.network import LOOPBACK, interface_address, outward_address
from hvkeras.launch_environments import hvkeras_run
from hvkeras.launcher import exit_report as reports
from hvkeras.launcher.elastic_driver import (
    Abort,
    Action,
    Announce,
    Driver,
    Event,
    Finish,
    Form,
    Kill,
    Start,
    State,
    Worker,
)
from hvkeras.launcher.host_agents import Event as AgentEvent
from hvkeras.launcher.host_agents import HostAgent
from hvkeras.launcher.host_pool import FIRST_REPORT, REPORT_EVERY, HostPool
from hvkeras.launcher.job import Job
from hvkeras.launcher.orders import by_machine, newcomers_order, place_of, start_order
from hvkeras.launcher.placement import THIS_HOST, HostRanks
from hvkeras.launcher.printer import Printer
from hvkeras.launcher.run import TICK, UNWIND, Launcher
from hvkeras.report.outcome import Outcome
from hvkeras.settings import Settings

LOOK_EVERY = 1.0  # seconds between two looks for hosts
COME_BACK_WITHIN = 60.0  # seconds that a living member may take to notice that its generation is over


class ElasticLauncher(Launcher):
    """One elastic job.

    Args:
        job: What to run; it has a pool of hosts.
        printer: Where the workers' output goes.
        pool: What chooses hosts.
        resets: How often a generation may be followed by another one.

    Attributes:
        last_error: The exception that the last failure was; "" if it was none.
    """

    def __init__(self, job: Job, printer: Printer, pool: HostPool, resets: int) -> None:
        super().__init__(job, printer)
        self._pool = pool
        self._driver = Driver(pool.least, pool.most, {host.name: len(host.ranks) for host in job.hosts}, resets,
                              job.counts_changes)
        self._found: Mapping[str, int] = self._driver.slots  # slots, as last found
        self._withheld: dict[str, int] = {}  # slots of workers that were told to leave, by host
        self._resets = resets
        self._secret = ""
        self._began = time.time()
        self._membership: MembershipServer | None = None
        self._membership_address = ""
        self._ranks: list[int] = list(range(job.size))  # the worker of each rank in the present generation
        self._generation = 0
        self._final: Cause | None = None  # why the job ends
        self._ending: Cause | None = None  # why it is to end once all ranks have committed
        self._last: Cause | None = None  # why the last generation has ended
        self.last_error = job.last_error
        self._function = 0  # the elastic function that the ranks are in
        self._joins = hvkeras_run.JOINS_AT_COMMIT  # when new workers join
        self._entered = time.monotonic()  # when the driver's state was entered
        self._next_report = FIRST_REPORT
        self._starting: set[asyncio.Future[None]] = set()
        self._next_number = job.size
        self._leaving_hosts: set[str] = set()
        self._changes: list[dict[str, Any]] = []  # of the ranks, for a report
        for agent in self._agents:
            for number in agent.host.ranks:
                self._driver.add(Worker(number, agent.host.name, agent.host.local, rank=number))

    @property
    def outcome(self) -> Outcome:
        """How the job ended, with the ranks of the last generation."""
        hosts = {number: agent.host_name for agent in self._agents for number in agent.host.ranks}
        ended = {str(rank): reports.described_end(self._codes[number]) for rank, number in enumerate(self._ranks)
                 if self._codes.get(number)}
        cause = self._final.sentence() if self._final is not None else ""
        return Outcome(len(self._ranks), [hosts.get(number, "") for number in self._ranks], ended, cause, self._stalls,
                       self._changes, self._job.size, self._began)

    @property
    def resets(self) -> int:
        """How often the job has gone on, by the count that is limited, without starting all workers again."""
        used = self._resets - max(self._driver.resets, 0)
        return used - 1 if self._final is not None and used else used

    @property
    def may_restart(self) -> bool:
        """Whether all workers may be started again: those that are left could not go on by themselves."""
        return super().may_restart and self._driver.resets > 0

    def _process_of(self, rank: int | None) -> int | None:
        return None if rank is None or rank >= len(self._ranks) else self._ranks[rank]

    @property
    def _cause(self) -> Cause | None:
        return self._final

    # Starting.

    def _serve(self, secret: str) -> None:
        self._secret = secret
        super()._serve(secret)
        assert self._server is not None
        self._membership = MembershipServer(
            secret.encode(), self._server.address[0], lambda worker, message: self._from_thread(
                self._on_message, worker, message), self._settings.liveness_timeout)
        self._membership_address = "{}:{}".format(*self._membership.start())

    def _own_address(self) -> str:
        found = super()._own_address()
        if found != LOOPBACK or not self._pool.changes:
            return found
        try:  # other hosts may come
            chosen = self._settings.network_interfaces
            return interface_address(chosen) if chosen else outward_address()
        except UsageError:  # this one has no network
            return found

    def _new_server(self, size: int, host: str) -> ControlServer:
        generation = self._generation
        return ControlServer(
            size, self._secret.encode(), host, 0, Deadlines.from_settings(self._settings),
            on_end=lambda cause: self._from_thread(self._on_generation_end, generation, cause),
            on_warning=lambda text: self._from_thread(self._on_warning, text),
            on_note=lambda text: self._from_thread(self._say, f"hvkeras: {text}"))

    def _order(self, agent: HostAgent, secret: str, address: str) -> dict[str, Any]:
        return start_order(self._job, agent.host, secret, address, self._workers, self._membership_address)

    async def _run_ranks(self, secret: str) -> None:
        if self._job.reporting is not None:
            self._job.reporting.notify_leaving(lambda host: self._from_thread(self._let_host_leave, host))
        looking = asyncio.ensure_future(self._look_for_hosts())
        try:
            await super()._run_ranks(secret)
        finally:
            looking.cancel()
            for task in self._starting:
                task.cancel()
            await asyncio.gather(looking, *self._starting, return_exceptions=True)

    async def _clean_up(self) -> None:
        await super()._clean_up()
        if self._membership is not None:
            self._membership.stop()

    async def _start(self, counts: Mapping[str, int], numbers: Mapping[str, list[int]]) -> None:
        """Starts workers on hosts; connects to a host first where nothing runs yet."""
        for host in counts:
            try:
                await self._start_on(host, numbers[host])
            except HvkerasError as error:
                self._say(f"hvkeras run: {host} cannot be used: {error}")
                self._note_failure(host, lost=True)
                for number in numbers[host]:
                    self._record_exit(number, 1)

    async def _start_on(self, host: str, numbers: list[int]) -> None:
        agent = next((agent for agent in self._agents if agent.host.name == host), None)
        is_new = agent is None
        if agent is None:
            agent = self._new_agent(HostRanks(host, (), local=host == THIS_HOST))
            await agent.connect()
            self._agents.append(agent)
        agent.host = replace(agent.host, ranks=(*agent.host.ranks, *numbers))
        with contextlib.suppress(OSError):
            for number in numbers:
                self._printer.open_files(number)
        there = {number: worker.slot for number, worker in self._driver.workers.items() if worker.host == host}
        slots = {number: there.get(number, 0) for number in numbers}
        local_size = max(len(there), max(slots.values()) + 1)
        order = newcomers_order(self._job, agent.host, self._secret, self._membership_address, slots, local_size,
                                max(len(self._ranks), local_size - len(numbers)), self._joins)
        if is_new:
            self._in_background(self._listen(agent, order))
        else:
            agent.start(order)

    async def _look_for_hosts(self) -> None:
        """Looks for hosts as long as the job runs; runs the user's script in a thread."""
        failed = ""
        while True:
            await asyncio.sleep(LOOK_EVERY)
            try:
                slots, failed = await asyncio.to_thread(self._pool.usable), ""
            except HvkerasError as error:
                if str(error) != failed:
                    self._say(f"hvkeras run: {error}")
                failed = str(error)
                continue
            if slots != self._found:
                for host in [host for host in self._withheld if slots.get(host) != self._found.get(host)]:
                    del self._withheld[host]
                self._use(slots)

    def _in_background(self, coroutine: Any) -> None:
        task = asyncio.ensure_future(coroutine)
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    # What happens.

    def _on_message(self, number: int, message: Message) -> None:
        """Handles what a worker sends over the membership channel."""
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
                    self._send(number, FunctionDone())
                    return
                worker.commit = message.commit
                self._handle(Event.READY, number)
            case RanksChanged():
                self._changes.append({**message.change, "time": time.time()})
            case WorkerLeaving():
                if not worker.is_leaving:
                    self._let_leave(worker)

    def _let_host_leave(self, host: str) -> None:
        """Lets the workers of a host leave that is being taken away; it is released when they have left."""
        self._leaving_hosts.add(host)
        there = [worker for worker in self._driver.workers.values()
                 if worker.host == host and not worker.is_leaving]
        for worker in there:
            self._let_leave(worker)
        if not there:
            self._release(host)

    def _release(self, host: str) -> None:
        for agent in self._agents:
            ranks = agent.host.ranks if agent.host.name == host else ()
            if ranks and all(number in self._codes for number in ranks):
                agent.release()

    def _let_leave(self, worker: Worker) -> None:
        """Lets a worker leave at the next commit; its slot is not used again until the script finds other hosts."""
        agent = next((agent for agent in self._agents if worker.number in agent.host.ranks), None)
        self._say(f"hvkeras run: worker {worker.number} on {agent.host_name if agent else worker.host} received"
                  f" SIGTERM, and leaves at the next commit, within {self._settings.leave_grace:g} s")
        worker.is_leaving = True
        self._withheld[worker.host] = self._withheld.get(worker.host, 0) + 1
        if self._driver.state is State.CHANGING:
            self._announce()  # again, as it was for a change that has more time
        self._use(self._found)
        self._loop.call_later(self._settings.leave_grace, self._kill, worker.number)

    def _note_failure(self, host: str, lost: bool) -> None:
        """Notes on which host a rank has failed, or that a host was lost; nothing starts on one that is set aside."""
        words = self._pool.note_failure(host, lost)
        self._say(words)
        if words and self._pool.changes:  # once the failure itself is handled
            self._loop.call_soon(lambda: self._use({name: slots for name, slots in self._found.items()
                                                    if name != host}))

    def _use(self, found: Mapping[str, int]) -> None:
        """Tells the driver which slots there are."""
        self._found = found
        self._driver.slots = {host: max(0, slots - self._withheld.get(host, 0)) for host, slots in found.items()}
        self._handle(Event.HOSTS)

    def _on_event(self, agent: HostAgent, event: AgentEvent) -> None:
        number = event["rank"]
        if event["type"] == "leaving":
            self._let_host_leave(agent.host.name)
        elif event["type"] in ("exit", "failed"):
            self._log(f"worker {number} {reports.described_end(event['code'])}")
            worker = self._driver.workers.get(number)
            if event["code"] and worker is not None:
                error = (reports.described_end(event["code"]) if event["type"] == "exit" else "could not be started: "
                         + reports.why_not_started(event["error"], event["errno"], event["culprit"]))
                kind = (CauseKind.SETUP if event["type"] == "failed" else
                        CauseKind.EXIT if event["code"] > 0 else CauseKind.SIGNAL)
                self._report_failure(worker, agent, kind, error, event["code"])
            self._record_exit(number, event["code"])
        elif event["type"] == "stopped":
            worker = self._driver.workers.get(number)
            if worker is not None:  # one that starts, or starts anew, gives no sign of life that could be missed
                self._report_failure(worker, agent, CauseKind.SILENT, "gave no sign of life for"
                                     f" {self._settings.liveness_timeout:g} s (stopped)", -signal.SIGKILL)
                self._kill(number)
                self._record_exit(number, -signal.SIGKILL)
        else:
            super()._on_event(agent, event)

    def _report_failure(self, worker: Worker, agent: HostAgent, kind: CauseKind, error: str, code: int) -> None:
        """Ends the generation because of a member's failure, or says that a newcomer has failed."""
        if worker.rank is None:
            self._say(f"hvkeras run: worker {worker.number} on {agent.host_name}, which was to join, {error}")
            self._note_failure(worker.host, lost=False)
        else:
            self._fail(Cause(kind, worker.rank, agent.host_name, agent.pids.get(worker.number), error, "",
                             reports.shell_code(code)))

    def _record_exit(self, rank: int, code: int) -> None:
        """Records the end of a process; `rank` is the worker's number, as it is everywhere in agents' events."""
        if rank in self._codes:
            return
        self._codes[rank] = code
        worker = self._driver.workers.get(rank)
        if worker is not None:
            if code:
                self._signalled.add(rank)  # its end does not decide the exit code of a job that goes on without it
            self._handle(Event.LOST if code else Event.DONE, rank)
        if self._final is not None and len(self._codes) == self._next_number:
            self._all_over.set()
        for host in self._leaving_hosts:
            self._release(host)

    async def _listen(self, agent: HostAgent, order: dict[str, Any]) -> None:
        await agent.run(order)
        self._leaving_hosts.discard(agent.host.name)
        left = [number for number in agent.host.ranks if number not in self._codes]
        if agent in self._agents and self._final is None and self._driver.state is not State.ENDED:
            self._agents.remove(agent)
        if not left:
            return
        self._lost_hosts.add(agent.host.name)
        error = f"was lost with its host ({await agent.last_errors()})"
        self._note_failure(agent.host.name, lost=True)
        for number in left:
            if agent.host.local and number in agent.pids:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(agent.pids[number], signal.SIGKILL)
            worker = self._driver.workers.get(number)
            if worker is not None:
                self._report_failure(worker, agent, CauseKind.LOST, error, -signal.SIGKILL)
            self._record_exit(number, -signal.SIGKILL)

    def _on_end(self) -> None:
        """The first generation has ended; those that follow report it with their number."""
        assert self._server is not None
        assert self._server.cause is not None
        self._on_generation_end(0, self._server.cause)

    def _on_generation_end(self, generation: int, cause: Cause) -> None:
        if generation != self._generation or self._final is not None:
            return
        self._last = cause
        if not cause.kind.leaves_others_intact or cause.rank is None or (self._interrupted and self._ending is None):
            self._end(cause)
            return
        if cause.kind is CauseKind.RESET:
            return
        if cause.kind is CauseKind.EXCEPTION and self._job.ends_on_same_error and cause.error == self.last_error:
            self._end(cause)
            return
        self.last_error = cause.error if cause.kind is CauseKind.EXCEPTION else ""
        number = self._ranks[cause.rank]
        worker = self._driver.workers.get(number)
        if worker is None:
            return
        self._note_failure(worker.host, lost=False)
        if not generation:
            # Nothing else informs those that have not called hvd.init().
            silent = set(range(self._job.size)) - self._codes.keys() - (
                frozenset() if self._server is None else self._server.ever_connected)
            for agent in self._agents:
                agent.signal(signal.SIGTERM, [rank for rank in agent.host.ranks if rank in silent])
        if cause.kind.is_unresponsive:
            self._kill(number)
        else:
            self._loop.call_later(self._exit_grace + UNWIND, self._kill, number)
        self._signalled.add(number)
        self._handle(Event.LOST, number)

    def _end(self, cause: Cause) -> None:
        """Ends the job as a whole."""
        self._final = cause
        self._driver.state = State.ENDED
        super()._on_end()

    def _fail(self, cause: Cause) -> None:
        if self._server is not None and self._server.cause is not None and self._final is None and cause.rank is None:
            self._end(cause)  # between two generations
        else:
            super()._fail(cause)

    async def _watch(self) -> None:
        """Ends what keeps the others waiting."""
        while True:
            await asyncio.sleep(TICK)
            for agent in self._agents:
                if agent.is_stopped(TICK):
                    agent.wake()  # it then ends what is left on its host
            waited, driver, server = time.monotonic() - self._entered, self._driver, self._server
            if server is None or self._final is not None:
                continue
            if driver.state is State.WAITING:
                self._report_waiting(waited)
                if waited > self._pool.timeout:
                    self._handle(Event.TIMEOUT)
            elif driver.state is State.GATHERING or (driver.state is State.FORMING and self._generation):
                silent = server.silent_for(self._settings.liveness_timeout) if driver.state is State.GATHERING else (
                    frozenset(range(server.size)) - server.connected if waited > self._settings.liveness_timeout
                    else frozenset[int]())
                for member in driver.members:
                    if member.rank in silent or waited > max(COME_BACK_WITHIN, self._settings.start_timeout):
                        self._handle(Event.LATE, member.number)

    def _report_waiting(self, waited: float) -> None:
        if waited >= self._next_report:
            self._next_report = waited + REPORT_EVERY
            ready = sum(worker.commit is not None for worker in self._driver.workers.values())
            self._say(f"hvkeras run: waiting for workers, {waited:.0f} s of {self._pool.timeout:g} s: {ready} of at"
                      f" least {self._driver.least} are ready")

    # What the driver wants.

    def _handle(self, event: Event, number: int = -1) -> None:
        before = self._driver.state
        self._driver.handle(event, number)
        if self._driver.state is not before:
            self._entered, self._next_report = time.monotonic(), FIRST_REPORT
            self._log(f"{before.name.lower()} -> {self._driver.state.name.lower()} ({event.name.lower()})")
        actions, self._driver.actions = self._driver.actions, []
        for action in actions:
            self._do(action)

    def _do(self, action: Action) -> None:
        if isinstance(action, Form):
            self._form(action)
        elif isinstance(action, Start):
            self._start_workers(action)
        elif isinstance(action, Announce):
            self._announce()
        elif isinstance(action, Abort):
            self._abort()
        elif isinstance(action, Kill):
            for number in action.workers:
                self._signalled.add(number)
                self._kill(number)
        elif isinstance(action, Finish):
            self._finish(action.reason)

    def _announce(self) -> None:
        """Tells the members that workers join or leave: at the next step if a machine is being taken away."""
        soon = self._ending is not None or any(worker.is_leaving for worker in self._driver.members)
        leaving = self._driver.leaving
        for member in self._driver.members:
            self._send(member.number, ChangeAhead(soon, member.number in leaving))

    def _start_workers(self, action: Start) -> None:
        """Gives new workers their numbers, and starts them."""
        numbers: dict[str, list[int]] = {}
        for host, count in action.counts.items():
            numbers[host] = list(range(self._next_number, self._next_number + count))
            self._next_number += count
            for number in numbers[host]:
                self._driver.add(Worker(number, host, host == THIS_HOST))
        self._in_background(self._start(action.counts, numbers))

    def _abort(self) -> None:
        """Makes the members leave their collectives, unless a failure has done so."""
        if self._server is not None and self._server.cause is None:
            host = next((agent.host_name for agent in self._agents), "")
            self._server.fail(Cause(CauseKind.RESET, len(self._ranks), host, None, "has left"))

    def _tell_to_end(self, cause: Cause) -> None:
        """Lets the ranks commit to disk at the next step, if the user has chosen a folder, which outlives the job."""
        if not Settings().elastic_dir or self._driver.state is State.ENDED:
            self._fail(cause)
            return
        self._ending = cause
        self._say("hvkeras run: received SIGTERM: the ranks commit at the next step, and the job ends, within"
                  f" {self._settings.leave_grace:g} s")
        if self._driver.state is State.WAITING:
            self._fail(cause)
            return
        self._announce()
        self._loop.call_later(self._settings.leave_grace, self._fail, cause)

    def _form(self, action: Form) -> None:
        """Starts the control channel of a generation, and gives its members their ranks."""
        if self._ending is not None:
            self._end(replace(self._ending, error=f"{self._ending.error}; all ranks have committed"))
            return
        assert self._server is not None
        self._last, former, host = None, self._server, self._server.address[0]
        self._loop.run_in_executor(None, former.stop)
        self._generation += 1
        self._ranks = [worker.number for worker in action.workers]
        self._server = self._new_server(len(self._ranks), host)
        address = "{}:{}".format(*self._server.start())
        by_host: dict[str, list[int]] = {}
        for worker in action.workers:
            by_host.setdefault(worker.host, []).append(worker.rank or 0)
        hosts = by_machine(self._job, [HostRanks(name, tuple(ranks), name == THIS_HOST)
                                       for name, ranks in by_host.items()])
        for worker in action.workers:
            self._send(worker.number, Assignment(action.commit, place_of(hosts, worker.rank or 0, address)))

    def _send(self, number: int, message: Message) -> None:
        if self._membership is not None:
            self._membership.send(number, message)

    def _kill(self, number: int) -> None:
        for agent in self._agents:
            if number in agent.host.ranks and number not in self._codes:
                agent.signal(signal.SIGKILL, [number])

    def _finish(self, reason: str) -> None:
        """Ends what is left once the ranks have finished, or when they cannot go on."""
        if reason:
            self._say(f"hvkeras run: {reason}")
            self._final = self._last or Cause(CauseKind.LOST, None, "", None, reason)
        self._signalled.update(set(range(self._next_number)) - self._codes.keys())
        if reason:
            self._signal_ranks(signal.SIGTERM, False)
        self._loop.call_later(UNWIND if reason else 0.0, self._all_over.set)

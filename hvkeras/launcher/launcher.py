"""Runs a job once: starts its workers on all hosts, shows their output, and ends them all when the job is over.

Its membership (`hvkeras.launcher.membership`) decides who belongs to the job, and whether it goes on without a worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from hvkeras.control.cause import Cause, CauseKind
from hvkeras.diagnostics.outcome import Outcome
from hvkeras.errors import HvkerasError, MachineError
from hvkeras.host.console import format_ranks, some_of, summary
from hvkeras.host.network import LOOPBACK, address_towards, split_address
from hvkeras.launcher import exit_report as reports
from hvkeras.launcher.host_agents import AgentProcess, AgentTransport, Event, HostAgent, UnreachableError
from hvkeras.launcher.job_spec import JobSpec, Order
from hvkeras.launcher.membership import UNWIND, Exit, Membership, Workers
from hvkeras.launcher.placement import THIS_HOST, HostRanks, WorkerId
from hvkeras.launcher.printer import Printer
from hvkeras.launcher.reporting_hosts import ReportedTransport
from hvkeras.settings import Settings

TICK = 0.25  # seconds between two checks of agents, and of the membership
INTERRUPT_GRACE = 1.0  # seconds that they have instead when the launcher is interrupted
KILL_AFTER = 3.0  # seconds between SIGTERM and SIGKILL
AGENT_GRACE = 10.0  # seconds within which an agent must end what is left on its host
STARTING = 32  # agents that are being started at a time
LATE_EVERY = 10.0  # seconds between two lines about hosts that are awaited
ALSO_WITHIN = 1.5  # seconds after a host's failure within which those of others are told with it
HINT_AFTER = 30.0  # seconds until a hint says what `hvd.init()` is for, if no rank has called it
STALLS = 100  # stall warnings kept for a report: the first ones
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NewAgent = Callable[[JobSpec, HostRanks, Callable[[HostAgent, Event], None]], HostAgent]


def agent_of(job: JobSpec, host: HostRanks, on_event: Callable[[HostAgent, Event], None]) -> HostAgent:
    """Returns the agent of a host: one that has reported by itself, or one that the launcher starts."""
    transport: AgentTransport = AgentProcess(host, job.ssh, Settings(job.environment).liveness_timeout)
    if job.reporting is not None and not host.local:
        transport = ReportedTransport(host, job.reporting)
    return HostAgent(host, transport, on_event)


class Launcher:
    """One running job.

    Args:
        job: What to run.
        printer: Where the workers' output goes.
        membership: Makes what decides who belongs to the job; called with this launcher.
        new_agent: Makes the agent of a host.

    Attributes:
        membership: What it has made.
        exit_report: What failed first, once the job is over; "" if the job succeeded.
    """

    def __init__(self, job: JobSpec, printer: Printer, membership: Callable[[Workers], Membership],
                 new_agent: NewAgent = agent_of) -> None:
        self._job = job
        self._printer = printer
        self._settings = Settings(job.environment)
        self._loop = asyncio.get_running_loop()
        self._new_agent = new_agent
        self._agents = [new_agent(job, host, self._on_event) for host in job.hosts]  # all that there have been
        self._agent_on = {agent.host.name: agent for agent in self._agents}  # those that workers can be started by
        self._agent_of = {WorkerId(rank): agent for agent in self._agents for rank in agent.host.ranks}
        self._starting = asyncio.Semaphore(STARTING)
        self._serving: dict[HostAgent, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._codes: dict[WorkerId, int] = {}  # exit codes, in the order of ends
        self._discounted: set[WorkerId] = set()  # workers whose code is not the job's
        self._leaving_hosts: set[str] = set()
        self._over = asyncio.Event()
        self._interrupted = 0
        self._stalls: list[str] = []
        self._lost_output = ""
        self._has_hinted = False
        self.exit_report: str = ""
        self.membership: Membership = membership(self)

    async def run(self) -> int:
        """Runs the job to its end.

        Returns:
            The exit code: 0, or that of the rank that failed first.

        Raises:
            HvkerasError: The job could not be started.
        """
        with self._signals():
            try:
                self.membership.serve()
                await self._connect()
                if not self._interrupted:
                    await self._run_workers(await self._reserve())
            finally:
                await self._clean_up()
        if self._has_finished:
            self._hint_if_independent("no rank has called hvd.init(): they were")
        cause, codes = self.membership.cause, self._codes_of_ranks()
        if cause is not None:
            ranks = dict(enumerate(self.membership.ranks))
            tail = "" if cause.rank not in ranks else self._printer.tail(ranks[cause.rank])
            self.exit_report = reports.exit_report(cause, codes, tail)
        elif self._lost_output:
            self.exit_report = f"hvkeras run: {self._lost_output}"
            return 1
        if self._interrupted and not self._has_finished:
            return 128 + self._interrupted
        return reports.exit_code(cause, codes)

    @property
    def outcome(self) -> Outcome:
        """How the job ended, for a report on it."""
        cause, ranks = self.membership.cause, self.membership.ranks
        ended = {str(rank): reports.described_end(self._codes[worker]) for rank, worker in enumerate(ranks)
                 if self._codes.get(worker)}
        return self.membership.with_changes(Outcome(
            len(ranks), [self.host_name(worker) for worker in ranks], ended,
            "" if cause is None else reports.with_exit_status(cause, self._codes_of_ranks()).sentence(), self._stalls))

    @property
    def may_restart(self) -> bool:
        """Whether the failure is one that ranks have now and then: after the rendezvous, and not an interrupt."""
        cause = self.membership.cause
        return (cause is not None and cause.kind.may_pass and not self._interrupted) and self.membership.may_restart

    @property
    def _has_finished(self) -> bool:
        """Whether the ranks have ended well, even if the launcher was interrupted meanwhile."""
        return self.membership.cause is None and all(self._codes.get(worker) == 0 for worker in self.membership.ranks)

    def _codes_of_ranks(self) -> dict[int, int]:
        """Returns the exit codes of the ranks that have ended by themselves, in the order in which they did."""
        ranks = {worker: rank for rank, worker in enumerate(self.membership.ranks)}
        return {ranks[worker]: code for worker, code in self._codes.items()
                if worker in ranks and worker not in self._discounted}

    # Hosts and their agents.

    async def _connect(self) -> None:
        """Starts all agents; raises what kept hosts from answering, or returns early when interrupted."""
        connecting = {asyncio.ensure_future(self._connect_to(agent)): agent.host.name for agent in self._agents}
        until = [asyncio.ensure_future(asyncio.wait(connecting, return_when=asyncio.FIRST_EXCEPTION)),
                 asyncio.ensure_future(self._over.wait()), asyncio.ensure_future(self._report_late(connecting))]
        try:
            await asyncio.wait(until, return_when=asyncio.FIRST_COMPLETED)
            if _failures(connecting):
                await asyncio.wait(connecting, timeout=ALSO_WITHIN)
        finally:
            failures = _failures(connecting)
            await _cancelled([*connecting, *until])
        if failures:
            raise _as_one(failures, len(connecting))

    async def _connect_to(self, agent: HostAgent) -> None:
        async with self._starting:
            await agent.connect()

    async def _report_late(self, connecting: Mapping[asyncio.Task[None], str]) -> None:
        """Says every few seconds which hosts are awaited."""
        while True:
            await asyncio.sleep(LATE_EVERY)
            late = [host for task, host in connecting.items() if not task.done()]
            self.say(f"hvkeras run: waiting for {len(late)} of {len(connecting)} host{'s' * (len(connecting) > 1)}:"
                     f" {some_of(late)}")

    async def _reserve(self) -> list[str]:
        """Reserves an address for each rank, if the ranks get a TF_CONFIG; returns all host:port in order of ranks."""
        if not self._job.tf_config:
            return []
        remote = [host.name for host in self._job.hosts if not host.local]
        chosen = self._settings.network_interfaces

        async def on_host(agent: HostAgent) -> list[str]:
            found = await asyncio.wait_for(agent.reserve(chosen if remote else ()), self._job.ssh.timeout)
            if agent.host.local and not chosen:  # its name is localhost, and no ssh connects to it
                own = address_towards(remote[0]) if remote else LOOPBACK
                found = [f"{own}:{split_address(address)[1]}" for address in found]
            return found

        reserved = await asyncio.gather(*map(on_host, self._agents))
        return [address for found in reserved for address in found]

    async def _run_workers(self, tf_workers: list[str]) -> None:
        for agent in self._agents:
            self._serving[agent] = self._task(self._serve(agent, self.membership.order(agent.host, tf_workers)))
        self.membership.begin()
        self.in_background(self._tick())
        hint = self._loop.call_later(HINT_AFTER, self._hint_if_independent,
                                     f"no rank has called hvd.init() in {HINT_AFTER:.0f} s; without it, they are")
        await self._over.wait()
        hint.cancel()
        await _cancelled(self._background)
        for agent in self._agents:
            agent.release()
        await asyncio.wait(self._serving.values(), timeout=AGENT_GRACE)
        await _cancelled(self._serving.values())

    async def _serve(self, agent: HostAgent, order: Order) -> None:
        """Starts workers on a host, and serves it until its agent ends; workers that run then are lost with it."""
        await agent.run(order)
        if self._agent_on.get(agent.host.name) is agent:
            del self._agent_on[agent.host.name]
        self._leaving_hosts.discard(agent.host.name)
        if not (left := self._running_by(agent)):
            return
        error = f"was lost with its host ({await agent.last_errors()})"
        self.membership.on_host_lost(agent.host.name)
        self.discount(left)
        for worker in left:
            if agent.host.local and worker in agent.pids:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(agent.pids[worker], signal.SIGKILL)
            self._on_exit(worker, self._exit(worker, CauseKind.LOST, -signal.SIGKILL, error))

    async def _tick(self) -> None:
        """Looks for agents that are stopped, and lets the membership look for what keeps the job waiting."""
        while True:
            await asyncio.sleep(TICK)
            for agent in self._agents:
                if agent.is_stopped(TICK):
                    if there := [worker for worker, its_agent in self._agent_of.items() if its_agent is agent]:
                        error = ("was lost with its host (the agent of hvkeras run there was stopped for"
                                 f" {self._settings.liveness_timeout:g} s)")
                        self.membership.on_host_stopped(
                            there[0], self._exit(there[0], CauseKind.LOST, -signal.SIGKILL, error))
                    agent.wake()  # it then ends what is left on its host
            self.membership.on_tick()

    # Events of workers.

    def _on_event(self, agent: HostAgent, event: Event) -> None:
        if event["type"] == "leaving":
            error = f"the agent on {agent.host_name} received SIGTERM"
            self.membership.on_host_preempted(
                agent.host.name, Cause(CauseKind.SIGNAL, None, "", None, error, "", 128 + signal.SIGTERM))
            return
        worker = WorkerId(event["worker"])
        if event["type"] == "output":
            self._show(worker, event["stream"], event["data"])
        elif event["type"] == "started":
            self.log(f"{self.membership.noun} {worker} runs on {agent.host_name} as pid {event['pid']}")
        elif event["type"] == "failed":
            problem = reports.why_not_started(event["error"], event["errno"], event["culprit"])
            error = f"could not be started: {problem}"
            self._on_exit(worker, self._exit(worker, CauseKind.SETUP, event["code"], error))
        elif event["type"] == "exit":
            kind = CauseKind.EXIT if event["code"] >= 0 else CauseKind.SIGNAL
            self._on_exit(worker, self._exit(worker, kind, event["code"], reports.described_end(event["code"])))
        elif event["type"] == "stopped" and self.membership.on_stopped(worker):
            self.signal(signal.SIGKILL, [worker])
            error = f"gave no sign of life for {self._settings.liveness_timeout:g} s (stopped)"
            self._on_exit(worker, self._exit(worker, CauseKind.SILENT, -signal.SIGKILL, error))

    def _exit(self, worker: WorkerId, kind: CauseKind, code: int, error: str) -> Exit:
        agent = self._agent_of[worker]
        return Exit(kind, code, error, agent.host_name, agent.pids.get(worker))

    def _on_exit(self, worker: WorkerId, end: Exit) -> None:
        """Handles the end of a worker: it has ended by itself, was killed, was never started, or is lost."""
        if worker in self._codes:  # it counts as ended already
            return
        self.log(f"{self.membership.noun} {worker} {end.error}")
        self._codes[worker] = end.code
        self.membership.on_exit(worker, end)  # decides what follows: nothing, the end of the job, other ranks
        if len(self._codes) == len(self._agent_of) and not self.membership.may_start_workers:
            self._over.set()
        self._release_empty_hosts()

    def _show(self, worker: WorkerId, stream: str, data: bytes) -> None:
        try:
            self._printer.show(worker, stream, data)
        except OSError:
            self._interrupt(signal.SIGPIPE)
        except MachineError as error:
            self.membership.fail(Cause(CauseKind.SETUP, None, "", None, str(error)))

    def _hint_if_independent(self, begin: str) -> None:
        """Says what is wrong with programs that know nothing of each other: each trains alone, on the same files."""
        if self._job.size > 1 and not self._job.tf_config and not self.membership.server.ever_connected and (
                not self._has_hinted):
            self._has_hinted = True
            self.say(f"hvkeras run: {begin} {self._job.size} programs that know nothing of each other. HINT: call"
                     " hvd.init(), or start a script of MultiWorkerMirroredStrategy with hvkeras run --tf-config, one"
                     " of Horovod's with --as-horovod")

    # What the membership asks for: `Workers`.

    @property
    def running(self) -> frozenset[WorkerId]:
        """The workers that are, or are to be, started, and have not ended."""
        return frozenset(self._agent_of.keys() - self._codes.keys())

    def host_name(self, worker: WorkerId) -> str:
        """Returns what the host of a worker calls itself; "" before the worker is started."""
        return self._agent_of[worker].host_name if worker in self._agent_of else ""

    async def reach(self, host: str) -> None:
        """Connects to a host, unless an agent serves there already.

        Raises:
            HvkerasError: The host cannot be used.
        """
        if host not in self._agent_on:
            agent = self._new_agent(self._job, HostRanks(host, (), local=host == THIS_HOST), self._on_event)
            self._agents.append(agent)
            await self._connect_to(agent)
            self._agent_on[host] = agent

    def start(self, host: str, order: Order) -> None:
        """Starts workers on a host that was reached."""
        agent = self._agent_on[host]
        for each in order["workers"]:
            self._agent_of[WorkerId(each["worker"])] = agent
            with contextlib.suppress(OSError):
                self._printer.open_files(each["worker"])
        if agent in self._serving:
            agent.start(order)
        else:
            self._serving[agent] = self._task(self._serve(agent, order))

    def signal(self, number: int, workers: Iterable[WorkerId]) -> None:
        """Signals those of the workers that run, and discounts them."""
        running = self.running.intersection(workers)
        self.discount(running)
        self._send_signal(number, running)

    def discount(self, workers: Iterable[WorkerId]) -> None:
        """Takes care that the exit codes of workers do not decide the job's."""
        self._discounted.update(workers)

    def release(self, host: str) -> None:
        """Lets a host go as soon as no worker runs on it."""
        self._leaving_hosts.add(host)
        self._release_empty_hosts()

    def end_all(self) -> None:
        """Ends all workers: those at once that nothing else informs of the end, the others a moment later."""
        grace = INTERRUPT_GRACE if self._interrupted else self.membership.server.deadlines.exit_grace + UNWIND
        self.later(0.0, self._signal_unconnected)
        self.later(grace, self._signal_running, signal.SIGTERM)
        self.later(grace + KILL_AFTER, self._signal_running, signal.SIGKILL)

    def finish(self, seconds: float) -> None:
        """Ends the run after so many seconds, with all processes that are left."""
        self.later(seconds, self._over.set)

    def say(self, text: str) -> None:
        """Prints a line of the launcher's own."""
        with contextlib.suppress(OSError, MachineError):
            self._printer.say(text)

    def log(self, text: str) -> None:
        """Prints a step, if the user wants to see each."""
        if self._job.verbose:
            self.say(f"hvkeras run: {text}")

    def warn(self, text: str) -> None:
        """Prints a warning about late ranks, and keeps it for a report."""
        if len(self._stalls) < STALLS:
            self._stalls.append(text)
        self.say(f"hvkeras: {text}")

    def later(self, seconds: float, function: Callable[..., None], *arguments: Any) -> None:
        """Calls a function in the launcher's event loop after so many seconds."""
        self._loop.call_later(seconds, function, *arguments)

    def from_thread(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls a function in the launcher's event loop; any thread may call this."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def in_background(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine until it or the job ends."""
        task = self._task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # What these have in common.

    def _running_by(self, agent: HostAgent) -> list[WorkerId]:
        return [worker for worker, its_agent in self._agent_of.items()
                if its_agent is agent and worker not in self._codes]

    def _release_empty_hosts(self) -> None:
        for host in self._leaving_hosts & self._agent_on.keys():
            agent = self._agent_on[host]
            if agent in self._agent_of.values() and not self._running_by(agent):
                agent.release()

    def _signal_running(self, number: int) -> None:
        self.signal(number, self.running)

    def _signal_unconnected(self) -> None:
        """Ends workers that have never connected, which nothing else informs of the end of the job."""
        reached = {self.membership.ranks[rank] for rank in self.membership.server.ever_connected}
        self.signal(signal.SIGTERM, self.running - reached)

    def _send_signal(self, number: int, workers: frozenset[WorkerId]) -> None:
        by_agent: dict[HostAgent, list[WorkerId]] = {}
        for worker, agent in self._agent_of.items():
            if worker in workers and worker not in self._codes:
                by_agent.setdefault(agent, []).append(worker)
        for agent, there in by_agent.items():
            agent.signal(number, there)

    def _task(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(coroutine)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        """Ends the job if a part of the launcher has failed, instead of waiting for what it would have done."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.membership.fail(Cause(CauseKind.SETUP, None, "", None, f"the launcher failed with {summary(error)}"))

    # Signals of the user, and the end.

    def _interrupt(self, number: int) -> None:
        if self._interrupted:
            self._signal_running(signal.SIGKILL)
            return
        self._interrupted = number
        how = {signal.SIGINT: "was interrupted (Ctrl-C)", signal.SIGPIPE: "lost its output (closed pipe)"}
        text = how.get(signal.Signals(number), f"received {signal.Signals(number).name}")
        cause = Cause(CauseKind.SIGNAL, None, "", None, f"the launcher {text}", "", 128 + number)
        if number == signal.SIGTERM:
            self.membership.terminate(cause)
        else:
            self.membership.fail(cause)
        if not any(agent.pids for agent in self._agents):
            self._over.set()

    @contextlib.contextmanager
    def _signals(self) -> Any:
        caught = [number for number in INTERRUPTS if signal.getsignal(number) != signal.SIG_IGN]
        for number in caught:
            self._loop.add_signal_handler(number, self._interrupt, number)
        self._loop.add_signal_handler(signal.SIGTSTP, self._suspend)
        self._loop.add_signal_handler(signal.SIGUSR1, self._ask_locations)
        try:
            yield
        finally:
            for number in (*caught, signal.SIGTSTP, signal.SIGUSR1):
                self._loop.remove_signal_handler(number)

    def _suspend(self) -> None:
        """Stops the workers too on Ctrl-Z, because they have sessions of their own; `fg` resumes all."""
        self._send_signal(signal.SIGSTOP, self.running)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._send_signal(signal.SIGCONT, self.running)

    def _ask_locations(self) -> None:
        """Has the ranks report their locations; names those that have not called `hvd.init()`."""
        connected = self.membership.server.connected
        if silent := [rank for rank, worker in enumerate(self.membership.ranks)
                      if rank not in connected and worker not in self._codes]:
            self.say(f"hvkeras run: not in the job yet, or no longer: {format_ranks(silent)}")
        self.membership.server.ask_locations()

    async def _clean_up(self) -> None:
        for agent in self._agents:
            agent.release()
        await asyncio.gather(*(agent.ended(AGENT_GRACE) for agent in self._agents))
        self.membership.stop()
        try:
            self._printer.finish()
        except MachineError as error:  # the ranks have ended well, but some of their output was not saved
            self._lost_output = str(error)
        except OSError:
            pass  # nobody reads the output


def _failures(connecting: Mapping[asyncio.Task[None], str]) -> dict[str, BaseException]:
    """Returns what has kept hosts from answering."""
    return {host: error for task, host in connecting.items()
            if task.done() and not task.cancelled() and (error := task.exception()) is not None}


def _as_one(failures: Mapping[str, BaseException], hosts: int) -> BaseException:
    """Returns one error for all hosts that cannot be used: that of the first one, and a line for each of several."""
    first = next(iter(failures.values()))
    if len(failures) == 1 or not isinstance(first, HvkerasError):
        return first
    lines = [f"{host}: {error.why if isinstance(error, UnreachableError) else error}"
             for host, error in failures.items()]
    return MachineError("\n  ".join([f"{first}\n{len(failures)} of {hosts} hosts cannot be used:",
                                     some_of(lines, "\n  ")]))


async def _cancelled(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancels tasks, and waits until they have ended."""
    running = list(tasks)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)

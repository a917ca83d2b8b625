"""Launcher of a job: starts its workers on all hosts, shows their output, and ends all when the job is done.

Its membership (`hvkeras.launcher.membership`) decides which workers belong to the job, and whether it
continues without one that was lost.
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
from hvkeras.errors import HvkerasError, MachineError, summary
from hvkeras.horovod import as_horovod
from hvkeras.host.console import format_ranks, some_of
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
INTERRUPT_GRACE = 1.0  # seconds between an interrupt of the launcher and SIGTERM to the workers
KILL_AFTER = 3.0  # seconds between SIGTERM and SIGKILL
AGENT_GRACE = 10.0  # seconds within which an agent must end all processes on its host
MAX_CONCURRENT_STARTS = 32  # maximum number of agents that start concurrently
LATE_REPORT_INTERVAL = 10.0  # seconds between two reports about missing hosts
FAILURE_WINDOW = 1.5  # seconds after a host's failure within which others are reported with it
HINT_AFTER = 30.0  # seconds until a hint about `hvd.init()`, if no rank has called it
MAX_STALLS = 100  # stall warnings in a report: the first ones
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# What a script may be written for, and the flag of `hvkeras run` or `exec` that makes it train on all ranks.
_WAYS_TO_TRAIN = {
    "--data-parallel": "a Keras script for one process with hvkeras run --data-parallel",
    "--tf-config": "a script of MultiWorkerMirroredStrategy with --tf-config",
    "--as-horovod": "one of Horovod's with --as-horovod",
}
NewAgent = Callable[[JobSpec, HostRanks, Callable[[HostAgent, Event], None]], HostAgent]


def agent_of(job: JobSpec, host: HostRanks, on_event: Callable[[HostAgent, Event], None]) -> HostAgent:
    """Return the handle of a host's agent, which connects by itself, or which the launcher starts."""
    transport: AgentTransport = AgentProcess(host, job.ssh, Settings(job.environment).liveness_timeout)
    if job.reporting is not None and not host.local:
        transport = ReportedTransport(host, job.reporting)
    return HostAgent(host, transport, on_event)


class Launcher:
    """Launcher of one run of a job.

    Args:
        printer: Printer for the workers' output.
        membership: Factory of the membership; called with this launcher.
        new_agent: Factory of a host's agent.

    Attributes:
        exit_report: The first failure, when the job is done; "" if the job succeeded.
    """

    def __init__(self, job: JobSpec, printer: Printer, membership: Callable[[Workers], Membership],
                 new_agent: NewAgent = agent_of) -> None:
        self._job = job
        self._printer = printer
        self._settings = Settings(job.environment)
        self._loop = asyncio.get_running_loop()
        self._new_agent = new_agent
        self._agents = [new_agent(job, host, self._on_event) for host in job.hosts]  # all ever created
        self._agent_on = {agent.host.name: agent for agent in self._agents}  # those that can start workers
        self._agent_of = {WorkerId(rank): agent for agent in self._agents for rank in agent.host.ranks}
        self._starting = asyncio.Semaphore(MAX_CONCURRENT_STARTS)
        self._serving: dict[HostAgent, asyncio.Task[None]] = {}
        self._background: set[asyncio.Task[None]] = set()
        self._codes: dict[WorkerId, int] = {}  # exit codes, in the order of exits
        self._discounted: set[WorkerId] = set()  # workers whose exit code does not count
        self._leaving_hosts: set[str] = set()
        self._done = asyncio.Event()
        self._interrupted = 0
        self._stalls: list[str] = []
        self._lost_output = ""
        self._last_words: tuple[str, list[int]] = ("", [])  # what `LastWords.take` has returned at the end
        self._has_hinted = False
        self._reasons_for_cold_starts: set[str] = set()
        self.exit_report: str = ""
        self.membership: Membership = membership(self)

    async def run(self) -> int:
        """Run the job to completion.

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
        if self._has_finished and self._settings.data_parallel:
            self._hint_about_keras()
        elif self._has_finished:
            self._hint_about_init("no rank has called hvd.init(): they were")
        cause, codes = self.membership.cause, self._codes_of_ranks()
        if cause is not None:
            self.exit_report = self._exit_report(cause, codes)
        elif self._lost_output:
            self.exit_report = f"hvkeras run: {self._lost_output}"
            return 1
        if self._interrupted and not self._has_finished:
            return 128 + self._interrupted
        return reports.exit_code(cause, codes)

    def _exit_report(self, cause: Cause, codes: dict[int, int]) -> str:
        ranks = dict(enumerate(self.membership.ranks))
        failed = ranks.get(cause.rank) if cause.rank is not None else None
        if failed is None:
            return reports.exit_report(cause, codes, "")
        traceback, alike = self._last_words
        rank_of = {worker: rank for rank, worker in ranks.items()}
        return reports.exit_report(
            cause, codes, traceback or self._printer.tail(failed),
            failed_alike=[rank_of[worker] for worker in map(WorkerId, alike) if worker in rank_of])

    @property
    def outcome(self) -> Outcome:
        """Outcome of the job, for its report."""
        cause, ranks = self.membership.cause, self.membership.ranks
        ended = {str(rank): reports.described_end(self._codes[worker]) for rank, worker in enumerate(ranks)
                 if self._codes.get(worker)}
        return self.membership.with_changes(Outcome(
            len(ranks), [self.host_name(worker) for worker in ranks], ended,
            "" if cause is None else reports.with_exit_status(cause, self._codes_of_ranks()).sentence(), self._stalls))

    @property
    def may_restart(self) -> bool:
        """True if a restart may help: the failure came after the rendezvous, and was no interrupt."""
        cause = self.membership.cause
        return (cause is not None and cause.kind.may_pass and not self._interrupted) and self.membership.may_restart

    @property
    def _has_finished(self) -> bool:
        """True if all ranks have exited with code 0, even if the launcher was interrupted."""
        return self.membership.cause is None and all(self._codes.get(worker) == 0 for worker in self.membership.ranks)

    def _codes_of_ranks(self) -> dict[int, int]:  # of those that exited by themselves, in the order of exits
        ranks = {worker: rank for rank, worker in enumerate(self.membership.ranks)}
        return {ranks[worker]: code for worker, code in self._codes.items()
                if worker in ranks and worker not in self._discounted}

    # Hosts and their agents.

    async def _connect(self) -> None:
        """Start all agents; raise the errors of hosts that do not answer. Return early on an interrupt."""
        connecting = {asyncio.ensure_future(self._connect_to(agent)): agent.host.name for agent in self._agents}
        until = [asyncio.ensure_future(asyncio.wait(connecting, return_when=asyncio.FIRST_EXCEPTION)),
                 asyncio.ensure_future(self._done.wait()), asyncio.ensure_future(self._report_late(connecting))]
        try:
            await asyncio.wait(until, return_when=asyncio.FIRST_COMPLETED)
            if _failures(connecting):
                await asyncio.wait(connecting, timeout=FAILURE_WINDOW)
        finally:
            failures = _failures(connecting)
            await _cancelled([*connecting, *until])
        if failures:
            raise _merged_error(failures, len(connecting))

    async def _connect_to(self, agent: HostAgent) -> None:
        async with self._starting:
            await agent.connect()

    async def _report_late(self, connecting: Mapping[asyncio.Task[None], str]) -> None:
        while True:
            await asyncio.sleep(LATE_REPORT_INTERVAL)
            late = [host for task, host in connecting.items() if not task.done()]
            self.say(f"hvkeras run: waiting for {len(late)} of {len(connecting)} host{'s' * (len(connecting) > 1)}:"
                     f" {some_of(late)}")

    async def _reserve(self) -> list[str]:
        """Reserve a port for each rank if the ranks get a TF_CONFIG; return each rank's `host:port`."""
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
        self._note_cold(self._job.preload[1])
        for agent in self._agents:
            self._serving[agent] = self._task(self._serve(agent, self.membership.order(agent.host, tf_workers)))
        self.membership.begin()
        self.in_background(self._tick())
        hint = self._loop.call_later(HINT_AFTER, self._hint_about_init,
                                     f"no rank has called hvd.init() in {HINT_AFTER:.0f} s; without it, they are")
        if self._settings.data_parallel:  # a script may prepare its data before it imports Keras
            hint.cancel()
        await self._done.wait()
        hint.cancel()
        await _cancelled(self._background)
        for agent in self._agents:
            agent.release()
        await asyncio.wait(self._serving.values(), timeout=AGENT_GRACE)
        await _cancelled(self._serving.values())

    async def _serve(self, agent: HostAgent, order: Order) -> None:
        """Start workers on a host, and handle events until its agent ends; workers that still run then are lost."""
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
        """Check for stopped agents, and call `Membership.on_tick`, periodically."""
        while True:
            await asyncio.sleep(TICK)
            if self._printer.last_words is not None:
                self._printer.last_words.job_ends = self.membership.cause is not None
            with contextlib.suppress(OSError, MachineError):
                self._printer.show_late()
            for agent in self._agents:
                if agent.is_stopped(TICK):
                    if on_host := [worker for worker, its_agent in self._agent_of.items() if its_agent is agent]:
                        error = ("was lost with its host (the agent of hvkeras run there was stopped for"
                                 f" {self._settings.liveness_timeout:g} s)")
                        self.membership.on_host_stopped(
                            on_host[0], self._exit(on_host[0], CauseKind.LOST, -signal.SIGKILL, error))
                    agent.wake()  # to end the processes on its host
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
            self._note_cold(event.get("cold", ""))
        elif event["type"] == "failed":
            problem = reports.start_error(event["error"], event["errno"], event["culprit"])
            error = f"could not be started: {problem}"
            self._on_exit(worker, self._exit(worker, CauseKind.SETUP, event["code"], error))
        elif event["type"] == "exit":
            if "import_error" in event and not self.membership.server.ever_connected:  # no restart would help
                error = (f"the ranks could not be forked on {agent.host_name}, as the imports of --preload failed:"
                         f" {event['import_error']}")
                self.membership.fail(Cause(CauseKind.SETUP, None, "", None, error, "",
                                           reports.shell_code(event["code"])))
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
        """Handle a worker that has exited, was killed, could not be started, or is lost."""
        if worker in self._codes:  # handled already
            return
        self.log(f"{self.membership.noun} {worker} {end.error}")
        self._codes[worker] = end.code
        self.membership.on_exit(worker, end)  # may end the job, or form another generation
        if len(self._codes) == len(self._agent_of) and not self.membership.may_start_workers:
            self._done.set()
        self._release_empty_hosts()

    def _show(self, worker: WorkerId, stream: str, data: bytes) -> None:
        try:
            self._printer.show(worker, stream, data)
        except OSError:
            self._interrupt(signal.SIGPIPE)
        except MachineError as error:
            self.membership.fail(Cause(CauseKind.SETUP, None, "", None, str(error)))

    def _note_cold(self, why: str) -> None:
        """Print why ranks are not forked under --preload, once for each reason."""
        if why and why not in self._reasons_for_cold_starts:
            self._reasons_for_cold_starts.add(why)
            self.say(f"hvkeras run: ranks are started as new Python processes in spite of --preload: {why}")

    def _hint_about_init(self, begin: str) -> None:
        """Print a hint about programs that do not call `hvd.init()`: each trains alone, and writes the same files."""
        if self._job.size > 1 and not self._job.tf_config and not self.membership.server.ever_connected and (
                not self._has_hinted):
            self._has_hinted = True
            given = {*self._job.command, "--as-horovod" * as_horovod.is_set(self._job.environment)}
            ways = [way for flag, way in _WAYS_TO_TRAIN.items() if flag not in given]
            self.say(f"hvkeras run: {begin} {self._job.size} independent programs.\nHINT: call hvd.init(), or start"
                     f" {', '.join(ways)}")

    def _hint_about_keras(self) -> None:
        """Print a hint if no rank has imported TensorFlow under --data-parallel, so that each ran the whole script."""
        if not self.membership.server.ever_connected:
            self.say("hvkeras run: no rank has imported TensorFlow in the Python process of the command, so each of the"
                     f" {self._job.size} ranks ran all of it alone.\nHINT: run it without --data-parallel, or start the"
                     " Python script that trains as the command, with a Python in which hvkeras is installed")

    # Interface for the membership: `Workers`.

    @property
    def running(self) -> frozenset[WorkerId]:
        """Workers that are starting or running."""
        return frozenset(self._agent_of.keys() - self._codes.keys())

    def host_name(self, worker: WorkerId) -> str:
        """Return the name that the host of a worker reported; "" before the worker is started."""
        return self._agent_of[worker].host_name if worker in self._agent_of else ""

    async def reach(self, host: str) -> None:
        """Connect to a host, unless its agent is connected.

        Raises:
            HvkerasError: The host cannot be used.
        """
        if host not in self._agent_on:
            agent = self._new_agent(self._job, HostRanks(host, (), local=host == THIS_HOST), self._on_event)
            self._agents.append(agent)
            await self._connect_to(agent)
            self._agent_on[host] = agent

    def start(self, host: str, order: Order) -> None:
        """Start workers on a connected host."""
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
        """Send a signal to those of the workers that run; their exit codes do not count."""
        running = self.running.intersection(workers)
        self.discount(running)
        self._send_signal(number, running)

    def discount(self, workers: Iterable[WorkerId]) -> None:
        """Exclude the exit codes of workers from that of the job."""
        self._discounted.update(workers)

    def release(self, host: str) -> None:
        """Disconnect from a host when no worker runs on it any more."""
        self._leaving_hosts.add(host)
        self._release_empty_hosts()

    def end_all(self) -> None:
        """End all workers: unconnected ones immediately, the others (notified by the channel) after a grace period."""
        grace = INTERRUPT_GRACE if self._interrupted else self.membership.server.deadlines.exit_grace + UNWIND
        self.later(0.0, self._signal_unconnected)
        self.later(grace, self._signal_running, signal.SIGTERM)
        self.later(grace + KILL_AFTER, self._signal_running, signal.SIGKILL)

    def finish(self, seconds: float) -> None:
        """End the run, and all remaining processes, after a delay in seconds."""
        self.later(seconds, self._done.set)

    def say(self, text: str) -> None:
        """Print the launcher's own text."""
        with contextlib.suppress(OSError, MachineError):
            self._printer.say(text)

    def log(self, text: str) -> None:
        """Print a step of the launcher if `JobSpec.verbose` is set."""
        if self._job.verbose:
            self.say(f"hvkeras run: {text}")

    def warn(self, text: str) -> None:
        """Print a stall warning, and store it for the report."""
        if len(self._stalls) < MAX_STALLS:
            self._stalls.append(text)
        self.say(f"hvkeras: {text}")

    def later(self, seconds: float, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function in the launcher's event loop after a delay in seconds."""
        self._loop.call_later(seconds, function, *arguments)

    def from_thread(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function in the launcher's event loop; any thread may call this."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def in_background(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine until it, or the job, ends."""
        task = self._task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    # Helpers.

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
        # The control channel notifies the others.
        connected = {self.membership.ranks[rank] for rank in self.membership.server.ever_connected}
        self.signal(signal.SIGTERM, self.running - connected)

    def _send_signal(self, number: int, workers: frozenset[WorkerId]) -> None:
        by_agent: dict[HostAgent, list[WorkerId]] = {}
        for worker, agent in self._agent_of.items():
            if worker in workers and worker not in self._codes:
                by_agent.setdefault(agent, []).append(worker)
        for agent, numbers in by_agent.items():
            agent.signal(number, numbers)

    def _task(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(coroutine)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.membership.fail(Cause(CauseKind.SETUP, None, "", None, f"the launcher failed with {summary(error)}"))

    # Signals, and the end.

    def _interrupt(self, number: int) -> None:
        if self._interrupted:
            self._signal_running(signal.SIGKILL)
            return
        self._interrupted = number
        texts = {signal.SIGINT: "was interrupted (Ctrl-C)", signal.SIGPIPE: "lost its output (closed pipe)"}
        text = texts.get(signal.Signals(number), f"received {signal.Signals(number).name}")
        cause = Cause(CauseKind.SIGNAL, None, "", None, f"the launcher {text}", "", 128 + number)
        if number == signal.SIGTERM:
            self.membership.terminate(cause)
        else:
            self.membership.fail(cause)
        if not any(agent.pids for agent in self._agents):
            self._done.set()

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
        """Stop the workers as well on Ctrl-Z, as each leads its own session; `fg` resumes all."""
        self._send_signal(signal.SIGSTOP, self.running)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._send_signal(signal.SIGCONT, self.running)

    def _ask_locations(self) -> None:
        """Request the locations of the ranks; print those that are not connected."""
        connected = self.membership.server.connected
        if silent := [rank for rank, worker in enumerate(self.membership.ranks)
                      if rank not in connected and worker not in self._codes]:
            self.say(f"hvkeras run: not connected to the job: {format_ranks(silent)}")
        self.membership.server.ask_locations()

    async def _clean_up(self) -> None:
        for agent in self._agents:
            agent.release()
        await asyncio.gather(*(agent.ended(AGENT_GRACE) for agent in self._agents))
        self.membership.stop()
        if (cause := self.membership.cause) is not None and (waiting := self._printer.last_words) is not None:
            ranks = dict(enumerate(self.membership.ranks))
            lines, alike = waiting.take(ranks.get(cause.rank) if cause.rank is not None else None)
            self._last_words = b"\n".join(lines).decode(errors="replace"), alike
        try:
            self._printer.finish()
        except MachineError as error:  # the ranks may have succeeded, but some of their output was not saved
            self._lost_output = str(error)
        except OSError:
            pass  # nobody reads the output


def _failures(connecting: Mapping[asyncio.Task[None], str]) -> dict[str, BaseException]:
    return {host: error for task, host in connecting.items()
            if task.done() and not task.cancelled() and (error := task.exception()) is not None}


def _merged_error(failures: Mapping[str, BaseException], hosts: int) -> BaseException:
    """Return one error for all failed hosts: that of the first one and, if there are several, a line for each."""
    first = next(iter(failures.values()))
    if len(failures) == 1 or not isinstance(first, HvkerasError):
        return first
    lines = [f"{host}: {error.why if isinstance(error, UnreachableError) else error}"
             for host, error in failures.items()]
    return MachineError("\n  ".join([f"{first}\n{len(failures)} of {hosts} hosts cannot be used:",
                                     some_of(lines, "\n  ")]))


async def _cancelled(tasks: Iterable[asyncio.Future[Any]]) -> None:
    running = list(tasks)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)

"""Runs a job once: starts its ranks on all hosts, monitors them, and ends them all when one fails."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import Callable
from typing import Any

from hvkeras.control.cause import Cause, CauseKind
from hvkeras.control.messages import Deadlines
from hvkeras.control.server import ControlServer
from hvkeras.errors import MachineError
from hvkeras.host.network import LOOPBACK, address_towards, interface_address, split_address
from hvkeras.launcher import exit_report as reports
from hvkeras.launcher.host_agents import AgentProcess, AgentTransport, Event, HostAgent
from hvkeras.launcher.job import Job
from hvkeras.launcher.orders import start_order
from hvkeras.launcher.placement import HostRanks
from hvkeras.launcher.printer import Printer
from hvkeras.launcher.reporting_hosts import ReportedTransport
from hvkeras.report.outcome import Outcome
from hvkeras.settings import Settings

TICK = 0.25  # seconds between checks for stopped agents, and for ranks that ended before calling hvd.init()
UNWIND = 1.0  # seconds beyond HVKERAS_EXIT_GRACE that connected ranks have for their last output
INTERRUPT_GRACE = 1.0  # seconds that they have instead when the launcher is interrupted
KILL_AFTER = 3.0  # seconds between SIGTERM and SIGKILL
AGENT_GRACE = 10.0  # seconds within which an agent must end what is left on its host
TELL_AFTER = 30.0  # seconds until ranks that have not called `hvd.init()` are told what it is for
STALLS = 100  # stall warnings kept for a report: the first ones
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Launcher:
    """One running job.

    Args:
        job: What to run.
        printer: Where the ranks' output goes.

    Attributes:
        exit_report: What failed first, once the job is over; "" if the job succeeded.
    """

    def __init__(self, job: Job, printer: Printer) -> None:
        self._job = job
        self._printer = printer
        self._settings = Settings(job.environment)
        self._agents = [self._new_agent(host) for host in job.hosts]
        self._codes: dict[int, int] = {}
        self._signalled: set[int] = set()
        self._interrupted = 0
        self._all_over = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._server: ControlServer | None = None
        self._stalls: list[str] = []
        self._workers: list[str] = []  # host:port of each rank, for TF_CONFIG
        self._lost_output = ""
        self._told = False  # that the ranks know nothing of each other
        self._lost_hosts: set[str] = set()
        self.exit_report: str = ""

    async def run(self) -> int:
        """Runs the job to its end.

        Returns:
            The exit code: 0, or that of the rank that failed first.

        Raises:
            HvkerasError: The job could not be started.
        """
        with self._signals():
            try:
                secret = secrets.token_hex(32) if self._job.reporting is None else self._job.reporting.secret
                self._serve(secret)
                await self._connect()
                if not self._interrupted:
                    await self._reserve()
                    await self._run_ranks(secret)
            finally:
                await self._clean_up()
        if self._has_finished:
            self._tell_if_independent("no rank has called hvd.init(): they were")
        own_codes = {rank: code for rank, code in self._codes.items() if rank not in self._signalled}
        if self._cause is not None:
            process = self._process_of(self._cause.rank)
            tail = self._printer.tail(process) if process is not None else ""
            codes = {} if process is None or process not in own_codes else {self._cause.rank or 0: own_codes[process]}
            self.exit_report = reports.exit_report(self._cause, codes, tail)
        elif self._lost_output:
            self.exit_report = f"hvkeras run: {self._lost_output}"
            return 1
        if self._interrupted and not self._has_finished:
            return 128 + self._interrupted
        return reports.exit_code(self._cause, own_codes)

    @property
    def _has_finished(self) -> bool:
        """Whether the ranks have ended well, although the launcher was told to end them."""
        return self._cause is None and len(self._codes) == self._job.size and not any(self._codes.values())

    def _new_agent(self, host: HostRanks) -> HostAgent:
        transport: AgentTransport = AgentProcess(host, self._job.ssh, self._settings.liveness_timeout)
        if self._job.reporting is not None and not host.local:
            transport = ReportedTransport(host, self._job.reporting)
        return HostAgent(host, transport, self._on_event)

    def _process_of(self, rank: int | None) -> int | None:
        """Returns the number by which agents and the printer know a rank; None for none."""
        return rank

    @property
    def _exit_grace(self) -> float:
        """Seconds that ranks have after a failure, as rank 0 has told the server."""
        return (self._server.deadlines if self._server is not None else Deadlines()).exit_grace

    @property
    def _cause(self) -> Cause | None:
        """Why the job ends early; only the server knows it, from the ranks and from `_fail`.

        A failure reaches the server's thread a moment after `_fail` has returned. The cause of a job's end is therefore
        read after the server has stopped, which happens after it has handled everything reported before.
        """
        return None if self._server is None else self._server.cause

    @property
    def outcome(self) -> Outcome:
        """How the job ended, for a report on it."""
        hosts = {rank: agent.host_name for agent in self._agents for rank in agent.host.ranks}
        ended = {str(rank): reports.described_end(code) for rank, code in self._codes.items() if code}
        return Outcome(self._job.size, [hosts[rank] for rank in sorted(hosts)], ended,
                       reports.with_exit_status(self._cause, self._codes).sentence() if self._cause is not None else "",
                       self._stalls)

    @property
    def resets(self) -> int:
        """How often the job has gone on after a failure."""
        return 0

    @property
    def may_restart(self) -> bool:
        """Whether the failure is one that ranks have now and then: after the rendezvous, and not an interrupt."""
        return self._cause is not None and self._cause.kind.may_pass and not self._interrupted

    @property
    def failed_host(self) -> tuple[str, bool]:
        """The host of the rank that failed first, as the user wrote it, and whether the host itself was lost."""
        rank = None if self._cause is None else self._cause.rank
        name = next((host.name for host in self._job.hosts if rank in host.ranks), "")
        return name, name in self._lost_hosts

    def _serve(self, secret: str) -> None:
        self._server = ControlServer(
            self._job.size, secret.encode(), self._own_address(), 0, Deadlines.from_settings(self._settings),
            on_end=lambda _: self._from_thread(self._on_end),
            on_warning=lambda text: self._from_thread(self._on_warning, text),
            on_note=lambda text: self._from_thread(self._say, f"hvkeras: {text}"))
        address = self._server.start()
        self._log(f"the control channel listens on {address[0]}:{address[1]}")

    def _own_address(self) -> str:
        """Returns the address of this host that all hosts of the job reach."""
        remote = [host.name for host in self._job.hosts if not host.local]
        chosen = self._settings.network_interfaces
        if self._job.reporting is not None:
            return self._job.reporting.address[0]
        if not remote:
            return LOOPBACK
        return interface_address(chosen) if chosen else address_towards(remote[0])

    async def _connect(self) -> None:
        """Starts all agents; raises the first error, or returns early when interrupted."""
        waiting = {asyncio.ensure_future(agent.connect()) for agent in self._agents}
        interrupted = asyncio.ensure_future(self._all_over.wait())
        everything: list[asyncio.Future[Any]] = [*waiting, interrupted]
        try:
            while waiting and not interrupted.done():
                done, _ = await asyncio.wait([*waiting, interrupted], return_when=asyncio.FIRST_COMPLETED)
                for task in done & waiting:
                    task.result()
                waiting -= done
        finally:
            for each in everything:
                each.cancel()
            await asyncio.gather(*everything, return_exceptions=True)

    async def _reserve(self) -> None:
        """Reserves an address for each rank, if the ranks get a TF_CONFIG."""
        if not self._job.tf_config:
            return
        remote = [host.name for host in self._job.hosts if not host.local]
        chosen = self._settings.network_interfaces
        for agent in self._agents:
            found = await asyncio.wait_for(agent.reserve(chosen if remote else ()), self._job.ssh.timeout)
            if agent.host.local and not chosen:  # its name is localhost, and no ssh connects to it
                own = address_towards(remote[0]) if remote else LOOPBACK
                found = [f"{own}:{split_address(address)[1]}" for address in found]
            self._workers += found

    async def _run_ranks(self, secret: str) -> None:
        if self._server is None:
            raise AssertionError("the control channel is served before ranks start")
        address = "{}:{}".format(*self._server.address)
        orders = [self._order(agent, secret, address) for agent in self._agents]
        listening = [asyncio.ensure_future(self._listen(agent, order))
                     for agent, order in zip(self._agents, orders, strict=True)]
        watching = asyncio.ensure_future(self._watch())
        telling = self._loop.call_later(TELL_AFTER, self._tell_if_independent, f"no rank has called hvd.init() in"
                                        f" {TELL_AFTER:.0f} s; without it, they are")
        await self._all_over.wait()
        watching.cancel()
        telling.cancel()
        for agent in self._agents:
            agent.release()
        await asyncio.wait(listening, timeout=AGENT_GRACE)
        for task in listening:
            task.cancel()
        await asyncio.gather(watching, *listening, return_exceptions=True)

    def _order(self, agent: HostAgent, secret: str, address: str) -> dict[str, Any]:
        return start_order(self._job, agent.host, secret, address, self._workers)

    async def _listen(self, agent: HostAgent, order: dict[str, Any]) -> None:
        await agent.run(order)
        left = [rank for rank in agent.host.ranks if rank not in self._codes]
        if left:
            self._lost_hosts.add(agent.host.name)
            last_errors = await agent.last_errors()
            self._fail(Cause(CauseKind.LOST, left[0], agent.host_name, agent.pids.get(left[0]),
                             f"was lost with its host ({last_errors})"))
            self._signalled.update(left)
            for rank in left:
                if agent.host.local and rank in agent.pids:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(agent.pids[rank], signal.SIGKILL)
                self._record_exit(rank, -signal.SIGKILL)

    def _tell_if_independent(self, begin: str) -> None:
        """Says what is wrong with programs that know nothing of each other: each trains alone, on the same files."""
        if self._job.size > 1 and not self._job.tf_config and self._server is not None and (
                not self._server.ever_connected) and not self._told:
            self._told = True
            self._say(f"hvkeras run: {begin} {self._job.size} programs that know nothing of each other. HINT: call"
                      " hvd.init(), or start a script of MultiWorkerMirroredStrategy with hvkeras run --tf-config, one"
                      " of Horovod's with --as-horovod")

    # Events of the ranks.

    def _on_event(self, agent: HostAgent, event: Event) -> None:
        rank = event["rank"]
        if event["type"] == "leaving":
            error = f"the agent on {agent.host_name} received SIGTERM"
            self._tell_to_end(Cause(CauseKind.SIGNAL, None, "", None, error, "", 128 + signal.SIGTERM))
        elif event["type"] == "output":
            try:
                self._printer.show(rank, event["stream"], event["data"])
            except OSError:
                self._interrupt(signal.SIGPIPE)
            except MachineError as error:
                self._fail(Cause(CauseKind.SETUP, None, "", None, str(error)))
        elif event["type"] == "started":
            self._log(f"rank {rank} runs on {agent.host_name} as pid {event['pid']}")
        elif event["type"] == "failed":
            problem = reports.why_not_started(event["error"], event["errno"], event["culprit"])
            self._fail(Cause(CauseKind.SETUP, rank, agent.host_name, None, f"could not be started: {problem}", "",
                             event["code"]))
            self._record_exit(rank, event["code"])
        elif event["type"] == "exit":
            self._log(f"rank {rank} {reports.described_end(event['code'])}")
            if event["code"]:
                kind = CauseKind.EXIT if event["code"] > 0 else CauseKind.SIGNAL
                self._fail(Cause(kind, rank, agent.host_name, agent.pids.get(rank),
                                 reports.described_end(event["code"]), "", reports.shell_code(event["code"])))
            self._record_exit(rank, event["code"])

    def _record_exit(self, rank: int, code: int) -> None:
        self._codes.setdefault(rank, code)
        if len(self._codes) == self._job.size:
            self._all_over.set()

    async def _watch(self) -> None:
        """Ends a job whose agent is stopped, or whose ranks wait for one that ended before calling `hvd.init()`."""
        while True:
            await asyncio.sleep(TICK)
            for agent in self._agents:
                if agent.is_stopped(TICK):
                    self._lost_hosts.add(agent.host.name)
                    first = agent.host.ranks[0]
                    self._fail(Cause(CauseKind.LOST, first, agent.host_name, agent.pids.get(first),
                                     "was lost with its host (the agent of hvkeras run there was stopped for"
                                     f" {self._settings.liveness_timeout:g} s)"))
                    agent.wake()
            if self._server is None or self._cause is not None:
                continue
            waiting, absent = self._server.connected, self._codes.keys() - self._server.ever_connected
            if waiting and absent:
                rank = min(absent)
                agent = next(agent for agent in self._agents if rank in agent.host.ranks)
                self._fail(Cause(CauseKind.SETUP, rank, agent.host_name, agent.pids.get(rank),
                                 f"exited with code {self._codes[rank]} and never called hvd.init(), in which"
                                 f" {len(waiting)} other{'s wait' if len(waiting) > 1 else ' waits'} for it"))

    # The end of the job.

    def _fail(self, cause: Cause) -> None:
        if self._server is not None:
            self._server.fail(cause)  # calls _on_end, unless the ranks have already reported a cause

    def _on_end(self) -> None:
        self._loop.call_later(0.0, self._signal_ranks, signal.SIGTERM, True)
        grace = INTERRUPT_GRACE if self._interrupted else self._exit_grace + UNWIND
        self._loop.call_later(grace, self._signal_ranks, signal.SIGTERM, False)
        self._loop.call_later(grace + KILL_AFTER, self._signal_ranks, signal.SIGKILL, False)

    def _signal_ranks(self, number: int, only_unconnected: bool) -> None:
        """Signals running ranks: all, or only those that never connected, which nothing else informs of the end."""
        reached = self._server.ever_connected if only_unconnected and self._server is not None else frozenset()
        for agent in self._agents:
            ranks = [rank for rank in agent.host.ranks if rank not in self._codes and rank not in reached]
            if ranks:
                self._signalled.update(ranks)
                agent.signal(number, ranks)

    def _interrupt(self, number: int) -> None:
        if self._interrupted:
            self._signal_ranks(signal.SIGKILL, False)
            return
        self._interrupted = number
        how = {signal.SIGINT: "was interrupted (Ctrl-C)", signal.SIGPIPE: "lost its output (closed pipe)"}
        text = how.get(signal.Signals(number), f"received {signal.Signals(number).name}")
        cause = Cause(CauseKind.SIGNAL, None, "", None, f"the launcher {text}", "", 128 + number)
        if number == signal.SIGTERM:
            self._tell_to_end(cause)
        else:
            self._fail(cause)
        if not any(agent.pids for agent in self._agents):
            self._all_over.set()

    def _tell_to_end(self, cause: Cause) -> None:
        """Ends the job because a machine is being taken away, but lets the ranks save what they train."""
        if self._server is None:
            return
        if self._job.size == 1:  # it has no control channel
            self._signal_ranks(signal.SIGTERM, False)
        else:
            self._server.terminate(cause)
        self._loop.call_later(self._settings.leave_grace, self._fail, cause)

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
        """Stops the ranks too on Ctrl-Z, because they have sessions of their own; `fg` resumes all."""
        signalled = set(self._signalled)
        self._signal_ranks(signal.SIGSTOP, False)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._signal_ranks(signal.SIGCONT, False)
        self._signalled = signalled

    def _ask_locations(self) -> None:
        """Has the ranks report their locations; names those that have not called `hvd.init()`."""
        connected = frozenset[int]() if self._server is None else self._server.connected
        if silent := [str(rank) for rank in range(self._job.size) if rank not in connected and rank not in self._codes]:
            self._say(f"hvkeras run: not in the job yet, or no longer: rank{'s' * (len(silent) > 1)}"
                      f" {', '.join(silent)}")
        if self._server is not None:
            self._server.ask_locations()

    async def _clean_up(self) -> None:
        for agent in self._agents:
            agent.release()
        await asyncio.gather(*(agent.ended(AGENT_GRACE) for agent in self._agents))
        if self._server is not None:
            self._server.stop()
        try:
            self._printer.finish()
        except MachineError as error:  # the ranks have ended well, but some of their output was not saved
            self._lost_output = str(error)
        except OSError:
            pass  # nobody reads the output

    def _from_thread(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def _on_warning(self, text: str) -> None:
        if len(self._stalls) < STALLS:
            self._stalls.append(text)
        self._say(f"hvkeras: {text}")

    def _log(self, text: str) -> None:
        if self._job.verbose:
            self._say(f"hvkeras run: {text}")

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError, MachineError):
            self._printer.say(text)

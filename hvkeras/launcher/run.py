"""Runs one job: starts its ranks on all hosts, watches them, and ends them all when one fails."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvkeras.control.cause import Cause
from hvkeras.control.server import ControlServer, Deadlines
from hvkeras.errors import MachineError, explain
from hvkeras.launch_environments import hvkeras_run, tf_config
from hvkeras.launch_environments.horovod_numbers import announced, named
from hvkeras.launcher.host_agents import Event, HostAgent, Ssh, exported
from hvkeras.launcher.limits import how_to_make_room, require_open_files
from hvkeras.launcher.placement import HostRanks
from hvkeras.launcher.printer import Printer
from hvkeras.launcher.trace import forget_traces, merged_after, trace_of
from hvkeras.launcher.verdict import described_end, exit_code, known_better, last_words, shell_code
from hvkeras.network import LOOPBACK, address_towards, interface_address, split_address
from hvkeras.output import quiet_variables
from hvkeras.report.after_run import forget_run, report_on_run, reports_to, tell_outcome
from hvkeras.report.outcome import Outcome
from hvkeras.settings import Settings

TICK = 0.25  # seconds between two looks at ranks that ended without joining the job
UNWIND = 1.0  # seconds beyond HVKERAS_EXIT_GRACE that connected ranks have for their last line
INTERRUPT_GRACE = 1.0  # seconds that they have for it when the launcher is interrupted
KILL_AFTER = 3.0  # seconds between SIGTERM and SIGKILL
AGENT_GRACE = 10.0  # seconds in which an agent has ended what is left on its host
STALLS = 100  # warnings that are kept for a report, the first ones
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Job:
    """What to run.

    Attributes:
        command: The ranks' command line.
        hosts: Where they run.
        folder: Their working folder, on every host.
        environment: Their environment, the settings of hvkeras among it.
        ssh: How other hosts are reached.
        verbose: Whether each step is said.
        terminal: Columns and rows for rank 0's standard output, or None for a pipe.
        reset_limit: How often all ranks are started again after one has failed.
        tf_config: Whether ranks get a TF_CONFIG, in which each is a worker.
    """

    command: Sequence[str]
    hosts: Sequence[HostRanks]
    folder: str
    environment: Mapping[str, str]
    ssh: Ssh = field(default_factory=Ssh)
    verbose: bool = False
    terminal: tuple[int, int] | None = None
    reset_limit: int = 0
    tf_config: bool = False

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return sum(len(host.ranks) for host in self.hosts)


class Launcher:
    """One running job.

    Args:
        job: What to run.
        printer: Where the ranks' output goes.

    Attributes:
        last_words: What failed first, once the job is over; "" after a good end.
    """

    def __init__(self, job: Job, printer: Printer) -> None:
        self._job = job
        self._printer = printer
        self._settings = Settings(job.environment)
        patience = self._settings.liveness_timeout
        self._agents = [HostAgent(host, job.ssh, self._on_event, patience) for host in job.hosts]
        self._codes: dict[int, int] = {}
        self._signalled: set[int] = set()
        self._interrupted = 0
        self._all_over = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._server: ControlServer | None = None
        self._stalls: list[str] = []
        self._workers: list[str] = []  # host:port of each rank, for TF_CONFIG
        self._lost_output = ""
        self.last_words = ""

    async def run(self) -> int:
        """Runs the job to its end.

        Returns:
            The exit code: 0, or that of the rank that failed first.

        Raises:
            HvkerasError: The job could not be started.
        """
        with self._signals():
            try:
                secret = secrets.token_hex(32)
                self._serve(secret)
                await self._connect()
                if not self._interrupted:
                    await self._reserve()
                    await self._run_ranks(secret)
            finally:
                await self._clean_up()
        by_itself = {rank: code for rank, code in self._codes.items() if rank not in self._signalled}
        if self._cause is not None:
            tail = self._printer.tail(self._cause.rank) if self._cause.rank is not None else ""
            self.last_words = last_words(self._cause, by_itself, tail)
        elif self._lost_output:
            self.last_words = f"hvkeras run: {self._lost_output}"
            return 1
        return 128 + self._interrupted if self._interrupted else exit_code(self._cause, by_itself)

    @property
    def _cause(self) -> Cause | None:
        """Why the job ends early; the server alone knows it, from the ranks and from `_fail`.

        A failure reaches the server's thread a moment after `_fail` has returned, so what a job has ended of is read
        when the server has stopped, which it does after all that it was told before.
        """
        return None if self._server is None else self._server.cause

    @property
    def outcome(self) -> Outcome:
        """How the job ended, for a report on it."""
        hosts = {rank: agent.host_name for agent in self._agents for rank in agent.host.ranks}
        ended = {str(rank): described_end(code) for rank, code in self._codes.items() if code}
        return Outcome(self._job.size, [hosts[rank] for rank in sorted(hosts)], ended,
                       known_better(self._cause, self._codes).sentence() if self._cause is not None else "",
                       self._stalls)

    @property
    def may_start_again(self) -> bool:
        """Whether the job has failed as a rank may now and then: after the ranks had met, and not by an interrupt."""
        return self._cause is not None and self._cause.kind != "setup" and not self._interrupted

    def _serve(self, secret: str) -> None:
        remote = [host.name for host in self._job.hosts if not host.local]
        host = LOOPBACK
        if remote:
            chosen = self._settings.network_interfaces
            host = interface_address(chosen) if chosen else address_towards(remote[0])
        self._server = ControlServer(
            self._job.size, secret.encode(), host, 0, Deadlines.from_settings(self._settings),
            on_end=lambda _: self._from_thread(self._on_end),
            on_warning=lambda text: self._from_thread(self._on_warning, text),
            on_note=lambda text: self._from_thread(self._say, f"hvkeras: {text}"))
        address = self._server.start()
        self._tell(f"the control channel listens on {address[0]}:{address[1]}")

    async def _connect(self) -> None:
        """Starts all agents; raises the first error, or returns when interrupted."""
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
        """Finds an address for each rank, if they are to have a TF_CONFIG."""
        if not self._job.tf_config:
            return
        remote = [host.name for host in self._job.hosts if not host.local]
        chosen = self._settings.network_interfaces
        for agent in self._agents:
            found = await asyncio.wait_for(agent.reserve(chosen if remote else ()), self._job.ssh.timeout)
            if agent.host.local and not chosen:  # its name is localhost, and no ssh came to it
                own = address_towards(remote[0]) if remote else LOOPBACK
                found = [f"{own}:{split_address(address)[1]}" for address in found]
            self._workers += found

    async def _run_ranks(self, secret: str) -> None:
        listening = [asyncio.ensure_future(self._listen(agent, self._order(agent.host, secret)))
                     for agent in self._agents]
        watching = asyncio.ensure_future(self._watch())
        await self._all_over.wait()
        watching.cancel()
        for agent in self._agents:
            agent.release()
        await asyncio.wait(listening, timeout=AGENT_GRACE)
        for task in listening:
            task.cancel()
        await asyncio.gather(watching, *listening, return_exceptions=True)

    def _order(self, host: HostRanks, secret: str) -> dict[str, Any]:
        """The job as an agent wants it."""
        if self._server is None:
            raise AssertionError("the control channel is served before ranks start")
        address = "{}:{}".format(*self._server.address)
        shared = {"HVKERAS_SECRET": secret, hvkeras_run.CONTROL_ADDRESS: address,
                  hvkeras_run.PROCESS_COUNT: str(self._job.size),
                  hvkeras_run.LOCAL_PROCESS_COUNT: str(len(host.ranks))}
        defaults = {"PYTHONUNBUFFERED": "1", **quiet_variables(self._settings.log_level)}
        environment = dict(self._job.environment) if host.local else exported(self._job.environment)
        return {
            "folder": self._job.folder,
            "environment": {**defaults, **environment, **shared},
            "ranks": [{"rank": rank, "command": list(self._job.command),
                       "environment": {hvkeras_run.PROCESS_ID: str(rank),
                                       hvkeras_run.LOCAL_PROCESS_ID: str(local_rank),
                                       **self._numbers(host, rank, local_rank),
                                       **(tf_config.worker_variables(self._workers, rank, environment)
                                          if self._workers else {})},
                       "terminal": self._job.terminal if rank == 0 else None}
                      for local_rank, rank in enumerate(host.ranks)],
        }

    def _numbers(self, host: HostRanks, rank: int, local_rank: int) -> dict[str, str]:
        """A rank's numbers under Horovod's names."""
        column = [each.name for each in self._job.hosts if len(each.ranks) > local_rank]
        return announced(hvkeras_run.LAUNCHER, named(rank, self._job.size, local_rank, len(host.ranks),
                                                     column.index(host.name), len(column), host.name))

    async def _listen(self, agent: HostAgent, order: dict[str, Any]) -> None:
        await agent.run(order)
        left = [rank for rank in agent.host.ranks if rank not in self._codes]
        if left:
            complaint = await agent.complaint()
            self._fail(Cause("lost", left[0], agent.host_name, agent.pids.get(left[0]),
                             f"was lost with its host ({complaint})"))
            self._signalled.update(left)
            for rank in left:
                if agent.host.local and rank in agent.pids:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(agent.pids[rank], signal.SIGKILL)
                self._over(rank, -signal.SIGKILL)

    # What the ranks do.

    def _on_event(self, agent: HostAgent, event: Event) -> None:
        rank = event["rank"]
        if event["type"] == "output":
            try:
                self._printer.show(rank, event["stream"], event["data"])
            except OSError:
                self._interrupt(signal.SIGPIPE)
            except MachineError as error:
                self._fail(Cause("setup", None, "", None, str(error)))
        elif event["type"] == "started":
            self._tell(f"rank {rank} runs on {agent.host_name} as pid {event['pid']}")
        elif event["type"] == "failed":
            hint = "check its spelling, the PATH and the current folder there"
            if event["culprit"].endswith(".py"):
                hint = f"scripts are started by Python: hvkeras run ... python {event['culprit']}"
            hint = how_to_make_room(event["errno"]) or hint
            problem = explain(f"The command must start on every host ({event['error']})", hint,
                              command=event["culprit"])
            self._fail(Cause("setup", rank, agent.host_name, None, f"could not be started: {problem}", "",
                             event["code"]))
            self._over(rank, event["code"])
        elif event["type"] == "exit":
            self._tell(f"rank {rank} {described_end(event['code'])}")
            if event["code"]:
                kind = "exit" if event["code"] > 0 else "signal"
                self._fail(Cause(kind, rank, agent.host_name, agent.pids.get(rank), described_end(event["code"]), "",
                                 shell_code(event["code"])))
            self._over(rank, event["code"])

    def _over(self, rank: int, code: int) -> None:
        self._codes.setdefault(rank, code)
        if len(self._codes) == self._job.size:
            self._all_over.set()

    async def _watch(self) -> None:
        """Ends a job whose agent is stopped, or whose ranks wait for one that has ended without joining them."""
        while True:
            await asyncio.sleep(TICK)
            for agent in self._agents:
                if agent.is_stopped(TICK):
                    self._fail(Cause("lost", agent.host.ranks[0], agent.host_name, agent.pids.get(agent.host.ranks[0]),
                                     "was lost with its host (the agent of hvkeras run there was stopped for"
                                     f" {self._settings.liveness_timeout:g} s)"))
                    agent.wake()
            if self._server is None or self._cause is not None:
                continue
            waiting, absent = self._server.connected, self._codes.keys() - self._server.met
            if waiting and absent:
                rank = min(absent)
                agent = next(agent for agent in self._agents if rank in agent.host.ranks)
                self._fail(Cause("setup", rank, agent.host_name, agent.pids.get(rank),
                                 f"exited with code {self._codes[rank]} and never called hvd.init(), in which"
                                 f" {len(waiting)} other{'s wait' if len(waiting) > 1 else ' waits'} for it"))

    # The end of the job.

    def _fail(self, cause: Cause) -> None:
        if self._server is not None:
            self._server.fail(cause)  # calls _on_end, unless the ranks told of a cause before

    def _on_end(self) -> None:
        self._loop.call_later(0.0, self._signal_ranks, signal.SIGTERM, True)
        grace = INTERRUPT_GRACE if self._interrupted else self._settings.exit_grace + UNWIND
        self._loop.call_later(grace, self._signal_ranks, signal.SIGTERM, False)
        self._loop.call_later(grace + KILL_AFTER, self._signal_ranks, signal.SIGKILL, False)

    def _signal_ranks(self, number: int, only_strangers: bool) -> None:
        """Signals running ranks: all, or those that never joined, which nobody else tells of the end."""
        reached = self._server.met if only_strangers and self._server is not None else frozenset()
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
        self._fail(Cause("signal", None, "", None, f"the launcher {text}", "", 128 + number))
        if not any(agent.pids for agent in self._agents):
            self._all_over.set()

    @contextlib.contextmanager
    def _signals(self) -> Any:
        caught = [number for number in INTERRUPTS if signal.getsignal(number) != signal.SIG_IGN]
        for number in caught:
            self._loop.add_signal_handler(number, self._interrupt, number)
        self._loop.add_signal_handler(signal.SIGTSTP, self._suspend)
        self._loop.add_signal_handler(signal.SIGUSR1, self._ask_where)
        try:
            yield
        finally:
            for number in (*caught, signal.SIGTSTP, signal.SIGUSR1):
                self._loop.remove_signal_handler(number)

    def _suspend(self) -> None:
        """Ctrl-Z stops the ranks as well, which have sessions of their own; `fg` lets all go on."""
        signalled = set(self._signalled)
        self._signal_ranks(signal.SIGSTOP, False)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._signal_ranks(signal.SIGCONT, False)
        self._signalled = signalled

    def _ask_where(self) -> None:
        """Has the ranks say where they are; those that have not called `hvd.init()` are named."""
        there = frozenset[int]() if self._server is None else self._server.connected
        if silent := [str(rank) for rank in range(self._job.size) if rank not in there and rank not in self._codes]:
            self._say(f"hvkeras run: not in the job yet, or no more: rank{'s' * (len(silent) > 1)} {', '.join(silent)}")
        if self._server is not None:
            self._server.ask_where()

    async def _clean_up(self) -> None:
        for agent in self._agents:
            agent.release()
        await asyncio.gather(*(agent.ended(AGENT_GRACE) for agent in self._agents))
        if self._server is not None:
            self._server.stop()
        try:
            self._printer.finish()
        except MachineError as error:  # the ranks have ended well, but not all that they said was kept
            self._lost_output = str(error)
        except OSError:
            pass  # nobody reads it

    # Small things.

    def _from_thread(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def _on_warning(self, text: str) -> None:
        if len(self._stalls) < STALLS:
            self._stalls.append(text)
        self._say(f"hvkeras: {text}")

    def _tell(self, text: str) -> None:
        if self._job.verbose:
            self._say(f"hvkeras run: {text}")

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError, MachineError):
            self._printer.say(text)


def run(job: Job, printer: Callable[[bool], Printer]) -> int:
    """Runs a job to its end, with as many starts as it may have.

    Args:
        job: What to run.
        printer: Makes what shows the ranks' output; called for each start, with whether it is another one.

    Returns:
        The exit code: 0, or that of the rank that failed first, or 128 and the signal that ended the launcher.

    Raises:
        HvkerasError: The job could not be started.
    """
    settings = Settings(job.environment)
    require_open_files(job.size, len(job.hosts))
    folder, trace = reports_to(settings), trace_of(settings, job.folder)
    forget_traces(trace)

    async def go(shown: Printer) -> tuple[int, bool, str]:
        launcher = Launcher(job, shown)
        forget_run(folder)
        try:
            return await launcher.run(), launcher.may_start_again, launcher.last_words
        finally:
            tell_outcome(folder, launcher.outcome)

    for start in range(job.reset_limit + 1):
        shown = printer(start > 0)
        code, again, words = asyncio.run(go(shown))
        if not again or start == job.reset_limit:
            break
        _say(shown, words, f"hvkeras run: starts all ranks again, reset {start + 1} of at most {job.reset_limit}")
    _say(shown, "" if folder is None else report_on_run(folder),
         "" if trace is None else f"hvkeras run: {merged_after(trace)}", words)
    return code


def _say(shown: Printer, *texts: str) -> None:
    with contextlib.suppress(OSError, MachineError):
        for text in filter(None, texts):
            shown.say(text)

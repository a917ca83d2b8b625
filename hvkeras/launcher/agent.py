"""Starts the workers of one host, forwards their output, and leaves no process behind.

The launcher sends the text of this file to a plain Python interpreter, locally or over ssh, so it uses only the
standard library. The agent reads lines of JSON from standard input: a request to reserve ports for the workers
(`{"reserve": 2, "interfaces": ["eth0"]}`), the job, more workers for it, and signals to send (`{"signal": 15,
"workers": [0]}`). It writes events to standard output (see `hvkeras.launcher.host_agents`).

When standard input closes, because the job is over or the launcher is gone, the agent ends every process below it. The
agent is the child of a guard, a watchdog: if one of them is killed, or the agent stays stopped, the other one ends all.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import fcntl
import json
import os
import resource
import selectors
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
import tty
from typing import Any

TERMINATE_GRACE = 3.0  # seconds between SIGTERM and SIGKILL when the launcher is gone
KILL_GRACE = 5.0  # seconds for SIGKILL to take effect; nothing waits longer for a process that hangs in the kernel
POLL_INTERVAL = 0.5  # seconds between the guard's checks of the agent
PATIENCE = 15.0  # seconds for which the agent, or a worker, may stay stopped, unless the command line says otherwise
LOOK_EVERY = 1.0  # seconds between the agent's checks for stopped workers
CHUNK = 65536
SPARE = 4  # spare file descriptors: as many as scanning /proc takes, and more
SET_PARENT_DEATH_SIGNAL, SET_CHILD_SUBREAPER = 1, 36  # prctl options, from <linux/prctl.h>
_GET_ADDRESS = 0x8915  # SIOCGIFADDR, from <linux/sockios.h>
_WATCHED = {signal.SIGCHLD, signal.SIGTERM}  # by the guard
libc = ctypes.CDLL(None, use_errno=True)


class WorkerProcess:
    """One running worker: its process, which leads its own session, and the read ends of its output streams."""

    def __init__(self, number: int, process: subprocess.Popen[bytes], streams: dict[int, str]) -> None:
        self.number: int = number
        self.process: subprocess.Popen[bytes] = process
        self.streams: dict[int, str] = streams
        self.is_suspended = False  # by the launcher
        self.stopped = 0.0  # seconds for which something else has stopped it


class Agent:
    """The workers of one host.

    A job, of which there may be several one after the other, has `folder`, `environment` and `workers`; each of these
    has `worker` (its number), `command`, `environment` and `terminal`.

    Args:
        patience: Seconds after which a worker that something else than the launcher has stopped is reported.
    """

    def __init__(self, patience: float) -> None:
        self._patience, self._next_look = patience, 0.0
        self._workers: list[WorkerProcess] = []
        self._running: dict[int, WorkerProcess] = {}  # by pid
        self._selector = selectors.DefaultSelector()
        self._launcher_alive = self._guard_alive = True
        self._leaving = False
        self._partial = bytearray()
        self._held: list[socket.socket] = []
        self._guard = os.getppid()
        self._open_files = resource.getrlimit(resource.RLIMIT_NOFILE)  # what workers get; this process has two for each
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (self._open_files[1], self._open_files[1]))
        self._spare = [os.open(os.devnull, os.O_RDONLY) for _ in range(SPARE)]  # to end workers when none are left

    def run(self) -> None:
        """Sends hello, starts the workers of the job that it receives, and serves them until standard input closes."""
        libc.prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        signal.signal(signal.SIGTERM, self._terminate)
        woken, waker = os.pipe()
        for descriptor in (0, woken, waker):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(waker)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        self._selector.register(0, selectors.EVENT_READ, self._on_command)
        self._selector.register(woken, selectors.EVENT_READ, lambda: os.read(woken, CHUNK))
        self._report({"type": "hello", "pid": os.getpid(), "host": socket.gethostname()})
        while self._launcher_alive:
            self._poll(LOOK_EVERY)
            self._report_stopped()
            if self._leaving:
                self._leaving = False
                self._report({"type": "leaving"})
        self._end_all()

    def _terminate(self, *_: Any) -> None:
        """Handles SIGTERM: this host is being taken away, which the launcher has to know, or the guard is gone.

        Without a guard, the workers end and nothing is reported: how they end says nothing about the job.
        """
        if os.getppid() == self._guard:
            self._leaving = True
        else:
            self._launcher_alive = self._guard_alive = False

    def _start(self, job: dict[str, Any], wanted: dict[str, Any]) -> None:
        environment = {**os.environ, **job["environment"], **wanted["environment"]}
        parent = os.getpid()

        def before_the_command() -> None:
            libc.prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)
            resource.setrlimit(resource.RLIMIT_NOFILE, self._open_files)

        ends: list[int] = []
        try:
            ends += terminal(wanted["terminal"]) if wanted["terminal"] else os.pipe()
            ends += os.pipe()
            process = subprocess.Popen(
                wanted["command"], cwd=job["folder"], env=environment, stdin=subprocess.DEVNULL,
                stdout=ends[1], stderr=ends[3], start_new_session=True,
                preexec_fn=before_the_command)  # noqa: PLW1509 - this process has one thread
        except OSError as error:
            for descriptor in (*ends, *self._spare):
                os.close(descriptor)
            self._spare = []
            culprit = job["folder"] if error.filename == job["folder"] else wanted["command"][0]
            self._report({"type": "failed", "worker": wanted["worker"], "error": error.strerror, "errno": error.errno,
                          "culprit": culprit, "code": 126 if isinstance(error, PermissionError) else 127})
            return
        os.close(ends[1])
        os.close(ends[3])
        worker = WorkerProcess(wanted["worker"], process, {ends[0]: "stdout", ends[2]: "stderr"})
        self._workers.append(worker)
        self._running[process.pid] = worker
        for descriptor in worker.streams:
            os.set_blocking(descriptor, False)
            self._selector.register(descriptor, selectors.EVENT_READ,
                                    lambda worker=worker, descriptor=descriptor: self._pass_on(worker, descriptor))
        self._report({"type": "started", "worker": worker.number, "pid": process.pid})

    def _poll(self, timeout: float | None) -> None:
        for key, _ in self._selector.select(timeout):
            if key.fd in self._selector.get_map():
                key.data()
        self._reap()

    def _on_command(self) -> None:
        text = os.read(0, CHUNK)  # sys.stdin has buffered nothing: the launcher sends more only after our hello
        if not text:
            self._launcher_alive = False
            self._selector.unregister(0)
        self._partial += text
        if b"\n" in text:
            *lines, self._partial = self._partial.split(b"\n")
            for line in lines:
                self._execute(json.loads(line))

    def _execute(self, command: dict[str, Any]) -> None:
        if "reserve" in command:
            self._reserve(command["reserve"], command["interfaces"])
            return
        if "folder" in command:
            for wanted in command["workers"]:
                self._start(command, wanted)
            return
        wanted = set(command["workers"])
        for worker in self._running.values():
            if worker.number in wanted:
                worker.is_suspended = command["signal"] == signal.SIGSTOP
                _signal_group(worker.process.pid, command["signal"])

    def _reserve(self, count: int, interfaces: list[str]) -> None:
        """Reserves free ports with sockets that never listen: only servers that allow port sharing can use them."""
        for _ in range(count):
            holder = socket.socket()
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            holder.bind(("", 0))
            self._held.append(holder)
        self._report({"type": "reserved", "ports": [holder.getsockname()[1] for holder in self._held],
                      "address": _own_address(interfaces)})

    def _pass_on(self, worker: WorkerProcess, descriptor: int) -> bool:
        """Forwards the output that is available; returns whether there may be more."""
        try:
            data = os.read(descriptor, CHUNK)
        except BlockingIOError:
            return False
        except OSError:  # a terminal reports its end as EIO
            data = b""
        if not data:
            self._selector.unregister(descriptor)
            os.close(descriptor)
            del worker.streams[descriptor]
            return False
        self._report({"type": "output", "worker": worker.number, "stream": worker.streams[descriptor],
                      "data": base64.b64encode(data).decode()})
        return True

    def _reap(self) -> None:
        """Records which processes have ended; sends a worker's last output before its exit event."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            worker = self._running.pop(pid, None)
            if worker is not None:  # else what a worker has left behind
                worker.process.returncode = os.waitstatus_to_exitcode(status)
                for descriptor in list(worker.streams):
                    while self._pass_on(worker, descriptor):
                        pass
                self._report({"type": "exit", "worker": worker.number, "code": worker.process.returncode})

    def _report_stopped(self) -> None:
        """Reports workers that stay stopped: those that are starting give no other sign of it."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + LOOK_EVERY
        for worker in self._running.values():
            is_stopped = not worker.is_suspended and process_state(worker.process.pid) == "T"
            worker.stopped = worker.stopped + LOOK_EVERY if is_stopped else 0.0
            if worker.stopped >= self._patience:
                worker.stopped = 0.0
                self._report({"type": "stopped", "worker": worker.number})

    def _end_all(self) -> None:
        """Ends what is left: the workers with a grace period, then every process that descends from this one."""
        if not self._guard_alive:
            _redirect_to_null(1)
        for pid in self._running:
            _signal_group(pid, signal.SIGTERM)
        deadline = time.monotonic() + TERMINATE_GRACE
        while time.monotonic() < deadline and self._running:
            self._poll(0.05)
        while time.monotonic() < deadline + KILL_GRACE and kill_descendants():
            self._poll(0.01)
        for worker in self._workers:
            for descriptor in list(worker.streams):
                while self._pass_on(worker, descriptor):
                    pass

    def _report(self, event: dict[str, Any]) -> None:
        try:
            sys.stdout.write(json.dumps(event) + "\n")
            sys.stdout.flush()
        except OSError:
            self._launcher_alive = False


def guarded(patience: float) -> None:
    """Forks: returns in the child, which becomes the agent; this process becomes its guard, and exits with it.

    Args:
        patience: Seconds for which the agent may stay stopped.
    """
    libc.prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)  # for sigtimedwait
    guard, agent = os.getpid(), os.fork()
    if agent == 0:
        libc.prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != guard:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
        return
    for descriptor in (0, 1):
        _redirect_to_null(descriptor)
    how = _watch(agent, patience)
    if how:
        sys.stderr.write(f"the agent of hvkeras run there, pid {agent}, {how}\n")
        sys.stderr.flush()
    deadline = time.monotonic() + KILL_GRACE
    while time.monotonic() < deadline and kill_descendants():
        time.sleep(0.01)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    os._exit(bool(how))


def _watch(agent: int, patience: float) -> str:
    """Waits for the agent to end; returns how it ended, or "" if it ended by itself."""
    stopped = 0.0
    while True:
        pid, status = os.waitpid(agent, os.WNOHANG)
        if pid:
            number = -os.waitstatus_to_exitcode(status)
            killed = f"was killed by {signal.Signals(number).name}" if number > 0 else ""
            return f"was stopped for {patience:g} s, and ended" if stopped >= patience else killed
        received = signal.sigtimedwait(_WATCHED, POLL_INTERVAL)
        if received is not None and received.si_signo == signal.SIGTERM:
            os.kill(agent, signal.SIGTERM)
        if received is None:
            stopped = stopped + POLL_INTERVAL if process_state(agent) == "T" else 0.0
            if stopped >= patience:
                os.kill(agent, signal.SIGKILL)
                os.waitid(os.P_PID, agent, os.WEXITED | os.WNOWAIT)


def _redirect_to_null(descriptor: int) -> None:
    """Replaces a pipe with /dev/null, so that the other end sees that this process no longer holds the pipe."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, descriptor)
    os.close(nothing)


def _own_address(interfaces: list[str]) -> str:
    """Returns the address of the first interface that has one, else the one that ssh connected to, else ""."""
    for name in interfaces:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            return socket.inet_ntoa(answer[20:24])
    connection = os.environ.get("SSH_CONNECTION", "").split()
    return connection[2] if len(connection) == 4 else ""


def terminal(size: list[int]) -> tuple[int, int]:
    """Opens a pseudo-terminal of `size` (columns, rows) that passes bytes through unchanged."""
    ours, theirs = os.openpty()
    tty.setraw(theirs)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
    return ours, theirs


def _signal_group(leader: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def kill_descendants() -> bool:
    """Kills every living process below this one; returns whether there were any."""
    left = _descendants(os.getpid())
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(left)


def process_state(pid: int) -> str:
    """Returns the letter of a process's state: T for a stopped one."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[0]
    return ""


def _descendants(ancestor: int) -> list[int]:
    """Lists the living descendants of a process, whatever their session or group."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", errors="replace") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
                if state != "Z":
                    parents[int(name)] = int(parent)
    found: list[int] = []
    for pid in parents:
        ancestor_of_pid = pid
        while ancestor_of_pid in parents and ancestor_of_pid != ancestor:
            ancestor_of_pid = parents[ancestor_of_pid]
        if ancestor_of_pid == ancestor != pid:
            found.append(pid)
    return found


if __name__ == "__main__":
    given = float(sys.argv[1]) if len(sys.argv) > 1 else PATIENCE
    guarded(given)
    Agent(given).run()

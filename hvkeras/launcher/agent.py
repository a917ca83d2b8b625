"""Agent of one host: starts its workers, forwards their output, and leaves no process behind.

The launcher sends the text of this file to a plain Python interpreter, locally or over ssh, so it uses only the
standard library. The agent reads lines of JSON from standard input: a request to reserve ports for the workers
(`{"reserve": 2, "interfaces": ["eth0"]}`), the job, more workers for it, and signals to send to workers
(`{"signal": 15, "workers": [0]}`). It writes events to standard output (see `hvkeras.launcher.host_agents`).

With `preload` in a job, workers are forked from a fork server (see `hvkeras.launcher.fork_server`), whose sources the
job contains. They are children of the agent as well.

When standard input closes, because the job is done or the launcher has died, the agent ends all its descendants. The
agent is the child of a guard, a watchdog process. If one of them is killed, or the agent stays stopped, the other one
ends all processes.
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
from collections.abc import Callable
from typing import Any

TERMINATE_GRACE = 3.0  # seconds between SIGTERM and SIGKILL when the launcher has died
KILL_GRACE = 5.0  # seconds to wait after SIGKILL, as a process that hangs in the kernel does not end
POLL_INTERVAL = 0.5  # seconds between the guard's checks of the agent
STOP_TIMEOUT = 15.0  # default: seconds for which the agent, or a worker, may stay stopped
STOP_CHECK_INTERVAL = 1.0  # seconds between the agent's checks for stopped workers
CHUNK = 65536
SPARE_FILES = 4  # spare file descriptors, for scanning /proc
SET_PARENT_DEATH_SIGNAL, SET_CHILD_SUBREAPER = 1, 36  # prctl options, from <linux/prctl.h>
_GET_ADDRESS = 0x8915  # SIOCGIFADDR, from <linux/sockios.h>
_WATCHED = {signal.SIGCHLD, signal.SIGTERM}  # by the guard
libc = ctypes.CDLL(None, use_errno=True)


class WorkerProcess:
    """Worker: its process, which leads a session, and the read ends of its output pipes.

    Attributes:
        pid: Its process ID; 0 while it is not ready.
    """

    def __init__(self, job: dict[str, Any], spec: dict[str, Any], streams: dict[int, str]) -> None:
        self.job, self.spec = job, spec
        self.number: int = spec["worker"]
        self.pid = 0
        self.server: ForkServer | None = None  # that is asked to fork it
        self.group: set[WorkerProcess] = set()  # that is asked for at once, and not ready yet
        self.streams: dict[int, str] = streams
        self.is_suspended = False  # by the launcher
        self.stopped = 0.0  # seconds for which it was stopped by something other than the launcher


class ForkServer:
    """Process that imports the modules of a job, and forks its workers.

    Args:
        preload: The part of a job for fork servers: Python with its options (`python`), the order that the program
            `boot` gets, and the `timeout` in seconds within which a worker must be forked, including the imports.

    Attributes:
        waited: Seconds for which workers have waited for it.
        stopped: Seconds for which it has been stopped.

    Raises:
        OSError: The process cannot be started.
    """

    def __init__(self, preload: dict[str, Any], folder: str, environment: dict[str, str],
                 before_exec: Callable[[], None]) -> None:
        self.timeout: float = preload["timeout"]
        self.waited = self.stopped = 0.0
        self._control, theirs = socket.socketpair()
        self._control.settimeout(self.timeout)  # hundreds of requests fill its buffer
        self._errors, errors = os.pipe()
        order = _file_of({**preload["order"], "control": theirs.fileno()})
        try:
            process = subprocess.Popen(
                [*preload["python"], "-c", preload["boot"], str(order)], cwd=folder, env=environment,
                stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, pass_fds=[order, theirs.fileno()],
                start_new_session=True, preexec_fn=before_exec)  # noqa: PLW1509 - this process has one thread
        except OSError:
            self.close()
            raise
        finally:
            theirs.close()
            os.close(order)
            os.close(errors)
        process.returncode = 0  # prevents Popen from waiting; `Agent` collects it
        self.pid: int = process.pid

    def fork(self, request: dict[str, Any], streams: list[int]) -> socket.socket:
        """Request a worker, and return the connection to it.

        Args:
            request: See `hvkeras.launcher.fork_server`.
            streams: Its standard input, output and error.

        Raises:
            TimeoutError: The server does not take it.
            OSError: The server has ended.
        """
        ours, theirs = socket.socketpair()
        file = _file_of(request)
        try:
            socket.send_fds(self._control, [b"c"], [theirs.fileno()])
            socket.send_fds(ours, [b"r"], [file, *streams])
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(file)
        return ours

    def has_ended(self) -> bool:
        """Return whether the process has ended; wait for a moment, as its connections end shortly before."""
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return True
            time.sleep(0.01)
        return False

    def last_output(self) -> bytes:
        """Return what the process has printed."""
        os.set_blocking(self._errors, False)
        with contextlib.suppress(OSError):
            return os.read(self._errors, CHUNK)
        return b""

    def close(self) -> None:
        """Close the connections, on which the process ends."""
        self._control.close()
        os.close(self._errors)


class Agent:
    """Workers of one host.

    A start command has `folder`, `environment` and `workers`. Each worker has `worker` (its number), `command`,
    `environment` and `terminal`.

    Args:
        patience: Seconds after which a worker that was stopped, but not by the launcher, is reported, and a fork server
            that was stopped is killed.
    """

    def __init__(self, patience: float) -> None:
        self._patience, self._next_check = patience, 0.0
        self._workers: list[WorkerProcess] = []
        self._running: dict[int, WorkerProcess] = {}  # by pid
        self._servers: dict[str, ForkServer] = {}  # by what distinguishes their ranks
        self._silent: dict[str, str] = {}  # why those were killed that did not answer
        self._forking: dict[socket.socket, WorkerProcess] = {}  # workers that are not ready yet
        self._ready: dict[WorkerProcess, socket.socket] = {}  # those that wait for others of their group
        self._selector = selectors.DefaultSelector()
        self._launcher_alive = self._guard_alive = True
        self._is_preempted = False
        self._partial = bytearray()
        self._reserved: list[socket.socket] = []
        self._guard, self._pid = os.getppid(), os.getpid()
        self._open_files = resource.getrlimit(resource.RLIMIT_NOFILE)  # for workers; this process needs two for each
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (self._open_files[1], self._open_files[1]))
        self._spare = [os.open(os.devnull, os.O_RDONLY) for _ in range(SPARE_FILES)]  # to end workers if files run out

    def run(self) -> None:
        """Send hello, then execute commands and forward output until standard input closes."""
        libc.prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        signal.signal(signal.SIGTERM, self._terminate)
        wake_reader, wake_writer = os.pipe()
        for descriptor in (0, wake_reader, wake_writer):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wake_writer)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        self._selector.register(0, selectors.EVENT_READ, self._on_command)
        self._selector.register(wake_reader, selectors.EVENT_READ, lambda: os.read(wake_reader, CHUNK))
        self._report({"type": "hello", "pid": os.getpid(), "host": socket.gethostname()})
        while self._launcher_alive:
            self._poll(STOP_CHECK_INTERVAL)
            self._check_progress()
            if self._is_preempted:
                self._is_preempted = False
                self._report({"type": "leaving"})
        self._end_all()

    def _terminate(self, *_: Any) -> None:
        # Either this host is being preempted, which the launcher must be notified of, or the guard has died. Without a
        # guard, the workers end and nothing is reported: their exit codes are not those of the job.
        if os.getppid() == self._guard:
            self._is_preempted = True
        else:
            self._launcher_alive = self._guard_alive = False

    def _start(self, job: dict[str, Any], spec: dict[str, Any], group: set[WorkerProcess],
               is_suspended: bool = False) -> None:
        ends: list[int] = []
        try:
            ends += terminal(spec["terminal"]) if spec["terminal"] else os.pipe()
            ends += os.pipe()
            worker = WorkerProcess(job, spec, {ends[0]: "stdout", ends[2]: "stderr"})
            environment = {**os.environ, **job["environment"], **spec["environment"]}
            connection = self._forked(worker, environment, ends) if job.get("preload") else None
            if connection is None:
                process = subprocess.Popen(
                    spec["command"], cwd=job["folder"], env=environment, stdin=subprocess.DEVNULL,
                    stdout=ends[1], stderr=ends[3], start_new_session=True,
                    preexec_fn=self._before_exec)  # noqa: PLW1509 - this process has one thread
                process.returncode = 0  # prevents Popen from waiting; `_reap` collects it
        except OSError as error:
            for descriptor in (*ends, *self._spare):
                os.close(descriptor)
            self._spare = []
            culprit = job["folder"] if error.filename == job["folder"] else spec["command"][0]
            self._report({"type": "failed", "worker": spec["worker"], "error": error.strerror, "errno": error.errno,
                          "culprit": culprit, "code": 126 if isinstance(error, PermissionError) else 127})
            return
        os.close(ends[1])
        os.close(ends[3])
        self._workers.append(worker)
        for descriptor in worker.streams:
            os.set_blocking(descriptor, False)
            self._selector.register(descriptor, selectors.EVENT_READ,
                                    lambda worker=worker, descriptor=descriptor:
                                    self._forward_output(worker, descriptor))
        if connection is None:
            why = self._silent.get(_server_key(job), "") if job.get("preload") else ""
            worker.is_suspended = is_suspended
            self._on_started(worker, process.pid, **({"cold": why} if why else {}))
            if is_suspended:
                _signal_group(process.pid, signal.SIGSTOP)
            return
        self._forking[connection], worker.group = worker, group
        group.add(worker)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._on_forked(connection))

    def _on_started(self, worker: WorkerProcess, pid: int, **details: str) -> None:
        worker.pid = pid
        self._running[pid] = worker
        self._report({"type": "started", "worker": worker.number, "pid": pid, **details})

    def _before_exec(self) -> None:
        libc.prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self._pid:
            os._exit(1)
        resource.setrlimit(resource.RLIMIT_NOFILE, self._open_files)

    # Workers that are forked.

    def _forked(self, worker: WorkerProcess, environment: dict[str, str], ends: list[int]) -> socket.socket | None:
        """Request a worker from a fork server; return None if that is impossible, or if the server was silent."""
        job, preload = worker.job, worker.job["preload"]
        key = _server_key(job)
        if key in self._silent:
            return None
        null = os.open(os.devnull, os.O_RDONLY)
        try:
            if key not in self._servers:
                self._servers[key] = ForkServer(preload, job["folder"], {**os.environ, **job["environment"]},
                                                self._before_exec)
            worker.server = self._servers[key]
            request = {**preload["request"], "cold": worker.spec["command"], "environment": environment,
                       "folder": job["folder"], "parent": self._pid}
            return worker.server.fork(request, [null, ends[1], ends[3]])
        except TimeoutError:
            self._give_up_late(key)
            return None
        except OSError:
            return None
        finally:
            os.close(null)

    def _on_forked(self, connection: socket.socket) -> None:
        """Handle the answer of a forked worker, or the end of its server."""
        try:
            answer = connection.recv(CHUNK)
        except OSError:
            answer = b""
        worker = self._forking[connection]
        assert worker.server is not None
        if answer:
            worker.server.waited = 0.0
            del self._forking[connection]
            self._selector.unregister(connection)
            pid, length = struct.unpack_from("=qq", answer)
            self._on_started(worker, pid, cold=answer[16:16 + length].decode())
            self._ready[worker] = connection
            self._release(worker)
        elif not worker.server.has_ended():  # else `_reap` ends all workers that it has not forked
            self._withdraw(connection, 1)

    def _release(self, worker: WorkerProcess) -> None:
        """Start the workers of a group when all are ready, so that none has ended before another one has begun."""
        worker.group.discard(worker)
        if worker.group:
            return
        for each in [each for each in self._ready if each.group is worker.group]:
            with contextlib.suppress(OSError), self._ready.pop(each) as connection:
                connection.send(b"g")
            if each.is_suspended:
                _signal_group(each.pid, signal.SIGSTOP)

    def _poll(self, timeout: float | None) -> None:
        for key, _ in self._selector.select(timeout):
            if key.fd in self._selector.get_map():
                key.data()
        self._reap()

    def _on_command(self) -> None:
        text = os.read(0, CHUNK)  # sys.stdin has buffered nothing: the launcher waits for our hello
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
            group: set[WorkerProcess] = set()
            for spec in command["workers"]:
                self._start(command, spec, group)
            return
        targets, number = set(command["workers"]), command["signal"]
        for worker in self._running.values():
            if worker.number in targets:
                worker.is_suspended = number == signal.SIGSTOP
                _signal_group(worker.pid, number)
        for connection, worker in list(self._forking.items()):
            if worker.number in targets:
                worker.is_suspended = number == signal.SIGSTOP
                if number not in (signal.SIGSTOP, signal.SIGCONT):
                    self._withdraw(connection, -number)

    def _withdraw(self, connection: socket.socket, code: int, import_error: str = "") -> None:
        """End a worker that is not forked yet; if it is forked at this moment, it exits."""
        worker = self._forking.pop(connection)
        self._selector.unregister(connection)
        connection.close()
        self._on_end(worker, code, **({"import_error": import_error} if import_error else {}))
        self._release(worker)

    def _reserve(self, count: int, interfaces: list[str]) -> None:
        """Reserve free ports with sockets that never listen: only servers with SO_REUSEPORT can use them."""
        for _ in range(count):
            holder = socket.socket()
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            holder.bind(("", 0))
            self._reserved.append(holder)
        self._report({"type": "reserved", "ports": [reserved.getsockname()[1] for reserved in self._reserved],
                      "address": _host_address(interfaces)})

    def _forward_output(self, worker: WorkerProcess, descriptor: int) -> bool:
        """Forward available output; return whether there may be more."""
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
        self._report_output(worker, worker.streams[descriptor], data)
        return True

    def _report_output(self, worker: WorkerProcess, stream: str, data: bytes) -> None:
        self._report({"type": "output", "worker": worker.number, "stream": stream,
                      "data": base64.b64encode(data).decode()})

    def _reap(self) -> None:
        """Collect the processes that have ended; report the rest of a worker's output before its exit."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            worker = self._running.pop(pid, None)
            if worker is not None:  # else a descendant that a worker has left
                self._on_end(worker, os.waitstatus_to_exitcode(status))
            for key, server in list(self._servers.items()):
                if server.pid == pid:
                    self._on_server_end(key, os.waitstatus_to_exitcode(status))

    def _on_end(self, worker: WorkerProcess, code: int, **details: str) -> None:
        for descriptor in list(worker.streams):
            while self._forward_output(worker, descriptor):
                pass
        self._report({"type": "exit", "worker": worker.number, "code": code, **details})

    def _on_server_end(self, key: str, code: int) -> None:
        """End the workers that a fork server has not forked; later ones get a new server."""
        server = self._servers.pop(key)
        text = server.last_output()
        if code < 0:
            text += f"the process that imports the modules of --preload was killed by signal {-code}\n".encode()
        why = (text.decode(errors="replace").rstrip().splitlines() or [f"exit code {code}"])[-1]
        for connection, worker in list(self._forking.items()):
            if worker.server is server:
                if text:
                    self._report_output(worker, "stderr", text)
                self._withdraw(connection, code, why)
                text = b""
        server.close()

    def _check_progress(self) -> None:
        """Once per interval, look for workers and fork servers that stay stopped, and for servers that do not answer.

        A worker that is starting sends no heartbeats that could be missed.
        """
        if time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + STOP_CHECK_INTERVAL
        waiting = {worker.server for worker in self._forking.values()}
        for key, server in list(self._servers.items()):
            if server in waiting and server.stopped >= self._patience:
                self._give_up(key, f"was stopped for {self._patience:g} s")
            elif server in waiting and server.waited >= server.timeout:
                self._give_up_late(key)
            server.stopped = server.stopped + STOP_CHECK_INTERVAL if process_state(server.pid) == "T" else 0.0
            server.waited = server.waited + STOP_CHECK_INTERVAL if server in waiting else 0.0
        for worker in self._running.values():
            is_stopped = not worker.is_suspended and process_state(worker.pid) == "T"
            worker.stopped = worker.stopped + STOP_CHECK_INTERVAL if is_stopped else 0.0
            if worker.stopped >= self._patience:
                worker.stopped = 0.0
                self._report({"type": "stopped", "worker": worker.number})

    def _give_up_late(self, key: str) -> None:
        self._give_up(key, f"did not answer for {self._servers[key].timeout:g} s (HVKERAS_START_TIMEOUT)")

    def _give_up(self, key: str, why: str) -> None:
        """Kill a fork server, and start the workers that wait for it, and all later ones, as new processes."""
        server = self._servers.pop(key)
        self._silent[key] = f"the fork server on {socket.gethostname()} (pid {server.pid}) {why}, and was killed"
        _signal_group(server.pid, signal.SIGKILL)
        for connection, worker in list(self._forking.items()):
            if worker.server is server:
                del self._forking[connection]
                self._selector.unregister(connection)
                connection.close()
                for descriptor in worker.streams:
                    self._selector.unregister(descriptor)
                    os.close(descriptor)
                self._workers.remove(worker)
                self._start(worker.job, worker.spec, set(), worker.is_suspended)
                self._release(worker)
        server.close()

    def _end_all(self) -> None:
        """End the workers with a grace period, then kill all other descendants."""
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
                while self._forward_output(worker, descriptor):
                    pass

    def _report(self, event: dict[str, Any]) -> None:
        try:
            sys.stdout.write(json.dumps(event) + "\n")
            sys.stdout.flush()
        except OSError:
            self._launcher_alive = False


def _server_key(job: dict[str, Any]) -> str:
    """Return what distinguishes the workers of one fork server from those of others."""
    preload = job["preload"]
    return json.dumps([preload["python"], preload["order"]["modules"], preload["order"]["program"], job["folder"],
                       job["environment"]])


def _file_of(content: dict[str, Any]) -> int:
    """Return the descriptor of a file in memory that contains JSON."""
    file = os.memfd_create("hvkeras")
    data = memoryview(json.dumps(content).encode())
    while data:
        data = data[os.write(file, data):]
    return file


def guarded(patience: float) -> None:
    """Fork, and return in the child, which becomes the agent. The parent becomes its guard, and exits with it.

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
    reason = _watch(agent, patience)
    if reason:
        sys.stderr.write(f"the agent of hvkeras run there, pid {agent}, {reason}\n")
        sys.stderr.flush()
    deadline = time.monotonic() + KILL_GRACE
    while time.monotonic() < deadline and kill_descendants():
        time.sleep(0.01)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    os._exit(bool(reason))


def _watch(agent: int, patience: float) -> str:
    """Wait for the agent to end; return the reason, or "" if it exited by itself."""
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
    """Replace a pipe with /dev/null, so that the other end is notified when the agent closes it."""
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, descriptor)
    os.close(null)


def _host_address(interfaces: list[str]) -> str:
    """Return the address of the first interface that has one, else the address of ssh's connection, else ""."""
    for name in interfaces:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            return socket.inet_ntoa(answer[20:24])
    connection = os.environ.get("SSH_CONNECTION", "").split()
    return connection[2] if len(connection) == 4 else ""


def terminal(size: list[int]) -> tuple[int, int]:
    """Open a pseudo-terminal of `size` (columns, rows) that passes bytes through unchanged."""
    ours, theirs = os.openpty()
    tty.setraw(theirs)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
    return ours, theirs


def _signal_group(leader: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def kill_descendants() -> bool:
    """Kill all living descendants of this process; return whether there were any."""
    left = _descendants(os.getpid())
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(left)


def process_state(pid: int) -> str:
    """Return the letter of a process's state: T if it is stopped."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", errors="replace") as file:
        return file.read().rpartition(")")[2].split()[0]
    return ""


def _descendants(ancestor: int) -> list[int]:
    """List the living descendants of a process, whatever their session or group."""
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
    timeout = float(sys.argv[1]) if len(sys.argv) > 1 else STOP_TIMEOUT
    guarded(timeout)
    Agent(timeout).run()

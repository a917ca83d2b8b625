"""Fork server of a host: imports modules once, and forks ranks that run a Python program as a new Python would.

The agent of a host starts it with the Python, the options and the environment of the ranks (`BOOT`), and asks it for
each rank; the rank becomes the agent's child. `hvkeras.launcher.shared_fork_server` starts one that several jobs use,
under any launcher; its ranks stay its own children.

A request comes over a connection of its own, with file descriptors: the request as JSON, standard input, output and
error, and namespaces to enter. The rank prepares its process, answers with its process ID, and waits for a byte before
it runs. A shared server then sends the rank's exit status. A request has:

- `command`, the command line of a Python program, and `cold`, the one to execute if it cannot be forked;
- `environment` and `folder`; from a stand-in, `umask` and `cores`;
- `parent`, the process ID of the agent, if the rank becomes its child;
- `name`, the process's name, if it is not that of Python;
- `prepare`, optionally: the `name` of a function, as `module:function`, and further arguments for it beside `command`.

Python runs this file from its source text, as the host may have no hvkeras; so it uses only the standard library.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import gc
import importlib
import io
import json
import mmap
import os
import re
import runpy
import selectors
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
import types
import zipfile
from collections.abc import Mapping, Sequence
from importlib.machinery import BuiltinImporter, SourceFileLoader
from pkgutil import resolve_name
from typing import Any, NoReturn

from hvkeras.launcher.preloading import Imports, at_start

# Program of the process: loads the sources of a fork server, and runs it. Its argument is the descriptor of an order.
BOOT = """import json, os, sys, types
with open(int(sys.argv[1]), "rb") as file:
    order = json.loads(os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0))
for name, source in order["sources"]:
    sys.modules[name] = types.ModuleType(name)
    exec(compile(source, name, "exec"), vars(sys.modules[name]))
sys.modules["hvkeras.launcher.fork_server"].main(order)"""
NUMBER = struct.Struct("=q")  # process IDs, exit statuses and the length of texts
REQUEST_FILES = 7  # the request, three streams, three namespaces
_SET_PARENT_DEATH_SIGNAL, _SET_NAME, _SET_MEMORY_MAP = 1, 15, (35, 14)  # prctl options, from <linux/prctl.h>
_FLAGS, _WITH_VALUE = re.compile(r"-[bBEIOPqsSu]+"), ("-W", "-X")  # options of Python
_libc = ctypes.CDLL(None, use_errno=True)


def split_command(command: Sequence[str]) -> tuple[list[str], list[str]] | None:
    """Split the command line of a Python program.

    Example:
        >>> split_command(["python", "-u", "train.py", "--epochs", "3"])
        (['python', '-u'], ['train.py', '--epochs', '3'])

    Returns:
        Python with its options, and the program: `-c` with code, `-m` with a module, or a script, and its arguments;
        None if a fork server cannot run it.
    """
    index = 1
    while index < len(command):
        word = command[index]
        if word in _WITH_VALUE and index + 1 < len(command):
            index += 2
        elif _FLAGS.fullmatch(word) or (word.startswith(_WITH_VALUE) and word not in _WITH_VALUE):
            index += 1
        elif word in ("-c", "-m"):
            return (list(command[:index]), list(command[index:])) if index + 1 < len(command) else None
        elif word.startswith("-"):
            return None
        else:
            return list(command[:index]), list(command[index:])
    return None


def main(order: Mapping[str, Any]) -> None:
    """Import the modules, serve requests, and run the program of a rank in each forked process.

    Args:
        order: The `modules`, the ranks' `program`, if it is known, and the `control` socket. A shared server has the
            `address` of its socket instead, a `life`, the descriptor of a pipe whose end is that of the server, and
            variables that `may_differ` between its environment and a rank's.
    """
    sys.argv = [__name__]
    program = order.get("program") or []
    if program:
        _set_arguments(program)
    imports = Imports()
    try:
        imports.load(order["modules"])
    except BaseException:  # noqa: BLE001 - of any kind, it is the error of the job
        text = imports.printed() + "".join(traceback.format_exc())
        os.write(2, text.encode(errors="backslashreplace"))
        os._exit(1)
    gc.collect()
    gc.freeze()  # a collection in a rank would copy all pages
    request, connection = _Server(order).serve()
    why = _why_cold(request, imports, frozenset(order.get("may_differ", ())))
    os.setsid()
    os.chdir(request["folder"])
    if not why:
        _become(request, imports)
    _wait_for_start(connection, why)
    if why:
        _execute(request.get("cold") or request["command"], request["environment"])
    for name in ("hvkeras.launcher.fork_server", "hvkeras.launcher.preloading"):
        del sys.modules[name]
    found = split_command(request["command"])
    assert found is not None  # see _why_cold
    _run(found[1])


class _Server:
    """Server of requests."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        self._waiting = selectors.DefaultSelector()
        self._ranks: dict[int, tuple[int, socket.socket]] = {}  # by descriptor of the process, of a shared server
        if "control" in order:
            self._control = socket.socket(fileno=order["control"])
            self._waiting.register(self._control, selectors.EVENT_READ)
        else:
            folder, name = os.path.split(order["address"])
            os.chdir(folder)  # as a socket's path must be short
            self._control = socket.socket(socket.AF_UNIX)
            self._control.bind(f"{name}.unready")
            self._control.listen(64)
            os.rename(f"{name}.unready", name)
            self._waiting.register(self._control, selectors.EVENT_READ)
            self._waiting.register(order["life"], selectors.EVENT_READ)
        self._is_shared = "address" in order

    def serve(self) -> tuple[dict[str, Any], socket.socket]:
        """Fork ranks until the owner of the server ends. In each rank, return its request and its connection."""
        while True:
            for key, _ in self._waiting.select():
                if key.data is not None:
                    if key.fd in self._waiting.get_map():
                        key.data(key.fd)
                elif key.fileobj is not self._control:
                    self._end()
                elif (accepted := self._accept()) is not None:
                    self._waiting.close()
                    self._control.close()
                    for descriptor, (_, connection) in self._ranks.items():
                        os.close(descriptor)
                        connection.close()
                    return accepted

    def _accept(self) -> tuple[dict[str, Any], socket.socket] | None:
        """Fork a rank for the next request; return the request and its connection in the rank, else None."""
        if self._is_shared:
            connection = self._control.accept()[0]
        else:
            data, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
            if not data:
                self._end()
            connection = socket.socket(fileno=descriptors[0])
        data, descriptors, _, _ = socket.recv_fds(connection, 1, REQUEST_FILES)
        if not data:  # withdrawn
            connection.close()
            return None
        with open(descriptors.pop(0), "rb") as file:
            request = json.loads(os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0))
        server, pid = os.getpid(), os.fork()
        if pid == 0:
            _enter(descriptors, request.get("parent"), server)
            return request, connection
        for descriptor in descriptors:
            os.close(descriptor)
        if self._is_shared:
            descriptor = os.pidfd_open(pid)
            self._ranks[descriptor] = pid, connection
            self._waiting.register(descriptor, selectors.EVENT_READ, self._send_status)
            self._waiting.register(connection, selectors.EVENT_READ, self._kill_rank_of)
        else:
            os.waitpid(pid, 0)
            connection.close()
        return None

    def _send_status(self, descriptor: Any) -> None:
        pid, connection = self._ranks.pop(descriptor)
        for source in (descriptor, connection):
            with contextlib.suppress(KeyError, ValueError):
                self._waiting.unregister(source)
        os.close(descriptor)
        with contextlib.suppress(OSError):
            connection.sendall(NUMBER.pack(os.waitpid(pid, 0)[1]))
        connection.close()

    def _kill_rank_of(self, descriptor: int) -> None:
        """Kill the rank of a stand-in that was killed; what it sends otherwise is for the rank."""
        for pid, connection in self._ranks.values():
            if connection.fileno() == descriptor:
                with contextlib.suppress(BlockingIOError):  # the rank has received it
                    if not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                        self._waiting.unregister(connection)
                        os.kill(pid, signal.SIGKILL)  # maybe a zombie, until _send_status has waited for it

    def _end(self) -> NoReturn:
        for pid, _ in self._ranks.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os._exit(0)


def _enter(descriptors: Sequence[int], agent: int | None, server: int) -> None:
    """Give a forked process its streams, namespaces and parent: the agent, if there is one, else the server."""
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    for namespace in descriptors[3:]:
        if _libc.setns(namespace, 0):
            raise OSError(ctypes.get_errno(), "setns")
    for descriptor in descriptors:
        os.close(descriptor)
    if agent is not None:
        _become_child_of_agent()
    _libc.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != (server if agent is None else agent):
        os._exit(1)


def _wait_for_start(connection: socket.socket, why_cold: str) -> None:
    """Tell the launcher that this process is ready, and wait until it may run."""
    text = why_cold.encode()
    try:
        connection.sendall(NUMBER.pack(os.getpid()) + NUMBER.pack(len(text)) + text)
        may_run = connection.recv(1)
    except OSError:
        may_run = b""
    if not may_run:  # the request was withdrawn
        os._exit(1)
    connection.close()


def _execute(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Execute the command of a rank that cannot be forked."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
        signal.signal(number, signal.SIG_DFL)
    os.execvpe(command[0], list(command), dict(environment))


def _become_child_of_agent() -> None:
    """Fork once more and exit, so that the new process becomes a child of the agent, its nearest subreaper."""
    middle = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == middle:
        time.sleep(0.0005)


def _why_cold(request: Mapping[str, Any], imports: Imports, may_differ: frozenset[str]) -> str:
    """Return why a rank has to start as a new Python process, or ""."""
    found = split_command(request["command"])
    if found is None:
        return "the command is not a Python program"
    script = os.path.join(request["folder"], found[1][0])
    if found[1][0] not in ("-c", "-m") and (
            not os.path.isfile(script) or script.endswith(".pyc") or zipfile.is_zipfile(script)):
        return f"{found[1][0]} is not a Python script"
    environment = request["environment"]
    changed = [name for name in (*at_start(imports.environment, environment), *imports.changed(environment))
               if name not in may_differ]
    return f"another {changed[0]} was set when the modules were imported" if changed else ""


def _become(request: Mapping[str, Any], imports: Imports) -> None:
    """Give this process the state of a new Python process."""
    if "umask" in request:
        os.umask(request["umask"])
        os.sched_setaffinity(0, request["cores"])
    os.environ.clear()
    os.environ.update(request["environment"])
    _libc.prctl(_SET_NAME, os.path.basename(request.get("name") or request["command"][0]).encode(), 0, 0, 0)
    sys.orig_argv = list(request["command"])
    importlib.invalidate_caches()
    imports.hide()
    if prepare := dict(request.get("prepare") or {}):
        resolve_name(prepare.pop("name"))(request["command"], **prepare)
    generator: Any = imports.hidden("numpy.random")
    if generator is not None:
        generator.seed()  # Python seeds its own
    tempfile.tempdir = None
    multiprocessing: Any = sys.modules.get("multiprocessing.process")
    if multiprocessing is not None:
        multiprocessing.current_process().authkey = os.urandom(32)
    _show(request["command"], os.environ)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.isatty() and not stream.write_through:
            stream.reconfigure(line_buffering=True)


class _MemoryMap(ctypes.Structure):
    """The kernel's `struct prctl_mm_map`: the addresses of a process's parts."""

    _fields_ = [*((name, ctypes.c_uint64) for name in (
        "start_code", "end_code", "start_data", "end_data", "start_brk", "brk", "start_stack", "arg_start", "arg_end",
        "env_start", "env_end", "auxv")), ("auxv_size", ctypes.c_uint32), ("exe_fd", ctypes.c_uint32)]


def _show(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Make `ps` and /proc show the command line and the environment, where the kernel can (CHECKPOINT_RESTORE)."""
    arguments = b"".join(os.fsencode(word) + b"\0" for word in command)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in environment.items())
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
        fields = ["", "", *file.read().rpartition(")")[2].split()]  # numbered as in proc(5), from 1
    _libc.mmap.restype = _libc.sbrk.restype = ctypes.c_void_p
    start = _libc.mmap(None, ctypes.c_size_t(len(arguments) + len(variables)), mmap.PROT_READ | mmap.PROT_WRITE,
                       mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, ctypes.c_long(0))
    end = start + len(arguments)
    ctypes.memmove(start, arguments + variables, len(arguments) + len(variables))
    number = [int(fields[index - 1]) for index in (26, 27, 45, 46, 47, 28)]
    layout = _MemoryMap(*number[:5], _libc.sbrk(0), number[5], start, end, end, end + len(variables), 0, 0, 0xFFFFFFFF)
    _libc.prctl(*_SET_MEMORY_MAP, ctypes.byref(layout), ctypes.c_ulong(ctypes.sizeof(layout)), 0)


def _set_arguments(program: Sequence[str]) -> None:
    """Set `sys.argv` and the first entry of `sys.path` as Python does."""
    kind, *rest = program
    sys.argv = [kind, *rest[1:]] if kind in ("-c", "-m") else list(program)
    if not (getattr(sys.flags, "safe_path", False) or sys.flags.isolated):
        folder = os.path.dirname(os.path.realpath(kind))
        sys.path[0] = {"-c": "", "-m": os.getcwd()}.get(kind, folder)


def _run(program: Sequence[str]) -> None:
    """Run a program as Python does. Its exceptions leave this function, for Python to handle them."""
    _set_arguments(program)
    kind, *rest = program
    module: Any = types.ModuleType("__main__")
    module.__builtins__, module.__annotations__, module.__loader__ = builtins, {}, BuiltinImporter
    sys.modules["__main__"] = module
    if "__mp_main__" in sys.modules:
        sys.modules["__mp_main__"] = module
    try:
        if kind == "-m":
            runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
        elif kind == "-c":
            exec(compile(rest[0], "<string>", "exec"), vars(module))
        else:
            module.__file__, module.__cached__ = os.path.join(os.getcwd(), kind), None
            module.__loader__ = SourceFileLoader("__main__", module.__file__)
            with open(kind, "rb") as file:
                source = file.read()
            exec(compile(source, module.__file__, "exec"), vars(module))
    except SystemExit:
        raise
    except BaseException:
        hook = sys.excepthook

        def without_this_file(kind: Any, error: BaseException, trace: Any) -> None:
            while trace is not None and trace.tb_frame.f_code is not _run.__code__:
                trace = trace.tb_next
            error.__traceback__ = trace and trace.tb_next
            hook(kind, error, error.__traceback__)

        sys.excepthook = without_this_file
        raise

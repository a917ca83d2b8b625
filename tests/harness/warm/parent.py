"""Parent process: import TensorFlow, Keras and hvkeras once, and fork a rank for each request.

It runs no TensorFlow operation, because that would start threads, which do not survive a fork. At the end of its
standard input, it kills its ranks and exits.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import struct
import sys
import tempfile
import threading
import types
from typing import Any

from harness import costs
from harness.warm.variables import ROOM, at_import

_NUMBER = struct.Struct("=q")
_MAX_DESCRIPTORS = 6  # three streams, three namespaces
# The usual imports of ranks, without MPI and Horovod, which the oldest environment does not have.
_MODULES = ("numpy", "hvkeras", "tensorflow", "hvkeras.tensorflow", "hvkeras.keras", "hvkeras.callbacks",
            "hvkeras.training.fit_run", "hvkeras.data", "tensorflow.python.framework.function_def_to_graph",
            "harness.checks")


def import_all() -> dict[str, str]:
    """Import the modules that ranks use, and return the environment variables that this has set."""
    before = dict(os.environ)
    keras = "tf_keras" if os.environ.get("TF_USE_LEGACY_KERAS") == "1" else "keras"
    for name in (*_MODULES, keras):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a rank would copy all pages
    return {name: value for name, value in os.environ.items() if name not in before}


class Ranks:
    """Running ranks, each with the connection of its stand-in."""

    def __init__(self, waiting: selectors.BaseSelector) -> None:
        self._waiting = waiting
        self._by_pidfd: dict[int, tuple[int, socket.socket]] = {}

    def add(self, pid: int, connection: socket.socket) -> None:
        """Watch a new rank."""
        pidfd = os.pidfd_open(pid)
        self._by_pidfd[pidfd] = pid, connection
        self._waiting.register(pidfd, selectors.EVENT_READ, self._send_status)
        self._waiting.register(connection, selectors.EVENT_READ, self._kill_rank_of)

    def close(self) -> None:
        """Close all descriptors, in a newly forked rank."""
        for pidfd, (_, connection) in self._by_pidfd.items():
            os.close(pidfd)
            connection.close()

    def kill(self) -> None:
        """Kill all ranks."""
        for pid, _ in self._by_pidfd.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _send_status(self, pidfd: Any) -> None:
        pid, connection = self._by_pidfd.pop(pidfd)
        for source in (pidfd, connection):
            with contextlib.suppress(KeyError):
                self._waiting.unregister(source)
        os.close(pidfd)
        with contextlib.suppress(OSError):
            connection.sendall(_NUMBER.pack(os.waitpid(pid, 0)[1]))
        connection.close()

    def _kill_rank_of(self, connection: Any) -> None:
        """Kill a rank whose stand-in was killed."""
        self._waiting.unregister(connection)
        for pid, other in self._by_pidfd.values():
            if other is connection:
                os.kill(pid, signal.SIGKILL)  # the pid is valid, maybe a zombie, until _send_status has waited for it


def serve(address: str) -> dict[str, Any]:
    """Fork ranks until standard input ends. In each rank, return the request of its stand-in."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"{address}.unready")
    listening.listen(64)
    os.rename(f"{address}.unready", address)
    with selectors.DefaultSelector() as waiting:
        ranks = Ranks(waiting)
        waiting.register(listening, selectors.EVENT_READ)
        waiting.register(sys.stdin, selectors.EVENT_READ)
        while True:
            key = next((key for key, _ in waiting.select()), None)
            if key is None:
                continue
            if key.fileobj is sys.stdin:
                ranks.kill()
                os._exit(0)
            if key.fileobj is not listening:
                key.data(key.fileobj)
                continue
            connection = listening.accept()[0]
            forked = fork(connection)
            if isinstance(forked, dict):
                listening.close()
                ranks.close()
                return forked
            if forked is not None:
                ranks.add(forked, connection)


def fork(connection: socket.socket) -> int | dict[str, Any] | None:
    """Fork one rank.

    Returns:
        The process id of the rank; in the rank itself, the request; None if it was rejected.
    """
    header, descriptors, _, _ = socket.recv_fds(connection, _NUMBER.size, _MAX_DESCRIPTORS)
    if not header:
        connection.close()
        return None
    length, data = _NUMBER.unpack(header)[0], bytearray()
    while len(data) < length:
        data += connection.recv(length - len(data))
    request: dict[str, Any] = json.loads(data)
    wanted, mine = at_import(request["environment"]), at_import(IMPORTED_WITH)
    if wanted != mine:
        text = (f"A warm rank must have its parent's variables that count at import. Received: {wanted}, not {mine}."
                " HINT: start it with cold=True.\n")
        os.write(descriptors[2], text.encode())
        connection.close()
        pid: int | None = None
    elif (pid := os.fork()) == 0:
        connection.close()
        for index, descriptor in enumerate(descriptors[:3]):
            os.dup2(descriptor, index)
        for namespace in descriptors[3:]:
            enter(namespace)
        for descriptor in descriptors:
            os.close(descriptor)
        return request
    for descriptor in descriptors:
        os.close(descriptor)
    if pid is not None:
        connection.sendall(_NUMBER.pack(pid))
    return pid


def enter(namespace: int) -> None:
    """Enter a namespace of the stand-in, which runs on another host of the tests."""
    if ctypes.CDLL(None, use_errno=True).setns(namespace, 0):
        raise OSError(ctypes.get_errno(), "setns")


def become(request: dict[str, Any]) -> types.CodeType:
    """Turn this forked process into the requested rank, and return the compiled program."""
    os.setsid()
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["cores"])
    os.environ.clear()
    os.environ.update(SET_BY_IMPORTS | request["environment"])
    os.chdir(request["folder"])
    show_environment()
    tempfile.tempdir = None
    sys.modules["numpy"].random.seed()
    arguments = request["arguments"]
    sys.orig_argv = [sys.executable, *arguments]
    main = types.ModuleType("__main__")
    if arguments[0] == "-c":
        sys.argv, path, source, folder = ["-c", *arguments[2:]], "<string>", arguments[1], ""
    else:
        sys.argv, path = arguments, os.path.abspath(arguments[0])
        folder = os.path.dirname(path)
        with open(path, "rb") as script:
            source = script.read()
        main.__file__ = path
    sys.modules["__main__"] = main
    paths = request["environment"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [folder, *filter(None, paths), *SYSTEM_PATH]
    importlib.invalidate_caches()
    return compile(source, path, "exec")


def show_environment() -> None:
    """Write the environment to the memory of `/proc/PID/environ`, where the variable `ROOM` reserves space."""
    with open("/proc/self/stat", encoding="ascii") as stat:
        fields = stat.read().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])
    block = ctypes.string_at(start, end - start)
    index = block.index(f"{ROOM}=".encode())
    room = block.index(b"\0", index) - index
    first = ("HARNESS_", "HVKERAS_RUN_RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "TF_CONFIG", "TMPDIR")
    ordered = sorted(os.environ.items(), key=lambda item: not item[0].startswith(first))
    text = b"\0".join(f"{name}={value}".encode(errors="surrogateescape") for name, value in ordered)[: room - 8]
    text += b"\0" + f"{ROOM}=".encode()[: room - len(text) - 1]
    ctypes.memmove(start + index, text.ljust(room, b"."), room)


def run(code: types.CodeType) -> int:
    """Run the rank's program like Python, and return the exit code."""
    try:
        exec(code, vars(sys.modules["__main__"]))
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - like Python, but without this file's frame
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        # As in Python, this keeps the frames' objects alive: some of TensorFlow's print when they are deleted.
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def end(code: int) -> None:
    """Exit after Python's own exit steps (threads and hooks), but before those of C++ libraries.

    Those of TensorFlow have hung. Ranks of MPI exit normally, as launchers wait for MPI's finalization.
    """
    if "mpi4py.MPI" in sys.modules or any(name.startswith(("OMPI_", "PMI")) for name in os.environ):
        sys.exit(code)
    threading._shutdown()  # type: ignore[attr-defined]  # joins non-daemon threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 0xFF)


costs.watch()
IMPORTED_WITH = dict(os.environ)
SYSTEM_PATH = sys.path[1 + len(list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))):]
SET_BY_IMPORTS = import_all()
end(run(become(serve(sys.argv[1]))))

"""Fork server that several jobs use, under any launcher: the launcher starts a stand-in instead of Python.

    launcher -> stand_in.py -> fork server (has imported the modules) -> the rank, forked

The rank is a child of the fork server. Its stand-in, which the launcher sees, forwards signals to it, and exits with
its status (see `hvkeras.launcher.stand_in`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvkeras.errors import MachineError, explain
from hvkeras.launcher.fork_server import BOOT
from hvkeras.launcher.preload import sources
from hvkeras.settings import Settings

_MAY_DIFFER = ("LD_LIBRARY_PATH",)  # mpirun adds the folder of its libraries, which are found without it
_STAND_IN = Path(__file__).with_name("stand_in.py")


def stand_in(addresses: Sequence[Path], timeout: float) -> list[str]:
    """Return the command that precedes the command line of a rank, to fork it.

    Args:
        addresses: Sockets of fork servers, which ranks use in turn.
        timeout: Seconds after which a server that has not forked a rank is killed, and the rank is a new process.
    """
    return [sys.executable, "-I", "-S", str(_STAND_IN), os.pathsep.join(map(str, addresses)), f"{timeout:g}"]


def start(address: Path, python: Sequence[str], modules: Sequence[str], environment: Mapping[str, str], life: int
          ) -> subprocess.Popen[bytes]:
    """Start a fork server. It is ready when its socket exists; what it prints is in a file beside that.

    Args:
        address: The path of the socket, in a private folder.
        python: Python of the ranks, with its options.
        modules: The modules to import.
        environment: Environment of the imports.
        life: Descriptor of a pipe; the server and its ranks end when the pipe is closed.
    """
    with tempfile.TemporaryFile() as order, open(f"{address}.log", "wb") as log:
        order.write(json.dumps({"sources": sources(), "modules": list(modules), "address": str(address), "life": life,
                                "may_differ": _MAY_DIFFER}).encode())
        order.flush()
        return subprocess.Popen([*python, "-c", BOOT, str(order.fileno())], env=dict(environment), cwd="/",
                                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                                pass_fds=[order.fileno(), life])


class SharedForkServer:
    """Fork server of this process, with which it ends.

    Args:
        python: Python of the ranks, with its options.
        modules: The modules to import.
        environment: Environment of the imports. Its `HVKERAS_START_TIMEOUT` is the deadline of the imports, and of each
            rank.
        command: Command line of the ranks.
    """

    def __init__(self, python: Sequence[str], modules: Sequence[str], environment: Mapping[str, str],
                 command: Sequence[str]) -> None:
        self.command: Sequence[str] = command
        self._folder = Path(tempfile.mkdtemp(prefix="hvkeras-fork-"))
        self._address = self._folder / "server"
        self._timeout: float = Settings(environment).start_timeout
        theirs, self._life = os.pipe()
        self._process = start(self._address, python, modules, environment, theirs)
        os.close(theirs)

    @property
    def stand_in(self) -> list[str]:
        """Command that precedes the command line of a rank, to fork it.

        Raises:
            MachineError: A module cannot be imported, or not in time; or the server was killed.
        """
        deadline = time.monotonic() + self._timeout
        if self._address.exists() and (code := self._process.poll()) is not None:
            raise MachineError(explain("The fork server of the ranks must not end before them", "use --no-preload",
                                       exit_code=code))
        while not self._address.exists():
            printed = Path(f"{self._address}.log").read_text(errors="replace").strip()[-2000:]
            if self._process.poll() is not None:
                raise MachineError(explain("The modules that ranks import must be importable", "use --no-preload",
                                           printed=printed))
            if time.monotonic() > deadline:
                self._process.kill()
                raise MachineError(explain(
                    f"The imports of the fork server must end within {self._timeout:g} s",
                    "set a longer HVKERAS_START_TIMEOUT, or use --no-preload", pid=self._process.pid, printed=printed))
            time.sleep(0.02)
        return stand_in([self._address], self._timeout)

    def close(self) -> None:
        """End the server and its ranks."""
        os.close(self._life)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10.0)
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

"""Forwarding of the ranks' output to the driver, over a connection that is authenticated with the job's secret."""

from __future__ import annotations

import base64
import contextlib
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from hvkeras.control import wire
from hvkeras.control.connection import Connection, Introduction
from hvkeras.control.handler import Handler, Member, Members
from hvkeras.control.message_server import MessageServer
from hvkeras.control.messages import Message, RankOutput
from hvkeras.errors import MachineError
from hvkeras.host.console import prints_at, say
from hvkeras.host.network import LOOPBACK, is_local, keep_alive
from hvkeras.launcher.printer import Printer
from hvkeras.settings import Settings
from hvkeras.spark.order import Order
from hvkeras.spark.session import configured, is_fixed

ALIVE = 60.0  # seconds without an answer of the other host until the connection is closed
CONNECT_WITHIN = 5.0  # seconds to connect; otherwise the output stays in the executors' logs
LAST_OUTPUT_WITHIN = 3.0  # seconds to receive pending output when a job ends


class OutputHandler(Handler):
    """Handler that prints the ranks' output."""

    def __init__(self, printer: Printer) -> None:
        self.members = Members()
        self._printer = printer

    def on_message(self, member: Member, message: Message) -> None:
        """Print output of a rank."""
        if isinstance(message, RankOutput):
            with contextlib.suppress(OSError, MachineError, ValueError):  # the target is closed
                self._printer.show(member.number, message.stream, base64.b64decode(message.data))


class OutputServer:
    """Server in the driver that receives and prints the ranks' output.

    Args:
        printer: Prints the output.

    Raises:
        MachineError: The server cannot listen on the address.
    """

    def __init__(self, size: int, secret: bytes, host: str, printer: Printer) -> None:
        self._printer = printer
        self._handler = OutputHandler(printer)
        self.server = MessageServer(self._handler, secret, host, size=size, alive=ALIVE)

    def finish(self) -> None:
        """Wait for pending output, and stop."""
        deadline = time.monotonic() + LAST_OUTPUT_WITHIN
        while self._handler.members and time.monotonic() < deadline:
            time.sleep(0.01)
        self.server.stop()
        with contextlib.suppress(OSError, MachineError, ValueError):
            self._printer.finish()


class OutputLink:
    """A task's connection to the driver's `OutputServer`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @classmethod
    def connect(cls, address: tuple[str, int], secret: bytes, introduction: Introduction) -> OutputLink | None:
        """Connect to the driver.

        Args:
            address: The address of the `OutputServer`.
            introduction: Identifies the rank of this task.

        Returns:
            The connection; None if this host cannot connect to the driver.
        """
        try:
            connected = socket.create_connection(address, timeout=CONNECT_WITHIN)
        except OSError:
            return None
        try:
            keep_alive(connected, ALIVE)
            return cls(Connection(connected, secret, introduction))
        except (OSError, wire.AuthenticationError):
            connected.close()
            return None

    def show(self, stream: str, data: bytes) -> None:
        """Send output of the rank; `stream` is `stdout` or `stderr`."""
        self._connection.send(RankOutput(stream, base64.b64encode(data).decode()))

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


class TextTarget:
    """Binary stream for `Printer` that writes to a text stream, such as a notebook's output."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def write(self, data: bytes) -> int:
        """Write complete lines of text."""
        self._target.write(data.decode(errors="replace"))
        return len(data)

    def flush(self) -> None:
        """Flush the text stream, if it has `flush`."""
        if hasattr(self._target, "flush"):
            self._target.flush()


class DriverOutput:
    """Target of the ranks' output in the driver.

    Args:
        stdout: Text stream for standard output; None for that of the driver.
        stderr: Text stream for standard error; None for that of the driver.
        timestamps: Whether to prefix lines with the time.
        folder: A folder in which to save each rank's output as well; None to save nothing.
    """

    def __init__(self, stdout: Any = None, stderr: Any = None, timestamps: bool = False, folder: Path | None = None
                 ) -> None:
        self._stdout, self._stderr, self._timestamps, self._folder = stdout, stderr, timestamps, folder

    @contextlib.contextmanager
    def served(self, context: Any, order: Order) -> Iterator[Order]:
        """Receive output from the tasks while the context is active.

        Yields:
            The order with the address of the server; the same order if the driver cannot listen.
        """
        announced = LOOPBACK if is_fixed(context) else configured(context, "spark.driver.host", LOOPBACK)
        bind_address = announced if is_local(announced) else configured(context, "spark.driver.bindAddress", announced)
        quiet = not prints_at(Settings(order.environment), "INFO")
        out = cast("Any", TextTarget(self._stdout or sys.stdout))
        err = cast("Any", TextTarget(self._stderr or sys.stderr))
        try:
            server = OutputServer(order.size, order.secret.encode(), bind_address,
                                  Printer(order.size, out, err, timestamps=self._timestamps, quiet=quiet,
                                          folder=self._folder))
        except (MachineError, OSError) as error:
            say(f"the driver cannot receive the ranks' output ({error}); it is in the logs of Spark's executors")
            yield order
            return
        _, port = server.server.start()
        try:
            yield replace(order, output=(announced, port))
        finally:
            server.finish()

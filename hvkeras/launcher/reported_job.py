"""Elastic job on hosts that connect to the launcher, for the drivers of Ray and Spark.

The launcher runs in a child process of the driver. Each slot of the cluster connects to it
(`hvkeras.launcher.host_reporter`) as a host with one slot. The job then runs as under `hvkeras run --min-np`.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvkeras.errors import HvkerasError, MachineError, UsageError, explain
from hvkeras.host.network import split_address
from hvkeras.launcher.exit_report import failed_call
from hvkeras.launcher.functions import BOOT_SOURCE, CALL, command_in, result_file
from hvkeras.launcher.host_pool import HostPool
from hvkeras.launcher.host_reporter import HostOverrides, report
from hvkeras.launcher.job_spec import JobSpec
from hvkeras.launcher.limits import ends_with_parent
from hvkeras.launcher.printer import Printer
from hvkeras.launcher.reporting_hosts import ReportingHosts
from hvkeras.launcher.restarts import run as run_job
from hvkeras.launcher.streamed_process import StreamedProcess
from hvkeras.settings import PREFIX, Settings

PLAN, ADDRESS, LAUNCHER = "plan.json", "address", "launcher.py"
LISTEN_TIMEOUT = 60.0  # seconds within which the launcher's process must listen
NO_LIMIT = 10**9  # of resets, or of failures on a host
UNREACHABLE = 2.0  # seconds after which an unreachable launcher counts as ended
ATTEMPTS = 1000  # maximum number of connections of one slot
Results = dict[int, tuple[float, bytes]]  # by rank: the time when its result was saved, and the pickled result


@dataclass(frozen=True)
class Output:
    """Destination of the ranks' output in the driver.

    Attributes:
        streams: Text streams for standard output and error, where None is `sys.stdout` or `sys.stderr`; or None to show
            nothing.
        timestamps: Prefix lines with the time.
    """

    streams: tuple[Any, Any] | None = (None, None)
    timestamps: bool = False


class ReportedJob:
    """Driver's handle of a job.

    Args:
        fewest: Minimum number of ranks.
        most: Maximum number of ranks; None for as many as there are slots.
        reset_limit: Maximum number of resets. With None, only an error that occurs twice in a row ends the job.
        timeout: Seconds to wait for slots for `fewest` ranks.
        host: Address of this host for the slots.
        variables: Additional environment variables of the launcher.
        first: Number of ranks to wait for at the start; `fewest` by default.
        output: Destination of the ranks' output.
    """

    def __init__(self, fewest: int, most: int | None, reset_limit: int | None, timeout: float, host: str,
                 variables: Mapping[str, str], first: int | None = None, output: Output | None = None) -> None:
        output = output or Output()
        self.secret = secrets.token_hex(32)
        self._folder = Path(tempfile.mkdtemp(prefix="hvkeras-driver-"))
        plan = {"fewest": fewest, "most": most, "timeout": timeout, "host": host,
                "first": fewest if first is None else first, "timestamps": output.timestamps,
                "resets": NO_LIMIT if reset_limit is None else reset_limit}
        (self._folder / PLAN).write_text(json.dumps(plan))
        boot = BOOT_SOURCE.format(path=[os.path.abspath(entry) for entry in sys.path])
        (self._folder / LAUNCHER).write_text(ends_with_parent() + boot)
        self._process = StreamedProcess(
            [sys.executable, str(self._folder / LAUNCHER), "hvkeras.launcher.reported_job", str(self._folder)],
            {**os.environ, **variables, f"{PREFIX}SECRET": self.secret}, output.streams)
        self.address = self._wait_for_address()

    def _wait_for_address(self) -> str:
        deadline, address = time.monotonic() + LISTEN_TIMEOUT, self._folder / ADDRESS
        while not address.exists():
            if self._process.wait(0.05) or time.monotonic() > deadline:
                self.interrupt()
                self.finish()
                raise MachineError(explain(f"The launcher must start within {LISTEN_TIMEOUT:g} s", "see its output"
                                           " above"))
        return address.read_text()

    def is_over(self, seconds: float) -> bool:
        """Wait for the end of the job, at most the given seconds; return whether it has ended."""
        return self._process.wait(seconds)

    def interrupt(self) -> None:
        """Interrupt the job, as Ctrl-C does."""
        self._process.interrupt()

    def finish(self) -> None:
        """Release the resources of the job; must be called after its end.

        Raises:
            PeerError: The job failed; the message names the rank that failed first, and its exception.
        """
        code, last = self._process.finish()
        shutil.rmtree(self._folder, ignore_errors=True)
        if code:
            raise failed_call(last, code)


def values_of(found: list[Results]) -> list[Any]:
    """Return the results of the final ranks, in rank order.

    Args:
        found: The results of each slot. If a rank was on several slots, its last result counts.
    """
    newest: Results = {}
    for results in found:
        for rank, saved in results.items():
            newest[rank] = max(saved, newest.get(rank, saved))
    return [pickle.loads(newest[rank][1]) for rank in range(len(newest)) if rank in newest]


def serve(address: str, secret: str, index: int, call: bytes, variables: Mapping[str, str], commits: str) -> Results:
    """Serve a job as one slot, until the job is done.

    Args:
        address: `host:port` of the launcher.
        index: The index of this slot, unique in the job.
        call: The function call of the ranks, from `hvkeras.launcher.calls.pickled_call`.
        variables: Additional environment variables of the ranks.
        commits: A folder of the job to remove in the end; "" for none.

    Returns:
        The results that ranks have saved on this slot.
    """
    with tempfile.TemporaryDirectory(prefix="hvkeras-place-") as name:
        folder = Path(name)
        (folder / CALL).write_bytes(call)
        here = HostOverrides(command_in(folder), variables)
        try:
            for attempt in range(ATTEMPTS):  # reconnect if this host was unresponsive, and counted as lost
                number = index * ATTEMPTS + attempt
                with contextlib.suppress(UsageError):
                    report(split_address(address), secret, number, f"{os.uname().nodename}-{number}", 1, UNREACHABLE,
                           here=here)
        except MachineError:  # the launcher has ended, and so has the job
            pass
        finally:
            if commits:
                shutil.rmtree(commits, ignore_errors=True)
        pattern = result_file(folder, 0).name.replace("0", "*")
        return {int(file.name.split(".")[1]): (file.stat().st_mtime, file.read_bytes())
                for file in folder.glob(pattern)}


def main(folder: Path) -> int:
    """Run the launcher.

    Args:
        folder: The folder with the plan, into which the launcher writes its address.

    Returns:
        The exit code.
    """
    plan, settings, code = json.loads((folder / PLAN).read_text()), Settings(), 1
    reporting = ReportingHosts(settings.secret, plan["host"], 0, settings.liveness_timeout)
    host, port = reporting.start()
    unfinished = folder / f"{ADDRESS}.unfinished"
    unfinished.write_text(f"{host}:{port}")
    unfinished.replace(folder / ADDRESS)
    try:
        pool = HostPool(reporting.slots, plan["fewest"], plan["most"], plan["timeout"], kept="", changes=True,
                        failures=NO_LIMIT)
        hosts = pool.hosts(plan["first"], _say)
        job = JobSpec([], hosts, str(folder), dict(os.environ), reset_limit=plan["resets"], pool=pool,
                      reporting=reporting, counts_changes=plan["resets"] != NO_LIMIT,
                      ends_on_same_error=plan["resets"] == NO_LIMIT)
        code = run_job(job, lambda append, size: Printer(size, sys.stdout.buffer, sys.stderr.buffer, False,
                                                         plan["timestamps"], quiet=False, folder=None, append=append,
                                                         reports_failures=True))
    except HvkerasError as error:
        _say(f"hvkeras: {type(error).__name__}: {error}")
    finally:
        reporting.finish(code)
    return code


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

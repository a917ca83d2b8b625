"""An elastic job on hosts that report by themselves, started by a program: Ray's and Spark's drivers.

The launcher runs in a process of its own, below the driver's. It listens, and every place of the cluster that has room
for a rank reports to it (`hvkeras.launcher.host_reporter`) as a host with one slot. What goes on from there is as under
`hvkeras run --min-np`.
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

from hvkeras.errors import HvkerasError, MachineError, PeerError, UsageError, explain
from hvkeras.host.network import split_address
from hvkeras.launcher.functions import BOOT_SOURCE, CALL, command_in, result_file
from hvkeras.launcher.host_pool import HostPool
from hvkeras.launcher.host_reporter import OnHost, report
from hvkeras.launcher.job_spec import JobSpec
from hvkeras.launcher.limits import ends_with_parent
from hvkeras.launcher.printer import Printer
from hvkeras.launcher.reporting_hosts import ReportingHosts
from hvkeras.launcher.restarts import run as run_job
from hvkeras.launcher.shown_process import ShownProcess
from hvkeras.settings import PREFIX, Settings

PLAN, ADDRESS, LAUNCHER = "plan.json", "address", "launcher.py"
LISTENS_WITHIN = 60.0  # seconds for the launcher's process to start
NO_LIMIT = 10**9  # resets, or failures on a place
UNREACHABLE = 2.0  # seconds after which a launcher that was there before is taken to be gone
ATTEMPTS = 1000  # how often one place may report
Results = dict[int, tuple[float, bytes]]  # when a rank's result was saved, and the pickled result


@dataclass(frozen=True)
class Output:
    """Where the driver shows the ranks' output.

    Attributes:
        streams: Text streams for standard output and standard error, None for Python's own; or None to show nothing.
        timestamps: Whether lines begin with the time.
    """

    streams: tuple[Any, Any] | None = (None, None)
    timestamps: bool = False


class ReportedJob:
    """The driver's side of a job.

    Args:
        fewest: The fewest ranks to train with.
        most: The most; None for as many as there are places.
        reset_limit: How often the ranks may change; None for no limit but that of an error that comes twice in a row.
        timeout: Seconds that the job waits for places for the fewest ranks.
        host: This host's address, as the places reach it.
        variables: More environment variables for the launcher.
        first: How many ranks there must be to begin; `fewest` by default.
        output: Where the ranks' output goes.
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
        self._process = ShownProcess(
            [sys.executable, str(self._folder / LAUNCHER), "hvkeras.launcher.reported_job", str(self._folder)],
            {**os.environ, **variables, f"{PREFIX}SECRET": self.secret}, output.streams)
        self.address = self._listening()

    def _listening(self) -> str:
        deadline, address = time.monotonic() + LISTENS_WITHIN, self._folder / ADDRESS
        while not address.exists():
            if self._process.wait(0.05) or time.monotonic() > deadline:
                self.interrupt()
                self.finish()
                raise MachineError(explain(f"The launcher must start within {LISTENS_WITHIN:g} s", "see its output"
                                           " above"))
        return address.read_text()

    def is_over(self, seconds: float) -> bool:
        """Waits until the job is over, for so many seconds at most; returns whether it is."""
        return self._process.wait(seconds)

    def interrupt(self) -> None:
        """Ends the job as Ctrl-C does."""
        self._process.interrupt()

    def finish(self) -> None:
        """Must be called once the job is over.

        Raises:
            PeerError: It failed; the message ends with the end of the ranks' output.
        """
        code, last = self._process.finish()
        shutil.rmtree(self._folder, ignore_errors=True)
        if code:
            raise PeerError(explain("The function must succeed on every rank", exit_code=code) + "\n" + last)


def values_of(found: list[Results]) -> list[Any]:
    """Returns the results of the ranks that were there at the end, in rank order.

    Args:
        found: The results that each place has: where a rank has been on two of them, the later one counts.
    """
    newest: Results = {}
    for results in found:
        for rank, saved in results.items():
            newest[rank] = max(saved, newest.get(rank, saved))
    return [pickle.loads(newest[rank][1]) for rank in range(len(newest)) if rank in newest]


def serve(address: str, secret: str, index: int, call: bytes, variables: Mapping[str, str], commits: str) -> Results:
    """Serves a job as one place for a rank, until the job is over.

    Args:
        address: Where the launcher listens.
        secret: The job's secret.
        index: The number of this place, which no other one has had.
        call: What the ranks do: what `hvkeras.launcher.calls.pickled_call` has made.
        variables: More environment variables of the ranks.
        commits: A folder of the job that is removed in the end; "" for none.

    Returns:
        The results that ranks have saved here.
    """
    with tempfile.TemporaryDirectory(prefix="hvkeras-place-") as name:
        folder = Path(name)
        (folder / CALL).write_bytes(call)
        here = OnHost(command_in(folder), variables)
        try:
            for attempt in range(ATTEMPTS):  # again if this host was silent for a while, and counted as lost
                number = index * ATTEMPTS + attempt
                with contextlib.suppress(UsageError):
                    report(split_address(address), secret, number, f"{os.uname().nodename}-{number}", 1, UNREACHABLE,
                           here=here)
        except MachineError:  # the launcher is gone: the job is over
            pass
        finally:
            if commits:
                shutil.rmtree(commits, ignore_errors=True)
        pattern = result_file(folder, 0).name.replace("0", "*")
        return {int(file.name.split(".")[1]): (file.stat().st_mtime, file.read_bytes())
                for file in folder.glob(pattern)}


def main(folder: Path) -> int:
    """Runs the launcher.

    Args:
        folder: The folder with the plan, where the launcher says where it listens.

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
                                                         plan["timestamps"], quiet=False, folder=None, append=append))
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

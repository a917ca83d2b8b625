"""Hosts of an elastic job: found by a discovery script, and set aside (blacklisted) after failures."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

from hvkeras.errors import MachineError, explain
from hvkeras.host.console import some_of
from hvkeras.launcher.placement import THIS_HOST, HostRanks, fill, slots_in_lines

SCRIPT_SECONDS = 60.0  # time limit of a host discovery script
TICK = 1.0  # seconds between two searches for hosts
FIRST_REPORT, REPORT_EVERY = 3.0, 30.0  # seconds until the first report of a wait for hosts, and between later ones
FAILURES = 2  # default: failures in a row after which a host is set aside

Slots = dict[str, int]


def discovered(script: str, default: int) -> Slots:
    """Run a host discovery script.

    Args:
        script: Its command line, for a shell. It prints a line `host` or `host:slots` per host.
        default: The slots of a host without a number.

    Returns:
        The slots of each host.

    Raises:
        MachineError: The script fails, or takes too long.
        UsageError: The script prints something else.
    """
    try:
        done = subprocess.run(script, shell=True, capture_output=True, text=True, timeout=SCRIPT_SECONDS,
                              stdin=subprocess.DEVNULL, check=False)
    except subprocess.TimeoutExpired:
        raise MachineError(explain(f"The host discovery script must end within {SCRIPT_SECONDS:g} s", "run it by hand",
                                   script=script)) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it printed no error"])[-1]
        raise MachineError(explain(f"The host discovery script must succeed ({last})", "run it by hand", script=script,
                                   exit_code=done.returncode))
    return slots_in_lines(done.stdout, default)


@dataclass
class _Aside:
    """Host that was set aside: number of times, and the monotonic time of its return."""

    times: int = 0
    until: float = 0.0


class HostPool:
    """Pool of the hosts that an elastic job may use.

    Args:
        find: Function that returns the slots of each available host.
        least: Minimum number of ranks.
        most: Maximum number of ranks; None for as many as there are slots.
        timeout: Seconds for which a start waits for slots.
        cooldown: The shortest and the longest time in seconds for which a host is set aside, doubled each time; None
            for the rest of the job.
        kept: A host that is never set aside, such as the launcher's own; "" for none.
        changes: Whether `find` may return other hosts later.
        failures: Failures in a row on a host after which it is set aside.
    """

    def __init__(self, find: Callable[[], Slots], least: int, most: int | None, timeout: float,
                 cooldown: tuple[float, float] | None = None, kept: str = THIS_HOST, changes: bool = False,
                 failures: int = FAILURES) -> None:
        self._find, self._cooldown, self._kept, self._failures = find, cooldown, kept, failures
        self.least: int = least
        self.most: int | None = most
        self.timeout: float = timeout
        self.changes: bool = changes
        self._aside: dict[str, _Aside] = {}
        self._failed = ("", 0)  # the host that failed last, and how often in a row

    def hosts(self, at_least: int, say: Callable[[str], None], may_fail: bool = False) -> list[HostRanks]:
        """Wait for enough slots, and place the ranks.

        Args:
            at_least: Minimum number of ranks.
            say: Function that prints a line.
            may_fail: Retry a search that fails.

        Returns:
            The hosts and their ranks.

        Raises:
            MachineError: There are not enough slots in time.
            UsageError: The hosts cannot be parsed.
        """
        began, next_report, problem = time.monotonic(), FIRST_REPORT, ""
        while True:
            try:
                slots, problem = self.usable(), ""
            except MachineError as error:
                if not may_fail:
                    raise
                slots, problem = {}, str(error)
            available, waited = sum(slots.values()), time.monotonic() - began
            if available >= at_least:
                return fill(slots, available if self.most is None else min(available, self.most))
            found = (f"at least {at_least} are needed and {available} {'is' if available == 1 else 'are'} available"
                     f"{self._aside_text()}{f' ({problem})' if problem else ''}")
            may_grow = self.changes or self._cooldown is not None
            if waited >= self.timeout or not may_grow:
                raise MachineError(explain(f"There must be slots for the ranks, but {found}"
                                           + (f" after {waited:.0f} s" if may_grow else ""),
                                           "lower --min-np, add hosts, or raise --elastic-timeout", slots=slots))
            if waited >= next_report:
                next_report = waited + REPORT_EVERY
                say(f"hvkeras run: waiting for slots, {waited:.0f} s of {self.timeout:g} s: {found}")
            time.sleep(TICK)

    def restart(self, say: Callable[[str], None]) -> list[HostRanks]:
        """Return the hosts for a restart; as `hosts`, with the minimum number of ranks."""
        return self.hosts(self.least, say, may_fail=True)

    def note_failure(self, host: str, lost: bool) -> str:
        """Record a failure on a host; set the host aside if it was lost, or fails repeatedly.

        Args:
            host: The host, as the user wrote it; "" if unknown.
            lost: Whether the host itself was lost.

        Returns:
            A message if the host was set aside, else "".
        """
        last, times = self._failed
        self._failed = (host, times + 1 if host == last else 1)
        if not host or host == self._kept or not (lost or self._failed[1] >= self._failures):
            return ""
        self._failed = ("", 0)
        aside = self._aside.setdefault(host, _Aside())
        aside.times += 1
        seconds = float("inf")
        if self._cooldown is not None:
            shortest, longest = self._cooldown
            seconds = min(longest, shortest * 2.0 ** (aside.times - 1))
        aside.until = time.monotonic() + seconds
        failed = "a rank has failed" if self._failures == 1 else f"ranks have failed {self._failures} times in a row"
        why = "which was lost" if lost else f"where {failed}"
        return (f"hvkeras run: sets {host} aside, {why},"
                f" for {f'{seconds:g} s' if self._cooldown is not None else 'the rest of the job'}")

    def usable(self) -> Slots:
        """Return the slots of the available hosts, except those set aside; may run the discovery script.

        Raises:
            MachineError: The search failed.
            UsageError: The hosts cannot be parsed.
        """
        now = time.monotonic()
        found = {name: number for name, number in self._find().items()
                 if name not in self._aside or self._aside[name].until <= now}
        # Rank 0 stays on the host of its commits.
        return dict(sorted(found.items(), key=lambda each: each[0] != self._kept))

    def _aside_text(self) -> str:
        now = time.monotonic()
        names = [name for name, aside in self._aside.items() if aside.until > now]
        return f"; set aside: {some_of(names)}" if names else ""

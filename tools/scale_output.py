"""Measure how `hvkeras run` handles the output of many processes that only print.

    python tools/scale_output.py 1000 100              # 1,000 processes that print 100 lines each
    PYTHONPATH=older python tools/scale_output.py 1000 100    # another checkout, with its link hvkeras/backends
    python tools/scale_output.py 1000 100 -- --output-filename logs

The tool fails unless every line arrives exactly once. It prints the duration of the job in seconds, and the peak memory
of the launcher and of its agent.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

SCRIPT = 'i=0; while [ $i -lt {lines} ]; do echo "line $i of $HVKERAS_RUN_RANK"; i=$((i+1)); done'
POLL_INTERVAL = 0.1  # seconds


def peak_memory(pid: int) -> float:
    """Return the peak memory of a process in MiB; 0 if it has exited."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return 0.0


def only_child(pid: int) -> int:
    """Return the pid of a process's first child; 0 if there is none."""
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            return int(child)
    return 0


def run(processes: int, lines: int, flags: Sequence[str] = ()) -> tuple[float, float, float]:
    """Run a job whose processes print.

    Args:
        processes: The number of processes.
        lines: The number of lines per process.
        flags: Further flags of `hvkeras run`.

    Returns:
        The duration of the job in seconds, and the peak memory of the launcher and of the agent in MiB.

    Raises:
        SystemExit: The job failed, or a line is missing or duplicated.
    """
    command = [sys.executable, "-m", "hvkeras", "run", "-np", str(processes), *flags, "sh", "-c",
               SCRIPT.format(lines=lines)]
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/output", "w+b") as output:
        began = time.monotonic()
        launcher = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output)
        peaks = [0.0, 0.0]
        agent = 0
        while launcher.poll() is None:
            agent = agent or only_child(only_child(launcher.pid))  # the launcher's child is the agent's guard
            peaks = [max(peaks[0], peak_memory(launcher.pid)), max(peaks[1], peak_memory(agent) if agent else 0.0)]
            time.sleep(POLL_INTERVAL)
        seconds = time.monotonic() - began
        if launcher.returncode:
            raise SystemExit(f"hvkeras run failed with exit code {launcher.returncode}")
        output.seek(0)
        found = Counter(output.read().splitlines())
    expected = Counter(f"[{rank}] line {line} of {rank}".encode() for rank in range(processes) for line in range(lines))
    if found != expected:
        raise SystemExit(f"{sum((expected - found).values())} lines are missing, {sum((found - expected).values())}"
                         " are duplicated or unexpected")
    return seconds, peaks[0], peaks[1]


def main() -> None:
    """Measure one job, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("processes", type=int)
    parser.add_argument("lines", type=int)
    parser.add_argument("flags", nargs="*", help="further flags of hvkeras run, after --")
    given = parser.parse_args()
    seconds, launcher, agent = run(given.processes, given.lines, given.flags)
    print(f"{given.processes} processes, {given.lines} lines each: {seconds:.1f} s, launcher {launcher:.0f} MiB, agent"
          f" {agent:.0f} MiB")


if __name__ == "__main__":
    main()

"""Train an elastic job under random failures and membership changes, and print the recovery time for each event.

Events: a worker is killed or stopped, two are killed at once, another one is killed during the recovery, and the host
discovery script finds more or fewer slots. With `--hosts 3`, as root, the hosts are network namespaces, and links
between them fail as well. The weights count how often each sample was used: at the end, it must be once per epoch. No
shared memory may be left.

Example:
    python tools/elastic_soak.py --minutes 10
    python tools/elastic_soak.py --minutes 10 --hosts 3
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from hvkeras.bench.namespaces import CABLE, NETWORK, Host, network, remote_shell

WORKER = Path(__file__).resolve().parents[1] / "tests" / "launch" / "workers" / "survives.py"
LIVENESS = 3.0  # seconds until a stopped worker counts as lost
PAUSE = (4.0, 9.0)  # seconds between two events: some occur while workers start, some when all are running


class Job:
    """A running elastic job.

    Args:
        folder: Its working folder.
        backend: The backend.
        hosts: The hosts; empty for this machine.
    """

    def __init__(self, folder: Path, backend: str, hosts: Sequence[Host]) -> None:
        self.folder, self.lines = folder, list[tuple[float, str]]()
        self.workers = list[psutil.Process]()  # with start times, because pids are reused
        self.hosts = hosts
        self.slots(4)
        environment = os.environ | {"HVKERAS_LIVENESS_TIMEOUT": f"{LIVENESS:g}", "TF_CPP_MIN_LOG_LEVEL": "2"}
        command = [sys.executable, "-m", "hvkeras", "run", "-np", "4", "--min-np", "1", "--max-np", "5",
                   "--reset-limit", "100000", "--verbose", "--backend", backend, "--host-discovery-script",
                   "cat hosts", "--blacklist-cooldown-range", "5", "10", sys.executable, str(WORKER), "soak", ""]
        if hosts:
            remote_shell(hosts, folder)
            environment["PATH"] = f"{folder}{os.pathsep}{environment['PATH']}"
            command = hosts[0].command(*command)
        self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.time(), line.rstrip()))
            if found := re.match(r"hvkeras run: rank (\d+) runs on \S+ as pid (\d+)", line):
                with contextlib.suppress(psutil.NoSuchProcess):
                    self.workers.append(psutil.Process(int(found[2])))

    def slots(self, count: int) -> None:
        """Set the number of slots that the discovery script finds."""
        indices = [host.address for host in self.hosts] or ["localhost"]
        each = [count // len(indices) + (index < count % len(indices)) for index in range(len(indices))]
        (self.folder / "hosts.new").write_text("".join(
            f"{name}:{some}\n" for name, some in zip(indices, each, strict=True) if some))
        (self.folder / "hosts.new").rename(self.folder / "hosts")

    def alive(self) -> list[int]:
        """Return the pids of the running workers; stopped ones do not count."""
        self.workers = [worker for worker in self.workers if worker.is_running()]
        found = []
        for worker in self.workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                if worker.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED):
                    found.append(worker.pid)
        return found

    def steps_since(self, moment: float) -> list[float]:
        """Return the times after `moment` of the first steps after a start or a recovery."""
        return [float(found[1]) for _, line in list(self.lines)
                if (found := re.search(r"first step at ([\d.]+)", line)) and float(found[1]) > moment]

    def memory(self) -> int:
        """Return the largest resident memory of a worker, in bytes."""
        return max((psutil.Process(pid).memory_info().rss for pid in self.alive()), default=0)

    def end(self) -> int:
        """Let training finish, and return the exit code."""
        (self.folder / "finish").touch()
        code = self.process.wait(timeout=180)
        self._reader.join(10)
        return code


def kill(job: Job, count: int = 1, number: int = signal.SIGKILL) -> None:
    """Send a signal to random workers; at least one keeps running."""
    alive = job.alive()
    for pid in random.sample(alive, max(0, min(count, len(alive) - 1))):
        os.kill(pid, number)


def kill_again(job: Job) -> None:
    """Kill a worker, and another one while the others recover."""
    kill(job)
    time.sleep(random.uniform(0.02, 0.3))
    kill(job)


def cut_cable(job: Job) -> None:
    """Disconnect a host until the others have resumed training, and reconnect it."""
    host, moment = random.choice(job.hosts[1:]), time.time()
    _link(host, "down")
    try:
        wait_for(lambda: bool(job.steps_since(moment)), 120, job)
        time.sleep(random.uniform(0, 5))
    finally:
        _link(host, "up")


def _link(host: Host, state: str) -> None:
    subprocess.run(["ip", "-n", host.namespace, "link", "set", CABLE, state], check=True, timeout=10)
    if state == "up":  # the kernel has removed the route
        subprocess.run(["ip", "-n", host.namespace, "route", "replace", f"{NETWORK}.0/24", "dev", CABLE, "src",
                        host.address, "congctl", "cubic"], check=True, timeout=10)


EVENTS: dict[str, Callable[[Job], None]] = {
    "kill one": kill,
    "kill two at once": lambda job: kill(job, 2),
    "kill one more during a recovery": kill_again,
    "stop one": lambda job: kill(job, 1, signal.SIGSTOP),
    "a slot more": lambda job: job.slots(5),
    "two slots fewer": lambda job: job.slots(3),
    "slots as before": lambda job: job.slots(4),
}


def soak(minutes: float, backend: str, seed: int, count: int) -> int:
    """Run a job for some minutes, and return the exit code."""
    with network(count) if count else contextlib.nullcontext() as made:
        return soak_on(made.hosts if made is not None else (), minutes, backend, seed)


def soak_on(hosts: Sequence[Host], minutes: float, backend: str, seed: int) -> int:
    """Run a job on hosts, and return the exit code."""
    random.seed(seed)
    events = EVENTS | ({"cut a cable": cut_cable} if hosts else {})
    table, seconds = Table("event", "count", "until the next step, median", "maximum"), dict[str, list[float]]()
    with tempfile.TemporaryDirectory(prefix="hvkeras-soak-") as folder:
        job, memory = Job(Path(folder), backend, hosts), list[int]()
        wait_for(lambda: bool(job.steps_since(0)), 120, job)
        until = time.time() + 60 * minutes
        while time.time() < until:
            name, moment = random.choice(list(events)), time.time()
            events[name](job)
            wait_for(lambda moment=moment: bool(job.steps_since(moment)), 120, job)
            seconds.setdefault(name, []).append(job.steps_since(moment)[0] - moment)
            time.sleep(random.uniform(*PAUSE))
            memory.append(job.memory())
        code = job.end()
        ended = [line for _, line in job.lines if "trained" in line]
    for name, found in seconds.items():
        table.add_row(name, str(len(found)), f"{statistics.median(found):.2f} s", f"{max(found):.2f} s")
    correct = bool(ended) and all("every sample once in each" in line for line in ended) and len(
        {line.partition("]")[2] for line in ended}) == 1
    left = [path.name for path in Path("/dev/shm").glob("hvkeras-*")]
    early, late = memory[len(memory) // 10], memory[-1]
    console = Console(width=100)
    console.print(table)
    restarts = sum("restarts all ranks" in line for _, line in job.lines)
    setup = f"{backend}, {len(hosts)} hosts" if hosts else backend
    console.print(f"{sum(map(len, seconds.values()))} events in {minutes:g} minutes on {setup} (seed {seed}); exit"
                  f" code {code}; {ended[0] if ended else 'no rank has finished'}; memory of a worker"
                  f" {early / 2**20:.0f} MiB after a tenth of the events, {late / 2**20:.0f} MiB at the end; left in"
                  f" /dev/shm: {left or 'nothing'}; all ranks restarted {restarts} times")
    if code or not correct or left:
        for _, line in job.lines[-60:]:
            console.print(line, markup=False)
        return 1
    return 0


def wait_for(condition: Callable[[], bool], timeout: float, job: Job) -> None:
    """Wait until a condition holds.

    Raises:
        SystemExit: Timeout, or the job has ended.
    """
    deadline = time.time() + timeout
    while not condition():
        if time.time() > deadline or job.process.poll() is not None:
            print("\n".join(line for _, line in job.lines[-80:]))
            job.process.terminate()
            sys.exit(f"the job made no progress for {timeout:g} s" if job.process.poll() is None else "the job ended")
        time.sleep(0.05)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--backend", default="native")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hosts", type=int, default=0)
    given = parser.parse_args()
    sys.exit(soak(given.minutes, given.backend, given.seed, given.hosts))

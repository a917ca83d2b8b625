"""A real Slurm on this machine: its controller and two nodes, in network namespaces with host names of their own."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from harness import hosts as machines
from harness.launchers import clean_environment

NODES = ("slurm1", "slurm2")
CPUS = 4  # of a node, as Slurm is told
CONFIGURATION = """
ClusterName=test
SlurmctldHost={first}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_min_interval=0,batch_sched_delay=0
ReturnToService=2
SlurmdTimeout=8
SlurmctldTimeout=10
KillWait=5
MinJobAge=600
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str:
    """What this machine lacks, or ""."""
    absent = [tool for tool in ("slurmctld", "slurmd", "munged", "srun", "nsenter") if not shutil.which(tool)
              and not Path("/usr/sbin", tool).exists()]
    return f"{', '.join(absent)} not found (Debian: apt-get install slurm-wlm munge)" if absent else machines.missing()


class Cluster:
    """A running cluster."""

    def __init__(self, folder: Path, hosts: Sequence[machines.Host]) -> None:
        self.folder, self.hosts = folder, hosts
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = clean_environment(folder) | {
            "SLURM_CONF": str(folder / "slurm.conf"), "HVKERAS_RENDEZVOUS_DIR": str(folder / "rendezvous")}

    def on_host(self, index: int, *command: str) -> list[str]:
        """Returns a command line that runs on a node; unlike `Host.command`, it sees the cgroups, as slurmd must."""
        host = self.hosts[index]
        script = (f"hostname {host.name}; mount --bind {host.names_file} /etc/hosts; mount --rbind /sys/fs/cgroup /mnt;"
                  " mount -t sysfs sysfs /sys; mount --rbind /mnt /sys/fs/cgroup; exec \"$@\"")  # UCX finds cards there
        return ["nsenter", f"--net=/run/netns/{host.namespace}", "unshare", "--uts", "--mount", "sh", "-c", script,
                "sh", *command]

    def start(self) -> None:
        """Starts all daemons, and waits until both nodes are idle."""
        for name in ("state", "rendezvous", "jobs", *(f"spool-{host.name}" for host in self.hosts)):
            (self.folder / name).mkdir(mode=0o700)
        nodes = "\n".join(f"NodeName={host.name} NodeAddr={host.address} CPUs={CPUS} RealMemory=2000 State=UNKNOWN"
                          for host in self.hosts)
        (self.folder / "slurm.conf").write_text(CONFIGURATION.format(
            first=self.hosts[0].name, address=self.hosts[0].address, folder=self.folder, nodes=nodes))
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        own = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
        self._daemon("munged", ["munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket", *own])
        self._daemon("slurmctld", self.on_host(0, "slurmctld", "-D", "-i"))
        for index in (0, 1):
            self.start_node(index)
        self.wait_for("idle", lambda: self.command("sinfo", "-h", "-o", "%t %D") == "idle 2")

    def start_node(self, index: int) -> None:
        """Starts a node's slurmd."""
        name = self.hosts[index].name
        self._daemon(name, self.on_host(index, "slurmd", "-D", "-N", name))

    def lose_node(self, index: int) -> None:
        """Kills a node's slurmd, and all that runs there, as a power cut does."""
        daemon = self._daemons.pop(self.hosts[index].name)
        for process in self.processes(index):
            with contextlib.suppress(psutil.Error):
                process.kill()
        daemon.wait(timeout=10)

    def processes(self, index: int, text: str = "") -> list[psutil.Process]:
        """The processes that run on a node, with a text in their command lines."""
        own = os.stat(f"/run/netns/{self.hosts[index].namespace}").st_ino
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if os.stat(f"/proc/{process.pid}/ns/net").st_ino == own and text in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def command(self, *command: str, deadline: float = 60.0, **environment: str) -> str:
        """Runs a command on the first node, and returns its output; it must succeed."""
        done = self.run(*command, deadline=deadline, **environment)
        assert done.returncode == 0, done.stdout
        return done.stdout.strip()

    def run(self, *command: str, deadline: float = 60.0, **environment: str) -> subprocess.CompletedProcess[str]:
        """Runs a command on the first node, to its end."""
        return subprocess.run(self.on_host(0, *command), env=self.environment | environment, cwd=self.folder / "jobs",
                              text=True, timeout=deadline, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def submit(self, script: str, *options: str, **environment: str) -> str:
        """Submits a batch script; returns the job's number. Its output goes to `output(number)`."""
        path = self.folder / "jobs" / f"script-{time.monotonic_ns()}"
        path.write_text(script)
        done = self.command("sbatch", "--parsable", "--output=%j.out", *options, str(path), **environment)
        return done.splitlines()[-1].partition(";")[0]

    def output(self, job: str) -> str:
        """What a job has printed so far."""
        path = self.folder / "jobs" / f"{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def state(self, job: str) -> str:
        """A job's state: PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, ..."""
        found = re.search(r"JobState=(\w+)", self.command("scontrol", "show", "job", job))
        return found[1] if found else ""

    def wait_for(self, what: str, condition: Callable[[], bool], deadline: float = 60.0) -> None:
        """Waits until a condition holds."""
        ends = time.monotonic() + deadline
        while not condition():
            assert time.monotonic() < ends, f"{what} never came: {self.logs()}"
            time.sleep(0.3)

    def wait_until_over(self, job: str, deadline: float = 120.0) -> str:
        """Waits for the end of a job; returns its state."""
        self.wait_for(f"the end of job {job}", lambda: self.state(job) not in
                      ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"), deadline)
        return self.state(job)

    def logs(self) -> str:
        """The ends of all logs and outputs."""
        paths = [*self.folder.glob("*.log"), *self.folder.glob("jobs/*.out")]
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in paths)

    def stop(self) -> None:
        """Ends everything that runs on the nodes, and the daemons."""
        for index in (0, 1):
            with contextlib.suppress(KeyError):
                self.lose_node(index)
        for daemon in self._daemons.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGKILL)
            daemon.wait(timeout=10)

    def _daemon(self, name: str, command: Sequence[str]) -> None:
        environment = self.environment | {"PATH": f"{self.environment['PATH']}:/usr/sbin:/sbin"}
        with (self.folder / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log,
                                                   stderr=log, cwd=self.folder, start_new_session=True)


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    """Starts a cluster, and ends it with all of its jobs."""
    with machines.network(2, NODES) as made:
        running = Cluster(folder, made.hosts)
        try:
            running.start()
            yield running
        finally:
            running.stop()



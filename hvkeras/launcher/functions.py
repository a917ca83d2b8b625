"""`hvkeras.run`: run a Python function on several processes, from a script or a notebook."""

from __future__ import annotations

import itertools
import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hvkeras.errors import UnsupportedError, explain
from hvkeras.launcher.calls import pickled_call
from hvkeras.launcher.exit_report import failed_call
from hvkeras.launcher.limits import ends_with_parent, require_current_folder
from hvkeras.launcher.placement import place_ranks
from hvkeras.launcher.streamed_process import StreamedProcess

CALL = "call.pickle"
BOOT = "boot.py"
LAUNCHER = "launcher.py"
# Runs a module with the search path of the calling process, without the current folder.
BOOT_SOURCE = """\
import runpy, sys
sys.path[:1] = [entry for entry in {path!r} if entry not in sys.path]
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
ResultT = TypeVar("ResultT")


def run(
    func: Callable[..., ResultT], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, num_proc: int = 1,
    min_num_proc: int | None = None, max_num_proc: int | None = None, slots: int | None = None,
    reset_limit: int | None = None, cooldown_range: tuple[int, int] | None = None, hosts: str | None = None,
    hostfile: str | None = None, host_discovery_script: str | None = None, start_timeout: float | None = None,
    ssh_port: int | None = None, ssh_identity_file: str | None = None, disable_cache: bool | None = None,
    output_filename: str | None = None, verbose: int | None = None, use_gloo: bool | None = None,
    use_mpi: bool | None = None, mpi_args: str | None = None, network_interface: str | None = None,
    network_interfaces: str | Sequence[str] | None = None, executable: str | None = None, np: int | None = None,
    min_np: int | None = None, max_np: int | None = None,
) -> list[ResultT]:
    """Run a function on several processes, and return the result of each.

    `hvkeras run` starts the processes, and shows their output line by line. The function, its arguments and its results
    are serialized with cloudpickle, so the function may be defined in a notebook. The processes use this process's
    `sys.path`. The function must call `hvd.init()` itself.

    Example:
        def train(rate):
            hvd.init()
            ...
            return history.history["loss"]

        losses = hvd.run(train, args=(0.01,), np=2)

    Args:
        func: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        num_proc: The number of processes.
        min_num_proc: Minimum number of processes of an elastic job, in which the others continue when one is lost. The
            function must then call one with `@hvd.elastic.run`.
        max_num_proc: Maximum number of processes of an elastic job; by default, the number of slots.
        slots: The slots of hosts that `host_discovery_script` prints without a number.
        reset_limit: Maximum number of restarts of all processes after a failure or, in an elastic job, of changes of
            the number of processes. 0 by default; elastic jobs end at the fourth failure by default.
        cooldown_range: The shortest and the longest time in seconds for which a host is set aside (blacklisted).
        hosts: As `hvkeras run -H`; the current folder must then be shared by all hosts.
        hostfile: As `hvkeras run -hostfile`.
        host_discovery_script: Prints the hosts that an elastic job may use, as `hvkeras run --host-discovery-script`;
            the current folder must then be shared by all of them.
        start_timeout: Seconds within which hosts and ranks must start.
        ssh_port: Port of ssh on the other hosts.
        ssh_identity_file: Key for ssh.
        disable_cache: Accepted for compatibility with Horovod; nothing is cached.
        output_filename: A folder for the output of each rank.
        verbose: Whether the launcher reports each step.
        use_gloo: Accepted for compatibility with Horovod: HVKERAS_BACKEND or `hvd.init` selects the backend.
        use_mpi: See `use_gloo`.
        mpi_args: Must be None: start with mpirun to pass options to MPI.
        network_interface: Network interfaces between hosts, separated by commas.
        network_interfaces: The same, as a list or a string.
        executable: The Python that the processes run; this one by default.
        np: The same as `num_proc`, which it overrides.
        min_np: The same as `min_num_proc`, which it overrides.
        max_np: The same as `max_num_proc`, which it overrides.

    Returns:
        The results, in rank order; in an elastic job, of the ranks at its end.

    Raises:
        UsageError: An argument is wrong, or the function cannot be pickled.
        UnsupportedError: `mpi_args` was given.
        PeerError: The function failed on some rank; the message names that rank and its exception.
    """
    if mpi_args:
        raise UnsupportedError(explain("hvkeras.run passes no options to MPI", "write a script, and start it by mpirun",
                                       mpi_args=mpi_args))
    del disable_cache, use_gloo, use_mpi
    size = num_proc if np is None else np
    interfaces = network_interfaces or network_interface
    flags = {
        "-np": size, "-H": hosts, "-hostfile": hostfile, "--start-timeout": start_timeout, "-p": ssh_port,
        "-i": ssh_identity_file, "--output-filename": output_filename,
        "--reset-limit": reset_limit, "--host-discovery-script": host_discovery_script, "--slots-per-host": slots,
        "--min-np": min_num_proc if min_np is None else min_np,
        "--max-np": max_num_proc if max_np is None else max_np,
        "--network-interfaces": ",".join(interfaces) if isinstance(interfaces, (list, tuple)) else interfaces,
    }
    options = [text for flag, value in flags.items() if value is not None for text in (flag, str(value))]
    options += ["--verbose"] if verbose else []
    options += ["--blacklist-cooldown-range", *map(str, cooldown_range)] if cooldown_range is not None else []
    require_current_folder()
    remote = host_discovery_script is not None or not all(host.local for host in place_ranks(size, hosts, hostfile))
    with tempfile.TemporaryDirectory(prefix=".hvkeras-run-", dir="." if remote else None) as name:
        folder = Path(name).absolute()
        command = command_of(func, args, kwargs, folder, executable)
        launcher = folder / LAUNCHER
        launcher.write_text(ends_with_parent() + (folder / BOOT).read_text())
        _run_to_completion([sys.executable, str(launcher), "hvkeras", "run", *options, *command])
        found = itertools.takewhile(Path.exists, (result_file(folder, rank) for rank in itertools.count()))
        return [pickle.loads(file.read_bytes()) for file in found]


def command_of(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None, folder: Path,
               executable: str | None = None) -> list[str]:
    """Save a function call in a folder.

    Args:
        folder: The folder, which must exist until the call has returned.
        executable: The Python interpreter; this one by default.

    Returns:
        The command line that executes the call on a rank.

    Raises:
        UsageError: The function cannot be pickled.
    """
    (folder / CALL).write_bytes(pickled_call(func, args, kwargs))
    return command_in(folder, executable)


def command_in(folder: Path, executable: str | None = None) -> list[str]:
    """Return the command line that executes the call saved in a folder; see `command_of`."""
    boot = folder / BOOT
    boot.write_text(BOOT_SOURCE.format(path=[os.path.abspath(entry) for entry in sys.path]))
    return [executable or sys.executable, str(boot), "hvkeras.launcher.task", str(folder)]


def result_file(folder: Path, rank: int) -> Path:
    """Return the file in which a rank saves its result."""
    return folder / f"rank.{rank}.pickle"


def _run_to_completion(command: Sequence[str]) -> None:
    process = StreamedProcess(command)
    try:
        process.wait()  # training may take days; the launcher ends ranks that fail or do not start
    except BaseException:
        process.interrupt()
        process.finish()
        raise
    code, last = process.finish()
    if code:
        raise failed_call(last, code)

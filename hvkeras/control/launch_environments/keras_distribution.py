"""`keras.distribution.initialize()`: processes that are started by hand, one by one, with an address and two numbers.

Keras documents the variables, and reads them in `initialize()`. As with JAX, the address of process 0 is enough.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from hvkeras.control.launch_environments.launch import IncompleteLaunchError, Launch, Rendezvous, number
from hvkeras.errors import UsageError, explain

LAUNCHER = "keras.distribution"
ADDRESSES = "KERAS_DISTRIBUTION_JOB_ADDRESSES"
PROCESS_COUNT = "KERAS_DISTRIBUTION_NUM_PROCESSES"
PROCESS_ID = "KERAS_DISTRIBUTION_PROCESS_ID"
VARIABLES = (ADDRESSES, PROCESS_COUNT, PROCESS_ID)
_EXAMPLE = 'keras.distribution.initialize("10.0.0.1:1234", num_processes=2, process_id=0)'
_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.%\w]+\]|[A-Za-z0-9._-]+):(?P<port>\d{1,5})")


def detect(environ: Mapping[str, str]) -> Launch | None:
    """Read the variables of `keras.distribution.initialize()`."""
    given = {name: environ[name] for name in VARIABLES if environ.get(name, "").strip()}
    count = number(given, PROCESS_COUNT, LAUNCHER, least=1) if PROCESS_COUNT in given else None
    index = number(given, PROCESS_ID, LAUNCHER) if PROCESS_ID in given else None
    return launch_of_arguments(given.get(ADDRESSES), count, index)


def launch_of_arguments(job_addresses: str | None, num_processes: int | None, process_id: int | None) -> Launch | None:
    """Return the launch that the arguments of `keras.distribution.initialize()` describe; None if none is given.

    Raises:
        UsageError: They contradict each other or cannot be read, or some are missing (`IncompleteLaunchError`).
    """
    addresses = [one.strip() for one in (job_addresses or "").split(",") if one.strip()]
    if num_processes is None and len(addresses) > 1:
        num_processes = len(addresses)
    given = {"job_addresses": job_addresses or None, "num_processes": num_processes, "process_id": process_id}
    if all(value is None for value in given.values()):
        return None
    if num_processes == 1 and not process_id:
        return Launch(LAUNCHER)
    missing = [name for name, value in given.items() if value is None]
    if num_processes is None or process_id is None or not addresses:
        raise IncompleteLaunchError(explain(
            f"keras.distribution.initialize() needs {' and '.join(missing)} as well, as an argument or a variable"
            " KERAS_DISTRIBUTION_*", f"{_EXAMPLE} on the first host, and on the others the same with their process_id",
            **{name: value for name, value in given.items() if value is not None}))
    if len(addresses) not in (1, num_processes):
        raise UsageError(explain("keras.distribution.initialize() needs the address of process 0, or one address for"
                                 " each process", _EXAMPLE, **given))
    if not 0 <= process_id < num_processes:
        raise UsageError(explain("process_id must be below num_processes, and differ between the processes",
                                 "count them from 0", process_id=process_id, num_processes=num_processes))
    match = _ADDRESS.fullmatch(addresses[0])
    if match is None or not 0 < int(match["port"]) < 65536:
        raise UsageError(explain("The address of process 0 must be host:port", 'write it like "10.0.0.1:1234", with a'
                                 " free port of its host", job_addresses=job_addresses))
    return _launch(addresses, num_processes, process_id)


def _launch(addresses: list[str], size: int, rank: int) -> Launch:
    job = "keras-" + hashlib.sha256("\n".join([addresses[0], str(size)]).encode()).hexdigest()[:16]
    hosts = {one.rpartition(":")[0] if ":" in one else one for one in addresses}
    is_one_host = len(addresses) == size and len(hosts) == 1
    local = (rank, size) if is_one_host else (None, None)
    return Launch(LAUNCHER, rank, size, Rendezvous("address", addresses[0], job), *local)


def require_agreement(launcher: str, rank: int, size: int, num_processes: int | None, process_id: int | None) -> None:
    """Check that the arguments of `keras.distribution.initialize()` do not contradict the job of this process.

    Args:
        launcher: What started the job.

    Raises:
        UsageError: They do.
    """
    if num_processes not in (None, size) or process_id not in (None, rank):
        raise UsageError(explain(
            f"keras.distribution.initialize() must get the numbers of the job that {launcher} has started: this is"
            f" process {rank} of {size}", "leave out its arguments, and unset KERAS_DISTRIBUTION_*",
            num_processes=num_processes, process_id=process_id))

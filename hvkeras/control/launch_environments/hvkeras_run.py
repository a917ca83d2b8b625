"""`hvkeras run`: our own launcher, which serves the control channel itself."""

from __future__ import annotations

from collections.abc import Mapping

from hvkeras.control.launch_environments.launch import Launch, Names, served_launch

LAUNCHER = "hvkeras run"
PROCESS_ID = "HVKERAS_RUN_RANK"
PROCESS_COUNT = "HVKERAS_RUN_SIZE"
LOCAL_PROCESS_ID = "HVKERAS_RUN_LOCAL_RANK"
LOCAL_PROCESS_COUNT = "HVKERAS_RUN_LOCAL_SIZE"
CONTROL_ADDRESS = "HVKERAS_RUN_CONTROL"
STARTED_BY = "HVKERAS_RUN_LAUNCHER"
MEMBERSHIP_ADDRESS = "HVKERAS_RUN_MEMBERSHIP"
WORKER = "HVKERAS_RUN_WORKER"
STANDBY = "HVKERAS_RUN_STANDBY"
# its values: a worker waits for its rank in a function, or in init()
JOINS_AT_COMMIT, JOINS_AT_START = "commit", "start"
HANDOVER = "HVKERAS_RUN_HANDOVER"


def detect(environ: Mapping[str, str]) -> Launch | None:
    """Detect a rank of `hvkeras run`, or of another process that serves the channel, such as Ray's driver."""
    names = Names(PROCESS_ID, PROCESS_COUNT, LOCAL_PROCESS_ID, LOCAL_PROCESS_COUNT)
    kind = "standby" if environ.get(STANDBY) else "run"
    return served_launch(environ.get(STARTED_BY) or LAUNCHER, kind, environ, names, CONTROL_ADDRESS)


def slot_variables(rank: int, size: int, local_rank: int, local_size: int, control: str) -> dict[str, str]:
    """Return the variables that assign a rank to a process."""
    return {PROCESS_ID: str(rank), PROCESS_COUNT: str(size), LOCAL_PROCESS_ID: str(local_rank),
            LOCAL_PROCESS_COUNT: str(local_size), CONTROL_ADDRESS: control}

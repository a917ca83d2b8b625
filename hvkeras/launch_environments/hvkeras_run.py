"""`hvkeras run`: our own launcher, which serves the control channel itself."""

from __future__ import annotations

from collections.abc import Mapping

from hvkeras.launch_environments.launch import Launch
from hvkeras.launch_environments.variables import Names, served_launch

LAUNCHER = "hvkeras run"
PROCESS_ID = "HVKERAS_RUN_RANK"
PROCESS_COUNT = "HVKERAS_RUN_SIZE"
LOCAL_PROCESS_ID = "HVKERAS_RUN_LOCAL_RANK"
LOCAL_PROCESS_COUNT = "HVKERAS_RUN_LOCAL_SIZE"
CONTROL_ADDRESS = "HVKERAS_RUN_CONTROL"
STARTED_BY = "HVKERAS_RUN_LAUNCHER"


def detect(environ: Mapping[str, str]) -> Launch | None:
    """Recognises a rank of `hvkeras run`, or of another process that serves the channel, such as Ray's driver."""
    names = Names(PROCESS_ID, PROCESS_COUNT, LOCAL_PROCESS_ID, LOCAL_PROCESS_COUNT)
    return served_launch(environ.get(STARTED_BY) or LAUNCHER, "run", environ, names, CONTROL_ADDRESS)

"""`hvkeras run`: our own launcher, which serves the control channel itself."""

from __future__ import annotations

from collections.abc import Mapping

from hvkeras.errors import UsageError, explain
from hvkeras.launch_environments.launch import Launch, Rendezvous
from hvkeras.launch_environments.variables import Names, is_launched_by, launch_from

LAUNCHER = "hvkeras run"
PROCESS_ID = "HVKERAS_RUN_RANK"
PROCESS_COUNT = "HVKERAS_RUN_SIZE"
LOCAL_PROCESS_ID = "HVKERAS_RUN_LOCAL_RANK"
LOCAL_PROCESS_COUNT = "HVKERAS_RUN_LOCAL_SIZE"
CONTROL_ADDRESS = "HVKERAS_RUN_CONTROL"
STARTED_BY = "HVKERAS_RUN_LAUNCHER"
_ALL = (PROCESS_ID, PROCESS_COUNT, LOCAL_PROCESS_ID, LOCAL_PROCESS_COUNT, CONTROL_ADDRESS)


def detect(environ: Mapping[str, str]) -> Launch | None:
    """Recognises a rank of `hvkeras run`, or of another process that serves the channel, such as Ray's driver."""
    launcher = environ.get(STARTED_BY) or LAUNCHER
    if not is_launched_by(launcher, environ, _ALL, _ALL):
        return None
    address = environ[CONTROL_ADDRESS]
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(explain(f"{CONTROL_ADDRESS} must be host:port, as {launcher} sets it",
                                 f"unset the variables that begin with HVKERAS_RUN_, or start with {launcher}",
                                 **{CONTROL_ADDRESS: address}))
    names = Names(PROCESS_ID, PROCESS_COUNT, LOCAL_PROCESS_ID, LOCAL_PROCESS_COUNT)
    return launch_from(launcher, environ, names, Rendezvous("run", address))

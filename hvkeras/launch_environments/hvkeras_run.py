"""`hvkeras run`: our own launcher, which serves the control channel itself."""

from __future__ import annotations

from collections.abc import Mapping

from hvkeras.errors import UsageError, explain
from hvkeras.launch_environments.launch import Launch, Rendezvous
from hvkeras.launch_environments.variables import Names, launch_from

LAUNCHER = "hvkeras run"
PROCESS_ID = "HVKERAS_RUN_RANK"
PROCESS_COUNT = "HVKERAS_RUN_SIZE"
LOCAL_PROCESS_ID = "HVKERAS_RUN_LOCAL_RANK"
LOCAL_PROCESS_COUNT = "HVKERAS_RUN_LOCAL_SIZE"
CONTROL_ADDRESS = "HVKERAS_RUN_CONTROL"


def detect(environ: Mapping[str, str]) -> Launch | None:
    """Recognises a rank of `hvkeras run`."""
    names = Names(PROCESS_ID, PROCESS_COUNT, LOCAL_PROCESS_ID, LOCAL_PROCESS_COUNT)
    if not names.announced(environ):
        return None
    address = environ.get(CONTROL_ADDRESS, "")
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(explain(f"{CONTROL_ADDRESS} must be host:port, as {LAUNCHER} sets it",
                                 f"unset the variables that begin with HVKERAS_RUN_, or start with {LAUNCHER}",
                                 **{CONTROL_ADDRESS: address}))
    return launch_from(LAUNCHER, environ, names, Rendezvous("run", address))

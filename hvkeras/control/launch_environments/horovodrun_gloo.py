"""`horovodrun --gloo`: Horovod's launcher without MPI, which serves a key-value store over HTTP."""

from __future__ import annotations

from collections.abc import Mapping

from hvkeras.control.launch_environments.launch import Launch, Names, Rendezvous, is_launched_by, launch_from, number
from hvkeras.errors import UsageError, explain

LAUNCHER = "horovodrun (Gloo)"
PROCESS_ID = "HOROVOD_RANK"
PROCESS_COUNT = "HOROVOD_SIZE"
LOCAL_PROCESS_ID = "HOROVOD_LOCAL_RANK"
LOCAL_PROCESS_COUNT = "HOROVOD_LOCAL_SIZE"
STORE_HOST = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
STORE_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"
ELASTIC = "HOROVOD_ELASTIC"
SET_BY = "HVKERAS_HOROVOD_NUMBERS"
_ALL = (PROCESS_ID, PROCESS_COUNT, LOCAL_PROCESS_ID, LOCAL_PROCESS_COUNT, STORE_HOST, STORE_PORT)


def detect(environ: Mapping[str, str]) -> Launch | None:
    """Detect a rank of `horovodrun --gloo` by the presence of all variables that are read here.

    A subset that describes a single rank is not a launch: scripts of one process set these for themselves. Neither are
    variables that hvkeras has set for a rank of another launcher, and that child processes inherit.
    """
    has_store = any(environ.get(name, "").strip() for name in (STORE_HOST, STORE_PORT))
    if not has_store and (environ.get(PROCESS_COUNT, "").strip() == "1" or environ.get(SET_BY)):
        return None
    if not is_launched_by(LAUNCHER, environ, _ALL, _ALL):
        return None
    if environ.get(ELASTIC, "").strip() in ("1", "true", "True"):
        raise UsageError(explain("hvkeras trains with a fixed number of ranks",
                                 "start horovodrun with -np alone, without --min-np, --max-np and"
                                 " --host-discovery-script", **{ELASTIC: environ[ELASTIC]}))
    host = environ[STORE_HOST].strip()
    port = number(environ, STORE_PORT, LAUNCHER, least=1)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    names = Names(PROCESS_ID, PROCESS_COUNT, LOCAL_PROCESS_ID, LOCAL_PROCESS_COUNT)
    return launch_from(LAUNCHER, environ, names, Rendezvous("horovod_store", address))

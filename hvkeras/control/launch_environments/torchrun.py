"""torchrun's variables, which many launchers set: Kubeflow, SageMaker, SkyPilot, Lightning, Vertex AI and others."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from hvkeras.control.launch_environments.launch import Launch, Names, Rendezvous, is_launched_by, launch_from, number

LAUNCHER = "torchrun or the like"
TORCHRUN = "torchrun"
PROCESS_ID = "RANK"
PROCESS_COUNT = "WORLD_SIZE"
LOCAL_PROCESS_ID = "LOCAL_RANK"
LOCAL_PROCESS_COUNT = "LOCAL_WORLD_SIZE"
FIRST_HOST = "MASTER_ADDR"
FIRST_PORT = "MASTER_PORT"
# Variables that only torchrun itself sets.
RUN = "TORCHELASTIC_RUN_ID"
_ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
_STORE_AT_PORT = "TORCHELASTIC_USE_AGENT_STORE"
_ALL = (PROCESS_ID, PROCESS_COUNT, FIRST_HOST, FIRST_PORT)


def detect(environ: Mapping[str, str]) -> Launch | None:
    """Detect a rank by the presence of rank, size, and the first rank's address and port.

    These names are common, so one of them alone is no launch. With a size of several ranks, though, or with all but one
    of them, assuming a job of one process would be wrong.
    """
    if not _announces_ranks(environ):
        return None
    launcher = TORCHRUN if environ.get(RUN) else LAUNCHER
    is_launched_by(launcher, environ, _ALL, _ALL)
    host = environ[FIRST_HOST].strip()
    # torchrun's own store listens at the port.
    port = number(environ, FIRST_PORT, launcher, least=1) + (environ.get(_STORE_AT_PORT) == "True")
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    attempt = "\n".join([address, environ.get(RUN, ""), environ.get(_ATTEMPT, "")])
    job = "torchrun-" + hashlib.sha256(attempt.encode()).hexdigest()[:16]
    names = Names(PROCESS_ID, PROCESS_COUNT, LOCAL_PROCESS_ID, LOCAL_PROCESS_COUNT)
    return launch_from(launcher, environ, names, Rendezvous("address", address, job))


def _announces_ranks(environ: Mapping[str, str]) -> bool:
    present = {name for name in _ALL if environ.get(name, "").strip()}
    several = environ.get(PROCESS_COUNT, "").strip() not in ("", "1")
    return len(present) >= 3 or ({PROCESS_ID, PROCESS_COUNT} <= present and several)

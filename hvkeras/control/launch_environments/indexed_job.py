"""A Kubernetes Indexed Job: one rank per pod, and a headless service that gives each pod a name.

Kubernetes gives a pod its index, but neither the number of pods nor their names, so the manifest sets both
(examples/kubernetes/indexed-job.yaml).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hvkeras.control.launch_environments.launch import Launch, Names, Rendezvous, is_launched_by, launch_from
from hvkeras.errors import UsageError, explain

LAUNCHER = "a Kubernetes Indexed Job"
PROCESS_ID = "JOB_COMPLETION_INDEX"
PROCESS_COUNT = "HVKERAS_KUBERNETES_SIZE"
SERVICE = "HVKERAS_KUBERNETES_SERVICE"
POD = "HOSTNAME"  # in a pod of an Indexed Job, the name of the job and the index
PORT = 29400
_ALL = (PROCESS_ID, PROCESS_COUNT, SERVICE)
_SERVICE = re.compile(r"(?P<name>[a-z0-9]([-a-z0-9.]*[a-z0-9])?)(?::(?P<port>\d{1,5}))?")


def detect(environ: Mapping[str, str]) -> Launch | None:
    """Detect a pod by its index, where the manifest sets the number of pods that train together.

    The index alone is no launch: most Indexed Jobs run unrelated processes.
    """
    if not is_launched_by(LAUNCHER, environ, _ALL, _ALL[1:]):
        return None
    match = _SERVICE.fullmatch(environ[SERVICE].strip())
    if match is None or not 0 < int(match["port"] or PORT) < 65536:
        raise UsageError(explain(f"{SERVICE} must be the name of the headless service that is the pods' subdomain",
                                 "write it like train, or like train:29400 for another port", service=environ[SERVICE]))
    launch = launch_from(LAUNCHER, environ, Names(PROCESS_ID, PROCESS_COUNT), Rendezvous("none"))
    pods = _pods(environ, launch)
    rendezvous = Rendezvous("address", f"{pods[0]}.{match['name']}:{match['port'] or PORT}", f"kubernetes-{pods[0]}")
    return Launch(LAUNCHER, launch.rank, launch.size, rendezvous, tasks=tuple(f"pod {pod}" for pod in pods))


def _pods(environ: Mapping[str, str], launch: Launch) -> list[str]:
    own, ending = environ.get(POD, "").partition(".")[0], f"-{environ[PROCESS_ID].strip()}"
    if not own.endswith(ending):
        raise UsageError(explain(f"{POD} in a pod of an Indexed Job must be the job's name and the pod's index",
                                 "leave hostname out of the pod's spec, so that Kubernetes sets it, and do not set"
                                 f" {POD} yourself", **{POD: own, PROCESS_ID: environ[PROCESS_ID]}))
    return [f"{own.removesuffix(ending)}-{rank}" for rank in range(launch.size)]

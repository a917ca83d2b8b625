"""Slurm's `srun`: the tasks of one job step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hvkeras.control.launch_environments.launch import Launch, Names, Rendezvous, is_launched_by, launch_from, number

LAUNCHER = "srun (Slurm)"
PROCESS_ID = "SLURM_PROCID"
# Not SLURM_NTASKS: in a batch script, or in the shell of an interactive step, that counts the whole allocation.
PROCESS_COUNT = "SLURM_STEP_NUM_TASKS"
LOCAL_PROCESS_ID = "SLURM_LOCALID"
HOST_COUNT = "SLURM_STEP_NUM_NODES"
JOB = "SLURM_JOB_ID"
STEP = "SLURM_STEP_ID"
_STEP = "SLURM_STEP"  # prefix of the variables that Slurm sets only in steps
_ALL = (PROCESS_ID, PROCESS_COUNT, LOCAL_PROCESS_ID, HOST_COUNT, JOB, STEP)


def detect(environ: Mapping[str, str]) -> Launch | None:
    """Detect a task of a job step by the presence of all variables that are read here.

    Only steps have all of them. Batch scripts, which start nothing, have some: those of task 0, and none of a step.
    """
    distinctive = [name for name in environ if name.startswith(_STEP)]
    distinctive += [name for name in (PROCESS_ID, LOCAL_PROCESS_ID) if environ.get(name, "").strip() not in ("", "0")]
    if not is_launched_by(LAUNCHER, environ, _ALL, distinctive):
        return None
    job = f"slurm-{number(environ, JOB, LAUNCHER)}-{number(environ, STEP, LAUNCHER)}"
    launch = launch_from(LAUNCHER, environ, Names(PROCESS_ID, PROCESS_COUNT, LOCAL_PROCESS_ID),
                         Rendezvous("folder", job=job))
    one_host = number(environ, HOST_COUNT, LAUNCHER, least=1) == 1
    return replace(launch, local_size=launch.size) if one_host else launch

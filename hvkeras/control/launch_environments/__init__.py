"""Detection of a process's rank and peers: one pure function per launcher, tried in a fixed order.

The order is a contract. First comes our own launcher, then launchers that start processes, then the variables of
`keras.distribution.initialize()`, then TF_CONFIG (which may be left over in a shell). Then come torchrun's variables
(which some clusters set alongside TF_CONFIG, for other frameworks), then a Kubernetes Indexed Job (in whose pods any of
these may start ranks). Slurm is last, since its variables are also set in batch scripts that start nothing. The first
launcher whose variables are complete wins. An incomplete set of variables is an error, unless a later launcher
announces several ranks: then the variables are left over, or a script has set them for itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from hvkeras.control.launch_environments import (
    horovodrun_gloo,
    hvkeras_run,
    hydra,
    indexed_job,
    keras_distribution,
    open_mpi,
    slurm,
    spark,
    tf_config,
    torchrun,
)
from hvkeras.control.launch_environments.launch import IncompleteLaunchError, Launch, Rendezvous
from hvkeras.control.launch_environments.tf_config import describe_cluster, detect_parameter_servers

__all__ = ["LAUNCH_ENVIRONMENTS", "Launch", "Rendezvous", "describe_cluster", "detect_launch",
           "initialized_launch", "parameter_server_launch"]

LAUNCH_ENVIRONMENTS: tuple[Callable[[Mapping[str, str]], Launch | None], ...] = (
    hvkeras_run.detect,
    spark.detect,
    horovodrun_gloo.detect,
    open_mpi.detect,
    hydra.detect,
    keras_distribution.detect,
    tf_config.detect,
    torchrun.detect,
    indexed_job.detect,
    slurm.detect,
)


def detect_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """Detect how this process was launched.

    Example:
        >>> detect_launch({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}).size
        4

    Args:
        environ: The environment to read; this process's by default.

    Returns:
        The launch of the first detected launcher, else a job of one process.

    Raises:
        UsageError: A launcher's variables are set but cannot be read, or are incomplete while no other launcher
            announces several ranks.
    """
    environ = os.environ if environ is None else environ
    incomplete: IncompleteLaunchError | None = None
    for detect in LAUNCH_ENVIRONMENTS:
        try:
            launch = detect(environ)
        except IncompleteLaunchError as error:
            incomplete = incomplete or error
            continue
        if launch is not None and (incomplete is None or launch.size > 1):
            return launch
        if launch is not None:
            break  # one rank (a TF_CONFIG, a Slurm shell) must not hide an incomplete launch of several
    if incomplete is not None:
        raise incomplete
    return Launch("none")


def initialized_launch(job_addresses: str | None, num_processes: int | None, process_id: int | None,
                       environ: Mapping[str, str] | None = None) -> Launch:
    """Return the launch of a process that calls `keras.distribution.initialize()`.

    Args:
        job_addresses: As Keras passes it: the argument, or the value of its variable.
        num_processes: The same.
        process_id: The same.
        environ: The environment to read; this process's by default.

    Returns:
        The launch of several ranks that a launcher has started, else the one that the arguments describe.

    Raises:
        UsageError: The arguments contradict the launcher or each other, or some are missing.
    """
    environ = os.environ if environ is None else environ
    arguments = (job_addresses, num_processes, process_id)
    try:
        launch = detect_launch({name: environ[name] for name in environ if name not in keras_distribution.VARIABLES})
    except IncompleteLaunchError:
        own = keras_distribution.launch_of_arguments(*arguments)
        if own is None or own.size == 1:
            raise
        return own
    if launch.size == 1:
        return keras_distribution.launch_of_arguments(*arguments) or launch
    keras_distribution.require_agreement(launch.launcher, launch.rank, launch.size, num_processes, process_id)
    return launch


def parameter_server_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """Detect which task of a parameter server cluster this process is.

    Args:
        environ: The environment to read; this process's by default.

    Returns:
        The launch from TF_CONFIG.

    Raises:
        UsageError: There is no TF_CONFIG, or it describes no such cluster.
    """
    return detect_parameter_servers(os.environ if environ is None else environ)

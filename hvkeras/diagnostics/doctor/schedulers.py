"""Checks of what a scheduler has set in this environment, and of what is installed to use one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hvkeras.control.launch_environments import detect_launch, slurm
from hvkeras.diagnostics.check_build import find_command, version_of
from hvkeras.diagnostics.doctor.finding import NOTE, OK, PROBLEM, Finding, check_result
from hvkeras.diagnostics.doctor.spark import spark
from hvkeras.errors import UsageError

_NEWEST_RAY = 3  # major version that hvkeras.ray is not made for


def findings(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Checks the schedulers.

    Args:
        environ: The environment variables.

    Yields:
        What this process would find as a rank; Slurm, Ray and Spark, where they are.
    """
    yield _launch(environ)
    if srun := find_command("srun"):
        known = [name for name in environ if name.startswith("SLURM_")]
        here = f"in job {environ[slurm.JOB]}" if slurm.JOB in known else "outside of a job"
        yield Finding("Slurm", OK, f"{srun}, {here}")
    if ray := version_of("ray"):
        yield check_result("Ray", ray, "" if int(ray.partition(".")[0]) < _NEWEST_RAY else
                           "hvkeras.ray is made for Ray 2", "pip install 'hvkeras[ray]'", NOTE)
    if version := version_of("pyspark"):
        yield spark(version, environ)


def _launch(environ: Mapping[str, str]) -> Finding:
    try:
        launch = detect_launch(environ)
    except UsageError as error:
        text, _, fix = str(error).partition(" HINT: ")
        return Finding("launch environment", PROBLEM, text, fix)
    if launch.launcher == "none":
        return Finding("launch environment", OK, "none: a process here is a job of its own")
    return Finding("launch environment", OK, f"rank {launch.rank} of {launch.size}, launched by {launch.launcher}")

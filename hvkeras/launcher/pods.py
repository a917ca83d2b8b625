"""Elastic jobs in the pods of a Kubernetes Indexed Job: the pod with index 0 launches, and the others report to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hvkeras.control.launch_environments import indexed_job
from hvkeras.control.launch_environments.launch import Launch
from hvkeras.errors import UsageError, explain
from hvkeras.host.network import outward_address, split_address
from hvkeras.launcher.host_reporter import report
from hvkeras.launcher.placement import THIS_HOST
from hvkeras.launcher.reporting_hosts import ReportingHosts
from hvkeras.settings import Settings

COOL_DOWN = (1.0, 60.0)  # seconds for which a pod that was lost is set aside, unless the command line says otherwise


def pod(environ: Mapping[str, str]) -> Launch | None:
    """Returns the place of this pod among those of its Indexed Job; None if this is no pod of one.

    Raises:
        UsageError: The variables contradict each other, or there is no secret.
    """
    launch = indexed_job.detect(environ)
    if launch is not None and not Settings(environ).secret:
        raise UsageError(explain("Pods must prove that they belong to the job", "set HVKERAS_SECRET in the manifest,"
                                 " from a Secret"))
    return launch


def report_from_pod(launch: Launch, slots: int) -> int:
    """Reports this pod to the one that launches, and serves it until the job is over; returns the exit code."""
    settings = Settings()
    name = launch.tasks[launch.rank].removeprefix("pod ")
    return report(split_address(launch.rendezvous.address), settings.secret, launch.rank, name, slots,
                  settings.start_timeout)


def hosts_of_pods(launch: Launch) -> ReportingHosts:
    """Returns the hosts that report to this pod, for which it listens from now on."""
    settings = Settings()
    hosts = ReportingHosts(settings.secret, outward_address(), split_address(launch.rendezvous.address)[1],
                           settings.liveness_timeout)
    hosts.start()
    return hosts


def slots_of(hosts: ReportingHosts, own: int) -> Callable[[], dict[str, int]]:
    """Returns what finds the slots that there are: those of this pod, and of those that have reported."""
    return lambda: {THIS_HOST: own, **hosts.slots()}



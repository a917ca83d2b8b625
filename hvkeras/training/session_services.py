"""Services of a session: the record, the hooks around `fit`, the timeline, and process sets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvkeras import compat
from hvkeras.collectives.join import ProxyCollectives
from hvkeras.collectives.mismatch import Refusals
from hvkeras.compat import patches
from hvkeras.diagnostics.recorder import recording
from hvkeras.diagnostics.timeline import start_timeline
from hvkeras.host.console import prints_at, say
from hvkeras.job.process_sets import ProcessSet, add_process_set, registered_process_sets
from hvkeras.job.session import Session
from hvkeras.job.session_start import restart_session
from hvkeras.settings import ignored_variables, misspelt_variables
from hvkeras.training import fit_hooks


def start_services(session: Session, process_sets: Any = None) -> None:
    """Start the services of the current session.

    Args:
        process_sets: Process sets to register, as for `init()`.
    """
    if session.control is not None:
        session.control.on_participation = session.part(ProxyCollectives).on_message
        session.control.on_refusal = session.part(Refusals).refuse
    settings, rank = session.settings, session.topology.rank
    ignored = {} if session.backend.reads_horovods_variables else ignored_variables()
    if ignored and rank == 0 and prints_at(settings, "WARNING"):
        say("ignored: " + "; ".join(f"{name} ({why})" for name, why in ignored.items()))
    if rank == 0:
        for name, near in misspelt_variables().items():
            say(f"{name} has no effect. HINT: did you mean {near}")
    records = bool(settings.record or settings.report or settings.trace_steps)
    if records:
        recording().start(session)
    if session.launch.size > 1 or settings.run_membership or records:
        install_hooks(session)
    if settings.timeline:
        start_timeline(settings.timeline)
    add_process_sets(process_sets)


def install_hooks(session: Session) -> None:
    """Install the hooks around `fit`, and make TensorFlow retrace functions after each membership change."""
    fit_hooks.install()
    if session.settings.run_membership:
        compat.renew_traces(membership_changed=session.number > 1)


def stop_services() -> None:
    """Stop the services of the current session."""
    recording().finish()
    patches.uninstall_job()


def restart_with_services(session: Session) -> None:
    """Close a session and open another one with the same ranks; hooks in Keras stay installed."""
    recording().finish()
    start_services(restart_session(session))


def add_process_sets(process_sets: str | Sequence[ProcessSet | Sequence[int]] | None) -> None:
    """Register the process sets that are not registered yet."""
    if not process_sets or isinstance(process_sets, str):  # Horovod's "dynamic" has no effect here
        return
    for process_set in process_sets:
        if not any(process_set is known for known in registered_process_sets().values()):
            add_process_set(process_set)

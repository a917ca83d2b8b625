"""The folder of commits that a restarted job resumes from: rank 0 writes there, and removes it when all is over."""

from __future__ import annotations

import sys
from pathlib import Path

from hvkeras.elastic.commits import CommitFile
from hvkeras.errors import PeerError
from hvkeras.host.commit_files import remove_commits
from hvkeras.host.console import in_words, prints_at, say
from hvkeras.host.forks import at_exit
from hvkeras.job.session import Session, current_session


def commit_file(number: int) -> CommitFile | None:
    """Returns the file in which rank 0 keeps its commits for a restart of the job, if any.

    Args:
        number: The index of the elastic function.
    """
    session = current_session()
    if session.topology.rank:
        return None
    if session.settings.elastic_dir:
        return CommitFile(Path(session.settings.elastic_dir).absolute(), number, session.topology.size)
    if session.topology.size > 1 and number == 0:
        say_on_rank_0("keeps commits in memory only, where they are lost if a rank is lost. HINT: start the script"
                      " with hvkeras run --reset-limit 3")
    return None


def remove_commits_at_exit(session: Session) -> None:
    """Makes the ranks remove the commits once all of them have ended successfully.

    A failed job may be restarted from them. Under `hvkeras run`, the launcher removes them if it can.
    """
    at_exit(_remove_commits, session, Path(session.settings.elastic_dir).absolute())


def say_on_rank_0(text: str) -> None:
    """Prints a line about elastic training, on rank 0."""
    session = current_session()
    if session.topology.rank == 0 and prints_at(session.settings, "WARNING"):
        say(f"hvd.elastic.run {text}")


def _remove_commits(session: Session, folder: Path) -> None:
    if session.control is None:
        if not hasattr(sys, "last_type"):  # Python sets it when it prints a traceback
            remove_commits(folder)
        return
    control, hooks = session.control, session.hooks
    if control.cause is not None or control.detached or hooks is None or hooks.exits_with_failure:
        return
    warned = False

    def on_missing(ranks: list[int], waited: float) -> None:
        nonlocal warned
        if waited > session.settings.stall_warning > 0 and not warned and session.topology.rank == 0:
            warned = True
            say(f"rank 0 removes the commits of hvd.elastic when all ranks have ended, and waits for {in_words(ranks)}")

    try:
        control.gather("the end of an elastic job", None, session.settings.stall_shutdown or float("inf"), on_missing)
    except PeerError:
        return
    if session.topology.rank == 0:
        remove_commits(folder)

"""This worker's membership of an elastic job whose survivors go on: which ranks it belongs to, one after the other.

The launcher decides who belongs to the next generation, and tells each worker through the lobby
(`hvkeras.control.lobby`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from hvkeras.control.cause import Cause
from hvkeras.elastic import handover
from hvkeras.errors import PeerError
from hvkeras.job.changes import Change
from hvkeras.job.state import current_job
from hvkeras.launch_environments.hvkeras_run import JOINS_AT_COMMIT, JOINS_AT_START
from hvkeras.settings import Settings
from hvkeras.startup import (
    commit_at_start,
    join_generation,
    leave_generation,
    lobby,
    outlived_failure,
    start_anew,
    survive_failures,
)


class Membership:
    """This worker's membership, for the life of the process.

    Args:
        settings: The settings in force.

    Attributes:
        commit: The number of the commit that the present generation has begun with; 0 for none.
        starts_anew: Whether this process starts its program anew at each change, as its engine can start only once, or
            its graphs are those of sessions. It keeps the commits of each elastic function in memory then.
        has_joined_at_start: Whether this process joined ranks that others belonged to before, and has to tell so.
        has_joined_others: Whether it joins such ranks, and has not called the reset callbacks of a state yet.
    """

    def __init__(self, settings: Settings) -> None:
        self.commit: int = commit_at_start() or 0
        self.starts_anew: bool = not self.is_waiting and not current_job().backend.starts_after_failure
        self.has_joined_at_start: bool = commit_at_start() is not None
        self.has_joined_others: bool = self.is_waiting or self.has_joined_at_start
        self._lobby = lobby(settings)
        self._descriptor = int(settings.run_handover.partition(":")[0]) if settings.run_handover else None
        self._kept: handover.Commits = {} if self._descriptor is None else handover.read(self._descriptor)

    @property
    def hosts_changed(self) -> bool:
        """Whether workers wait to join, or must leave, at the next commit."""
        return self._lobby.hosts_changed

    @property
    def must_leave_soon(self) -> bool:
        """Whether workers must leave before the next commit that is due."""
        return self._lobby.must_leave_soon

    @property
    def must_leave(self) -> bool:
        """Whether this worker must leave at the next commit."""
        return self._lobby.must_leave

    @property
    def is_waiting(self) -> bool:
        """Whether this worker has no rank yet, as it was started for a job that runs already."""
        return current_job().launch.rendezvous.kind == "standby"

    def enter(self, function: int) -> None:
        """Tells the launcher that this worker has reached an elastic function."""
        self._lobby.tell({"type": "function", "function": function, "starts_anew": self.starts_anew})
        survive_failures(True, self._ask_to_leave, None if self._descriptor is None else start_anew)

    def begun(self, when_stuck: Callable[[Cause], None]) -> None:
        """Must be called when the state of an elastic function is complete; failures raise in the function then.

        Args:
            when_stuck: Called if they do not, in another thread, as the backend has lost a collective.
        """
        may_be_stuck = self.starts_anew or current_job().backend.loses_collectives
        survive_failures(True, self._ask_to_leave, when_stuck=when_stuck if may_be_stuck else None)
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def tell_change(self, change: Change) -> None:
        """Tells the launcher how training goes on after a change, for its report."""
        self._lobby.tell({"type": "change", **change.to_message()})

    def _ask_to_leave(self) -> None:
        self._lobby.tell({"type": "leaving"})

    def leave(self) -> None:
        """Must be called when this worker leaves an elastic function; what fails from then on ends this process."""
        survive_failures(False)

    def handed_over(self, function: int) -> dict[str, Any] | None:
        """Returns the commit of an elastic function that this process has kept while its program started anew."""
        return self._kept.get(function)

    def keep(self, function: int, commit: dict[str, Any]) -> None:
        """Keeps the commit of an elastic function."""
        self._kept[function] = commit

    def start_anew(self, number: int, is_stuck: bool = False) -> None:
        """Starts this process's program anew, with the commits that were kept.

        Args:
            number: The number of the last commit.
            is_stuck: Whether the ranks cannot be left in good order, as one has failed, or the main thread is stuck.
        """
        descriptor = handover.written(self._kept)
        if not is_stuck:
            leave_generation()
        start_anew(descriptor, number, JOINS_AT_START if self.starts_anew else JOINS_AT_COMMIT)

    def join_next(self, commit: int, function: int) -> bool:
        """Leaves the present generation, and joins the next one as soon as its members are known.

        Ranks may be lost on the way, so that this takes several generations.

        Args:
            commit: The number of the last commit that this worker holds; -1 for none.
            function: The index of the elastic function that it is in.

        Returns:
            False if the job has finished this function, so that there is nothing to join.

        Raises:
            PeerError: The job has ended.
        """
        while True:
            leave_generation()
            answer = self._lobby.next_generation(commit, function)
            if answer["type"] == "over":
                return False
            try:
                join_generation(answer["place"])
            except PeerError:
                if not outlived_failure():
                    raise
                continue  # a member was lost before all had joined, and the launcher forms a generation without it
            self.commit = answer["commit"]
            self._lobby.tell({"type": "joined"})
            return True


class _Process:
    """What this process has one of."""

    membership: Membership | None = None


def membership() -> Membership | None:
    """Returns this worker's membership; None if the job's survivors do not go on without a restart."""
    settings = current_job().settings
    if _Process.membership is None and settings.run_lobby:
        _Process.membership = Membership(settings)
    return _Process.membership

"""This worker's membership of an elastic job whose survivors go on: which ranks it belongs to, one after the other.

The launcher decides who belongs to the next generation, and tells each worker through the lobby
(`hvkeras.control.lobby`).
"""

from __future__ import annotations

from hvkeras.control.lobby import LobbyClient
from hvkeras.errors import PeerError
from hvkeras.host.console import prints_at, say
from hvkeras.host.network import split_address
from hvkeras.job.state import current_job
from hvkeras.settings import Settings
from hvkeras.startup import join_generation, leave_generation, outlived_failure


class Membership:
    """This worker's membership, for the life of the process.

    Args:
        settings: The settings in force.

    Attributes:
        commit: The number of the commit that the present generation has begun with; 0 for none.
    """

    def __init__(self, settings: Settings) -> None:
        self.worker: int = settings.run_worker
        self.commit = 0
        self._lobby = LobbyClient(split_address(settings.run_lobby), settings.secret.encode(), self.worker)

    @property
    def hosts_changed(self) -> bool:
        """Whether workers wait to join, or must leave, at the next commit."""
        return self._lobby.hosts_changed

    @property
    def is_waiting(self) -> bool:
        """Whether this worker has no rank yet, as it was started for a job that runs already."""
        return current_job().launch.rendezvous.kind == "standby"

    def enter(self, function: int) -> None:
        """Tells the launcher that this worker has reached an elastic function."""
        self._lobby.tell({"type": "function", "function": function})

    def ask_to_leave(self) -> None:
        """Asks the launcher to let this worker leave at the next commit, as its machine is being taken away."""
        self._lobby.tell({"type": "leaving"})

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
    job, settings = current_job(), current_job().settings
    if _Process.membership is None and settings.run_lobby:
        if not job.backend.starts_after_failure:
            if job.topology.rank == 0 and prints_at(settings, "WARNING"):
                say(f"backend {job.backend.name} cannot start again in a process: when a rank is lost, all are"
                    " restarted, and no host joins in between")
            return None
        _Process.membership = Membership(settings)
    return _Process.membership

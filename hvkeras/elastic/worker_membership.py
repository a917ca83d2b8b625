"""This worker's membership of an elastic job: the generations of ranks that it belongs to, one after the other.

The launcher decides who belongs to the next generation, and tells each worker over the membership
channel (`hvkeras.control.membership_channel`). Each generation is a session of its own.
"""

from __future__ import annotations

import functools
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from hvkeras.backends import backend_class
from hvkeras.backends.refusing import StandbyBackend
from hvkeras.control.cause import Cause
from hvkeras.control.launch_environments import Launch, detect_launch, hvkeras_run
from hvkeras.control.launch_environments.hvkeras_run import JOINS_AT_COMMIT, JOINS_AT_START
from hvkeras.control.membership_channel import ANY_FUNCTION, MembershipClient
from hvkeras.control.messages import FunctionEntered, GenerationJoined, RanksChanged, WorkerLeaving
from hvkeras.control.rendezvous import Waiting
from hvkeras.diagnostics.recorder import recording
from hvkeras.elastic import encoding
from hvkeras.errors import PeerError
from hvkeras.host.gpus import seen_gpus, take_gpus
from hvkeras.host.machine import limit_threads, usable_cores
from hvkeras.host.network import split_address
from hvkeras.host.topology import Topology
from hvkeras.job.failure import END_ALWAYS, FailurePolicy
from hvkeras.job.session import Change, Session, current_session, is_initialized, this_process
from hvkeras.job.session_start import open_session
from hvkeras.settings import Settings
from hvkeras.training.session_services import install_hooks, start_services

RETRY = 0.1  # seconds between two attempts to reach an elastic job's launcher


class WorkerMembership:
    """This worker's membership, for the life of the process.

    Attributes:
        commit: The number of the commit that the present generation has begun with; 0 for none.
        has_joined_at_start: Whether this process joined ranks that others belonged to before, and has to tell so.
        has_joined_others: Whether it joins such ranks, and has not called the reset callbacks of a state yet.
    """

    def __init__(self) -> None:
        self._settings = Settings()
        self._policy = END_ALWAYS
        self._requested: str | None = None  # the backend that the script asks for
        self._must_restart = False
        self._descriptor = int(self._settings.run_handover.partition(":")[0]) if self._settings.run_handover else None
        self._kept: encoding.Commits = {} if self._descriptor is None else encoding.read(self._descriptor)
        self.commit: int = 0
        self.has_joined_at_start: bool = False
        self.has_joined_others: bool = bool(self._settings.run_standby)

    @functools.cached_property
    def _channel(self) -> MembershipClient:
        this_process().require_rank()
        settings = self._settings
        waiting = Waiting(settings.start_timeout)
        while True:
            try:
                return MembershipClient(split_address(settings.run_membership), settings.secret.encode(),
                                        settings.run_worker, settings.liveness_timeout)
            except OSError as error:
                waiting.check(f"the launcher, which listens for workers at {settings.run_membership}", str(error))
                time.sleep(RETRY)

    @property
    def hosts_changed(self) -> bool:
        """Whether workers wait to join, or must leave, at the next commit."""
        return self._channel.hosts_changed

    @property
    def must_leave_soon(self) -> bool:
        """Whether workers must leave before the next commit that is due."""
        return self._channel.must_leave_soon

    @property
    def must_leave(self) -> bool:
        """Whether this worker must leave at the next commit."""
        return self._channel.must_leave

    @property
    def is_waiting(self) -> bool:
        """Whether this worker has no rank yet, as it was started for a job that runs already."""
        return current_session().is_standby

    @property
    def restarts(self) -> bool:
        """Whether this process restarts its program at each change, and keeps the commits of each elastic function."""
        return self._must_restart or not (self.is_waiting or current_session().backend.starts_after_failure)

    def require_restarts(self) -> None:
        """Makes this process restart its program at each change, whatever its engine can do."""
        self._must_restart = True

    def enter(self, function: int) -> None:
        """Tells the launcher that this worker has reached an elastic function."""
        self._channel.send(FunctionEntered(function, self.restarts))
        self._set_policy(FailurePolicy(True, self._ask_to_leave,
                                       restart=None if self._descriptor is None else self._restart_program))

    def begun(self, when_stuck: Callable[[Cause], None]) -> None:
        """Must be called when the state of an elastic function is complete; failures raise in the function then.

        Args:
            when_stuck: Called if they do not, in another thread, as the backend has lost a collective.
        """
        may_be_stuck = self.restarts or current_session().backend.loses_collectives
        self._set_policy(FailurePolicy(True, self._ask_to_leave, when_stuck=when_stuck if may_be_stuck else None))
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def leave(self) -> None:
        """Must be called when this worker leaves an elastic function; what fails from then on ends this process."""
        self._set_policy(END_ALWAYS)

    def notify_change(self, change: Change) -> None:
        """Tells the launcher how training goes on after a change, for its report."""
        self._channel.send(RanksChanged(change.to_message()))

    def handed_over(self, function: int) -> dict[str, Any] | None:
        """Returns the commit of an elastic function that this process has kept while its program restarted."""
        return self._kept.get(function)

    def keep(self, function: int, commit: dict[str, Any]) -> None:
        """Keeps the commit of an elastic function."""
        self._kept[function] = commit

    def restart(self, number: int, is_stuck: bool = False) -> None:
        """Restarts this process's program, with the commits that were kept.

        Args:
            number: The number of the last commit.
            is_stuck: Whether the ranks cannot be left in good order, as one has failed, or the main thread is stuck.
        """
        descriptor, joins = encoding.written(self._kept), JOINS_AT_START if self.restarts else JOINS_AT_COMMIT
        if not is_stuck:
            self._leave_generation()
        self._restart_program(descriptor, number, joins)

    def join_at_start(self, requested: str | None, process_sets: Any) -> None:
        """Joins the next generation as soon as there is one, in `init()`, for engines that start only once.

        Until the first elastic function, this process restarts its program if a rank is lost.

        Args:
            requested: The backend that the script asks for.
            process_sets: Process sets to register, as for `init()`.
        """
        self._requested = requested
        last = int(self._settings.run_handover.partition(":")[2] or -1)
        answer = self._channel.next_generation(last, ANY_FUNCTION)
        assert answer is not None  # no function can be over that nobody has reached
        self.commit, self.has_joined_at_start, self.has_joined_others = answer.commit, True, True
        self._set_policy(FailurePolicy(True, restart=self._restart_program))
        try:
            session = self._open_generation(answer.variables)
        except PeerError:
            if not _has_outlived_failure():
                raise
            self._restart_program()
            raise
        self._channel.send(GenerationJoined())
        start_services(session, process_sets)

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
            self._leave_generation()
            answer = self._channel.next_generation(commit, function)
            if answer is None:
                return False
            try:
                session = self._open_generation(answer.variables)
            except PeerError:
                if not _has_outlived_failure():
                    raise
                continue  # a member was lost before all had joined, and the launcher forms a generation without it
            start_services(session)
            self.commit = answer.commit
            self._channel.send(GenerationJoined())
            return True

    def _leave_generation(self) -> None:
        if is_initialized():
            self._requested = current_session().requested
            recording().finish()
        this_process().disconnect()

    def _open_generation(self, assigned: Mapping[str, str]) -> Session:
        """Opens the session of a generation.

        Args:
            assigned: The variables that a launcher sets for this rank.
        """
        variables = {**os.environ, hvkeras_run.STANDBY: "", **assigned}
        this_process().session = None
        return open_session(detect_launch(variables), Settings(variables), self._requested, self._policy)

    def _set_policy(self, policy: FailurePolicy) -> None:
        self._policy = policy
        if (link := this_process().link) is not None:
            link.hooks.policy = policy

    def _ask_to_leave(self) -> None:
        self._channel.send(WorkerLeaving())

    def _restart_program(self, descriptor: int | None = None, commit: int = -1, joins: str = JOINS_AT_START) -> None:
        """Restarts this process's program, which joins the next generation.

        Args:
            descriptor: A file with commits; by default the one that this process was started with, if any.
            commit: The number of the last one of them.
            joins: When it joins them: a value of `hvkeras_run.STANDBY`.
        """
        kept = self._settings.run_handover if descriptor is None else f"{descriptor}:{commit}"
        file = int(kept.partition(":")[0]) if kept else None
        this_process().program.restart({hvkeras_run.STANDBY: joins, hvkeras_run.HANDOVER: kept}, file)


def membership() -> WorkerMembership | None:
    """Returns this worker's membership; None if the job's survivors do not go on without a restart."""
    return this_process().part(WorkerMembership) if current_session().settings.run_membership else None


def join_running_job(launch: Launch, settings: Settings, backend: str | None, process_sets: Any) -> None:
    """Joins an elastic job that runs already, in `init()`: at once, or as soon as its ranks make a commit.

    Args:
        launch: The launch of this worker, with an expected rank and size.
        settings: The settings in force.
        backend: The backend that the script asks for; None for the one that the settings say.
        process_sets: Process sets to register, as for `init()`.
    """
    wanted = backend or settings.backend
    if settings.run_standby == JOINS_AT_COMMIT and (wanted == "auto" or backend_class(wanted).starts_after_failure):
        this_process().session = session = _standby_session(launch, settings, backend)
        install_hooks(session)
    else:
        this_process().part(WorkerMembership).join_at_start(backend, process_sets)


def _standby_session(launch: Launch, settings: Settings, requested: str | None) -> Session:
    """Returns the session of a worker that will join at a commit."""
    host, local_size = socket.gethostname(), launch.local_size or 1
    topology = Topology(launch.rank, launch.size, launch.local_rank or 0, local_size, 0, 1, (host,) * launch.size,
                        (local_size,) * launch.size, (0,) * launch.size)
    if settings.threads:
        limit_threads(max(1, len(usable_cores()) // local_size))
    gpus = seen_gpus(settings.gpu_placement)
    if gpus["ids"] and gpus["taken"] is None:
        take_gpus([topology.local_rank % len(gpus["ids"])])
    return Session(StandbyBackend(), this_process().entries, topology, launch, settings, requested=requested)


def _has_outlived_failure() -> bool:
    link = this_process().link
    return link is not None and link.outlived_failure

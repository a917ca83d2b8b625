"""Membership of this worker in an elastic job: the successive generations of ranks that it belongs to.

The launcher chooses the members of the next generation, and notifies each worker over the membership channel
(`hvkeras.control.membership_channel`). Each generation has its own session.
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

RETRY = 0.1  # seconds between two attempts to connect to the launcher


class WorkerMembership:
    """Membership of this worker, for the lifetime of the process.

    Attributes:
        commit: Number of the commit that the current generation started from; 0 if none.
        has_joined_at_start: Whether this process joined an existing job in `init()`.
        has_joined_others: Whether it joined existing ranks, and has yet to call the reset callbacks of a state.
    """

    def __init__(self) -> None:
        self._settings = Settings()
        self._policy = END_ALWAYS
        self._requested: str | None = None  # backend that the script requests
        self._must_restart = False
        self._descriptor = int(self._settings.run_handover.partition(":")[0]) if self._settings.run_handover else None
        self._commits: encoding.Commits = {} if self._descriptor is None else encoding.read_commits(self._descriptor)
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
                waiting.check(f"the launcher at {settings.run_membership}", str(error))
                time.sleep(RETRY)

    @property
    def hosts_changed(self) -> bool:
        """Return whether workers join or leave at the next commit."""
        return self._channel.hosts_changed

    @property
    def must_leave_soon(self) -> bool:
        """Return whether workers must leave before the next regular commit."""
        return self._channel.must_leave_soon

    @property
    def must_leave(self) -> bool:
        """Return whether this worker must leave at the next commit."""
        return self._channel.must_leave

    @property
    def is_waiting(self) -> bool:
        """Return whether this worker is waiting to join a running job, and has no rank yet."""
        return current_session().is_standby

    @property
    def restarts(self) -> bool:
        """Return whether this process restarts its program at each change of ranks."""
        return self._must_restart or not (self.is_waiting or current_session().backend.starts_after_failure)

    def require_restarts(self) -> None:
        """Make this process restart its program at each change of ranks, regardless of its backend."""
        self._must_restart = True

    def enter(self, function: int) -> None:
        """Notify the launcher that this worker has entered an elastic function."""
        self._channel.send(FunctionEntered(function, self.restarts))
        self._set_policy(FailurePolicy(True, self._ask_to_leave,
                                       restart=None if self._descriptor is None else self._restart_program))

    def raise_failures(self, when_stuck: Callable[[Cause], None]) -> None:
        """Make failures raise in the elastic function; to be called once its state is synchronized.

        Args:
            when_stuck: Called in another thread if a failure cannot raise, because the backend has lost a collective.
        """
        may_be_stuck = self.restarts or current_session().backend.loses_collectives
        self._set_policy(FailurePolicy(True, self._ask_to_leave, when_stuck=when_stuck if may_be_stuck else None))
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def leave(self) -> None:
        """Make failures end this process; to be called when this worker leaves an elastic function."""
        self._set_policy(END_ALWAYS)

    def notify_change(self, change: Change) -> None:
        """Send a completed change of ranks to the launcher, for its report."""
        self._channel.send(RanksChanged(change.to_message()))

    def handed_over(self, function: int) -> dict[str, Any] | None:
        """Return the commit of an elastic function that was handed over when the program restarted, if any."""
        return self._commits.get(function)

    def store_commit(self, function: int, commit: dict[str, Any]) -> None:
        """Store the commit of an elastic function, to be handed over when the program restarts."""
        self._commits[function] = commit

    def restart(self, number: int, is_stuck: bool = False) -> None:
        """Restart this process's program, and hand over the stored commits.

        Args:
            is_stuck: Skip an orderly shutdown of the session, because a rank has failed or the main thread is stuck.
        """
        descriptor, joins = encoding.write_commits(self._commits), JOINS_AT_START if self.restarts else JOINS_AT_COMMIT
        if not is_stuck:
            self._leave_generation()
        self._restart_program(descriptor, number, joins)

    def join_at_start(self, requested: str | None, process_sets: Any) -> None:
        """Join the next generation in `init()`, for backends that start only once per process.

        Until the first elastic function, this process restarts its program if a rank is lost.

        Args:
            requested: Backend that the script requests.
            process_sets: Process sets to register, as for `init()`.
        """
        self._requested = requested
        last = int(self._settings.run_handover.partition(":")[2] or -1)
        answer = self._channel.next_generation(last, ANY_FUNCTION)
        assert answer is not None  # None only after an elastic function has completed
        self.commit, self.has_joined_at_start, self.has_joined_others = answer.commit, True, True
        self._set_policy(FailurePolicy(True, restart=self._restart_program))
        try:
            session = self._open_generation(answer.variables)
        except PeerError:
            if not _has_survived_failure():
                raise
            self._restart_program()
            raise
        self._channel.send(GenerationJoined())
        start_services(session, process_sets)

    def join_next(self, commit: int, function: int) -> bool:
        """Leave the current generation, and join the next one once its members are known.

        If members are lost while the generation forms, it is skipped.

        Args:
            commit: Number of the last commit that this worker holds; -1 if none.
            function: Index of the current elastic function.

        Returns:
            False if the job has completed this function.

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
                if not _has_survived_failure():
                    raise
                continue  # a member was lost before all had joined; the launcher forms another generation
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
        # `assigned`: the environment variables that a launcher sets for this rank.
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
        """Restart this process's program, which joins the next generation.

        Args:
            descriptor: File with commits; by default the one that this process was started with, if any.
            commit: Number of the last commit in it.
            joins: When the program joins: a value of `hvkeras_run.STANDBY`.
        """
        handover = self._settings.run_handover if descriptor is None else f"{descriptor}:{commit}"
        file = int(handover.partition(":")[0]) if handover else None
        this_process().program.restart({hvkeras_run.STANDBY: joins, hvkeras_run.HANDOVER: handover}, file)


def membership() -> WorkerMembership | None:
    """Return this worker's membership; None if the loss of a rank ends all ranks of the job."""
    return this_process().part(WorkerMembership) if current_session().settings.run_membership else None


def join_running_job(launch: Launch, settings: Settings, backend: str | None, process_sets: Any) -> None:
    """Join a running elastic job in `init()`: immediately, or at the next commit of its ranks.

    Args:
        launch: Launch of this worker, with an expected rank and size.
        settings: Current settings.
        backend: Backend that the script requests; None for that of the settings.
        process_sets: Process sets to register, as for `init()`.
    """
    wanted = backend or settings.backend
    if settings.run_standby == JOINS_AT_COMMIT and (wanted == "auto" or backend_class(wanted).starts_after_failure):
        this_process().session = session = _standby_session(launch, settings, backend)
        install_hooks(session)
    else:
        this_process().part(WorkerMembership).join_at_start(backend, process_sets)


def _standby_session(launch: Launch, settings: Settings, requested: str | None) -> Session:
    """Return the session of a worker that will join at a commit."""
    host, local_size = socket.gethostname(), launch.local_size or 1
    topology = Topology(launch.rank, launch.size, launch.local_rank or 0, local_size, 0, 1, (host,) * launch.size,
                        (local_size,) * launch.size, (0,) * launch.size)
    if settings.threads:
        limit_threads(max(1, len(usable_cores()) // local_size))
    gpus = seen_gpus(settings.gpu_placement)
    if gpus["ids"] and gpus["taken"] is None:
        take_gpus([topology.local_rank % len(gpus["ids"])])
    return Session(StandbyBackend(), this_process().entries, topology, launch, settings, requested=requested)


def _has_survived_failure() -> bool:
    link = this_process().link
    return link is not None and link.outlived_failure

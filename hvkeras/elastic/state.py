"""State with which training resumes after a rank was lost."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hvkeras.data.accounts import Positions, accounts
from hvkeras.elastic.commits import CommitFile
from hvkeras.errors import HostsUpdatedInterrupt, UsageError, explain
from hvkeras.job.preemption import PreemptionSignal


class State:
    """Base class of all states, which `hvd.elastic.run` saves, restores and synchronizes between ranks.

    Subclasses implement `save`, `restore` and `sync`. If the state should outlive its process, they also implement
    `saved`, which returns what was saved, and `take`, which takes it back.

    Example:
        class Position(hvd.elastic.State):
            def __init__(self):
                super().__init__(hvd.broadcast_object, hvd.rank)
                self.step = self.step_saved = 0

            def save(self):
                self.step_saved = self.step

            def restore(self):
                self.step = self.step_saved

            def sync(self):
                self.step = hvd.broadcast_object(self.step)
                self.save()

    Args:
        bcast_object: Broadcasts rank 0's object to every rank, like `hvd.broadcast_object`.
        get_rank: Returns this process's rank, like `hvd.rank`.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int]) -> None:
        self._bcast_object, self._rank = bcast_object, get_rank
        self._reset_callbacks: list[Callable[[], Any]] = []
        self._commits: CommitFile | None = None
        self._hosts_have_changed: Callable[[], bool] | None = None
        self._leaves: Callable[[], bool] = lambda: False
        self._preemption: PreemptionSignal | None = None
        self.commit_number: int = 0  # of the last commit, the same on all ranks
        self.newest_commit: tuple[object, Positions, int] | None = None  # all of it, for another thread
        self.steps_at_commit: int | None = None  # what `steps_made` returned at the last commit
        self.data_positions: Positions = {}  # in the data, at the last commit

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], Any]]) -> None:
        """Registers functions to call after the job has been rebuilt and before training resumes.

        Args:
            callbacks: Functions without parameters, such as one that adapts the learning rate to the number of ranks.
                All ranks call them, those that join as well, so that they may call collectives, as `fit` does.
        """
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Calls `reset`, and then the functions of `register_reset_callbacks`."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Saves the state, with which training resumes if a rank is lost from now on.

        All ranks call it after the same step. Rank 0's state is also written to a file if the job can be restarted
        (HVKERAS_ELASTIC_DIR). In a job whose survivors go on, that happens while the next steps run, new workers join
        at a commit, and those of removed hosts leave. After SIGTERM, a job that keeps commits on disk ends here.

        Raises:
            HostsUpdatedInterrupt: They do now; `hvd.elastic.run` catches it.
        """
        ends = self._hosts_have_changed is None and self.must_commit()
        self.note_commit()
        waits = self._hosts_have_changed is None or (self._preemption is not None and self._preemption.is_pending)
        commits = self._commits
        is_written = commits is not None and (waits or not self.is_shared or commits.is_idle)
        whole = self.whole(is_written)
        if commits is not None and is_written:
            write = commits.write if waits else commits.write_soon
            write(whole, positions=self.data_positions)
        if ends and self._preemption is not None:
            self._bcast_object(None)  # rank 0 has written
            self._preemption.end(f"the state was saved as commit {self.commit_number}")
        self.check_host_updates()

    def must_commit(self) -> bool:
        """Whether all ranks should commit now, as a machine is being taken away; all call it after the same steps."""
        return self._preemption is not None and self._preemption.is_due()

    def note_commit(self) -> None:
        """Saves the state, and the position in the data that `hvd.shard` has assigned."""
        self.save()
        self.steps_at_commit = self.steps_made()
        self.commit_number += 1
        self.data_positions = accounts().positions()
        self.newest_commit = self.saved(), self.data_positions, self.commit_number

    def check_host_updates(self) -> None:
        """Checks whether workers wait to join, or must leave; all ranks call it after the same step.

        Raises:
            HostsUpdatedInterrupt: Some do; `hvd.elastic.run` catches it.
        """
        if self._hosts_have_changed is not None and self._hosts_have_changed():
            self.prepare_change(self._leaves())
            raise HostsUpdatedInterrupt

    def save(self) -> None:
        """Keeps a copy of the state in memory.

        Raises:
            NotImplementedError: A subclass must implement it.
        """
        raise NotImplementedError

    def restore(self) -> None:
        """Restores the state that was saved last.

        Raises:
            NotImplementedError: A subclass must implement it.
        """
        raise NotImplementedError

    def sync(self) -> None:
        """Broadcasts the state of rank 0 to every rank.

        Raises:
            NotImplementedError: A subclass must implement it.
        """
        raise NotImplementedError

    def reset(self) -> None:
        """Adapts the state to a rebuilt job; does nothing by default."""

    @property
    def must_restart(self) -> bool:
        """Whether the program must restart when the ranks change, as its graphs cannot be traced again."""
        return False

    def steps_made(self) -> int | None:
        """Returns how many steps were made in all; None if the state does not know it."""
        return None

    def saved(self) -> object:
        """Returns what was saved last, to be written to a file: anything that can be pickled."""
        return None

    def take(self, saved: Any) -> None:
        """Takes over what another process had saved, without restoring it.

        Args:
            saved: What `saved` returned in that process.
        """

    # What a state needs of which no rank has all.

    @property
    def is_shared(self) -> bool:
        """Whether no rank has all of the state."""
        return False

    def whole(self, is_wanted: bool) -> object:
        """Returns what was saved last, whole, to be written to a file; all ranks call it together.

        Args:
            is_wanted: Whether this rank wants it: rank 0, if anybody.

        Returns:
            What `take` takes; None if this rank does not want it.
        """
        return self.saved() if is_wanted else None

    def prepare_change(self, leaves: bool) -> None:
        """Makes those who stay have the whole state, before other ranks leave; all ranks call it together.

        Args:
            leaves: Whether this rank leaves.
        """

    def reshard(self) -> None:
        """Gives up what ranks have kept for each other, before a whole commit is restored."""

    def memory_of_parts(self) -> tuple[int, int]:
        """The bytes of what this rank has kept of its part of the state, and of those of other ranks."""
        return 0, 0

    def check_hosts_with(self, hosts_have_changed: Callable[[], bool] | None,
                         leaves: Callable[[], bool] = lambda: False) -> None:
        """Sets the functions by which `check_host_updates` checks, in a job whose survivors go on.

        Args:
            hosts_have_changed: Called by all ranks, on which it returns the same; None to check nothing.
            leaves: Whether this rank must leave when hosts have changed.
        """
        self._hosts_have_changed, self._leaves = hosts_have_changed, leaves

    @property
    def _survives(self) -> bool:
        """Whether ranks go on when others are lost, with what they have in memory."""
        return self._hosts_have_changed is not None

    def commit_on(self, notice: PreemptionSignal | None) -> None:
        """Sets what tells `must_commit` that a machine is being taken away.

        Args:
            notice: The notice, or None for none.
        """
        self._preemption = notice

    def keep_commits_in(self, commits: CommitFile | None) -> None:
        """Makes `commit` also write to a file from now on.

        Args:
            commits: The file, or None to write no file.
        """
        self._commits = commits


class ObjectState(State):
    """A state of Python objects, which are its attributes.

    Example:
        state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, epoch=0, best=None)
        state.epoch += 1
        state.commit()

    Args:
        bcast_object: As for `State`.
        get_rank: As for `State`.
        **kwargs: The attributes and their initial values, which must be picklable.

    Raises:
        UsageError: An attribute cannot be copied, or has the name of a method.
    """

    def __init__(self, bcast_object: Callable[[Any], Any], get_rank: Callable[[], int], **kwargs: Any) -> None:
        super().__init__(bcast_object, get_rank)
        taken = [name for name in kwargs if hasattr(self, name)]
        if taken:
            raise UsageError(explain("A state's attributes must not have the names of its methods", "rename it",
                                     attribute=taken[0]))
        self._names = tuple(kwargs)
        self._saved_state: dict[str, Any] = kwargs
        self.__dict__.update(kwargs)
        ObjectState.save(self)

    if TYPE_CHECKING:  # the attributes given by name

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def save(self) -> None:
        """Copies the attributes."""
        self._saved_state = {name: _copied(name, getattr(self, name)) for name in self._names}

    def restore(self) -> None:
        """Restores the attributes that were saved last."""
        self.__dict__.update(copy.deepcopy(self._saved_state))

    def sync(self) -> None:
        """Sets the attributes to those that rank 0 saved last."""
        if self._saved_state:
            self._saved_state = self._bcast_object(self._saved_state)
            ObjectState.restore(self)

    def saved(self) -> object:
        """Returns the attributes that were saved last."""
        return self._saved_state

    def take(self, saved: Any) -> None:
        """Takes over what another process had saved.

        Args:
            saved: What `saved` returned in that process.

        Raises:
            UsageError: The saved state has other attributes.
        """
        if set(saved) != set(self._names):
            raise UsageError(explain("A commit must have the state's attributes", "remove HVKERAS_ELASTIC_DIR, or give"
                                     " each job one of its own", commit=sorted(saved), state=sorted(self._names)))
        self._saved_state = saved


def _copied(name: str, value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception as error:  # whatever an object's own copying raises
        raise UsageError(explain(f"A state's attributes must be copyable ({type(error).__name__}: {error})",
                                 "give models and optimizers to TensorFlowKerasState", **{name: value})) from error

"""Accounts of the samples that all ranks together have trained on, so that an epoch goes on where a commit has left it.

In an elastic job, the ranks may change in the middle of an epoch. An account counts the samples of a pass over data
that `hvd.shard` has assigned; after a change, what is left of the pass is assigned to the ranks that there are then. To
this end, all ranks read the data in the same order, which follows from the number of the pass.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvkeras.control import activity
from hvkeras.job.session import current_session, is_initialized, this_process

Positions = dict[str, tuple[int, int]]


@dataclass
class Account:
    """The position in one set of data.

    Attributes:
        count: The number of samples in a pass over the data.
        seed: The seed of the order of each pass.
        passes: The number of passes that are complete.
        done: The samples of the current pass that were trained on when it began, or went on after a change.
    """

    count: int
    seed: int = 0
    passes: int = 0
    done: int = 0
    _per_step: int = 0  # samples in a step of all ranks
    _skipped: int = 0  # steps of the pass that are left out as they are done
    _steps: int = 0  # steps that have been made or left out
    _left: int = 0  # steps that were left when the pass began

    def order(self, shuffles: bool) -> Any:
        """Returns the order of the samples in this pass, an int64 array; the same on all ranks."""
        if shuffles:
            return np.random.default_rng([self.seed, self.passes]).permutation(self.count)
        return np.arange(self.count)

    def share(self, all_of_them: bool = False) -> tuple[int, int, int, int]:
        """Returns which samples of the pass are this rank's: how many to skip, then to take, and one of every how many.

        Args:
            all_of_them: Whether some ranks get one sample more than others, if need be.

        Returns:
            `(done, usable, size, rank)`: of the `usable` samples after the first `done` of the order, those with the
            numbers `rank`, `rank + size`, `rank + 2 size`, ...
        """
        topology = current_session().topology
        left = self.count - self.done
        uneven = left % topology.size
        if all_of_them and left > uneven:
            uneven = 0
        return self.done, left - uneven, topology.size, topology.rank

    def steps(self, batch: int, whole: bool = False, drops: bool = False) -> int:
        """Returns the steps in what is left of the pass, or in a whole one.

        Args:
            batch: The samples in a step of each rank.
            whole: Whether to count a pass from its beginning.
            drops: Whether a last step with fewer samples is left out.
        """
        mine = (self.count if whole else self.count - self.done) // current_session().topology.size
        return mine // batch if drops else -(-mine // batch)

    def begin(self, batch: int, drops: bool = False) -> int:
        """Begins a pass, or what is left of it.

        Args:
            batch: The samples in a step of each rank.
            drops: Whether a last step with fewer samples is left out.

        Returns:
            The number of its first step, in a pass that has the steps of a whole one.
        """
        self._per_step, self._left = batch * current_session().topology.size, self.steps(batch, False, drops)
        self._skipped = self._steps = (self.steps(batch, True, drops) - self.steps(batch, False, drops)
                                       if self.done else 0)
        return self._skipped

    def note(self, steps: int) -> None:
        """Notes that so many steps of this pass have been made, or left out."""
        self._steps = steps

    def end(self) -> None:
        """Ends the pass."""
        self.passes, self.done = self.passes + 1, 0
        self.stop()

    def stop(self) -> None:
        """Counts no further steps of the pass that has begun."""
        self._per_step = self._skipped = self._steps = self._left = 0

    @property
    def position(self) -> tuple[int, int]:
        """The number of complete passes, and of samples of the next one that all ranks together have trained on."""
        if activity.ends_epoch() and self._per_step:
            return self.passes + 1, 0
        made = self._steps - self._skipped
        if self._per_step and made >= self._left:
            return self.passes, self.count
        return self.passes, self.done + made * self._per_step


class Accounts:
    """The accounts of all data that `hvd.shard` has assigned in this process."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._restored: Positions = {}  # of the last commit that was gone back to, for accounts that are opened later

    def account(self, description: object, count: int, seed: int) -> Account:
        """Returns the account of data, which is the same for the same data.

        Args:
            description: What tells the data from others, the same on all ranks and after a restart.
            count: The number of samples.
            seed: The seed of the order of each pass.
        """
        key = hashlib.sha256(repr((description, count, seed)).encode()).hexdigest()[:16]
        if key not in self._accounts:
            self._accounts[key] = Account(count, seed, *self._restored.get(key, (0, 0)))
        return self._accounts[key]

    def positions(self) -> Positions:
        """Returns the position in each set of data, for a commit."""
        return {key: account.position for key, account in self._accounts.items()}

    def restore(self, positions: Positions) -> None:
        """Goes back to the positions of a commit; data that it does not know begin anew."""
        self._restored = dict(positions)
        for key, account in self._accounts.items():
            account.passes, account.done = positions.get(key, (0, 0))
            account.stop()


def accounts() -> Accounts:
    """Returns the accounts of this process, which outlive the generations of an elastic job."""
    return this_process().part(Accounts)


def keeps_accounts() -> bool:
    """Whether this job's ranks may change while it runs."""
    return is_initialized() and bool(current_session().settings.run_membership)


def rough(marks: Any) -> Any:
    """Returns marks of data without the last digits of their numbers, which differ between processors."""
    if isinstance(marks, list):
        return [rough(mark) for mark in marks]
    return f"{marks:.1e}" if isinstance(marks, float) else marks

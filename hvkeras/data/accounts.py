"""Accounts of the samples that all ranks together have trained on, so that an epoch resumes at the last commit.

In an elastic job, membership may change in the middle of an epoch. An account counts the samples of a pass over data
that `hvd.shard` has assigned; after a change, the remaining samples of the pass are assigned to the current ranks. For
this, all ranks read the data in the same order, which is derived from the index of the pass.
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
    """Position in one set of data.

    Attributes:
        count: The number of samples in a pass over the data.
        seed: The seed of the order of each pass.
        done: The samples of the current pass that were trained on before it began or resumed.
    """

    count: int
    seed: int = 0
    passes: int = 0
    done: int = 0
    _per_step: int = 0  # samples in a step of all ranks
    _skipped: int = 0  # steps of the pass that were completed before it resumed
    _steps: int = 0  # steps that are completed, including the skipped ones
    _remaining: int = 0  # steps that remained when the pass began

    def order(self, shuffles: bool) -> Any:
        """Return the order of the samples in this pass, an int64 array; equal on all ranks."""
        if shuffles:
            return np.random.default_rng([self.seed, self.passes]).permutation(self.count)
        return np.arange(self.count)

    def share(self, all_of_them: bool = False) -> tuple[int, int, int, int]:
        """Return this rank's samples of the pass.

        Args:
            all_of_them: Whether no sample is dropped, if need be by one more sample on some ranks.

        Returns:
            `(done, usable, size, rank)`: of the `usable` samples after the first `done` of the order, those with the
            indices `rank`, `rank + size`, `rank + 2 size`, ...
        """
        topology = current_session().topology
        remaining = self.count - self.done
        uneven = remaining % topology.size
        if all_of_them and remaining > uneven:
            uneven = 0
        return self.done, remaining - uneven, topology.size, topology.rank

    def steps(self, batch: int, whole: bool = False, drops: bool = False) -> int:
        """Return the number of steps in the remaining pass, or in a complete one.

        Args:
            batch: The samples per step of each rank.
            whole: Whether to count a complete pass.
            drops: Whether a last step with fewer samples is dropped.
        """
        mine = (self.count if whole else self.count - self.done) // current_session().topology.size
        return mine // batch if drops else -(-mine // batch)

    def begin(self, batch: int, drops: bool = False) -> int:
        """Begin or resume a pass.

        Args:
            batch: The samples per step of each rank.
            drops: Whether a last step with fewer samples is dropped.

        Returns:
            The index of its first step within a complete pass.
        """
        self._per_step, self._remaining = batch * current_session().topology.size, self.steps(batch, False, drops)
        self._skipped = self._steps = (self.steps(batch, True, drops) - self.steps(batch, False, drops)
                                       if self.done else 0)
        return self._skipped

    def record_steps(self, steps: int) -> None:
        """Record the number of completed steps of this pass, including the skipped ones."""
        self._steps = steps

    def end(self) -> None:
        """End the pass."""
        self.passes, self.done = self.passes + 1, 0
        self.stop()

    def stop(self) -> None:
        """Stop counting steps of the current pass."""
        self._per_step = self._skipped = self._steps = self._remaining = 0

    @property
    def position(self) -> tuple[int, int]:
        """Number of complete passes, and of samples of the next one that all ranks together have trained on."""
        if activity.ends_epoch() and self._per_step:
            return self.passes + 1, 0
        completed = self._steps - self._skipped
        if self._per_step and completed >= self._remaining:
            return self.passes, self.count
        return self.passes, self.done + completed * self._per_step


class Accounts:
    """Accounts of all data that `hvd.shard` has assigned in this process."""

    def __init__(self) -> None:
        self._accounts: dict[str, Account] = {}
        self._restored: Positions = {}  # of the last restored commit, for accounts that are opened later

    def account(self, description: object, count: int, seed: int) -> Account:
        """Return the account of data; equal data have the same account.

        Args:
            description: The identity of the data, equal on all ranks and after a restart.
            seed: The seed of the order of each pass.
        """
        key = hashlib.sha256(repr((description, count, seed)).encode()).hexdigest()[:16]
        if key not in self._accounts:
            self._accounts[key] = Account(count, seed, *self._restored.get(key, (0, 0)))
        return self._accounts[key]

    def positions(self) -> Positions:
        """Return the position in each set of data, for a commit."""
        return {key: account.position for key, account in self._accounts.items()}

    def restore(self, positions: Positions) -> None:
        """Restore the positions of a commit; data without a position start from the beginning."""
        self._restored = dict(positions)
        for key, account in self._accounts.items():
            account.passes, account.done = positions.get(key, (0, 0))
            account.stop()


def accounts() -> Accounts:
    """Return the accounts of this process, which persist over the generations of an elastic job."""
    return this_process().part(Accounts)


def keeps_accounts() -> bool:
    """Return whether the membership of this job may change while it runs."""
    return is_initialized() and bool(current_session().settings.run_membership)


def rounded_marks(marks: Any) -> Any:
    """Return fingerprints without the last digits of their numbers, which differ between processors."""
    if isinstance(marks, list):
        return [rounded_marks(mark) for mark in marks]
    return f"{marks:.1e}" if isinstance(marks, float) else marks

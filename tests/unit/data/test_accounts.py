"""Accounts of the samples of a pass: whatever the ranks do, each sample is assigned once."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import AbstractContextManager

from hvkeras.backends.local import LocalBackend
from hvkeras.data.accounts import Account, Accounts
from hvkeras.host.topology import topology_from_hosts
from hvkeras.job.plans import EntryCounts
from hvkeras.job.session import Session

ROUNDS = 200


def as_rank(rank: int, size: int) -> AbstractContextManager[None]:
    return Session(LocalBackend(), EntryCounts(), topology_from_hosts(rank, ["host"] * size)).made_current()


def steps_of(account: Account, batch: int, size: int) -> list[list[int]]:
    """The samples of each step of all ranks, as `resharding.Arrays` and its dataset cut them."""
    found: list[list[int]] = []
    for rank in range(size):
        with as_rank(rank, size):
            done, usable, _, _ = account.share(all_of_them=True)
            left = account.steps(batch)
        mine = account.order(True)[done : done + usable][rank::size].tolist()
        found.extend([] for _ in range(left - len(found)))
        for step in range(left):
            found[step] += mine[step * batch : len(mine) if step + 1 == left else (step + 1) * batch]
    return found


def test_each_sample_is_dealt_once_however_ranks_change() -> None:
    chance = random.Random(3)
    for _ in range(ROUNDS):
        count, batch = chance.randint(60, 400), chance.randint(3, 9)
        account, seen, size = Account(count, seed=1), Counter[int](), chance.randint(1, 5)
        while account.passes == 0:
            steps = steps_of(account, batch, size)
            if not steps:  # fewer samples are left than there are ranks
                assert count - sum(seen.values()) < size
                break
            with as_rank(0, size):
                first = account.begin(batch)
            made = chance.randint(1, len(steps))
            for number in range(1, made + 1):
                seen.update(steps[number - 1])
                account.record_steps(first + number)
            account.passes, account.done = account.position  # a commit, and a change of ranks
            account.stop()
            if account.done == count:
                account.end()
                assert set(seen) == set(range(count))
            size = chance.randint(1, 5)
        assert max(seen.values()) == 1


def test_a_pass_goes_on_with_the_step_that_leaves_as_many_as_there_are() -> None:
    account = Account(160)
    with as_rank(0, 4):
        assert account.begin(4) == 0
    account.record_steps(3)
    assert account.position == (0, 48)
    account.passes, account.done = account.position
    with as_rank(0, 2):
        assert account.steps(4) == 14
        assert account.begin(4) == 20 - 14
    account.record_steps(20)
    assert account.position == (0, 160)
    account.end()
    assert account.position == (1, 0)


def test_positions_are_taken_by_accounts_that_are_opened_later() -> None:
    before, after = Accounts(), Accounts()
    first = before.account("data", 10, 0)
    first.passes, first.done = 2, 4
    after.restore(before.positions())
    again = after.account("data", 10, 0)
    assert (again.passes, again.done) == (2, 4)
    after.restore({})
    assert (again.passes, again.done) == (0, 0)

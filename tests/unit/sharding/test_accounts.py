"""Accounts of the samples of a pass: whatever the ranks do, each sample is dealt once."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace

import pytest

from hvkeras.sharding import accounts
from hvkeras.sharding.accounts import Account, Accounts

ROUNDS = 200


def ranks(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    job = SimpleNamespace(topology=SimpleNamespace(rank=rank, size=size))
    monkeypatch.setattr(accounts, "current_session", lambda: job)


def steps_of(account: Account, batch: int, monkeypatch: pytest.MonkeyPatch, size: int) -> list[list[int]]:
    """The samples of each step of all ranks, as `redealing.Arrays` and its dataset cut them."""
    found: list[list[int]] = []
    for rank in range(size):
        ranks(monkeypatch, rank, size)
        done, usable, _, _ = account.share(all_of_them=True)
        mine = account.order(True)[done : done + usable][rank::size].tolist()
        left = account.steps(batch)
        found.extend([] for _ in range(left - len(found)))
        for step in range(left):
            found[step] += mine[step * batch : len(mine) if step + 1 == left else (step + 1) * batch]
    return found


def test_each_sample_is_dealt_once_however_ranks_change(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(3)
    for _ in range(ROUNDS):
        count, batch = chance.randint(60, 400), chance.randint(3, 9)
        account, seen, size = Account(count, seed=1), Counter[int](), chance.randint(1, 5)
        while account.passes == 0:
            steps = steps_of(account, batch, monkeypatch, size)
            if not steps:  # fewer samples are left than there are ranks
                assert count - sum(seen.values()) < size
                break
            first = account.begin(batch)
            made = chance.randint(1, len(steps))
            for number in range(1, made + 1):
                seen.update(steps[number - 1])
                account.note(first + number)
            account.passes, account.done = account.position  # a commit, and a change of ranks
            account.stop()
            if account.done == count:
                account.end()
                assert set(seen) == set(range(count))
            size = chance.randint(1, 5)
        assert max(seen.values()) == 1


def test_a_pass_goes_on_with_the_step_that_leaves_as_many_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks(monkeypatch, 0, 4)
    account = Account(160)
    assert account.begin(4) == 0
    account.note(3)
    assert account.position == (0, 48)
    account.passes, account.done = account.position
    ranks(monkeypatch, 0, 2)
    assert account.steps(4) == 14
    assert account.begin(4) == 20 - 14
    account.note(20)
    assert account.position == (0, 160)
    account.end()
    assert account.position == (1, 0)


def test_positions_are_taken_by_accounts_that_are_opened_later(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks(monkeypatch, 0, 1)
    before, after = Accounts(), Accounts()
    first = before.account("data", 10, 0)
    first.passes, first.done = 2, 4
    after.restore(before.positions())
    again = after.account("data", 10, 0)
    assert (again.passes, again.done) == (2, 4)
    after.restore({})
    assert (again.passes, again.done) == (0, 0)

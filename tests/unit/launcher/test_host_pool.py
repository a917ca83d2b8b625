"""The hosts of an elastic job at each of its starts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hvkeras.errors import MachineError, UsageError
from hvkeras.launcher import host_pool
from hvkeras.launcher.host_pool import HostPool, discovered
from hvkeras.launcher.placement import HostRanks


class Clock:
    """A clock that sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(host_pool, "time", made)
    return made


def sizes(hosts: list[HostRanks]) -> dict[str, int]:
    return {host.name: len(host.ranks) for host in hosts}


def silent(_text: str) -> None:
    pass


@pytest.mark.parametrize(("slots", "most", "placed"), [
    ({"a": 2, "b": 2}, 4, {"a": 2, "b": 2}), ({"a": 2, "b": 2}, 3, {"a": 2, "b": 1}),
    ({"a": 8}, None, {"a": 8}), ({"a": 2}, 9, {"a": 2}), ({"a": 1, "localhost": 2}, 9, {"localhost": 2, "a": 1}),
])
def test_there_are_as_many_ranks_as_slots_up_to_the_limit(slots: dict[str, int], most: int | None,
                                                          placed: dict[str, int]) -> None:
    found = HostPool(lambda: slots, 2, most, 10).restart(silent)
    assert sizes(found) == placed
    assert list(sizes(found)) == list(placed)
    assert [rank for host in found for rank in host.ranks] == list(range(sum(placed.values())))


def failing_times(times: int) -> Callable[[], dict[str, int]]:
    left = [times]

    def find() -> dict[str, int]:
        left[0] -= 1
        if left[0] >= 0:
            raise MachineError("no answer")
        return {"a": 2}

    return find


def test_slots_are_waited_for_and_a_script_may_fail_meanwhile(clock: Clock) -> None:
    said: list[str] = []
    pool = HostPool(failing_times(5), 2, 4, 60, changes=True)
    assert sizes(pool.restart(said.append)) == {"a": 2}
    assert clock.now == 5
    found = "at least 2 are needed and 0 are available (no answer)"
    assert said == [f"hvkeras run: waiting for slots, 3 s of 60 s: {found}"]
    with pytest.raises(MachineError, match="no answer"):
        HostPool(failing_times(1), 2, 4, 60, changes=True).hosts(2, silent)


def test_a_deadline_ends_the_wait_and_there_is_none_for_hosts_that_stay_the_same(clock: Clock) -> None:
    with pytest.raises(MachineError, match=r"2 are needed and 1 is available after 60 s\. Received: slots={'a': 1}"):
        HostPool(lambda: {"a": 1}, 2, 4, 60, changes=True).restart(silent)
    assert clock.now == 60
    with pytest.raises(MachineError, match=r"at least 2 are needed and 1 is available\. Received"):
        HostPool(lambda: {"a": 1}, 2, 4, 60).restart(silent)
    assert clock.now == 60


def test_hosts_are_set_aside_and_taken_back(clock: Clock) -> None:
    pool = HostPool(lambda: {"localhost": 1, "a": 2, "b": 2}, 1, 9, 60, cooldown=(10, 15))
    assert pool.note_failure("a", lost=False) == ""
    assert pool.note_failure("b", lost=False) == ""  # another one in between
    assert pool.note_failure("a", lost=False) == ""
    assert pool.note_failure("a", lost=False) == (
        "hvkeras run: sets a aside, where ranks have failed 2 times in a row, for 10 s")
    assert sizes(pool.restart(silent)) == {"localhost": 1, "b": 2}
    clock.now = 10
    assert sizes(pool.restart(silent)) == {"localhost": 1, "a": 2, "b": 2}
    assert pool.note_failure("a", lost=True) == "hvkeras run: sets a aside, which was lost, for 15 s"
    clock.now = 24
    assert sizes(pool.restart(silent)) == {"localhost": 1, "b": 2}
    assert [pool.note_failure("localhost", lost=False) for _ in range(3)] == [""] * 3
    assert pool.note_failure("", lost=False) == ""


def test_a_host_stays_aside_without_a_cool_down(clock: Clock) -> None:
    pool = HostPool(lambda: {"a": 2, "b": 2}, 3, 4, 60)
    assert pool.note_failure("a", lost=True) == "hvkeras run: sets a aside, which was lost, for the rest of the job"
    with pytest.raises(MachineError, match=r"at least 3 are needed and 2 are available; set aside: a\. Received"):
        pool.restart(silent)
    clock.now = 1e9
    with pytest.raises(MachineError, match="set aside: a"):
        pool.restart(silent)


def test_the_first_failure_can_set_a_host_aside() -> None:
    pool = HostPool(lambda: {"a": 2, "b": 2}, 1, 4, 60, failures=1)
    assert pool.note_failure("a", lost=False) == (
        "hvkeras run: sets a aside, where a rank has failed, for the rest of the job")
    assert pool.usable() == {"b": 2}


def test_a_script_prints_hosts_with_and_without_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    assert discovered("printf 'a:3\\n\\nb\\na\\nc:0\\n[fd00::1]:2\\n'", 4) == {"a": 7, "b": 4, "fd00::1": 2}
    with pytest.raises(UsageError, match="Received: line='a b'"):
        discovered("echo a b", 1)
    with pytest.raises(MachineError, match=r"must succeed \(not today\)\. Received: .* exit_code=3"):
        discovered("echo no; echo not today >&2; exit 3", 1)
    monkeypatch.setattr(host_pool, "SCRIPT_SECONDS", 0.2)
    with pytest.raises(MachineError, match=r"must end within 0\.2 s"):
        discovered("exec sleep 5", 1)

"""The driver of elastic jobs: every event in every phase, and what follows from series of them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from hvkeras.launcher.elastic_driver import (
    HANDLERS,
    Abort,
    Action,
    Announce,
    Driver,
    Event,
    Finish,
    Form,
    Kill,
    Phase,
    StartWorkers,
    Worker,
)

A, C, F, T = Phase.FORMING, Phase.CHANGING, Phase.FORMING, Phase.TRAINING
G, W, E = Phase.GATHERING, Phase.WAITING, Phase.ENDED


def driver(count: int = 3, least: int = 2, most: int | None = 4, slots: Mapping[str, int] | None = None,
           resets: int = 3) -> Driver:
    """A driver whose first workers have all joined; 4 slots on one host."""
    made = Driver(least, most, slots or {"a": 4}, resets)
    for number in range(count):
        made.add(Worker(number, "a", rank=number))
    for number in range(count):
        made.handle(Event.JOINED, number)
    taken(made)
    return made


def taken(driver: Driver) -> list[Action]:
    """Takes the actions, and carries out the starts."""
    actions, driver.actions = driver.actions, []
    for action in actions:
        if isinstance(action, StartWorkers):
            for host, count in action.counts.items():
                for _ in range(count):
                    driver.add(Worker(max([9, *driver.workers]) + 1, host))
    return actions


def ready(driver: Driver, number: int, commit: int) -> list[Action]:
    driver.workers[number].commit = commit
    driver.handle(Event.READY, number)
    return taken(driver)


def happens(driver: Driver, event: Event, number: int | None = None) -> list[Action]:
    driver.handle(event, number)
    return taken(driver)


def formed(actions: list[Action]) -> list[int]:
    (action,) = [action for action in actions if isinstance(action, Form)]
    assert [worker.rank for worker in action.workers] == list(range(len(action.workers)))
    return [worker.number for worker in action.workers]


def at(phase: Phase) -> Driver:
    """A driver in a phase; 10 is a newcomer, and 0 a member, which is ready where the generation is over."""
    made = driver()
    if phase is C:
        ready(made, 10, -1)
    elif phase in (G, A):
        happens(made, Event.LOST, 2)
        ready(made, 0, 5)
        if phase is A:
            ready(made, 1, 5)
    elif phase is W:
        happens(made, Event.LOST, 2)
        happens(made, Event.LOST, 1)
        ready(made, 0, 5)
    elif phase is E:
        for number in range(3):
            happens(made, Event.DONE, number)
    assert made.phase is phase
    return made


# For each phase and event: the worker that it happens to, the next phase, and the kinds of actions.
TABLE = {
    (F, Event.READY): (10, F, []), (F, Event.JOINED): (0, F, []), (F, Event.LOST): (1, G, [Abort]),
    (F, Event.DONE): (1, F, []), (F, Event.HOSTS): (-1, F, []), (F, Event.LATE): (1, F, [Kill]),
    (F, Event.TIMEOUT): (-1, F, []),
    (T, Event.READY): (10, C, [Announce]), (T, Event.JOINED): (0, T, []), (T, Event.LOST): (1, G, [Abort]),
    (T, Event.DONE): (1, T, []), (T, Event.HOSTS): (-1, T, []), (T, Event.LATE): (1, T, []),
    (T, Event.TIMEOUT): (-1, T, []),
    (C, Event.READY): (0, G, []), (C, Event.JOINED): (0, C, []), (C, Event.LOST): (1, G, [Abort]),
    (C, Event.DONE): (1, C, []), (C, Event.HOSTS): (-1, C, []), (C, Event.LATE): (1, C, []),
    (C, Event.TIMEOUT): (-1, C, []),
    (G, Event.READY): (1, F, [Form, StartWorkers]), (G, Event.JOINED): (0, G, []),
    (G, Event.LOST): (1, W, [StartWorkers]), (G, Event.DONE): (1, W, [StartWorkers]),
    (G, Event.HOSTS): (-1, G, [StartWorkers]), (G, Event.LATE): (1, G, [Kill]), (G, Event.TIMEOUT): (-1, G, []),
    (W, Event.READY): (10, F, [Form]), (W, Event.JOINED): (0, W, []), (W, Event.LOST): (10, W, [StartWorkers]),
    (W, Event.DONE): (10, W, [StartWorkers]), (W, Event.HOSTS): (-1, W, []), (W, Event.LATE): (1, W, []),
    (W, Event.TIMEOUT): (-1, E, [Finish]),
    **{(E, event): (10, E, []) for event in Event},
}


def test_the_table_is_complete() -> None:
    assert set(TABLE) == set(HANDLERS) == {(phase, event) for phase in Phase for event in Event}


@pytest.mark.parametrize(("phase", "event"), list(TABLE), ids=lambda each: each.name.lower())
def test_every_event_in_every_phase(phase: Phase, event: Event) -> None:
    number, following, kinds = TABLE[phase, event]
    made = at(phase)
    if number in made.workers and event is Event.READY:
        made.workers[number].commit = 5 if made.workers[number].rank is not None else -1
    actions = happens(made, event, number)
    assert made.phase is following
    assert [type(action) for action in actions] == kinds


def test_survivors_go_on_at_once_and_a_newcomer_joins_at_the_next_commit() -> None:
    made = driver()
    assert happens(made, Event.LOST, 0) == [Abort()]
    assert ready(made, 2, 7) == []
    actions = ready(made, 1, 8)
    assert formed(actions) == [1, 2]  # the newest commit is that of rank 0
    assert [action.commit for action in actions if isinstance(action, Form)] == [8]
    happens(made, Event.JOINED, 1)
    happens(made, Event.JOINED, 2)
    assert made.phase is T
    assert ready(made, 10, -1) == [Announce()]
    assert ready(made, 1, 9) == []
    assert formed(ready(made, 2, 9)) == [1, 2, 10]
    assert made.phase is F
    assert [worker.number for worker in made.members] == [1, 2, 10]


def test_rank_0_stays_on_the_launchers_host() -> None:
    made = driver(slots={"a": 2, "b": 2})
    made.workers[1].is_local = False
    happens(made, Event.LOST, 0)
    ready(made, 1, 7)
    assert formed(ready(made, 2, 7)) == [2, 1]


def test_failures_are_limited() -> None:
    made = driver(resets=0)
    (action,) = happens(made, Event.LOST, 0)
    assert isinstance(action, Finish)
    assert "--reset-limit" in action.reason


def test_changes_are_limited_as_in_horovod() -> None:
    made = driver(resets=2)
    made.counts_changes = True
    happens(made, Event.LOST, 2)
    ready(made, 0, 7)
    assert formed(ready(made, 1, 7)) == [0, 1]
    happens(made, Event.JOINED, 0)
    happens(made, Event.JOINED, 1)
    ready(made, 10, -1)
    ready(made, 0, 8)
    assert formed(ready(made, 1, 8)) == [0, 1, 10]  # as many ranks as before the loss: not another change
    for number in (0, 1, 10):
        happens(made, Event.JOINED, number)
    ready(made, 11, -1)
    for number in (0, 1):
        ready(made, number, 9)
    assert formed(ready(made, 10, 9)) == [0, 1, 10, 11]  # a growth
    for number in (0, 1, 10, 11):
        happens(made, Event.JOINED, number)
    made.slots = {"a": 3}
    happens(made, Event.HOSTS)
    for number in (0, 1, 10):
        assert ready(made, number, 10) == []
    (action,) = ready(made, 11, 10)
    assert isinstance(action, Finish)
    assert "--reset-limit" in action.reason


def test_a_job_without_survivors_cannot_go_on() -> None:
    made = driver()
    for number in range(3):
        actions = happens(made, Event.LOST, number)
    assert made.phase is E
    assert [type(action) for action in actions] == [Finish]


def test_workers_of_a_removed_host_leave_at_the_next_commit() -> None:
    made = Driver(1, 4, {"a": 1, "b": 2}, 3)
    for number, host in enumerate("abb"):
        made.add(Worker(number, host, host == "a", rank=number))
    for number in range(3):
        made.handle(Event.JOINED, number)
    taken(made)
    made.slots = {"a": 1}
    assert happens(made, Event.HOSTS) == [Announce()]
    assert made.leaving == {1, 2}
    ready(made, 0, 3)
    ready(made, 1, 3)
    actions = ready(made, 2, 3)
    assert actions[0] == Kill((1, 2))
    assert formed(actions) == [0]


def test_a_worker_that_leaves_is_replaced_elsewhere_alone() -> None:
    made = driver(slots={"a": 4})
    made.workers[0].is_leaving = True
    made.slots = {"a": 3}
    assert happens(made, Event.HOSTS) == [Announce()]
    ready(made, 0, 3)
    ready(made, 1, 3)
    actions = ready(made, 2, 3)
    assert actions[0] == Kill((0,))
    assert formed(actions) == [1, 2]


def test_newcomers_that_fail_again_and_again_are_not_started_for_ever() -> None:
    made = driver()
    for _ in range(9):
        number = max(made.workers)
        if number < 10:
            break
        happens(made, Event.LOST, number)
    assert sorted(made.workers) == [0, 1, 2]
    assert made.phase is T


def test_too_few_with_nobody_to_come_end_the_job() -> None:
    made = at(W)
    for number in [number for number in made.workers if number >= 10]:
        happens(made, Event.LOST, number)
    for _ in range(9):
        for number in [number for number in made.workers if number >= 10]:
            actions = happens(made, Event.LOST, number)
    assert made.phase is E
    assert isinstance(actions[-1], Finish)
    assert "failed" in actions[-1].reason


def test_there_are_no_more_ranks_than_the_most() -> None:
    made = driver(count=2, most=2)
    assert sorted(made.workers) == [0, 1]
    happens(made, Event.LOST, 1)
    ready(made, 0, 1)
    assert made.phase is W
    assert sorted(made.workers) == [0, 10]
    assert formed(ready(made, 10, -1)) == [0, 10]


def test_slots_that_come_back_let_those_go_on_that_wait() -> None:
    made = driver(count=2, least=1)
    made.slots = {}  # the script has found nothing for a moment
    assert Announce() in happens(made, Event.HOSTS)
    ready(made, 0, 3)
    ready(made, 1, 3)
    assert made.phase is W
    made.slots = {"a": 1}
    actions = happens(made, Event.HOSTS)
    assert actions[0] == Kill((1,))
    assert formed(actions) == [0]


def test_a_newcomer_takes_the_slot_of_a_lost_worker() -> None:
    made = driver(3, slots={"a": 3, "b": 2})
    happens(made, Event.LOST, 1)
    made.add(Worker(30, "a"))
    made.add(Worker(31, "b"))
    assert {number: made.workers[number].slot for number in (0, 2, 30)} == {0: 0, 2: 2, 30: 1}
    assert sorted(worker.slot for worker in made.workers.values() if worker.host == "b") == [0, 1]

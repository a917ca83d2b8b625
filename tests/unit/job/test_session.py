"""A session of this process: made without a job, it is what public functions ask, and it closes what it holds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import hvkeras as hvd
from hvkeras.backends.local import LocalBackend
from hvkeras.errors import NotInitializedError, UsageError
from hvkeras.host.topology import topology_from_hosts
from hvkeras.job.plans import EntryCounts
from hvkeras.job.session import Session, current_session


class FakeBackend(LocalBackend):
    """Remembers its process sets, and that it was stopped."""

    def __init__(self) -> None:
        self.sets: list[tuple[int, ...]] = []
        self.stopped = False

    def add_process_set(self, ranks: object) -> None:
        self.sets.append(tuple(ranks))  # type: ignore[arg-type]

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def session() -> Iterator[Session]:
    made = Session(FakeBackend(), EntryCounts(), topology_from_hosts(1, ["a", "a", "b"]))
    with made.made_current():
        yield made


def test_public_functions_ask_the_present_session(session: Session) -> None:
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_size()) == (1, 3, 1, 2, 1)
    assert current_session() is session


class Part:
    closed: list[int] = []  # noqa: RUF012 - counts for all

    def __init__(self, session: Session) -> None:
        self.number = session.number

    def close(self) -> None:
        self.closed.append(self.number)


def test_a_part_is_made_once_and_closed_with_its_session() -> None:
    first, second = (Session(FakeBackend(), EntryCounts()) for _ in range(2))
    with first.made_current(), second.made_current():
        assert first.part(Part) is first.part(Part) is not second.part(Part)
    assert Part.closed == [second.number, first.number]
    assert first.backend.stopped  # type: ignore[attr-defined]
    with pytest.raises(NotInitializedError):
        current_session()


def test_process_sets_belong_to_their_session(session: Session) -> None:
    half = hvd.add_process_set([0, 1])
    assert session.backend.sets == [(0, 1)]  # type: ignore[attr-defined]
    assert (half.process_set_id, half.rank(), half.size()) == (1, 1, 2)
    with pytest.raises(UsageError, match="only once"):
        hvd.add_process_set([1, 0])
    session.close()
    assert half.process_set_id is None

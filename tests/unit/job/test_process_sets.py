"""Process sets in one process: what they are, and what they refuse."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

import hvkeras as hvd


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "warning")  # init() would set it for the rest of the process
    hvd.init("local")
    yield
    hvd.shutdown()


def test_the_global_set_is_the_job() -> None:
    everyone = hvd.global_process_set
    assert (everyone.process_set_id, everyone.ranks, everyone.size(), everyone.rank()) == (0, [0], 1, 0)
    assert everyone.included()
    assert copy.deepcopy(everyone) is everyone
    assert pickle.loads(pickle.dumps(everyone)) is everyone


@pytest.mark.parametrize("ranks", [[], [0, 0], ["one"], "01", [0.5], 3, None])
def test_sets_are_made_of_ranks(ranks: Any) -> None:
    with pytest.raises(hvd.UsageError, match="process set"):
        hvd.ProcessSet(ranks)


@pytest.mark.check
def test_sets_are_printed_as_horovods_are() -> None:
    one, everyone = hvd.add_process_set([0]), hvd.global_process_set
    texts = [f"ProcessSet(process_set_id={number}, ranks=[0], mpi_comm=None)" for number in (1, 0)]
    assert [str(one), str(everyone)] == [repr(one), repr(everyone)] == texts
    hvd.remove_process_set(one)
    assert str(one) == "ProcessSet(process_set_id=None, ranks=[0], mpi_comm=None)"
    hvd.shutdown()
    assert str(everyone) == "ProcessSet(process_set_id=0, ranks=[], mpi_comm=None)"
    assert everyone.ranks == []


def test_ranks_must_exist() -> None:
    with pytest.raises(hvd.UsageError, match=r"unknown=\[1\]"):
        hvd.add_process_set([0, 1])


def test_the_same_ranks_are_registered_once() -> None:
    first = hvd.add_process_set([0])
    assert first.process_set_id == 1
    with pytest.raises(hvd.UsageError, match="registered only once"):
        hvd.add_process_set(hvd.ProcessSet([0]))
    with pytest.raises(hvd.UsageError, match="registered only once"):
        hvd.add_process_set(hvd.global_process_set)
    assert copy.deepcopy(first) is first
    assert hvd.remove_process_set(first)
    assert not hvd.remove_process_set(first)
    assert not hvd.remove_process_set(hvd.global_process_set)


def test_sets_serve_only_once_registered_and_until_shutdown() -> None:
    alone = hvd.ProcessSet([0])
    assert (alone.included(), alone.rank(), alone.size()) == (True, None, None)
    with pytest.raises(hvd.UsageError, match=r"call hvd.add_process_set"):
        hvd.allreduce(1.0, process_set=alone)
    hvd.add_process_set(alone)
    assert (alone.included(), alone.rank(), alone.size()) == (True, 0, 1)
    hvd.shutdown()
    hvd.init("local")
    assert alone.process_set_id is None
    assert alone.size() is None
    with pytest.raises(hvd.UsageError, match=r"call hvd.add_process_set"):
        alone.members()

"""What ranks tell each other before their engine starts."""

from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from hvkeras.control import rendezvous
from hvkeras.control.client import ControlClient
from hvkeras.control.connection import Introduction
from hvkeras.control.launch_environments import Launch
from hvkeras.control.server import ControlServer
from hvkeras.errors import MachineError, PeerError
from hvkeras.job.session_start import check_versions, exchange_facts, settings_of_rank_0
from hvkeras.settings import Settings

VERSIONS = {"Python": "3.11.7", "hvkeras": "0.1.0", "TensorFlow": "2.21.0", "Keras": "3.12.0"}


def check(*changes: dict[str, str], rank: int = 0) -> None:
    facts = [{"host": f"node{index}", "versions": VERSIONS | change} for index, change in enumerate(({}, *changes))]
    check_versions(Launch("none", rank, len(facts)), Settings({}), facts)


@pytest.mark.parametrize("change", [{"hvkeras": "0.0.9"}, {"Python": "3.10.4"}])
def test_versions_that_must_not_differ_are_named_with_their_hosts(change: dict[str, str]) -> None:
    with pytest.raises(MachineError, match=rf"same versions of Python.*rank_0_on_node0=.*rank_2_on_node2=.*"
                                           rf"{next(iter(change.values()))[:4]}"):
        check({}, change)


def test_other_versions_that_differ_are_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    check({"TensorFlow": "2.16.2", "Python": "3.11.9"}, {"TensorFlow": "2.16.2"})
    assert capsys.readouterr().err == ("hvkeras: versions differ between rank 0 on node0 and rank 1 on node1: Python"
                                       " 3.11.7 and 3.11.9, TensorFlow 2.21.0 and 2.16.2\n")
    check({"TensorFlow": "2.16.2"}, rank=1)
    check({})
    assert not capsys.readouterr().err


def test_settings_of_the_job_are_those_of_rank_0(capsys: pytest.CaptureFixture[str]) -> None:
    mine = [Settings({}), Settings({"HVKERAS_GUARD": "off", "HVKERAS_LOG_LEVEL": "ERROR"})]
    facts = [{"settings": settings.shared()} for settings in mine]
    found = [settings_of_rank_0(Launch("none", rank, 2), settings, facts) for rank, settings in enumerate(mine)]
    assert [(settings.guard, settings.log_level) for settings in found] == [(True, "WARNING"), (True, "ERROR")]
    assert capsys.readouterr().err == ("hvkeras: HVKERAS_GUARD is on on rank 0, off on rank 1; all ranks use"
                                       " the value of rank 0\n")


def test_missing_ranks_are_told_in_one_short_line(capsys: pytest.CaptureFixture[str],
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "FIRST_REPORT", 0.0)
    addresses = tuple(f"node{rank}:2222" for rank in range(1000))
    launch = Launch("TF_CONFIG", size=1000, cluster=addresses, tasks=tuple(f"worker {rank}" for rank in range(1000)))
    eight = ", ".join(f"worker {rank} (node{rank}:2222)" for rank in range(1, 9))
    settings = Settings({"HVKERAS_START_TIMEOUT": "1.5"})
    server = ControlServer(1000, b"s" * 32)
    server.start()
    client = ControlClient(socket.create_connection(server.address), b"s" * 32, Introduction(0, 1000, "node0"), 5.0,
                           lambda _: None)
    try:
        with pytest.raises(PeerError) as told:
            exchange_facts(client, launch, settings, 1, {})
        assert f"within 1.5 s, but {eight} and 991 more did not" in str(told.value)
        assert capsys.readouterr().err == f"hvkeras: waiting for {eight} and 991 more, 1 s of 1.5 s\n"
        with pytest.raises(PeerError, match="but ranks 1"):
            exchange_facts(client, replace(launch, cluster=(), tasks=()), settings, 2, {})
        assert capsys.readouterr().err.startswith("hvkeras: waiting for ranks 1")
    finally:
        client.close()
        server.stop()


def test_reports_of_a_wait_become_rarer() -> None:
    reports = rendezvous.WaitReports()
    assert [second for second in range(120) if reports.is_due(second)] == [3, 9, 21, 45, 75, 105]

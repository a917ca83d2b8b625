"""What ranks tell each other before their engine starts."""

from __future__ import annotations

import pytest

from hvkeras.errors import MachineError
from hvkeras.job.session_start import check_versions, settings_of_rank_0
from hvkeras.launch_environments import Launch
from hvkeras.settings import Settings

VERSIONS = {"Python": "3.11.7", "hvkeras": "0.1.0", "TensorFlow": "2.21.0", "Keras": "3.12.0"}


def check(*changes: dict[str, str], rank: int = 0) -> None:
    facts = [{"host": f"node{place}", "versions": VERSIONS | change} for place, change in enumerate(({}, *changes))]
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
    assert capsys.readouterr().err == ("hvkeras: HVKERAS_GUARD is on on rank 0, off on rank 1; that of rank 0 counts"
                                       " on all ranks\n")

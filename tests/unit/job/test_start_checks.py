"""The checks of what ranks tell each other before their engine starts."""

from __future__ import annotations

import pytest

from hvkeras.errors import MachineError
from hvkeras.job.start_checks import check_versions
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

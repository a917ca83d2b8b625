"""What `hvkeras doctor` finds in the facts that its probe brings; `tests/launch/test_doctor` runs the probe itself."""

from __future__ import annotations

from typing import Any

import pytest

from hvkeras.diagnostics.doctor import software
from hvkeras.diagnostics.doctor.machine import NOTE, OK, PROBLEM, CheckResult
from hvkeras.diagnostics.doctor.software import findings

WELL: dict[str, Any] = {"tensorflow": {"version": "2.21.0", "gpus": [], "cuda": ""},
                        "keras": {"name": "keras", "version": "3.12.0", "backend": "tensorflow"}, "native": {"xla": ""}}


def found(facts: dict[str, Any], environ: dict[str, str] | None = None) -> dict[str, CheckResult]:
    return {finding.check: finding for finding in findings(WELL | facts, environ or {})}


def test_a_wrong_setting_is_a_problem_with_its_fix() -> None:
    settings = found({}, {"HVKERAS_BACKENDS": "native"})["settings"]
    assert (settings.state, settings.fix) == (PROBLEM, "did you mean HVKERAS_BACKEND.")
    assert found({}, {"HVKERAS_BACKEND": "native"})["settings"].state == OK


def test_a_name_in_tf_config_without_an_address_is_a_problem() -> None:
    text = '{"cluster": {"worker": ["localhost:2345", "%s:2345"]}, "task": {"type": "worker", "index": 0}}'
    launch = found({}, {"TF_CONFIG": text % "nowhere.invalid"})["launch environment"]
    assert launch.state == PROBLEM
    assert launch.found == "rank 0 of 2, launched by TF_CONFIG: no address here for nowhere.invalid"
    assert launch.fix.startswith("correct TF_CONFIG, or add the hosts to DNS")
    assert found({}, {"TF_CONFIG": text % "127.0.0.1"})["launch environment"].state == OK


@pytest.mark.parametrize(("part", "check", "state", "text"), [
    ("tensorflow", "TensorFlow", PROBLEM, "it cannot be imported (no room)"),
    ("keras", "Keras", PROBLEM, "tf.keras cannot be imported (no room)"),
    ("native", "backend native", PROBLEM, "no room"),
])
def test_what_cannot_be_imported_is_named(part: str, check: str, state: str, text: str) -> None:
    finding = found({part: {"error": "no room"}})[check]
    assert (finding.state, finding.found) == (state, text)
    assert finding.fix


def test_what_is_well_is_said_to_be() -> None:
    for check in ("TensorFlow", "Keras", "backend native"):
        assert found({})[check].state == OK


@pytest.mark.parametrize(("known", "text"), [
    ({"error": "no room"}, "a step cannot be divided (no room)"),
    ({"lacks": ["call_flat"]}, "this TensorFlow lacks call_flat"),
    ({"lacks": [], "differs": True}, "a step that two ranks divide differs from that of one process"),
])
def test_a_step_that_cannot_be_divided_is_noted(known: dict[str, Any], text: str) -> None:
    finding = found({"data parallel": known})["--data-parallel"]
    assert (finding.state, finding.found) == (NOTE, text)
    assert "write the lines of hvkeras" in finding.fix


def test_a_version_outside_of_the_tested_ones_is_noted() -> None:
    finding = found({"tensorflow": WELL["tensorflow"] | {"version": "2.15.1"}})["TensorFlow"]
    assert finding.state == NOTE
    assert "tested with 2.16 to 2.21" in finding.found


@pytest.mark.parametrize("nccl", [False, True])
def test_a_horovod_without_nccl_is_noted_where_there_are_gpus(nccl: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "version_of", lambda package: "0.28.1")
    known = {"tensorflow": {"version": "2.21.0", "gpus": ["/physical_device:GPU:0"] * 2, "cuda": "12.5.1"},
             "horovod": {"mpi": True, "gloo": True, "nccl": nccl}}
    gpus = found(known)["GPUs"]
    assert gpus.state == (OK if nccl else NOTE)
    assert gpus.found.startswith("TensorFlow (CUDA 12.5.1) sees 2")
    assert gpus.fix.rstrip(".") == ("" if nccl else "run hvkeras build-horovod --with-mpi --cuda")

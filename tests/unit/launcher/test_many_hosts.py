"""Jobs on many hosts, which an `ssh` that runs its command here reaches, or not."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from harness.launchers import clean_environment
from hvkeras.errors import MachineError
from hvkeras.host.ssh import Ssh
from hvkeras.launcher import launcher as launcher_run
from hvkeras.launcher import restarts
from hvkeras.launcher.job_spec import JobSpec
from hvkeras.launcher.placement import fill
from hvkeras.launcher.printer import Printer

SSH = """#!/bin/sh
for word; do host=$command; command=$word; done
case $host in
refuses*) echo "Permission denied on $host" >&2; exit 255;;
silent*) exec sleep 1000;;
late*) while [ ! -e {folder}/go ]; do sleep 0.05; done;;
esac
touch {folder}/starting/$host
ls {folder}/starting | wc -l >> {folder}/counts
sleep 0.2
rm {folder}/starting/$host
exec sh -c "$command"
"""


class Screen(io.BytesIO):
    """A screen that creates a file as soon as it shows a text."""

    def __init__(self, text: str, file: Path) -> None:
        super().__init__()
        self._text, self._file = text.encode(), file

    def write(self, data) -> int:
        if self._text in bytes(data):
            self._file.touch()
        return super().write(data)


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs `true` on hosts; returns the exit code and the lines of the launcher."""
    (tmp_path / "starting").mkdir()
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(SSH.format(folder=tmp_path))
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ssh.parent}:/usr/bin:/bin")

    def run(hosts: list[str], screen: io.BytesIO | None = None) -> tuple[int, list[str]]:
        screen = screen or io.BytesIO()
        environment = {**clean_environment(tmp_path), "HVKERAS_NETWORK_INTERFACES": "lo"}
        job = JobSpec([sys.executable, "-c", ""], fill(dict.fromkeys(hosts, 1), len(hosts)), str(tmp_path), environment,
                      ssh=Ssh(timeout=3600.0), tf_config=True)
        code = restarts.run(job, lambda again, size: Printer(size, io.BytesIO(), screen))
        return code, screen.getvalue().decode().splitlines()

    return run


def test_a_few_hosts_are_started_at_a_time(launch, tmp_path, monkeypatch):
    monkeypatch.setattr(launcher_run, "MAX_CONCURRENT_STARTS", 3)
    assert launch([f"node{number}" for number in range(10)]) == (0, [])
    counts = [int(line) for line in (tmp_path / "counts").read_text().split()]
    assert len(counts) == 10
    assert max(counts) <= 3


def test_late_hosts_are_named_in_one_line(launch, tmp_path, monkeypatch):
    monkeypatch.setattr(launcher_run, "LATE_REPORT_INTERVAL", 0.2)
    late = [f"late{number:02}" for number in range(10)]
    line = f"hvkeras run: waiting for 10 of 11 hosts: {', '.join(late[:8])} and 2 more"
    code, lines = launch([*late, "node"], Screen(line, tmp_path / "go"))
    assert code == 0
    assert line in lines


def test_hosts_that_cannot_be_reached_are_told_together(launch, monkeypatch):
    monkeypatch.setattr(launcher_run, "FAILURE_WINDOW", 600.0)  # it ends once all have answered or failed
    with pytest.raises(MachineError) as told:
        launch(["node", *(f"refuses{number}" for number in range(10))])
    first, *rest = str(told.value).splitlines()
    assert first == (
        "Every host must answer over ssh without a password, and have Python at the same path (Permission denied on"
        f" refuses0). Received: host='refuses0'. HINT: try: ssh -o BatchMode=yes refuses0 {sys.executable} --version.")
    assert rest == ["10 of 11 hosts cannot be used:",
                    *(f"  refuses{number}: Permission denied on refuses{number}" for number in range(8)),
                    "  and 2 more"]


def test_a_host_that_cannot_be_reached_is_told_without_waiting_for_others(launch, monkeypatch):
    monkeypatch.setattr(launcher_run, "FAILURE_WINDOW", 0.1)
    with pytest.raises(MachineError) as told:
        launch(["silent", "refuses"])
    assert str(told.value).endswith(f"HINT: try: ssh -o BatchMode=yes refuses {sys.executable} --version.")

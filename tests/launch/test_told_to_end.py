"""SIGTERM from schedulers and spot instances: training saves at the next step, and resumes from there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.launchers import BIN, clean_environment
from launch.hvkeras_run import run, warm_ranks

WORKER = Path(__file__).parent / "workers" / "told_to_end.py"
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "2"]
ONE_RANK = r"rank \d on \S+ \(pid \d+\) received SIGTERM"
ELASTIC = ["--min-np", "1"]


def ended_and_resumed(launcher: list[str], kind: str, who: str, folder: Path) -> tuple[str, str]:
    """Run the worker twice, and return the standard error of both runs."""
    (folder / "tmp").mkdir()
    env = {"HVKERAS_ELASTIC_DIR": "kept"} if kind == "commits" else {}
    worker, errors = [sys.executable, str(WORKER), kind, who], []
    for _ in range(2):
        if launcher and launcher[0] == "run":
            done = run([*launcher[1:], *(warm_ranks(worker, env) if who.isdigit() else worker)], folder, env)
        else:
            done = subprocess.run([*launcher, *worker], cwd=folder, text=True, capture_output=True, timeout=100,
                                  check=False, env={**clean_environment(folder / "tmp"), **env})
        errors.append(done.stderr)
        if not errors[1:]:
            assert "not ended" not in done.stdout
            assert done.returncode, done.stderr
            if launcher and launcher[0] == "run":
                assert done.returncode == 143
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("same: True") == (int(launcher[launcher.index("-np") + 1]) if launcher else 1)
    return errors[0], errors[1]


@pytest.mark.parametrize(("launcher", "kind", "who", "why"), [
    (["run", "-np", "2"], "backup", "1", ONE_RANK),
    pytest.param(["run", "-np", "2"], "commits", "hvkeras", "the launcher received SIGTERM", marks=pytest.mark.slow),
    pytest.param(["run", "-np", "2"], "backup", "-I -S -c", r"the agent on \S+ received SIGTERM",
                 marks=pytest.mark.nightly),
    pytest.param(MPIRUN, "backup", "mpirun", ONE_RANK, marks=pytest.mark.nightly),
    pytest.param([str(BIN / "horovodrun"), "-np", "2"], "backup", "horovodrun", ONE_RANK, marks=pytest.mark.nightly),
    pytest.param(["run", "-np", "1"], "backup", "hvkeras", "received SIGTERM", marks=pytest.mark.nightly),
    pytest.param([], "backup", "0", "received SIGTERM", marks=pytest.mark.nightly),
], ids=["rank", "launcher", "agent", "mpirun", "horovodrun", "launcher of one", "one process"])
def test_all_ranks_save_at_the_same_step(launcher: list[str], kind: str, who: str, why: str, tmp_path: Path) -> None:
    first, second = ended_and_resumed(launcher, kind, who, tmp_path)
    saved = r"training was saved in kept after (.*)" if kind == "backup" else "the state was saved as commit (1)"
    found = re.search(f"{why}; {saved}", first)
    assert found, first
    if kind == "backup":
        step, epoch = re.findall(r"\d+", found[1])
        assert f"training resumes with epoch {epoch} after step {step}, from" in second, second


@pytest.mark.slow
def test_an_elastic_job_is_on_disk_before_its_launcher_ends(tmp_path: Path) -> None:
    first, _ = ended_and_resumed(["run", "-np", "2", *ELASTIC], "commits", "hvkeras", tmp_path)
    assert "received SIGTERM: the ranks commit at the next step, and the job ends, within 25 s" in first
    assert first.splitlines()[-1] == "hvkeras run: the launcher received SIGTERM; all ranks have committed"

"""The commands that the README shows for each launcher work as they stand there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from harness.launchers import clean_environment, free_ports

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = re.findall(r"<!-- tested -->\n```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
LAUNCHERS = ("hvkeras run", "horovodrun", "mpirun", "TF_CONFIG")


def test_every_launcher_is_shown() -> None:
    assert [next(name for name in LAUNCHERS if name in block) for block in BLOCKS] == list(LAUNCHERS)


@pytest.mark.parametrize("block", [
    pytest.param(block, marks=pytest.mark.slow if name != "hvkeras run" else (), id=name)
    for block, name in zip(BLOCKS, LAUNCHERS, strict=True)])
def test_commands_work_as_shown(block: str, tmp_path: Path) -> None:
    commands = block.replace("examples/train.py", "examples/train.py --epochs 1")
    assert commands != block
    for shown, free in zip(re.findall(r"localhost:(\d+)", block), free_ports(2), strict=False):
        commands = commands.replace(shown, str(free))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    done = subprocess.run(["bash", "-ec", commands], cwd=tmp_path, env=clean_environment(tmp_path), capture_output=True,
                          text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"test accuracy: \d\.\d{4}$", done.stdout, re.MULTILINE)) == 1, done.stdout + done.stderr

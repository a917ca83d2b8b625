"""Scripts and commands in README and docs/ work as shown.

`<!-- file: NAME -->` gives the name of the script in the block below. `<!-- tested -->` marks commands, which run in a
folder with the page's scripts, those of the quick start and the examples. `<!-- tested: nightly -->` defers them to
`make test-soak`, and `<!-- tested: trackers -->` to `make test-trackers`. A text block after the commands is their
expected output: each of its lines must occur in the real output, apart from numbers.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from harness.launchers import clean_environment, free_ports
from harness.pages import FILE, ROOT, WITH_TRACKERS, scripts

README = ROOT / "README.md"
QUICK_START = ROOT / "docs" / "tutorials" / "quick-start.md"
PAGES = (README, *sorted((ROOT / "docs").rglob("*.md")))
LAUNCHERS = ("hvkeras run", "horovodrun", "mpirun", "TF_CONFIG")
TESTED = re.compile(r"<!-- tested(?:: (slow|nightly|trackers))? -->\n```sh\n(.*?)```\n(?:\n```text\n(.*?)```)?",
                    re.DOTALL)
MARKS: dict[str, Any] = {"": (), "slow": pytest.mark.slow, "nightly": pytest.mark.nightly, "trackers": WITH_TRACKERS}
# A number, maybe with a unit.
NUMBER = re.compile(r"\d[\d.,]*(?:e[+-]\d+)?(?:[mu]?s\b)?")


def blocks() -> list[object]:
    """Return page, commands and expected output of each marked block."""
    made = []
    for page in PAGES:
        name = page.relative_to(ROOT).with_suffix("").as_posix()
        for number, (mark, commands, output) in enumerate(TESTED.findall(page.read_text()), 1):
            made.append(pytest.param(page, commands, output, id=f"{name}-{number}", marks=MARKS[mark]))
    return made


def pattern(line: str) -> str:
    """Return a pattern for a line of output with arbitrary numbers."""
    parts = [re.escape(part) for part in NUMBER.split(line.rstrip())]
    return "^" + NUMBER.pattern.join(parts) + r"\s*$"


def test_every_launcher_is_shown() -> None:
    shown = "".join(commands for page in PAGES for _, commands, _ in TESTED.findall(page.read_text()))
    assert [name for name in LAUNCHERS if name not in shown] == []


def test_what_is_marked_is_found() -> None:
    text = "".join(page.read_text() for page in PAGES)
    assert text.count("<!-- tested") == len(TESTED.findall(text))
    assert text.count("<!-- file:") == len(FILE.findall(text))


@pytest.mark.parametrize("page", [README, QUICK_START])
def test_the_first_script_downloads_nothing(page: Path) -> None:
    script = scripts(page)["train.py"]
    assert not re.search(r"https?:|load_data|get_file|keras\.datasets", script)


@pytest.mark.parametrize(("page", "commands", "output"), list(blocks()))
def test_commands_work_as_shown(page: Path, commands: str, output: str, tmp_path: Path) -> None:
    for name, script in (scripts(QUICK_START) | scripts(page)).items():
        (tmp_path / name).write_text(script)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for shown, free in zip(dict.fromkeys(re.findall(r"localhost:(\d+)", commands)), free_ports(2), strict=False):
        commands = commands.replace(shown, str(free))
    # mpirun requires these as root, or with more ranks than cores.
    mpirun = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
              "OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_hwloc_base_binding_policy": "none"}
    done = subprocess.run(["bash", "-ec", commands], cwd=tmp_path, env=clean_environment(tmp_path) | mpirun,
                          capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = done.stdout + done.stderr
    for line in filter(None, output.splitlines()):
        assert re.search(pattern(line), printed, re.MULTILINE), f"not printed: {line}\n{printed}"
    if "train.py" in commands:
        size = 1 if commands == "python train.py\n" else 2
        accuracies = re.findall(rf"test accuracy on {size} processes: (\d\.\d{{4}})$", done.stdout, re.MULTILINE)
        assert len(accuracies) == 1, printed
        assert float(accuracies[0]) > 0.8, printed

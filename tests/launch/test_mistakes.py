"""Mistakes of users: each is explained in five lines besides the frames of the script, as docs/troubleshooting.md says.

`python tests/launch/test_mistakes.py` makes them, and writes the table of that page.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import Outcome
from harness.launchers import BIN, clean_environment
from launch.hvkeras_run import run, warm_ranks
from launch.mistakes import MISTAKES, SCRIPT, Mistake, told

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
MOST_LINES = 5
BEGIN, END = "<!-- mistakes -->", "<!-- end -->"
HEADING = "| lines | what was done | what hvkeras says | HINT |\n| --- | --- | --- | --- |"
QUICK = ("no `DistributedOptimizer`", "an exception on all ranks before `hvd.init()`")


def row(mistake: Mistake, output: str) -> str:
    """Return the row of a mistake in the table."""
    said = told(output)
    cells = (str(said.lines), mistake.what + f" ({mistake.note})" * bool(mistake.note), said.cause, said.cure)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|').replace('<', '&lt;') for cell in cells)} |"


def made(mistake: Mistake, folder: Path, warm: bool) -> subprocess.CompletedProcess[str]:
    """Make a mistake in a folder."""
    (folder / SCRIPT).write_text(mistake.script)
    command, *words = mistake.command
    if "python" in words:
        index = words.index("python")
        warm = warm and mistake.starts_ranks and not mistake.cold
        words[index:] = (warm_ranks([sys.executable, *words[index + 1 :]], mistake.env) if warm
                         else [sys.executable, *words[index + 1 :]])
    return run(words, folder, mistake.env, command=command)


@pytest.mark.parametrize("mistake", [
    pytest.param(each, id=each.what, marks=[pytest.mark.slow] if each.starts_ranks and each.what not in QUICK else [])
    for each in MISTAKES])
def test_a_mistake_is_explained_in_five_lines(mistake: Mistake, tmp_path: Path) -> None:
    done = made(mistake, tmp_path, warm=True)
    output = done.stdout + done.stderr
    assert (done.returncode != 0) == mistake.ends, output
    assert told(output).lines <= MOST_LINES, output
    assert output.count("Traceback (most recent call last)") <= 1, output
    assert row(mistake, output) in PAGE.read_text(), (
        f"docs/troubleshooting.md is out of date: run python tests/launch/test_mistakes.py\n{output}")


@pytest.mark.parametrize(("launcher", "cold"), [
    pytest.param("tf_config", False, marks=pytest.mark.slow), pytest.param("mpirun", False, marks=pytest.mark.slow),
    pytest.param("horovodrun_gloo", True, marks=pytest.mark.nightly)])
def test_one_rank_explains_what_all_do_wrong_under_other_launchers(
        launcher: str, cold: bool, launch: Callable[..., Outcome], tmp_path: Path) -> None:
    (tmp_path / SCRIPT).write_text(MISTAKES[0].script)
    outcome = launch(launcher, tmp_path / SCRIPT, np=2, backend="native", expect_failure=True, cold=cold)
    said = [outcome.stderr(rank) for rank in (0, 1)]
    first = next(rank for rank in (0, 1) if "Traceback" in said[rank])
    assert "Traceback" not in said[1 - first]
    assert f"failed in the same way as rank {first} on" in said[1 - first].splitlines()[-1]
    assert said[first].splitlines()[-1] == "HINT: compile with hvd.DistributedOptimizer(optimizer)."
    assert told(said[first]).lines + 1 <= MOST_LINES, said[first]
    assert "site-packages" not in said[first]


def test_all_frames_are_shown_on_request(tmp_path: Path) -> None:
    (tmp_path / SCRIPT).write_text("import hvkeras\nhvkeras.rank()\n")
    shown = {}
    for switch in ("0", "1"):
        done = subprocess.run([sys.executable, SCRIPT], cwd=tmp_path, text=True, stderr=subprocess.PIPE, check=False,
                              env=clean_environment(tmp_path) | {"HVKERAS_FULL_TRACEBACK": switch}, timeout=100)
        shown[switch] = done.stderr.splitlines()
    assert [line.split(",")[0] for line in shown["0"]] == [
        "Traceback (most recent call last):", f'  File "{tmp_path / SCRIPT}"', "    hvkeras.rank()",
        "hvkeras.errors.NotInitializedError: hvkeras must be initialized first.",
        "HINT: call hvd.init() before this."]
    assert any("current_session" in line for line in shown["1"])


def main() -> None:
    """Make all mistakes, and write the table."""
    import tempfile

    os.environ["PATH"] = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    rows = []
    for mistake in MISTAKES:
        with tempfile.TemporaryDirectory() as folder:
            done = made(mistake, Path(folder), warm=False)
            rows.append(row(mistake, done.stdout + done.stderr))
            print(rows[-1], flush=True)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + "\n".join([BEGIN, "", HEADING, *rows, "", END]) + rest.partition(END)[2])


if __name__ == "__main__":
    main()

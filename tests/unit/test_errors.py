"""How uncaught exceptions are printed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(("code", "error", "fix"), [
    ("import importlib; importlib.import_module('horovod.that.is.not.there')", "ModuleNotFoundError: No module named",
     "HINT: import hvkeras as hvd instead, or start the script with --as-horovod, unchanged."),
    ("import os; os.environ['PYTHONPATH'] = str(hvkeras.horovod.as_horovod.SITE); import horovod.not_there",
     "ModuleNotFoundError: No module named",
     "HINT: start Python without -E, -I and -S, which keep it from what --as-horovod has added to its PYTHONPATH."),
    ("import h5py; h5py.File('x.h5', 'w')", "BlockingIOError: [Errno 11]",
     "HINT: let one rank write the file, as hvd.callbacks.BackupAndRestore and hvd.callbacks.ModelCheckpoint do."),
])
def test_common_exceptions_of_others_end_with_the_fix(tmp_path: Path, code: str, error: str, fix: str) -> None:
    holds = "import h5py, subprocess, sys; file = h5py.File('x.h5', 'w'); sys.exit(subprocess.call(sys.argv[1:]))"
    command = [sys.executable, "-c", f"import hvkeras.horovod.as_horovod; {code}"]
    done = subprocess.run([sys.executable, "-c", holds, *command], cwd=tmp_path, capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-2].startswith(error) and done.stderr.splitlines()[-1] == fix


def test_an_error_with_a_hint_gets_no_other(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import horovod.torch")
    command = [Path(sys.executable).with_name("hvkeras"), "exec", "--as-horovod", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(" HINT: run without --as-horovod, or with PYTHONPATH unset.")


def test_frames_of_hvkeras_commands_are_not_the_users(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise ValueError('x')")
    command = [Path(sys.executable).with_name("hvkeras"), "exec", "--as-horovod", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert [line.strip() for line in done.stderr.splitlines()[-4:]] == [
        "Traceback (most recent call last):", 'File "train.py", line 1, in <module>', "raise ValueError('x')",
        "ValueError: x"]

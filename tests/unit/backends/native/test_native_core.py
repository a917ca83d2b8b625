"""The C++ core by itself: mixed collectives of up to twelve ranks on up to eleven hosts, under the sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


@pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="needs a C++ compiler")
@pytest.mark.nightly
@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_mixed_collectives_are_right_and_without_races(sanitizer: str, tmp_path: Path) -> None:
    environment = os.environ | {"PATH": PATH}
    for command in (["cmake", "-S", str(ROOT), "-B", str(tmp_path), "-G", "Ninja", f"-DSANITIZER={sanitizer}"],
                    ["cmake", "--build", str(tmp_path), "--target", "core_test"],
                    [str(tmp_path / "backends/native/core_test"), "check", "4"]):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("collectives right") == 12, done.stdout

"""The C++ core by itself: mixed collectives of up to twelve ranks on up to eleven hosts, under the sanitizers; and of a
thousand ranks on one host.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"


pytestmark = [pytest.mark.nightly,
              pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="needs a C++ compiler")]


def printed(folder: Path, sanitizers: str, *arguments: str) -> str:
    """What the core's test prints, built with these sanitizers."""
    for command in (["cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", f"-DSANITIZER={sanitizers}"],
                    ["cmake", "--build", str(folder), "--target", "core_test"],
                    [str(folder / "backends/native/core_test"), *arguments]):
        done = subprocess.run(command, env=os.environ | {"PATH": PATH}, capture_output=True, text=True, timeout=800)
        assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("sanitizers", ["thread", "address,undefined"])
def test_mixed_collectives_are_right_and_without_races(sanitizers: str, tmp_path: Path) -> None:
    assert printed(tmp_path, sanitizers, "check", "4").count("collectives ok") == 13


def test_a_thousand_ranks_of_one_host_get_what_is_theirs(tmp_path: Path) -> None:
    assert "up to 1025 ranks on one host: ok" in printed(tmp_path, "", "many")

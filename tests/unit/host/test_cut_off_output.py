"""Commands whose output is read in part alone, as by `head`."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("command", [["--help"], ["run", "--help"], ["bench", "--help"]], ids=" ".join)
def test_output_that_nobody_reads_any_more_is_no_error(command: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run([sys.executable, "-I", "-m", "hvkeras", *command], stdout=writing, stderr=subprocess.PIPE,
                              text=True, timeout=60)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")

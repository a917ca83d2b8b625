"""The contract of backends: the example package and the built-in engines fulfill it, and it detects a faulty one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.launchers import BIN, clean_environment
from launch.test_bench import plug_in

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "backend_mpi4py"
CASES = [pytest.param("mpi4py", "2", marks=pytest.mark.slow), *(pytest.param(backend, "2,4", marks=pytest.mark.nightly)
                            for backend in ("mpi4py", "native", "tfdist", "horovod"))]


def contract(backend: str, ranks: str, folder: Path, site: str) -> subprocess.CompletedProcess[str]:
    """Run the contract like a third party, from a separate folder."""
    clean = clean_environment(folder)
    environment = clean | {"PYTHONPATH": f"{site}{os.pathsep}{clean['PYTHONPATH']}", "PYTEST_ADDOPTS": ""}
    return subprocess.run([BIN / "pytest", "-v", "-p", "no:cacheprovider", "--pyargs", "hvkeras.backends.contract",
                           "--backend", backend, "--ranks", ranks, f"--basetemp={folder / 'base'}"], cwd=folder,
                          env=environment, capture_output=True, text=True, timeout=400)


@pytest.mark.parametrize(("backend", "ranks"), CASES)
def test_a_backend_keeps_the_contract(backend, ranks, tmp_path):
    shutil.copytree(EXAMPLE, tmp_path / "example")
    subprocess.run([sys.executable, "-I", "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
                    "--no-index", "--target", tmp_path / "site", tmp_path / "example"], check=True, timeout=120)
    done = contract(backend, ranks, tmp_path, str(tmp_path / "site"))
    assert done.returncode == 0, done.stdout + done.stderr
    passed = set(re.findall(r"::(\S+?)(?:\[(\S+ ranks)\S*)? PASSED", done.stdout))
    assert {("test_abort_eagerly", f"{count} ranks") for count in ranks.split(",")} <= passed
    assert len(re.findall("PASSED", done.stdout)) >= 3 + 15 * len(ranks.split(","))


@pytest.mark.nightly
def test_a_backend_that_lies_does_not(tmp_path):
    site = plug_in(tmp_path, {"liar_about_much": "LiarAboutMuch"})["PYTHONPATH"]
    done = contract("liar_about_much", "2", tmp_path, site)
    assert done.returncode == 1
    assert "rank 1: AssertionError: a large sum must be right eagerly" in done.stdout
    failed = done.stdout.split("short test summary info")[1]
    assert "test_clause[2 ranks-large]" in failed
    assert "test_clause[2 ranks-broadcast]" not in failed


def test_an_unknown_backend_is_refused(tmp_path):
    done = contract("natvie", "2", tmp_path, "")
    assert done.returncode == 4
    assert re.search(r"The backend must be one of auto, native, [\w, ]+\. Received: backend='natvie'", done.stderr)

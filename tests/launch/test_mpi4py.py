"""Scripts that use mpi4py: before, after and around `init()`, and MPI's finalization."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import permutations
from pathlib import Path

import pytest

from harness import ENGINES, start_job
from harness.launchers import BIN

WORKER = Path(__file__).parent / "workers" / "with_mpi.py"
MPI_FIRST = "mpi4py,tensorflow,hvkeras"
MPI_LAST = "tensorflow,hvkeras"  # and mpi4py after init()
HVKERAS_FIRST = "hvkeras,mpi4py,tensorflow"
ALONE = {"PATH": f"{BIN}:/usr/bin:/bin"}  # MPI with one process, without mpirun


def results(outcome, np, name="result"):
    # mpirun may print several ranks' output on one line.
    return [re.findall(rf"{name} ([^\n]*)", outcome.stdout(rank)) for rank in range(np)]


# Open MPI and TensorFlow both export the library hwloc: a rank whose MPI uses both crashes at exit.
@pytest.mark.parametrize(("launcher", "backend", "how"), [
    ("mpirun", "native", MPI_FIRST),
    ("mpirun", "horovod", f"{MPI_FIRST} finalize"),
    *(pytest.param("mpirun", "native", ",".join(order), marks=pytest.mark.slow)
      for order in permutations(MPI_FIRST.split(",")) if ",".join(order) != MPI_FIRST),
    *(pytest.param("mpirun", backend, how, marks=pytest.mark.slow) for backend in ENGINES
      for how in (MPI_FIRST, MPI_LAST, f"{MPI_FIRST} finalize", f"{MPI_LAST} finalize", f"{MPI_FIRST} world")
      if (backend, how) not in (("native", MPI_FIRST), ("horovod", f"{MPI_FIRST} finalize"))),
    *(pytest.param("horovodrun_mpi", backend, f"{MPI_LAST} finalize", marks=pytest.mark.nightly)
      for backend in ENGINES),
])
def test_a_script_that_uses_mpi_ends(launch, launcher, backend, how):
    outcome = launch(launcher, WORKER, tuple(how.split()), np=2, backend=backend, cold=True)
    assert results(outcome, 2) == [[f"{rank} 2 2 2 2"] for rank in (0, 1)]
    assert "hwloc" not in outcome.stderr(0)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("how", [MPI_FIRST, MPI_LAST])
def test_an_exception_on_one_rank_ends_a_script_that_uses_mpi(tmp_path, backend, how):
    with start_job("mpirun", WORKER, (how, "raise"), np=2, folder=tmp_path, backend=backend, cold=True,
                   expect_failure=True, deadline=90.0) as job:
        outcome = job.wait()
    assert "rank 0 on" in outcome.stderr(0).splitlines()[-1] and "the sky is falling" in outcome.stderr(0)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ENGINES)
def test_parts_of_the_world_are_jobs_of_their_own(launch, backend):
    outcome = launch("mpirun", WORKER, (MPI_FIRST, "part"), np=4, backend=backend, cold=True)
    assert results(outcome, 4) == [[f"{rank // 2} 2 2 2 4"] for rank in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ENGINES)
def test_process_sets_may_be_made_of_communicators(launch, backend):
    outcome = launch("mpirun", WORKER, (MPI_FIRST, "sets", "finalize"), np=4, backend=backend, cold=True)
    assert results(outcome, 4, "set") == [[f"{1 + rank % 2} [{rank % 2}, {2 + rank % 2}] {rank // 2} 2"]
                                          for rank in range(4)]
    assert results(outcome, 4) == [[f"{rank} 4 4 4 4"] for rank in range(4)]


@pytest.mark.parametrize(("prefix", "code"), [
    (None, "import hvkeras; from mpi4py import MPI; print(MPI.COMM_WORLD.size, end='')"),
    ("/elsewhere", "import hvkeras, mpi4py, os; print(os.environ['OPAL_PREFIX'] == '/elsewhere', end='')"),
])
def test_the_open_mpi_of_pip_starts_without_mpirun(prefix, code):
    environ = ALONE | ({"OPAL_PREFIX": prefix} if prefix else {})
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True" if prefix else "1", "")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["hvkeras_run", "horovodrun_gloo"])
def test_mpi_that_knows_one_process_only_is_named(launch, tmp_path, launcher):
    outcome = launch(launcher, WORKER, (HVKERAS_FIRST,), np=2, backend="native", cold=True, env=ALONE)
    assert results(outcome, 2) == [[f"{rank} 2 2 2 1"] for rank in (0, 1)]
    assert "this job has 2 ranks, but MPI.COMM_WORLD has 1: launch with mpirun" in outcome.stderr(0)
    with start_job(launcher, WORKER, (HVKERAS_FIRST, "world"), np=2, folder=tmp_path, backend="native", cold=True,
                   env=ALONE, expect_failure=True) as job:
        outcome = job.wait()
    assert re.search(r"comm must belong to the job, but .* started 2 ranks, and MPI has 1", outcome.stderr(1))

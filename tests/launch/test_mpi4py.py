"""Scripts that use mpi4py: before, after and around `init()`, and MPI's finalization."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from harness import ENGINES, start_job
from harness.launchers import BIN

WORKER = Path(__file__).parent / "workers" / "with_mpi.py"
ALONE = {"OPAL_PREFIX": str(Path(sys.prefix)), "PATH": f"{BIN}:/usr/bin:/bin"}  # MPI with one process, without mpirun


def results(outcome, np, name="result"):
    # mpirun may print several ranks' output on one line.
    return [re.findall(rf"{name} ([^\n]*)", outcome.stdout(rank)) for rank in range(np)]


@pytest.mark.parametrize(("launcher", "backend", "how"), [
    ("mpirun", "native", "before"),
    ("mpirun", "horovod", "before finalize"),
    *(pytest.param("mpirun", backend, how, marks=pytest.mark.slow) for backend in ENGINES
      for how in ("before", "after", "before finalize", "after finalize", "world")
      if (backend, how) not in (("native", "before"), ("horovod", "before finalize"))),
    *(pytest.param("horovodrun_mpi", backend, "after finalize", marks=pytest.mark.nightly) for backend in ENGINES),
])
def test_a_script_that_uses_mpi_ends(launch, launcher, backend, how):
    outcome = launch(launcher, WORKER, tuple(how.split()), np=2, backend=backend, cold=True)
    assert results(outcome, 2) == [[f"{rank} 2 2 2 2"] for rank in (0, 1)]
    assert "hwloc" not in outcome.stderr(0)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("how", ["before", "after"])
def test_an_exception_on_one_rank_ends_a_script_that_uses_mpi(tmp_path, backend, how):
    with start_job("mpirun", WORKER, (how, "raise"), np=2, folder=tmp_path, backend=backend, cold=True,
                   expect_failure=True, deadline=90.0) as job:
        outcome = job.wait()
    assert "rank 0 on" in outcome.stderr(0).splitlines()[-1] and "the sky is falling" in outcome.stderr(0)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ENGINES)
def test_parts_of_the_world_are_jobs_of_their_own(launch, backend):
    outcome = launch("mpirun", WORKER, ("part",), np=4, backend=backend, cold=True)
    assert results(outcome, 4) == [[f"{rank // 2} 2 2 2 4"] for rank in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ENGINES)
def test_process_sets_may_be_made_of_communicators(launch, backend):
    outcome = launch("mpirun", WORKER, ("sets", "finalize"), np=4, backend=backend, cold=True)
    assert results(outcome, 4, "set") == [[f"{1 + rank % 2} [{rank % 2}, {2 + rank % 2}] {rank // 2} 2"]
                                          for rank in range(4)]
    assert results(outcome, 4) == [[f"{rank} 4 4 4 4"] for rank in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["hvkeras_run", "horovodrun_gloo"])
def test_mpi_that_knows_one_process_only_is_named(launch, tmp_path, launcher):
    outcome = launch(launcher, WORKER, ("before",), np=2, backend="native", cold=True, env=ALONE)
    assert results(outcome, 2) == [[f"{rank} 2 2 2 1"] for rank in (0, 1)]
    assert "this job has 2 ranks, but MPI.COMM_WORLD has 1: launch with mpirun" in outcome.stderr(0)
    with start_job(launcher, WORKER, ("world",), np=2, folder=tmp_path, backend="native", cold=True, env=ALONE,
                   expect_failure=True) as job:
        outcome = job.wait()
    assert re.search(r"comm must belong to the job, but .* started 2 ranks, and MPI has 1", outcome.stderr(1))

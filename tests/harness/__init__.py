"""Test harness: start real ranks under every launcher, and collect their output.

One launch, one script
    Use the fixture `launch` for a job of one test, with any of `LAUNCHERS`:

        def test_ranks_know_their_number(launch):
            outcome = launch("mpirun", Path(__file__).parent / "workers" / "print_rank.py", np=2, backend="tfdist")
            assert outcome.stdout(1) == "1\\n"

    If the launcher or a rank exits with a nonzero code, the test fails, and reports the first failing rank
    with the end of its log. At the deadline, the ranks print their Python stacks, and the test fails, too.
    With `expect_failure=True`, the outcome of a failing job is returned, and success fails the test.

One launch, many checks
    Starting ranks takes seconds, so let one worker script run many checks and write a result for each:

        # tests/parallel/workers/collectives.py
        import hvkeras as hvd
        from harness.checks import check, run_checks

        @check
        def the_sum_of_ranks():
            return hvd.allreduce(tf.constant(float(hvd.rank())), op=hvd.Sum)    # JSON or NumPy types

        if __name__ == "__main__":
            run_checks(before=hvd.init, after=hvd.shutdown)

    and the tests read them; `launch_once` starts each distinct job once per session:

        WORKER = Path(__file__).parent / "workers" / "collectives.py"

        @pytest.fixture(params=PAIRS, ids=str)                 # PAIRS: every (launcher, backend)
        def outcome(request, launch_once):
            return launch_once(*request.param, WORKER, np=2)

        def test_allreduce_sums(outcome):
            assert outcome.results("the_sum_of_ranks") == [1.0, 1.0]

    `results` is a list of values in rank order. If a check raised, the test that reads it fails with the
    rank's traceback. Checks run on every rank in the order of the file. After one raises, the job ends, and
    later checks count as not run. Therefore checks should return values, and tests should assert on them.

Warm ranks, and which combinations
    Ranks are forked from a process that has imported everything, unless a test sets `cold=True`: see
    `harness.warm`. `harness.axes` selects combinations of launchers, engines, Keras versions and sizes.

Interfering with a running job
    The fixtures use the context manager `start_job`:

        with start_job("tf_config", SCRIPT, np=2, folder=tmp_path, expect_failure=True) as job:
            job.wait_for(1, "step 3")              # until rank 1 has printed it
            os.kill(job.pid(1), signal.SIGKILL)    # `job.pid(rank)` is the rank's own process
            outcome = job.wait()
        assert "rank 1" in outcome.stderr(0).splitlines()[-1]

What ranks get
    A clean environment (no variables of another launcher), the virtual environment's `bin` first on the
    PATH, `tests/` as PYTHONPATH so that `harness` can be imported, a private working folder outside of
    the repository, and the variables of `env=`. Every process of a job has a mark in its environment.
    Processes that are left when the job ends are killed, and listed in `outcome.orphans`.
"""

from __future__ import annotations

from harness.axes import OLDEST_ALONE, OLDEST_IN_SOAK, pairwise, some_cold
from harness.job import Job, LaunchError, Outcome, start_job
from harness.launchers import ENGINES, LAUNCHERS, PAIRS, SCHEDULERS

__all__ = ["ENGINES", "LAUNCHERS", "OLDEST_ALONE", "OLDEST_IN_SOAK", "PAIRS", "SCHEDULERS", "Job", "LaunchError",
           "Outcome", "pairwise", "some_cold", "start_job"]

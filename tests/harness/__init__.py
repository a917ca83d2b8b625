"""Starts real ranks under every launcher, and collects what they said.

One launch, one script
    Use the fixture `launch` for a job of one test, with any of `LAUNCHERS`:

        def test_ranks_know_their_number(launch):
            outcome = launch("mpirun", Path(__file__).parent / "workers" / "print_rank.py", np=2, backend="tfdist")
            assert outcome.stdout(1) == "1\\n"

    A job whose launcher or rank exits with another code than 0 fails the test, naming the first failing
    rank with the tail of its log; so does one that outlives its deadline (its ranks print their Python
    stacks first). `expect_failure=True` returns the outcome of a failing job, and fails a job that succeeds.

One launch, many checks
    Starting ranks takes seconds, so let one worker script run many checks and write a result for each:

        # tests/parallel/workers/collectives.py
        import hvkeras as hvd
        from harness.checks import check, run_checks

        @check
        def the_sum_of_ranks():
            return hvd.allreduce(tf.constant(float(hvd.rank())), op=hvd.Sum)    # what JSON or numpy can hold

        if __name__ == "__main__":
            run_checks(before=hvd.init, after=hvd.shutdown)

    and the tests read them; `launch_once` starts each distinct job once a session:

        WORKER = Path(__file__).parent / "workers" / "collectives.py"

        @pytest.fixture(params=PAIRS, ids=str)                 # PAIRS: every (launcher, backend)
        def outcome(request, launch_once):
            return launch_once(*request.param, WORKER, np=2)

        def test_allreduce_sums(outcome):
            assert outcome.results("the_sum_of_ranks") == [1.0, 1.0]

    `results` is one value a rank, in rank order; a check that raised fails the test that reads it, with
    the rank's traceback. Checks run in the order of the file on every rank; after one raises on a rank,
    the job ends and later checks count as not run. So let checks return values, and tests judge them.

Warm ranks, and which combinations
    Ranks are forked from a process that has imported everything, unless a test says `cold=True`: see
    `harness.warm`. Which launchers, engines, Keras versions and numbers of ranks meet is `harness.axes`'s matter.

Interfering with a running job
    `start_job` is the context manager below the fixtures:

        with start_job("tf_config", SCRIPT, np=2, folder=tmp_path, expect_failure=True) as job:
            job.wait_for(1, "step 3")              # until rank 1 has printed it
            os.kill(job.pid(1), signal.SIGKILL)    # `job.pid(rank)` is the rank's own process
            outcome = job.wait()
        assert "rank 1" in outcome.stderr(0).splitlines()[-1]

What ranks get
    A clean environment (no variable of another launcher), the virtual environment's `bin` first on the
    PATH, `tests/` as PYTHONPATH so that `harness` can be imported, a private working folder outside of
    the repository, and `env=` on top. Every process of a job carries a mark in its environment; whatever
    still lives when a job is over is killed and listed in `outcome.orphans`.
"""

from __future__ import annotations

from harness.axes import OLDEST_ALONE, OLDEST_IN_SOAK, pairwise, some_cold
from harness.job import Job, LaunchError, Outcome, start_job
from harness.launchers import ENGINES, LAUNCHERS, PAIRS, SCHEDULERS

__all__ = ["ENGINES", "LAUNCHERS", "OLDEST_ALONE", "OLDEST_IN_SOAK", "PAIRS", "SCHEDULERS", "Job", "LaunchError",
           "Outcome", "pairwise", "some_cold", "start_job"]

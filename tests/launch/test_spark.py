"""`hvkeras.spark.run` in Spark's local mode; `make test-clusters` has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import spark, start_job

SESSION = Path(__file__).parents[1] / "clusters" / "workers" / "spark_session.py"
CHECKS = ("results_come_in_rank_order_and_output_reaches_the_driver", "a_failed_rank_is_named_with_its_traceback")


@pytest.mark.skipif(bool(spark.missing()), reason=spark.missing())
def test_ranks_run_in_sparks_local_mode(tmp_path: Path):
    with start_job("none", SESSION, ("local[2]", *CHECKS), np=1, folder=tmp_path, python=[spark.python()],
                   env=spark.environment()) as job:
        outcome = job.wait()
    found, out, _ = outcome.result(CHECKS[0], 0)
    assert [each[0] for each in found] == [0, 1]
    assert out == ["[0] hello from 0", "[1] hello from 1"]
    kind, text = outcome.result(CHECKS[1], 0)
    assert kind == "PeerError" and "failed with ValueError: the data are not there" in text.splitlines()[1]
    assert not outcome.orphans

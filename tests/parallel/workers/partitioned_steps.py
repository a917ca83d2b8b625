"""Take training steps of which each rank computes its part, and the same steps in one process; report differences.

Arguments: names of the steps.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import hvkeras as hvd
from harness.checks import check, run_checks
from hvkeras.collectives.rounds import Rounds
from hvkeras.compat import patches
from unit.partition.steps import STEPS, use_float64


def join() -> None:
    """Join the job for its collectives alone: what Keras does stays what it does in one process."""
    hvd.init()
    patches.uninstall_job()


@check
def partitioned() -> Any:
    """Return for each step what differs, digests of the plan and of this rank's state, and the number of rounds."""
    found = {}
    for name in sys.argv[1:]:
        step = STEPS[name]
        ranks, _ = step.on(hvd.size(), job=(hvd.rank(), Rounds()))
        differences = step.differences(ranks)
        states = sorted((variable.name, own.numpy().tobytes()) for variable, own in ranks.variables)
        report = ranks.partitioned.report
        found[name] = differences, report.digest, hashlib.sha256(repr(states).encode()).hexdigest(), len(report.rounds)
    return found


if __name__ == "__main__":
    use_float64()
    run_checks(before=join, after=hvd.shutdown)

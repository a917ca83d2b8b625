"""How the chief of a cluster tells its own errors from those that a lost task causes."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import tensorflow as tf

from hvkeras.control.cause import Cause, CauseKind
from hvkeras.control.launch_environments import parameter_server_launch
from hvkeras.errors import UsageError
from hvkeras.parameter_server.chief import Chief
from hvkeras.settings import Settings

CLUSTER = '{"cluster": {"chief": ["c:1"], "worker": ["w:1"], "ps": ["p:1"]}, "task": {"type": "chief", "index": 0}}'
LOST = Cause(CauseKind.LOST, 2, "p", 1, "ps 0 on p (pid 1) ended unexpectedly")


def no_batches(because: Exception | None) -> UsageError:
    error = UsageError("dataset_fn must give every worker batches")
    error.__cause__ = because
    return error


@pytest.mark.parametrize(("error", "lost"), [
    (tf.errors.UnavailableError(None, None, "failed to connect"), True),
    (no_batches(tf.errors.OutOfRangeError(None, None, "End of sequence")), True),
    (no_batches(None), False),
    (KeyboardInterrupt(), False),
], ids=["by TensorFlow", "from one by TensorFlow", "by the user", "Ctrl-C"])
def test_errors_after_which_a_loss_may_be_reported_wait_for_it(error: BaseException, lost: bool) -> None:
    chief = Chief(parameter_server_launch({"TF_CONFIG": CLUSTER}), Settings({}))
    server = SimpleNamespace(cause=None)
    report = threading.Timer(0.2, lambda: setattr(server, "cause", LOST))
    report.start()
    try:
        assert chief._lost_task(server, error) is (LOST if lost else None)
    finally:
        report.cancel()
        report.join()

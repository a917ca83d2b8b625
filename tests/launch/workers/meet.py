"""Join the job, sum the ranks, and print rank and size."""

from __future__ import annotations

import json
import os
import sys
import time

import hvkeras as hvd

if "busy" in sys.argv:
    import tensorflow as tf

    tf.constant(1.0)
if os.environ.get("MEET_DELAY"):
    time.sleep(float(os.environ["MEET_DELAY"]))
if "argument" in sys.argv:
    hvd.init(os.environ["MEET_BACKEND"])
else:
    hvd.init()

import tensorflow as tf

from hvkeras.job.session import current_session


def facts() -> dict[str, object]:
    return {
        "rank": hvd.rank(),
        "size": hvd.size(),
        "local": [hvd.local_rank(), hvd.local_size()],
        "cross": [hvd.cross_rank(), hvd.cross_size()],
        "sum": float(hvd.allreduce(tf.constant(float(hvd.rank() + 1)), op=hvd.Sum)),
        "backend": current_session().backend.name,
        "launcher": current_session().launch.launcher,
        "threads": tf.config.threading.get_intra_op_parallelism_threads(),
        "sigterm": "SIG_DFL" not in open("/proc/self/status").read(),
    }


print("FACTS " + json.dumps(facts()), flush=True)
if "again" in sys.argv:
    hvd.shutdown()
    assert not hvd.is_initialized()
    hvd.init()
    print("FACTS " + json.dumps(facts()), flush=True)
hvd.shutdown()

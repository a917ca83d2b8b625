"""An elastic script with a TensorFlow 1 session: as its graph cannot be retraced, the program restarts.

Arguments: the successive sizes of the job; rank 0 requests each of them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import tensorflow as tf

import hvkeras as hvd

v1: Any = tf.compat.v1
v1.disable_eager_execution()
SIZES = [int(size) for size in sys.argv[1:]]

hvd.init()
weights = v1.get_variable("weights", shape=[], initializer=v1.zeros_initializer())
own = v1.placeholder(tf.float32, [])
step = v1.assign_add(weights, hvd.allreduce(own))
session = v1.Session()
session.run(v1.global_variables_initializer())
state = hvd.elastic.TensorFlowState(session=session, stage=0)


@hvd.elastic.run
def train(state: Any) -> None:
    while state.stage < len(SIZES):
        before = session.run(weights)
        after = session.run(step, {own: hvd.rank() + 1.0})
        assert after - before == (hvd.size() + 1) / 2, (before, after, hvd.size())
        if hvd.size() == SIZES[state.stage]:
            state.stage += 1
            if hvd.rank() == 0 and state.stage < len(SIZES):
                Path("hosts.new").write_text(f"localhost:{SIZES[state.stage]}\n")
                Path("hosts.new").rename("hosts")  # it may be read at any time
        state.commit()


train(state)
print("trained on", hvd.size(), flush=True)

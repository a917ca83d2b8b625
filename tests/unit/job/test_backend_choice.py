"""Which backend is tried first where nobody asks for one."""

from __future__ import annotations

import json

import tensorflow  # noqa: F401 - it changes the environment, which a test must not

from hvkeras.control.launch_environments import detect_launch
from hvkeras.job.backend_choice import preference


def test_native_leads_on_cpus_and_the_launcher_decides_who_comes_next():
    mpirun = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    workers = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    for variables, order in ((mpirun, ["native", "horovod", "tfdist"]),
                             ({"TF_CONFIG": json.dumps(workers)}, ["native", "tfdist", "horovod"])):
        assert preference(detect_launch(variables), has_gpu=False)[:3] == order


def test_engines_with_nccl_lead_where_each_rank_has_a_gpu():
    order = preference(detect_launch({}), has_gpu=True)
    assert order.index("tfdist") < order.index("native")

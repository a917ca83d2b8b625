"""Which backend is tried first where nobody asks for one."""

from __future__ import annotations

import json

import tensorflow  # noqa: F401 - it changes the environment, which a test must not

from hvkeras.job.backend_choice import preference
from hvkeras.launch_environments import detect_launch


def test_native_leads_on_cpus_and_the_launcher_decides_who_comes_next():
    mpirun = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    workers = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    assert preference(detect_launch(mpirun))[:3] == ["native", "horovod", "tfdist"]
    assert preference(detect_launch({"TF_CONFIG": json.dumps(workers)}))[:3] == ["native", "tfdist", "horovod"]

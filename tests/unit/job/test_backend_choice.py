"""Which backend is tried first where nobody asks for one."""

from __future__ import annotations

import json
from importlib import metadata
from typing import Any

import pytest
import tensorflow  # noqa: F401 - it changes the environment, which a test must not

from hvkeras.backends.horovod import installed
from hvkeras.control.launch_environments import Launch, Rendezvous, detect_launch
from hvkeras.errors import MachineError
from hvkeras.host.machine import SharedMemory
from hvkeras.job.backend_choice import agree_on_backend, facts_of_rank, preference

LAUNCH = Launch("hvkeras run", 0, 4, Rendezvous("run"))
MIB = 1024**2


def test_native_leads_on_cpus_and_the_launcher_decides_who_comes_next():
    mpirun = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    workers = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
    for variables, order in ((mpirun, ["native", "horovod", "tfdist"]),
                             ({"TF_CONFIG": json.dumps(workers)}, ["native", "tfdist", "horovod"])):
        assert preference(detect_launch(variables), has_gpu=False)[:3] == order


def test_engines_with_nccl_lead_where_each_rank_has_a_gpu():
    order = preference(detect_launch({}), has_gpu=True)
    assert order.index("tfdist") < order.index("native")


def facts(requested: str, *hosts: tuple[str, SharedMemory], restarted: bool = False) -> list[dict[str, Any]]:
    """Return the facts of two ranks on each host."""
    own = facts_of_rank(requested, LAUNCH, restarted)
    own["objections_between_hosts"]["native"] = ""  # with or without UCX here
    return [own | {"host": name, "identity": name, "shared_memory": list(memory)} for name, memory in hosts
            for _ in range(2)]


def test_auto_passes_over_native_where_one_host_lacks_shared_memory():
    large, small = SharedMemory(1024 * MIB, 1024 * MIB), SharedMemory(MIB, MIB)
    assert agree_on_backend(LAUNCH, facts("auto", ("node1", large), ("node2", large))) == ("native", "")
    chosen = agree_on_backend(LAUNCH, facts("auto", ("node1", large), ("node2", small)))
    assert chosen.name in ("tfdist", "horovod")
    assert chosen.without == ("backend native is not used: /dev/shm on node2 has 1 of 1 MiB free, and 2 ranks there"
                              " need 12 MiB; docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm")


def test_a_native_that_was_asked_for_names_what_it_lacks():
    full = SharedMemory(1024 * MIB, MIB)
    with pytest.raises(MachineError) as told:
        agree_on_backend(LAUNCH, facts("native", ("node1", full)))
    assert "native: /dev/shm on node1 has 1 of 1,024 MiB free, and 2 ranks there need 9 MiB" in str(told.value)
    assert "HINT: remove leftover files in /dev/shm, or docker run --shm-size=1g, or mount" in str(told.value)


def test_shared_memory_of_an_earlier_session_counts_as_free():
    assert facts_of_rank("auto", LAUNCH, restarted=True)["shared_memory"].free == SharedMemory.here().size
    assert facts_of_rank("auto", LAUNCH)["shared_memory"].free <= SharedMemory.here().size


def test_horovod_that_pip_is_still_installing_is_not_available(tmp_path, monkeypatch):
    def no_metadata(name):
        raise metadata.PackageNotFoundError(name)

    (tmp_path / "horovod").mkdir()
    (tmp_path / "horovod" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(metadata, "version", no_metadata)
    found = installed.availability()
    assert not found.ok and "the installation of Horovod is not complete" in found.reason

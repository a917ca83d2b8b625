"""Every launcher's variables, as captured under the real launchers, and what is wrong with broken ones."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import ANY

import pytest

from hvkeras.control.launch_environments import (
    Launch,
    Rendezvous,
    describe_cluster,
    detect_launch,
    initialized_launch,
)
from hvkeras.control.launch_environments.horovod_variables import launch_variables
from hvkeras.errors import UsageError

BIN = Path(sys.executable).parent

HVKERAS_RUN = {
    "HVKERAS_RUN_RANK": "1", "HVKERAS_RUN_SIZE": "4", "HVKERAS_RUN_LOCAL_RANK": "1", "HVKERAS_RUN_LOCAL_SIZE": "2",
    "HVKERAS_RUN_CONTROL": "127.0.0.1:4711",
}
SPARK = {name.replace("_RUN_", "_SPARK_"): value for name, value in HVKERAS_RUN.items()}
# Captured from horovodrun 0.28.1 --gloo, rank 1 of 2.
HOROVODRUN_GLOO = {
    "HOROVOD_HOSTNAME": "localhost", "HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "1",
    "HOROVOD_LOCAL_SIZE": "2", "HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1",
    "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "3289", "HOROVOD_CONTROLLER": "gloo",
    "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_GLOO_IFACE": "lo",
}
# Captured from Open MPI 4.1.8's mpirun, rank 1 of 2.
OPEN_MPI = {
    "OMPI_COMMAND": "python", "OMPI_UNIVERSE_SIZE": "2", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_FIRST_RANKS": "0", "PMIX_RANK": "1", "PMIX_NAMESPACE": "1240268801", "PMIX_HOSTNAME": "vm",
    "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_NODE_RANK": "1",
}
# What `horovodrun --mpi` adds to it.
HOROVODRUN_MPI = {
    **OPEN_MPI, "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^openib", "OMPI_MCA_btl_tcp_if_include": "lo",
    "OMPI_MCA_orte_tag_output": "1", "NCCL_SOCKET_IFNAME": "lo",
}
# Captured from the mpiexec of the PyPI wheels mpich and impi-rt, rank 0 of 2.
MPICH = {
    "PMI_HOSTNAME": "vm", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "0", "PMI_RANK": "0", "PMI_FD": "9",
    "PMI_SIZE": "2",
}
INTEL_MPI = {
    "HYDRA_BSTRAP_SUBTREE_SIZE": "1", "I_MPI_HYDRA_UUID": "27100000-b29f-b0a8", "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "0", "PMI_RANK": "0", "PMI_FD": "9", "PMI_SIZE": "2",
}
# Captured from Slurm 22.05, as far as it is read or tells of a step; task 3 of 4 on two nodes.
SLURM_STEP = {
    "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_LAUNCHER_PORT": "40759",
}
SLURM_BATCH_SCRIPT = {
    "SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0",
    "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_JOB_NUM_NODES": "2",
}
SLURM_SALLOC = {
    "SLURM_JOB_ID": "77", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_NUM_NODES": "2",
}
# Where salloc's shell is a step of its own (LaunchParameters=use_interactive_step), the job's count of tasks stays.
SLURM_SHELL_STEP = {
    **SLURM_SALLOC, "SLURM_STEP_ID": "4294967290", "SLURM_PROCID": "0", "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "n1",
}
# Captured from torchrun of torch 2.13, as far as it is read or tells of torchrun; rank 1 of 2.
TORCHRUN = {
    "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "vm",
    "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_RANK": "0", "ROLE_RANK": "1",
}
# As Kubeflow's PyTorchJob sets them for pod 1 of 2, and others do as well.
LIKE_TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "train-master-0", "MASTER_PORT": "23456"}
KERAS = {"KERAS_DISTRIBUTION_JOB_ADDRESSES": "a:1234,b:1234", "KERAS_DISTRIBUTION_NUM_PROCESSES": "2",
         "KERAS_DISTRIBUTION_PROCESS_ID": "1"}
INDEXED_JOB = {
    "JOB_COMPLETION_INDEX": "1", "HOSTNAME": "train-1", "HVKERAS_KUBERNETES_SIZE": "2",
    "HVKERAS_KUBERNETES_SERVICE": "workers",
}
JUPYTER_KERNEL = {"JPY_PARENT_PID": "4712", "JPY_SESSION_NAME": "/home/me/train.ipynb"}


def tf_config(cluster: object, kind: object = "worker", index: object = 0) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


TWO_WORKERS = {"worker": ["a:2222", "b:2222"]}


@pytest.mark.parametrize(("environ", "launch"), [
    ({}, Launch("none")),
    (HVKERAS_RUN, Launch("hvkeras run", 1, 4, Rendezvous("run", "127.0.0.1:4711"), 1, 2)),
    (SPARK, Launch("Spark", 1, 4, Rendezvous("spark", "127.0.0.1:4711"), 1, 2)),
    (HOROVODRUN_GLOO, Launch("horovodrun (Gloo)", 1, 2, Rendezvous("horovod_store", "127.0.0.1:3289"), 1, 2)),
    (OPEN_MPI, Launch("mpirun (Open MPI)", 1, 2, Rendezvous("mpi", job="open-mpi-1240268801"), 1, 2, mpi=True)),
    (HOROVODRUN_MPI,
     Launch("horovodrun (MPI)", 1, 2, Rendezvous("mpi", job="open-mpi-" + HOROVODRUN_MPI["PMIX_NAMESPACE"]), 1, 2,
            mpi=True)),
    (MPICH, Launch("mpiexec (MPICH)", 0, 2, Rendezvous("mpi"), 0, 2, mpi=True)),
    (INTEL_MPI, Launch("mpiexec (Intel MPI)", 0, 2, Rendezvous("mpi"), 0, 2, mpi=True)),
    (SLURM_STEP, Launch("srun (Slurm)", 3, 4, Rendezvous("folder", job="slurm-77-0"), 1)),
    (SLURM_STEP | {"SLURM_STEP_NUM_NODES": "1"},
     Launch("srun (Slurm)", 3, 4, Rendezvous("folder", job="slurm-77-0"), 1, 4)),
    (SLURM_BATCH_SCRIPT, Launch("none")),
    (LIKE_TORCHRUN, Launch("torchrun or the like", 1, 2, Rendezvous("address", "train-master-0:23456", ANY))),
    (TORCHRUN, Launch("torchrun", 1, 2, Rendezvous("address", "vm:29501", ANY), 1, 2)),
    (KERAS, Launch("keras.distribution", 1, 2, Rendezvous("address", "a:1234", ANY))),
    (INDEXED_JOB, Launch("a Kubernetes Indexed Job", 1, 2,
                         Rendezvous("address", "train-0.workers:29400", "kubernetes-train-0"),
                         tasks=("pod train-0", "pod train-1"))),
    ({"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "sweep-1"}, Launch("none")),
], ids=["none", "hvkeras run", "spark", "horovodrun gloo", "mpirun", "horovodrun mpi", "mpich",
        "intel mpi", "srun", "srun on one node", "sbatch script", "like torchrun", "torchrun", "keras.distribution",
        "indexed job", "job of independent pods"])
def test_each_launcher_is_recognised(environ: dict[str, str], launch: Launch) -> None:
    assert detect_launch(environ) == launch


@pytest.mark.parametrize(("environ", "numbers"), [
    ({}, ""), (HOROVODRUN_GLOO, ""), (OPEN_MPI, "1 2 1 2 0 1"), (tf_config(TWO_WORKERS, index=1), "1 2 0 1 1 2"),
    (SLURM_STEP, "3 4 1"),
])
def test_numbers_have_horovods_names_and_are_no_launch(environ: dict[str, str], numbers: str) -> None:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    launch = detect_launch(environ)
    found = launch_variables(launch)
    expected = dict(zip((f"HOROVOD_{name}" for name in names), numbers.split(), strict=False))
    assert {name: value for name, value in found.items() if name in expected} == expected
    assert ("HOROVOD_HOSTNAME" in found) == bool(numbers)
    assert detect_launch(found) == Launch("none")
    assert detect_launch({**environ, **found}) == launch
    assert detect_launch({**HOROVODRUN_GLOO, **found}).launcher == "horovodrun (Gloo)"


def test_the_order_is_launchers_then_tf_config_then_slurm() -> None:
    everything = [HVKERAS_RUN, SPARK, HOROVODRUN_GLOO, OPEN_MPI, MPICH, KERAS, tf_config(TWO_WORKERS), TORCHRUN,
                  INDEXED_JOB, SLURM_STEP]
    found = []
    while everything:
        found.append(detect_launch({name: value for one in everything for name, value in one.items()}).launcher)
        del everything[0]
    assert found == ["hvkeras run", "Spark", "horovodrun (Gloo)", "mpirun (Open MPI)", "mpiexec (MPICH)",
                     "keras.distribution", "TF_CONFIG", "torchrun", "a Kubernetes Indexed Job", "srun (Slurm)"]


@pytest.mark.parametrize(("environ", "name", "value"), [
    (HVKERAS_RUN, "HVKERAS_RUN_RANK", "one"),
    (HVKERAS_RUN, "HVKERAS_RUN_RANK", "4"),
    (HVKERAS_RUN, "HVKERAS_RUN_LOCAL_RANK", "2"),
    (HVKERAS_RUN, "HVKERAS_RUN_CONTROL", "nowhere"),
    (SPARK, "HVKERAS_SPARK_CONTROL", "127.0.0.1:"),
    (HOROVODRUN_GLOO, "HOROVOD_SIZE", "two"),
    (HOROVODRUN_GLOO, "HOROVOD_RANK", "2"),
    (HOROVODRUN_GLOO, "HOROVOD_GLOO_RENDEZVOUS_PORT", "http"),
    (HOROVODRUN_GLOO, "HOROVOD_ELASTIC", "1"),
    (OPEN_MPI, "OMPI_COMM_WORLD_SIZE", "0"),
    (OPEN_MPI, "OMPI_COMM_WORLD_RANK", "-1"),
    (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE", "1"),
    (MPICH, "PMI_SIZE", "2.5"),
    (MPICH, "PMI_RANK", "2"),
    (SLURM_STEP, "SLURM_PROCID", "4"),
    (SLURM_STEP, "SLURM_STEP_NUM_TASKS", "many"),
    (TORCHRUN, "RANK", "2"),
    (TORCHRUN, "MASTER_PORT", "http"),
    (LIKE_TORCHRUN, "WORLD_SIZE", "two"),
    (KERAS, "KERAS_DISTRIBUTION_PROCESS_ID", "one"),
    (INDEXED_JOB, "JOB_COMPLETION_INDEX", "2"),
    (INDEXED_JOB, "HVKERAS_KUBERNETES_SIZE", "0"),
    (INDEXED_JOB, "HVKERAS_KUBERNETES_SERVICE", "http://workers"),
    (INDEXED_JOB, "HVKERAS_KUBERNETES_SERVICE", "workers:70000"),
    (INDEXED_JOB, "HOSTNAME", "node7"),
])
def test_unreadable_variables_are_errors_that_name_them(environ: dict[str, str], name: str, value: str) -> None:
    with pytest.raises(UsageError) as caught:
        detect_launch(environ | {name: value})
    assert name in str(caught.value)
    assert value in str(caught.value)


@pytest.mark.parametrize(("environ", "missing"), [
    *((HVKERAS_RUN, name) for name in HVKERAS_RUN),
    *((SPARK, name) for name in SPARK),
    *((HOROVODRUN_GLOO, name) for name in (
        "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_GLOO_RENDEZVOUS_ADDR",
        "HOROVOD_GLOO_RENDEZVOUS_PORT")),
    (OPEN_MPI, "OMPI_COMM_WORLD_SIZE"), (OPEN_MPI, "OMPI_COMM_WORLD_RANK"), (MPICH, "PMI_SIZE"), (MPICH, "PMI_RANK"),
    *((SLURM_STEP, name) for name in (
        "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_NUM_NODES")),
    *((LIKE_TORCHRUN, name) for name in LIKE_TORCHRUN),
    *((INDEXED_JOB, name) for name in ("JOB_COMPLETION_INDEX", "HVKERAS_KUBERNETES_SIZE",
                                       "HVKERAS_KUBERNETES_SERVICE")),
])
def test_half_an_announcement_is_an_error_not_a_job_of_one(environ: dict[str, str], missing: str) -> None:
    half = {name: value for name, value in environ.items() if name != missing}
    with pytest.raises(UsageError, match=rf"must get all of its variables, but {missing} is missing\. Received: "):
        detect_launch(half)
    # One rank, as a TF_CONFIG left over says, or the shell of an allocation, does not hide it.
    for alone, first_of in ((tf_config({"worker": ["a:1"]}), (LIKE_TORCHRUN, INDEXED_JOB, SLURM_STEP)),
                            (SLURM_SHELL_STEP, (SLURM_STEP,))):
        if not any(environ is other for other in first_of):
            with pytest.raises(UsageError, match=f"{missing} is missing"):
                detect_launch(alone | half)


@pytest.mark.parametrize("kept", [
    "HVKERAS_RUN_CONTROL", "HOROVOD_RANK", "HOROVOD_LOCAL_RANK", "HOROVOD_GLOO_RENDEZVOUS_ADDR",
    "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_STEP_NUM_TASKS", "SLURM_STEPID", "SLURM_PROCID",
    "SLURM_LOCALID"])
def test_one_variable_of_a_launchers_own_is_half_an_announcement(kept: str) -> None:
    everything = HVKERAS_RUN | HOROVODRUN_GLOO | OPEN_MPI | MPICH | SLURM_STEP
    with pytest.raises(UsageError, match=rf"but .+ missing\. Received: {kept}='.*or unset {kept} to run a single"):
        detect_launch({kept: everything[kept]})


@pytest.mark.parametrize("kept", [("MASTER_ADDR",), ("MASTER_ADDR", "MASTER_PORT"), ("RANK",), ("WORLD_SIZE",)])
def test_common_names_by_themselves_are_no_launch(kept: tuple[str, ...]) -> None:
    assert detect_launch({name: LIKE_TORCHRUN[name] for name in kept}) == Launch("none")
    assert detect_launch({"RANK": "0", "WORLD_SIZE": "1"}) == Launch("none")


def test_torchruns_ranks_meet_beside_its_own_store_and_anew_after_each_restart() -> None:
    again = detect_launch(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"})
    assert again.rendezvous.address == "vm:29501"
    assert again.rendezvous.job != detect_launch(TORCHRUN).rendezvous.job
    assert detect_launch(TORCHRUN | {"RANK": "0"}).rendezvous == detect_launch(TORCHRUN).rendezvous
    alone = TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}
    assert detect_launch(alone).rendezvous.address == "vm:29500"
    assert detect_launch(LIKE_TORCHRUN | {"MASTER_ADDR": "fd00::1"}).rendezvous.address == "[fd00::1]:23456"


def test_processes_of_keras_distribution_are_on_one_host_if_all_addresses_say_so() -> None:
    launch = initialized_launch("10.0.0.1:1,10.0.0.1:2", 2, 1, {})
    assert (launch.local_rank, launch.local_size) == (1, 2)
    coordinator = initialized_launch("10.0.0.1:1", 2, 1, {})
    assert (coordinator.local_size, coordinator.rendezvous) == (None, launch.rendezvous)
    assert initialized_launch("a:1,b:1,c:1", None, 2, {}).size == 3
    assert initialized_launch("[fe80::1]:1,[fe80::2]:1", 2, 0, {}).rendezvous.address == "[fe80::1]:1"


@pytest.mark.parametrize(("arguments", "complaint"), [
    (("a:1", None, None), "needs num_processes and process_id as well"),
    ((None, 2, 0), "needs job_addresses as well"),
    (("a:1", 2, None), "needs process_id as well"),
    (("a:1,b:1", 3, 0), "the address of process 0, or one address for each process"),
    (("a:1", 2, 2), "process_id must be below num_processes"),
    (("a", 2, 0), "The address of process 0 must be host:port"),
    (("http://a:1", 2, 0), "The address of process 0 must be host:port"),
    (("a:70000", 2, 0), "The address of process 0 must be host:port"),
])
def test_arguments_of_keras_distribution_that_are_wrong_or_missing(
        arguments: tuple[str | None, int | None, int | None], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        initialized_launch(*arguments, {})


def test_keras_distribution_joins_the_job_of_a_launcher() -> None:
    launch = initialized_launch(None, None, None, OPEN_MPI)
    assert (launch.launcher, launch.rank, launch.size) == ("mpirun (Open MPI)", 1, 2)
    assert initialized_launch("a:1", 2, 1, OPEN_MPI | KERAS) == launch
    for arguments in ((None, 3, None), (None, None, 0), ("a:1", 2, 0)):
        with pytest.raises(UsageError, match=r"the job that mpirun \(Open MPI\) has started: this is process 1 of 2"):
            initialized_launch(*arguments, OPEN_MPI)


def test_keras_distribution_without_a_job_is_one_process() -> None:
    assert initialized_launch(None, None, None, {}) == Launch("none")
    assert initialized_launch("a:1", 1, 0, {}).size == 1
    for environ in (SLURM_SHELL_STEP, {"HVKERAS_RUN_RANK": "0"}):  # one rank, or a rest of variables
        assert initialized_launch("a:1", 2, 1, environ).launcher == "keras.distribution"
    with pytest.raises(UsageError, match="HVKERAS_RUN_SIZE"):
        initialized_launch(None, None, None, {"HVKERAS_RUN_RANK": "0"})


def test_an_indexed_jobs_service_may_name_a_port() -> None:
    launch = detect_launch(INDEXED_JOB | {"HVKERAS_KUBERNETES_SERVICE": "workers.team.svc:5000"})
    assert launch.rendezvous.address == "train-0.workers.team.svc:5000"


def test_all_that_is_missing_is_named_in_one_message() -> None:
    with pytest.raises(UsageError, match="but SLURM_LOCALID, SLURM_STEP_NUM_NODES are missing"):
        detect_launch({name: value for name, value in SLURM_STEP.items()
                       if name not in ("SLURM_LOCALID", "SLURM_STEP_NUM_NODES")})


# The rows of the table in docs/launch-variables.md.
SEVERAL = {
    "`horovodrun` in a shell with a TF_CONFIG": (HOROVODRUN_GLOO | tf_config(TWO_WORKERS), "horovodrun (Gloo)", 2),
    "`mpirun` in a shell with a TF_CONFIG": (OPEN_MPI | tf_config(TWO_WORKERS), "mpirun (Open MPI)", 2),
    "`hvkeras run` in the script of a batch job": (HVKERAS_RUN | SLURM_BATCH_SCRIPT, "hvkeras run", 4),
    "`mpirun` or `mpiexec` in a step of Slurm's": (SLURM_STEP | MPICH, "mpiexec (MPICH)", 2),
    "TF_CONFIG in a step of Slurm's": (SLURM_STEP | tf_config(TWO_WORKERS), "TF_CONFIG", 2),
    "TF_CONFIG in the script of a batch job": (SLURM_BATCH_SCRIPT | tf_config(TWO_WORKERS), "TF_CONFIG", 2),
    "`torchrun` in a step of Slurm's": (SLURM_STEP | TORCHRUN, "torchrun", 2),
    "torchrun's variables beside a TF_CONFIG": (LIKE_TORCHRUN | tf_config(TWO_WORKERS), "TF_CONFIG", 2),
    "the variables of `keras.distribution` beside a TF_CONFIG": (KERAS | tf_config(TWO_WORKERS), "keras.distribution",
                                                                 2),
    "`mpirun` in the pod of an Indexed Job": (INDEXED_JOB | OPEN_MPI, "mpirun (Open MPI)", 2),
    "`srun --mpi=pmi2`": (SLURM_STEP | {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_FD": "9"}, "srun (Slurm)", 4),
    "`mpirun`, and half of horovodrun's variables": (OPEN_MPI | {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2"},
                                                     "mpirun (Open MPI)", 2),
    "`python` in the script of a batch job": (SLURM_BATCH_SCRIPT, "none", 1),
    "`python` in the shell of `salloc`": (SLURM_SALLOC, "none", 1),
    "`python` in the shell of `salloc` that is a step": (SLURM_SHELL_STEP, "srun (Slurm)", 1),
    "a Jupyter kernel in any of these": (SLURM_SALLOC | JUPYTER_KERNEL, "none", 1),
    "an Indexed Job that sets nothing of hvkeras": ({"JOB_COMPLETION_INDEX": "1"}, "none", 1),
    "MASTER_ADDR and MASTER_PORT alone": ({"MASTER_ADDR": "a", "MASTER_PORT": "29500"}, "none", 1),
    "TF_CONFIG for one worker": (tf_config({"worker": ["a:1"]}), "TF_CONFIG", 1),
    "`mpirun -np 1`": ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, "mpirun (Open MPI)", 1),
    "HOROVOD_RANK=0 and HOROVOD_SIZE=1 alone": ({"HOROVOD_RANK": "0", "HOROVOD_SIZE": "1"}, "none", 1),
    "a process that a rank starts, with its HOROVOD_RANK alone": (launch_variables(detect_launch(OPEN_MPI)), "none",
                                                                  1),
}


@pytest.mark.parametrize("situation", SEVERAL)
def test_where_the_variables_of_two_launchers_are_there_one_wins(situation: str) -> None:
    environ, launcher, size = SEVERAL[situation]
    launch = detect_launch(environ)
    assert (launch.launcher, launch.size) == (launcher, size)


def test_a_jupyter_kernel_is_what_its_shell_is() -> None:
    for shell in (SLURM_SALLOC, SLURM_BATCH_SCRIPT, SLURM_SHELL_STEP):
        assert detect_launch(shell | JUPYTER_KERNEL) == detect_launch(shell)


def test_the_documentation_lists_these_situations() -> None:
    text = (Path(__file__).parents[3] / "docs" / "launch-variables.md").read_text()
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (one|all) \|", text, re.MULTILINE)
    assert {(situation, launcher, count) for situation, launcher, count in rows} == {
        (situation, "none" if launcher == "none" else launcher, "one" if size == 1 else "all")
        for situation, (_, launcher, size) in SEVERAL.items()}


def test_tf_config_workers_are_ranks_in_order() -> None:
    launch = detect_launch(tf_config(TWO_WORKERS, "worker", 1))
    assert (launch.rank, launch.size, launch.cluster) == (1, 2, ("a:2222", "b:2222"))
    assert launch.tasks == ("worker 0", "worker 1")
    assert (launch.rendezvous.kind, launch.rendezvous.address) == ("tf_config", "a:2222")


def test_tf_config_chief_is_rank_0_and_workers_follow() -> None:
    cluster = {"worker": ["a:1", "b:1"], "chief": ["c:1"]}
    assert detect_launch(tf_config(cluster, "chief", 0)).rank == 0
    launch = detect_launch(tf_config(cluster, "worker", 1))
    assert (launch.rank, launch.cluster) == (2, ("c:1", "a:1", "b:1"))
    assert launch.tasks == ("chief 0", "worker 0", "worker 1")


def test_tf_config_with_one_worker_is_a_job_of_one() -> None:
    assert detect_launch(tf_config({"worker": ["a:1"]})).size == 1


def test_tf_config_lets_an_evaluator_be_listed_but_not_started() -> None:
    cluster = {**TWO_WORKERS, "evaluator": ["e:1"]}
    assert detect_launch(tf_config(cluster)).size == 2
    with pytest.raises(UsageError, match="no role evaluator"):
        detect_launch(tf_config(cluster, "evaluator", 0))


def test_the_same_cluster_is_the_same_job_on_every_rank() -> None:
    jobs = {detect_launch(tf_config(TWO_WORKERS, "worker", index)).rendezvous.job for index in (0, 1)}
    other = detect_launch(tf_config({"worker": ["a:2222", "b:2223"]})).rendezvous.job
    assert len(jobs) == 1
    assert other not in jobs


def test_an_index_may_be_text_and_an_address_ipv6() -> None:
    launch = detect_launch(tf_config({"worker": ["[fe80::1]:1", "10.0.0.1:2"]}, "worker", "1"))
    assert (launch.rank, launch.cluster[0]) == (1, "[fe80::1]:1")


@pytest.mark.parametrize("empty", ["", "  "])
def test_an_empty_tf_config_is_none(empty: str) -> None:
    assert detect_launch({"TF_CONFIG": empty}) == Launch("none")


@pytest.mark.parametrize(("text", "complaint", "fix"), [
    ("{'cluster': {}}", "must be JSON", "write it like"),
    ("[1]", "must be a JSON object", "write it like"),
    ("{}", 'must have a "cluster"', "unset TF_CONFIG"),
    ('{"cluster": {}}', 'must have a "cluster"', "unset TF_CONFIG"),
    (json.dumps({"cluster": TWO_WORKERS}), 'must have a "task"', '"index": 0'),
    (json.dumps({"cluster": TWO_WORKERS, "task": {"type": "worker"}}), 'must have a "task"', '"index": 0'),
], ids=["not JSON", "not an object", "empty", "empty cluster", "no task", "no index"])
def test_a_malformed_tf_config_says_what_is_wrong_and_the_fix(text: str, complaint: str, fix: str) -> None:
    with pytest.raises(UsageError) as caught:
        detect_launch({"TF_CONFIG": text})
    assert complaint in str(caught.value)
    assert fix in str(caught.value).split("HINT: ")[1]


@pytest.mark.parametrize(("cluster", "kind", "index", "complaint", "fix"), [
    (TWO_WORKERS, "worker", 2, "task index", "0 to 1"),
    (TWO_WORKERS, "worker", -1, "task index", "0 to 1"),
    (TWO_WORKERS, "worker", "first", "task index", "0 to 1"),
    (TWO_WORKERS, "worker", True, "task index", "0 to 1"),
    (TWO_WORKERS, "chief", 0, "task index", 'no "chief"'),
    (TWO_WORKERS, "boss", 0, "task type", '"chief" or "worker"'),
    (TWO_WORKERS, "ps", 0, "no role ps", "as a worker"),
    ({**TWO_WORKERS, "ps": ["p:1"]}, "worker", 0, "parameter servers",
     "call hvd.parameter_server.train"),
    ({**TWO_WORKERS, "master": ["m:1"]}, "worker", 0, "Roles", 'rename "master"'),
    ({"chief": ["a:1", "b:1"]}, "chief", 0, "at most one chief", 'under "worker"'),
    ({"worker": "a:1,b:1"}, "worker", 0, "must list its addresses", '["host:port", ...]'),
    ({"worker": {"0": "a:1"}}, "worker", 0, "must list its addresses", '["host:port", ...]'),
    ({"worker": ["a:1", "a:1"]}, "worker", 0, "worker 0 and worker 1 share one", "give worker 1 another"),
    ({"chief": ["a:1"], "worker": ["a:1"]}, "worker", 0, "chief 0 and worker 0 share one", "give worker 0 another"),
    ({"worker": ["a"]}, "worker", 0, "host:port", "host1:2222"),
    ({"worker": ["a:"]}, "worker", 0, "host:port", "host1:2222"),
    ({"worker": [":1"]}, "worker", 0, "host:port", "host1:2222"),
    ({"worker": ["a:0"]}, "worker", 0, "host:port", "host1:2222"),
    ({"worker": ["a:70000"]}, "worker", 0, "host:port", "host1:2222"),
    ({"worker": ["grpc://a:1"]}, "worker", 0, "host:port", "no scheme"),
    ({"worker": ["fe80::1:1"]}, "worker", 0, "host:port", "IPv6"),
    ({"worker": [17]}, "worker", 0, "host:port", "host1:2222"),
])
def test_a_wrong_cluster_says_what_is_wrong_and_the_fix(cluster: object, kind: str, index: object, complaint: str,
                                                        fix: str) -> None:
    with pytest.raises(UsageError) as caught:
        detect_launch(tf_config(cluster, kind, index))
    assert complaint in str(caught.value)
    assert "Received: " in str(caught.value)
    assert fix in str(caught.value).split("HINT: ")[1]


def test_the_cluster_in_words_names_every_rank() -> None:
    launch = detect_launch(tf_config({"chief": ["c:1"], "worker": ["a:1"]}, "worker", 0))
    assert describe_cluster(launch) == "TF_CONFIG names 2 ranks: 0 is chief 0 (c:1), 1 is worker 0 (a:1)"


def test_a_large_cluster_in_words_stays_short() -> None:
    launch = detect_launch(tf_config({"worker": [f"h{number}:1" for number in range(20)]}))
    assert describe_cluster(launch).endswith("15 is worker 15 (h15:1), and 4 more")


DETECT = """
import sys
from hvkeras.control.launch_environments import detect_launch
sys.stdout.write(f"FOUND {detect_launch()}\\n")
"""


def found_under(command: list[str], around: dict[str, str] | None = None) -> list[str]:
    """Starts two processes by a real launcher, and returns what each found, sorted."""
    foreign = ("OMPI_", "PMI", "HOROVOD_", "HVKERAS_", "SLURM_", "TF_CONFIG", "MASTER_", "RANK", "WORLD_SIZE")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    environ |= {"PATH": f"{BIN}{os.pathsep}{environ['PATH']}", **(around or {})}
    done = subprocess.run([*command, sys.executable, "-I", "-c", DETECT], capture_output=True, text=True, timeout=120,
                          env=environ)
    assert done.returncode == 0, done.stderr
    return sorted(re.findall(r"FOUND (Launch\(.*?mpi=\w+\))", done.stdout))


@pytest.mark.nightly  # test_init starts every launcher
@pytest.mark.parametrize(("command", "launcher", "kind"), [
    (["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "2"], "mpirun (Open MPI)", "mpi"),
    (["horovodrun", "--mpi", "-np", "2"], "horovodrun (MPI)", "mpi"),
    (["horovodrun", "--gloo", "-np", "2"], "horovodrun (Gloo)", "horovod_store"),
], ids=["mpirun", "horovodrun mpi", "horovodrun gloo"])
def test_the_real_launchers_are_recognised(command: list[str], launcher: str, kind: str) -> None:
    found = found_under([str(BIN / command[0]), *command[1:]])
    assert len(found) == 2
    for rank, text in enumerate(found):
        assert f"launcher='{launcher}', rank={rank}, size=2, rendezvous=Rendezvous(kind='{kind}'" in text
        assert f"local_rank={rank}, local_size=2" in text


def test_the_real_mpirun_inside_a_step_of_slurms_is_recognised() -> None:
    here = ["--mca", "plm", "isolated", "--mca", "ras", "^slurm"]  # else it would ask Slurm for processes
    flags = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", *here, "-np", "2"]
    found = found_under([str(BIN / "mpirun"), *flags], SLURM_STEP)
    assert len(found) == 2
    for rank, text in enumerate(found):
        assert f"launcher='mpirun (Open MPI)', rank={rank}, size=2" in text

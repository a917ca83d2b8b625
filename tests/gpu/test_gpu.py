"""What can be seen on a machine with one or two GPUs (`make test-gpu`); each part says in a line why it was not run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import Outcome
from harness.launchers import BIN
from hvkeras.backends.horovod import installed

pytestmark = pytest.mark.nightly  # not part of `make test`

WORKER = Path(__file__).parent / "workers" / "on_gpus.py"
SPARSE = "sparse_adam_clip"
CASES = ("sgd_momentum", "adam", "adam_clip_decay", SPARSE)
TOLERANCE = 1e-3  # relative to the largest weight: a GPU sums in another order for each size of a batch
ENVIRONMENT = {"NVIDIA_TF32_OVERRIDE": "0"}  # else products have 10 bits
# Ranks that share a GPU are hosts of their own for NCCL, which talk over the loopback interface.
SHARED = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket",
          "NCCL_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0", "NCCL_CUMEM_ENABLE": "0"}
WAYS_WORKER = WORKER.with_name("ways_on_gpus.py")
WAYS = {"mixed_float16": 1e-2, "mixed_bfloat16": 5e-2, "compression": 1e-2, "shard_update": TOLERANCE,
        "compile_update": TOLERANCE, "tape": TOLERANCE, "gradients_by_xla": TOLERANCE}  # and their tolerances
BUILD = "hvkeras build-horovod --with-mpi --cuda"


@pytest.fixture(scope="session")
def gpus() -> int:
    """How many GPUs TensorFlow sees; asked in a process of its own, as a GPU is taken by whoever looks at it."""
    program = "import tensorflow as tf; print('GPUs:', len(tf.config.list_physical_devices('GPU')))"
    done = subprocess.run([sys.executable, "-Ic", program], capture_output=True, text=True, timeout=300)
    found = re.search(r"GPUs: (\d+)", done.stdout)
    assert found, done.stderr
    return int(found[1])


def require(what: str, gpus: int, least: int, horovod: bool = False, nccl: bool = False) -> None:
    """Skips a test that needs more than is here, with a line that says what was not run."""
    if gpus < least:
        pytest.skip(f"not run: {what}, which needs {least} GPU{'s' * (least > 1)}; TensorFlow sees {gpus}")
    if horovod and not installed.availability().ok:
        pytest.skip(f"not run: {what}, which needs Horovod. HINT: {BUILD.removesuffix(' --cuda')}")
    if nccl and not installed.has_nccl():
        pytest.skip(f"not run: {what}, which needs Horovod with NCCL. HINT: {BUILD}")


# What runs on how many GPUs, and by which transport tensors go. Two ranks share a GPU where there is only one.
RUNS = {
    "native, two ranks on one GPU": ("native", 1, "shared memory"),
    "native, two ranks on two GPUs": ("native", 2, "shared memory"),
    "horovod through host memory, two ranks on one GPU": ("horovod", 1, "MPI or Gloo"),
    "horovod through host memory, two ranks on two GPUs": ("horovod", 2, "MPI or Gloo"),
    "horovod over NCCL, two ranks on two GPUs": ("horovod", 2, "NCCL"),
    "tfdist through host memory, two ranks on one GPU": ("tfdist", 1, "gRPC"),
    "tfdist over NCCL, two ranks on one GPU": ("tfdist", 1, "NCCL"),
    "tfdist over NCCL, two ranks on two GPUs": ("tfdist", 2, "NCCL"),
}


def how_to_run(run: str) -> tuple[tuple[str, ...], dict[str, str]]:
    """Arguments of the workers, and the environment."""
    backend, least, transport = RUNS[run]
    hidden = {"CUDA_VISIBLE_DEVICES": "0"} if least == 1 else {}
    shares = (backend, least, transport) == ("tfdist", 1, "NCCL")
    return (("--share",) if shares else ()), ENVIRONMENT | hidden | (SHARED if shares else {})


def outcome_of(run: str, gpus: int, launch_once: Callable[..., Outcome], part: str, worker: Path = WORKER,
               arguments: tuple[str, ...] = CASES) -> Outcome:
    """Launches a run, or skips the test."""
    backend, least, transport = RUNS[run]
    what = f"{part} by {run}"
    require(what, gpus, least, backend == "horovod", backend == "horovod" and transport == "NCCL")
    if backend == "horovod" and transport != "NCCL" and installed.has_nccl():
        pytest.skip(f"not run: {what}, which needs Horovod without NCCL. HINT: {BUILD.removesuffix(' --cuda')} --force")
    more, environment = how_to_run(run)
    return launch_once("hvkeras_run", worker, (*arguments, *more), np=2, backend=backend, env=environment, cold=True)


@pytest.mark.parametrize("run", RUNS)
def test_each_rank_has_the_gpu_of_its_local_rank(run: str, gpus: int, launch_once: Callable[..., Outcome]) -> None:
    """And leaves memory to the other one, if they share it."""
    backend, least, transport = RUNS[run]
    outcome = outcome_of(run, gpus, launch_once, "ranks placed by their local rank")
    assert re.search(rf"GPU of each rank: {'0, 1' if least == 2 else '0, 0'} \(NVIDIA [^)]+\)"
                     rf"{'' if least == 2 else ', shared'};", outcome.stderr(0))
    found = outcome.results("place")
    for each in found:
        assert each["backend"] == backend and each["transport"] in transport
        assert "GPU" in each["device"]
        number = each["local_rank"] if least == 2 else 0
        assert each["visible"] == [f"/physical_device:GPU:{number}"]
    assert [each["local_rank"] for each in found] == [0, 1]


@pytest.mark.parametrize("run", RUNS)
def test_collectives_of_gpu_tensors_are_right(run: str, gpus: int, launch_once: Callable[..., Outcome]) -> None:
    assert outcome_of(run, gpus, launch_once, "collectives").results("collectives") == [[], []]


@pytest.mark.parametrize("run", RUNS)
def test_fit_gives_the_weights_of_one_process(run: str, gpus: int, launch_once: Callable[..., Outcome]) -> None:
    found = outcome_of(run, gpus, launch_once, "fit beside one process").results("differences")
    for case in CASES:
        for results in found:
            difference, moved, _ = results[case]
            assert moved > 10 * TOLERANCE and difference < TOLERANCE
        # On GPUs TensorFlow adds rows of the same index in any order.
        assert case == SPARSE or len({results[case][2] for results in found}) == 1, "the ranks' weights differ"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("run", RUNS)
def test_other_ways_of_training_give_them_too(
    run: str, way: str, gpus: int, launch_once: Callable[..., Outcome]
) -> None:
    """Each in a job of its own, so that one that hangs or fails takes no other down."""
    found = outcome_of(run, gpus, launch_once, f"{way} beside one process", WAYS_WORKER, (way,)).results("difference")
    for difference, moved, _ in found:
        assert moved > 3 * WAYS[way] and difference < WAYS[way]
    assert found[0][2] == found[1][2], "the ranks' weights differ"


@pytest.mark.parametrize("run", RUNS)
def test_large_tensors_bool_and_variables_arrive_and_xla_is_refused(
    run: str, gpus: int, launch_once: Callable[..., Outcome]
) -> None:
    outcome = outcome_of(run, gpus, launch_once, "other collectives", WAYS_WORKER, ("others",))
    assert outcome.results("large_and_odd") == [[], []]
    assert all("pass jit_compile=False" in said for said in outcome.results("compiled"))


@pytest.mark.parametrize("run", [run for run in RUNS if run.startswith("tfdist over NCCL")])
def test_collectives_in_unlike_orders_are_an_error(run: str, gpus: int, launch_once: Callable[..., Outcome]) -> None:
    outcome = outcome_of(run, gpus, launch_once, "collectives in unlike orders", WAYS_WORKER, ("crossed",))
    found = outcome.results("crossed")
    for kind in found[0]:
        said = [text for of_rank in found for text in of_rank[kind]]
        assert said and all("run their collectives in the same order" in text for text in said), kind


@pytest.mark.parametrize("how", ["raise", "kill"])
@pytest.mark.parametrize("run", [run for run in RUNS if "one GPU" in run])
def test_a_failed_rank_ends_the_job(run: str, how: str, gpus: int, launch: Callable[..., Outcome]) -> None:
    """The other one is within a collective then."""
    backend, least, transport = RUNS[run]
    require(f"a rank that fails by {how} with {run}", gpus, least, backend == "horovod", transport == "NCCL" and
            backend == "horovod")
    arguments, environment = how_to_run(run)
    outcome = launch("hvkeras_run", WORKER.with_name("misbehave_on_gpus.py"), (how, *arguments), np=2, backend=backend,
                     env=environment, cold=True, expect_failure=True, deadline=60)
    assert re.search(r"hvkeras: rank 0 on \S+ ends because rank 1 on", outcome.stderr(0))
    assert outcome.exit_code


@pytest.mark.parametrize("least", [1, 2])
def test_auto_takes_nccl_if_each_rank_has_a_gpu(least: int, gpus: int, launch: Callable[..., Outcome]) -> None:
    require(f"the choice of a backend for two ranks on {least} GPUs", gpus, least)
    outcome = launch("hvkeras_run", WORKER, CASES, np=2, cold=True, env=ENVIRONMENT | {
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, range(least)))})
    assert {each["transport"] == "NCCL" for each in outcome.results("place")} == {least == 2}
    assert f"; tensors go {'through host memory, as NCCL needs' if least == 1 else 'over NCCL'}" in outcome.stderr(0)


@pytest.mark.parametrize("backend", ["native", "tfdist"])
def test_the_report_divides_the_time_of_steps(backend: str, gpus: int, launch: Callable[..., Outcome]) -> None:
    least = 2 if backend == "tfdist" else 1
    require(f"the times in the report of {backend}", gpus, least)
    reported = Path(__file__).parents[1] / "launch" / "workers" / "reported.py"
    outcome = launch("hvkeras_run", reported, ("1",), np=2, backend=backend, cold=True,
                     env=ENVIRONMENT | {"HVKERAS_REPORT": "report"})
    found: dict[str, Any] = json.loads((outcome.cwd / "report" / "report.json").read_text())
    for each in found["ranks"]:
        split = each["split"]
        parts = [split[name] for name in ("input", "compute", "wait", "communication")]
        assert split["step"] == pytest.approx(sum(parts)) and min(parts) >= 0 and split["steps"] > 0
    print(json.dumps([each["split"] for each in found["ranks"]]))


def test_forked_ranks_have_their_gpus(gpus: int, tmp_path: Path) -> None:
    """The fork server opens no GPU; each rank opens its own, and one that the script has chosen before its imports."""
    require("ranks that are forked (--preload)", gpus, 1)
    script = tmp_path / "train.py"
    script.write_text("""import os
if "chosen" in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["chosen"]
import keras, numpy as np, tensorflow as tf
import hvkeras as hvd
print("GPUs:", len(tf.config.list_physical_devices("GPU")))
hvd.init()
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), "mse")
model.fit(np.ones((32, 4)), np.ones((32, 1)), verbose=0)
print("on", {variable.value.device[-5:] for variable in model.variables})
""")
    for chosen, seen in ((None, gpus), ("0", 1), ("", 0)):
        environment = {**os.environ, **({} if chosen is None else {"chosen": chosen})}
        flags = ["-np", "2", "--preload", "tensorflow,keras"]
        done = subprocess.run([str(BIN / "hvkeras"), "run", *flags, sys.executable, str(script)], env=environment,
                              cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert "in spite of --preload" not in done.stderr
        assert done.stdout.count(f"GPUs: {seen}\n") == 2
        assert done.stdout.count(f"{'GPU' if seen else 'CPU'}:") == 2

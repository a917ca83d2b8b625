"""Which rank gets which GPU, and what is said of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tensorflow  # noqa: F401 - it changes the environment, which a test must not

from hvkeras.backends.interface import Start
from hvkeras.backends.tfdist.cluster import uses_nccl
from hvkeras.control.launch_environments import Launch
from hvkeras.errors import UsageError
from hvkeras.host.gpus import GpuPlacement
from hvkeras.host.topology import topology_from_hosts
from hvkeras.settings import Settings


def rank(host: str, gpus: str, taken: list[int] | None = None, state: str = "", nccl_host: str = "") -> dict[str, Any]:
    """What a rank reports that sees GPUs, named by letters."""
    return {"host": host, "identity": f"{host} 1", "gpus": {
        "names": [str(number) for number in range(len(gpus))], "ids": list(gpus), "model": "H200" if gpus else "",
        "taken": taken if gpus else [], "state": state, "nccl_host": nccl_host, "unused": 0}}


LATE = "shared, as TensorFlow had started before hvd.init(), which must come first"
# The ranks; the GPUs that they take; whether each has its own; what is said.
CASES = {
    "one for each": ([rank("a", "XY")] * 2, [(0,), (1,)], True, "0, 1 (H200)"),
    "fewer than ranks": ([rank("a", "XY")] * 4, [(0,), (1,), (0,), (1,)], False, "0, 1, 0, 1 (H200), shared"),
    "more than ranks": ([rank("a", "XYZ")] * 2, [(0,), (1,)], True, "0, 1 (H200)"),
    "two hosts": ([rank("a", "XY"), rank("b", "VW")] * 2, [(0,), (0,), (1,), (1,)], True,
                  "0, 1 on each of 2 hosts (H200)"),
    "several for each": ([rank("a", "XY"), rank("b", "VW")], [(0, 1), (0, 1)], True,
                         "0+1 on each of 2 hosts (H200); without a strategy, each rank computes on its first"),
    "the launcher shows each rank one": ([rank("a", "X"), rank("a", "Y")], [(0,), (0,)], True, "0, 0 (H200)"),
    "chosen by the script": ([rank("a", "XY", [1]), rank("a", "XY", [0])], [(1,), (0,)], True, "1, 0 (H200)"),
    "one has chosen": ([rank("a", "XY"), rank("a", "XY", [0])], [(1,), (0,)], True, "1, 0 (H200)"),
    "survivors and a newcomer": ([rank("a", "XYZ", [1], "started"), rank("a", "XYZ", [2], "started"), rank("a", "XYZ")],
                                 [(1,), (2,), (0,)], True, "1, 2, 0 (H200)"),
    "started too early": ([rank("a", "XY", [0, 1], "started")] * 2, [(0, 1), (0, 1)], False,
                          f"0+1, 0+1 (H200), {LATE}"),
    "an elastic job that goes on": ([rank("a", "X", [0], "started")] * 2, [(0,), (0,)], False, "0, 0 (H200), shared"),
    "left to the script": ([rank("a", "XY", [0, 1], "open")] * 2, [(0, 1), (0, 1)], False, None),
    "hosts of NCCL's": ([rank("a", "X", nccl_host=name) for name in "12"], [(0,), (0,)], True, "0, 0 (H200), shared"),
    "none on one host": ([rank("a", "X"), rank("b", "")], [(0,), ()], False, "0 on a; none on b (H200)"),
    "none": ([rank("a", "")] * 2, [(), ()], False, None),
}


@pytest.mark.parametrize(("facts", "numbers", "own", "said"), CASES.values(), ids=CASES)
def test_each_rank_gets_the_gpu_that_the_fewest_others_use(
    facts: list[dict[str, Any]], numbers: list[tuple[int, ...]], own: bool, said: str | None
) -> None:
    placement = GpuPlacement.of(facts)
    assert list(placement.numbers) == numbers
    assert placement.each_has_own is own
    assert placement.sentence() == ("" if said is None else f"GPU of each rank: {said}")


def start_on(*facts: dict[str, Any]) -> Start:
    topology = topology_from_hosts(0, [fact["host"] for fact in facts], [fact["identity"] for fact in facts])
    return Start(topology, None, Launch("none"), Settings({}), GpuPlacement.of(facts).devices)


@pytest.mark.parametrize(("facts", "nccl"), [
    ([rank("a", "XY"), rank("a", "XY"), rank("b", "V")], True),
    ([rank("a", "X"), rank("a", "X"), rank("b", "V"), rank("b", "V")], False),
    ([rank("a", "X"), rank("a", "X"), rank("b", "")], False),  # all hosts go through host memory
    ([rank("a", ""), rank("b", "")], False)])
def test_tfdist_takes_nccl_if_each_rank_has_a_gpu(facts: list[dict[str, Any]], nccl: bool) -> None:
    assert uses_nccl(start_on(*facts)) is nccl


@pytest.mark.parametrize(("there", "received"), [("", "GPUs: 0"), ("V", "GPUs: 1")])
def test_tfdist_names_hosts_that_differ(there: str, received: str) -> None:
    facts = [rank("a", "XY"), rank("a", "XY"), rank("b", there), rank("b", there)]
    with pytest.raises(UsageError, match=f"on all hosts.*rank_0_on_a='ranks: 2, GPUs: 2', rank_2_on_b='ranks: 2,"
                                         f" {received}'.*HINT: start as many ranks on each host as it has GPUs"):
        uses_nccl(start_on(*facts))


DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return flags; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int number) { *device = 40 + number; return number > 1; }
int cuDeviceGetUuid_v2(char *uuid, int device) { memset(uuid, device, 16); return 0; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, device == 40 ? "H100" : "L4", size); return 0; }
"""


def test_gpus_are_told_apart_by_what_the_driver_calls_them(tmp_path: Path) -> None:
    """With a library of the driver's interface, as there may be no GPU."""
    (tmp_path / "driver.c").write_text(DRIVER)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", tmp_path / "driver.c"], check=True)
    program = "from hvkeras.host import gpus; print(gpus._driver_gpus())"
    done = subprocess.run([sys.executable, "-Ic", program], env={"LD_LIBRARY_PATH": str(tmp_path)}, text=True,
                          capture_output=True, check=True, timeout=60)
    assert done.stdout == f"{[('28' * 16, 'H100'), ('29' * 16, 'L4')]}\n"

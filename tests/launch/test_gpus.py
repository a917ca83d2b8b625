"""The GPU of each rank, with simulated GPUs (`harness.gpus`). Tests on real GPUs are in `tests/gpu`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import Outcome

WORKER = Path(__file__).parent / "workers" / "gpus.py"
GROWS, UNTOUCHED = [True, True], [None, None]

# Backend; the script's mode and number of GPUs; GPUs of the ranks; memory growth; transport of tensors.
CASES = {
    "native": ("native", "2", (["0"], ["1"]), GROWS, "shared memory"),
    "tfdist": ("tfdist", "2 horovod", (["0"], ["1"]), GROWS, "NCCL"),
    "horovod's own lines": ("native", "2 horovod", (["0"], ["1"]), GROWS, "shared memory"),
    "shared": ("tfdist", "1", (["0"], ["0"]), [True], "gRPC"),
    "chosen by the script": ("tfdist", "2 pins", (["1"], ["0"]), UNTOUCHED, "NCCL"),
    "hidden by the script": ("tfdist", "2 hides", ([], []), UNTOUCHED, "gRPC"),
    "with a limit": ("native", "2 limits", (["0"], ["1"]), UNTOUCHED, "shared memory"),
    "too late": ("native", "2 starts", (["0", "1"], ["0", "1"]), UNTOUCHED, "shared memory"),
}
SAID = {"shared": "0, 0, shared", "chosen by the script": "1, 0", "hidden by the script": None,
        "too late": "0+1, 0+1, shared, as TensorFlow had started before hvd.init(), which must come first"}


MARKS = {"tfdist": pytest.mark.oldest, "too late": pytest.mark.oldest, "native": pytest.mark.slow,
         "horovod's own lines": pytest.mark.slow, "hidden by the script": pytest.mark.slow,
         "with a limit": pytest.mark.slow}


@pytest.mark.parametrize("case", [pytest.param(case, marks=MARKS.get(case, ())) for case in CASES])
def test_each_rank_takes_its_gpu_and_leaves_to_the_script_what_it_has_chosen(
    case: str, launch: Callable[..., Outcome]
) -> None:
    backend, arguments, visible, growth, transport = CASES[case]
    outcome = launch("hvkeras_run", WORKER, tuple(arguments.split()), np=2, backend=backend)
    assert outcome.results("place") == [{"visible": each, "growth": growth, "backend": backend, "transport": transport}
                                        for each in visible]
    assert outcome.results("collective") == [3.0, 3.0]
    said, way = SAID.get(case, "0, 1"), "over NCCL" if transport == "NCCL" else "through host memory"
    assert re.findall("GPU of each rank: (.*)", outcome.stderr(0)) == (
        [] if said is None else [f"{said}; tensors go {way}"])
    assert "GPU of each" not in outcome.stderr(1)


@pytest.mark.parametrize(("arguments", "backend", "why"), [
    (("2",), "tfdist", "over NCCL, as each rank has its own GPU"),
    (("1",), "native", "through host memory, as NCCL needs a GPU for each rank")])
def test_auto_says_what_it_has_chosen_for_the_gpus(
    arguments: tuple[str, ...], backend: str, why: str, launch: Callable[..., Outcome]
) -> None:
    outcome = launch("hvkeras_run", WORKER, arguments, np=2)
    assert {found["backend"] for found in outcome.results("place")} == {backend}
    assert f"; tensors go {why}\n" in outcome.stderr(0)


@pytest.mark.slow
def test_a_setting_leaves_the_gpus_to_the_script(launch: Callable[..., Outcome]) -> None:
    outcome = launch("hvkeras_run", WORKER, ("2", "horovod"), np=2, backend="native",
                     env={"HVKERAS_GPU_PLACEMENT": "off"})
    assert [found["visible"] for found in outcome.results("place")] == [["0"], ["1"]]
    assert "GPU of each" not in outcome.stderr(0)


@pytest.mark.slow
def test_tfdist_ends_where_hosts_differ(launch: Callable[..., Outcome]) -> None:
    outcome = launch("tf_config", WORKER, ("1", "apart", "fewer"), np=2, backend="tfdist", expect_failure=True)
    for rank in range(2):
        assert "in the same way as rank" in outcome.stderr(rank) or re.search(
            r"On tfdist, each rank must have a separate GPU .*rank_0_on_\S+='ranks: 1, GPUs: 1',"
            r" rank_1_on_\S+='ranks: 1, GPUs: 0'", outcome.stderr(rank))


def test_collectives_in_unlike_orders_are_an_error_over_nccl(launch: Callable[..., Outcome]) -> None:
    """TensorFlow's ring, patched to combine collectives in the order of their start, as NCCL does."""
    outcome = launch("hvkeras_run", WORKER, ("2", "crosses"), np=2, backend="tfdist")
    found = outcome.results("crossed")
    assert len(found[0]) == 9
    for kind in found[0]:
        said = [text for of_rank in found for text in of_rank[kind]]
        assert said and all("run their collectives in the same order" in text for text in said), kind


@pytest.mark.slow
def test_the_report_names_the_gpu_of_each_rank(launch: Callable[..., Outcome]) -> None:
    outcome = launch("hvkeras_run", WORKER, ("2",), np=2, backend="native",
                     env={"CUDA_VISIBLE_DEVICES": "4,6", "HVKERAS_REPORT": "report"})
    assert "GPU of each rank: 4, 6;" in outcome.stderr(0)
    page = (outcome.cwd / "report" / "report.html").read_text()
    assert re.search(r"<th[^>]*>GPU</th>", page) and re.search(r"<td[^>]*>6</td>", page)

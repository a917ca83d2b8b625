"""What `hvkeras bench` computes, reads and prints, without starting a rank."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image, ImageColor
from rich.console import Console

from hvkeras.bench.allreduce import AllreduceTask, links_for
from hvkeras.bench.participant import PeakMemory
from hvkeras.bench.ranks import WrongResultError, one_line
from hvkeras.bench.row import (
    FORWARD_BACKWARD,
    ONE_PROCESS,
    PEER,
    REFERENCE,
    UPDATE,
    BenchmarkRow,
    bandwidth,
    bus_bandwidth,
    efficiency,
    exposed,
    part,
    quartiles,
    rate,
    speed_up,
    with_figures,
)
from hvkeras.bench.tables import draw, duration, explanations, table
from hvkeras.cli.main import main
from hvkeras.diagnostics.charts import colours_of
from hvkeras.host.machine import machine_facts, spread

ALLREDUCES = [
    BenchmarkRow("4KB", "fast", engine="wires", blocks=[1e-6, 2e-6, 3e-6], calls=10, links=100, bytes=4000,
                 memory=3_000_000),
    BenchmarkRow("4KB", "slow", engine="pigeons", blocks=[10e-6, 40e-6, 90e-6], calls=1, links=100, bytes=4000),
    BenchmarkRow("4KB", "none", reason="it is not installed"),
    BenchmarkRow("64MB", "fast", engine="wires", blocks=[0.02, 0.02], calls=1, links=2, bytes=64_000_000),
    BenchmarkRow("64MB", "liar", reason="1 is not 2", wrong=True),
    BenchmarkRow("64MB", "none", reason="it is not installed"),
]
STEPS = [
    BenchmarkRow("mlp", ONE_PROCESS, REFERENCE, blocks=[0.008, 0.010, 0.009], samples=64, bytes=7_500_000),
    BenchmarkRow("mlp", "fast", blocks=[0.010, 0.0125, 0.009], samples=128, bytes=7_500_000, difference=0.0, first=1.5,
        parts={FORWARD_BACKWARD: [0.006, 0.007, 0.005], UPDATE: [0.002, 0.003, 0.002]}),
    BenchmarkRow("mlp", "slow alone", PEER, blocks=[0.016, 0.020, 0.018], samples=128, bytes=7_500_000,
                 difference=2e-5),
]


def printed(kind: str, rows: list[BenchmarkRow]) -> tuple[list[list[str]], list[str]]:
    """The words of the table's lines, and the notes."""
    made, notes = table(kind, rows, 2)
    out = io.StringIO()
    Console(file=out, width=200).print(made)
    return [line.split() for line in out.getvalue().splitlines() if line.split()], notes


def test_quartiles_bandwidths_and_rates_follow_their_formulas() -> None:
    assert quartiles([5.0, 1.0, 2.0, 4.0, 3.0]) == (2.0, 3.0, 4.0)
    assert quartiles([7.0]) == (7.0, 7.0, 7.0)
    assert bandwidth(64_000_000, 0.02) == pytest.approx(3.2e9)
    assert bus_bandwidth(64_000_000, 0.02, 2) == pytest.approx(3.2e9)
    assert bus_bandwidth(64_000_000, 0.02, 4) == pytest.approx(4.8e9)
    assert rate(STEPS[1]) == pytest.approx(128 / 0.010)
    assert rate(ALLREDUCES[0]) is None


def test_rows_are_compared_round_by_round() -> None:
    fast, slow, none = ALLREDUCES[:3]
    assert speed_up(fast, slow) == pytest.approx(20.0)  # of 10, 20 and 30
    assert speed_up(slow, fast) == pytest.approx(0.05)
    assert speed_up(fast, none) is None
    assert efficiency(STEPS[1], STEPS) == pytest.approx(0.8)  # of 0.8, 0.8 and 1.0
    assert efficiency(STEPS[0], STEPS) == 1.0
    assert efficiency(STEPS[1], STEPS[1:]) is None


def test_communication_that_is_not_hidden_is_what_the_parts_of_a_step_leave() -> None:
    assert part(STEPS[1], FORWARD_BACKWARD) == pytest.approx(0.006)
    assert part(STEPS[1], UPDATE) == pytest.approx(0.002)
    assert exposed(STEPS[1]) == pytest.approx(0.002)  # of 2, 2.5 and 2 ms
    assert (part(STEPS[2], UPDATE), exposed(STEPS[2])) == (None, None)
    assert exposed(dataclasses.replace(STEPS[1], kind=REFERENCE)) is None
    assert with_figures(STEPS, 2)[1]["exposed_communication"] == pytest.approx(0.002)


def test_rows_come_back_from_json_with_figures() -> None:
    done = json.loads(json.dumps(with_figures(ALLREDUCES, 2)))
    assert [BenchmarkRow.from_json(each) for each in done] == ALLREDUCES
    assert done[0]["quartiles"] == pytest.approx([1.5e-6, 2.5e-6])
    assert done[0]["speed_up"] == {"slow": pytest.approx(20.0)}
    assert done[0]["algorithm_bandwidth"] == pytest.approx(2e9)
    assert "median" not in done[2]
    assert with_figures(STEPS, 2)[2]["efficiency"] == pytest.approx(0.5)


def test_the_table_of_allreduces_has_figures_and_reasons() -> None:
    lines, notes = printed("allreduce", ALLREDUCES)
    assert lines[0][:1] == ["allreduce"]
    assert lines[3] == ["4KB", "fast", "2", "us", "(1.5-2.5)", "2", "2", "3", "-", "20"]
    assert lines[4] == ["slow", "40", "us", "(25-65)", "0.1", "0.1", "-", "0.05", "-"]
    assert lines[5] == ["none", "failed", "(1)"]
    assert lines[6][:6] == ["64MB", "fast", "20", "ms", "(20-20)", "3.2"]
    assert lines[7:9] == [["liar", "wrong", "(2)"], ["none", "failed", "(1)"]]
    assert notes == ["(1) it is not installed", "(2) 1 is not 2"]
    said = explanations("allreduce", ALLREDUCES, 2)
    assert said[:2] == ["fast: wires", "slow: pigeons"]
    assert "100 at 4KB, 2 at 64MB" in said[2]


def test_the_table_of_steps_has_shares_of_one_process() -> None:
    lines, notes = printed("step", STEPS)
    assert lines[-3][:3] == ["mlp", "one", "process"]
    assert lines[-3][3:] == ["9,000", "us", "(8,500-9,500)", "-", "-", "-", "-", "7,111", "100%", "-", "-", "1.25", "2"]
    assert lines[-2] == ["fast", "10", "ms", "(9.5-11.2)", "6,000", "us", "2,000", "us", "2,000", "us", "1,500", "ms",
                         "12,800", "80%", "0", "-", "-", "1.6"]
    assert lines[-1] == ["slow", "alone", "18", "ms", "(17-19)", "-", "-", "-", "-", "7,111", "50%", "2e-05", "-",
                         "0.625", "-"]
    assert notes == []


@pytest.mark.parametrize(("seconds", "words"), [(1.7e-6, "1.7 us"), (1309e-6, "1,309 us"), (0.0149, "14.9 ms"),
                                                (0.368, "368 ms"), (12.5, "12.5 s")])
def test_durations_are_given_in_the_unit_that_fits(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(("kind", "rows"), [("allreduce", ALLREDUCES), ("step", STEPS), ("step", [])])
def test_plots_are_png_files(kind: str, rows: list[BenchmarkRow], tmp_path: Path) -> None:
    draw(kind, rows, 2, "a title", tmp_path / "plot.png")
    content = (tmp_path / "plot.png").read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 5000


@pytest.mark.parametrize("kind", ["allreduce", "step"])
def test_plots_have_the_colours_of_engines_in_reports(kind: str, tmp_path: Path) -> None:
    rows = [BenchmarkRow("mlp", ONE_PROCESS, REFERENCE, blocks=[0.01], bytes=4000),
            BenchmarkRow("mlp", "native", blocks=[0.012], bytes=4000),
            BenchmarkRow("mlp", "horovod alone", PEER, blocks=[0.02], bytes=4000),
            BenchmarkRow("mlp", "horovod", blocks=[0.02], bytes=4000)]
    draw(kind, rows, 2, "a title", tmp_path / "plot.png")
    with Image.open(tmp_path / "plot.png") as image:
        drawn = {colour for _, colour in image.convert("RGB").getcolors(2**24)}
    assert {ImageColor.getrgb(colours_of([name])[name]) for name in ("native", "horovod")} <= drawn


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize("label", ["4B", "52B", "4KiB"])
def test_chains_stay_finite_and_are_distinguished_from_wrong_ones(ranks: int, label: str) -> None:
    task = AllreduceTask(label, 0, ranks)
    # Another way to the same result: sums of float32 link by link, as an engine does it.
    tensors = [AllreduceTask(label, rank, ranks).own for rank in range(ranks)]

    def reduce(_: object, name: str) -> np.ndarray:
        total = tensors[0].copy()
        for each in tensors[1:]:
            total += each
        index = int(name.rsplit(maxsplit=1)[-1])
        tensors[:] = [total * np.float32(task.scale) if index % task.period == 0 else total] * ranks
        return total

    result = task.chained(reduce, tensors[0])
    assert np.isfinite(result).all() and (result > 0).all()
    task.check("good", result)
    wrong = result.copy()
    wrong[-1] *= 1.001
    with pytest.raises(WrongResultError, match=f"engine='bad', size='{label}', element={len(wrong) - 1}, got="):
        task.check("bad", wrong)
    wrong[0] = np.nan
    with pytest.raises(WrongResultError, match="element=0, got=nan"):
        task.check("bad", wrong)


def test_chains_are_shorter_for_large_tensors() -> None:
    assert [links_for(size) for size in (4, 4096, 2**20, 2**22, 2**26, 2**30)] == [100, 100, 100, 100, 16, 2]


def test_ranks_are_spread_over_cores_before_their_second_threads() -> None:
    cores = sorted(os.sched_getaffinity(0))
    assert sorted(spread(cores)) == cores
    facts = machine_facts(cores)
    assert facts["cores"] == cores and facts["cpu"] and facts["versions"]["numpy"] == np.__version__


def test_the_rise_of_the_peak_is_seen_even_after_it_went_down() -> None:
    memory = PeakMemory()
    block = np.ones(20_000_000)
    del block
    rise = memory.rise()
    assert rise is None or 150e6 < rise < 400e6


@pytest.mark.parametrize(("arguments", "message"), [
    (["allreduce", "-np", "1"], "At least two processes are needed to reduce anything. Received: np=1."),
    (["allreduce", "--sizes", "4QB"], "--sizes must be readable (a size must be a number and one of B, KB"),
    (["allreduce", "--sizes", "6B"], "Sizes must be multiples of 4 bytes, since tensors are of float32."),
    (["allreduce", "--sizes", ","], "--sizes takes names separated by commas"),
    (["allreduce", "--models", "mlp"], "--models belongs to hvkeras bench step"),
    (["step", "--sizes", "4KB"], "--sizes belongs to hvkeras bench allreduce"),
    (["step", "--models", "gpt"], "--models must be among mlp, transformer, resnet50. Received: model='gpt'."),
    (["step", "--backends", "gpu"], "The backend must be one of auto, native, horovod"),
    (["step", "--rounds", "0"], "--rounds must be a positive number"),
    (["step", "--rounds", "3", "--time", "4"], "--rounds must be a positive number, and replaces --time"),
    (["step", "--pin", "-np", "4097"], "--pin needs a core for each process"),
    (["step", "--plot", "/nowhere/plot.png"], "Files must be writable"),
    (["step", "--jit", "--fast"], "The command line must be readable (unrecognized arguments: --fast)"),
    (["sing"], "The command line must be readable (argument kind: invalid choice: 'sing'"),
])
def test_bad_command_lines_are_errors_with_a_hint(arguments: list[str], message: str,
                                                  capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    assert f"hvkeras bench: {message}" in capsys.readouterr().err


HOROVOD = "Horovod has been shut down. This was caused by an exception on one of the ranks."


@pytest.mark.parametrize("lines", [
    ["Detected at node H/HorovodAllreduce defined at (most recent call last):", "<stack traces unavailable>", HOROVOD,
     "\t [[{{node H/HorovodAllreduce}}]] [Op:__inference_step_4]"],
    ["2 root error(s) found.", f"  (0) UNKNOWN:  {HOROVOD}", "\t [[{{node H/HorovodAllreduce}}]]",
     "  (1) CANCELLED:  Function was cancelled before it was started"],
    [f"{HOROVOD} [Op:__inference_step_4]"],
])
def test_an_error_of_a_graph_is_told_by_its_reason(lines: list[str]) -> None:
    text = "\n".join(["Graph execution error:", "", *lines])
    assert one_line(tf.errors.UnknownError(None, None, text)) == f"UnknownError: {HOROVOD}"


def test_a_real_error_of_a_graph_is_told_by_its_reason() -> None:
    divide = tf.function(lambda x: tf.debugging.check_numerics(x / 0.0, "a division"))
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        divide(tf.constant(1.0))
    assert re.fullmatch(r"InvalidArgumentError: a division : Tensor had Inf values, at \S+test_bench.py:\d+ in \w+",
                        one_line(caught.value))
    assert one_line(WrongResultError("1 is not 2\nHINT: no")) == "1 is not 2"

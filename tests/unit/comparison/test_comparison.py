"""What `hvkeras compare` makes of records, logs and printed lines: numbers, rows and reasons."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

from hvkeras.cli.main import main
from hvkeras.comparison import results_file
from hvkeras.comparison.command import parser, print_table
from hvkeras.comparison.result import (
    ONE_PROCESS,
    WARM_UP,
    Number,
    Result,
    bytes_in_step,
    final_number,
    quartiles,
    result,
    samples_in_step,
    weight_difference,
)
from hvkeras.comparison.rows import Comparison, rows_of
from hvkeras.comparison.runs import trials_of
from hvkeras.comparison.table import explanations, scaling_table, sentences, table, warnings
from hvkeras.control.cause import Cause, CauseKind
from hvkeras.diagnostics.findings import COMPARE, Finding
from hvkeras.diagnostics.record import Record, write_weights
from hvkeras.diagnostics.time_split import TimeSplit
from hvkeras.errors import UsageError
from hvkeras.launcher.exit_report import exit_report, root_cause


def stamps(seconds: list[float], rows: list[float], kinds: list[int] | None = None) -> np.ndarray:
    """Stamps whose differences are these; the first one stands before them."""
    times, samples = np.cumsum([1.7e9, *seconds]), np.cumsum([8.0, *rows])
    return np.stack([times, samples, np.array(kinds or [0] * len(times), float)], axis=1)


def record(rank: int = 0, size: int = 2, **facts: object) -> Record:
    """A rank's record of 20 steps of 10 ms with 32 samples each, after a slow beginning."""
    facts = {"stamps": stamps([5.0] * WARM_UP + [0.01] * 20, [32.0] * (WARM_UP + 20)), **facts}
    return Record(rank, size, "tfdist", **facts)  # type: ignore[arg-type]


def test_a_record_comes_back_from_its_file(tmp_path: Path) -> None:
    written = record(1, logs={"fit": {"loss": 0.25}}, last_logs="fit", no_samples="of that")
    written.write(tmp_path / "new")
    read = Record.read(tmp_path / "new", 1)
    assert read is not None
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["rank.1.npz"]
    assert (read.stamps == written.stamps).all()
    read.stamps = written.stamps = np.zeros(0)
    assert str(read) == str(written)
    assert Record.read(tmp_path, 0) is None


def step_time(made: Record) -> tuple[float, float, float] | None:
    """The quartiles of the steps of a rank of its own."""
    return result(made.backend, 2, [made], "").step


def test_the_step_time_leaves_the_warm_up_out() -> None:
    assert step_time(record()) == pytest.approx((0.01, 0.01, 0.01), rel=1e-3)
    mixed = [5.0] * WARM_UP + [0.01, 0.02, 0.03, 0.04, 0.05]
    assert step_time(record(stamps=stamps(mixed, [1.0] * 10))) == pytest.approx((0.02, 0.03, 0.04), rel=1e-3)


def test_few_steps_are_better_than_none() -> None:
    assert step_time(record(stamps=stamps([5.0, 0.01, 0.02], [1.0] * 3))) == pytest.approx((0.0125, 0.015, 0.0175))
    assert step_time(record(stamps=stamps([0.01], [1.0]))) == pytest.approx((0.01, 0.01, 0.01), rel=1e-3)
    assert step_time(record(stamps=stamps([], []))) is None
    assert quartiles([]) is None


def test_of_several_kinds_of_steps_the_most_frequent_one_is_timed() -> None:
    kinds = [0, 1, 1] * 10 + [0]
    found = step_time(record(stamps=stamps([0.01] * 30, [1.0] * 30, kinds)))
    assert found == pytest.approx((0.01, 0.015, 0.02), rel=0.5)
    assert found is not None and found[2] < 0.025  # steps of kind 0 alone would be 30 ms apart


def test_samples_are_those_of_all_ranks_in_a_typical_step() -> None:
    short = stamps([0.01] * 25, [16.0, 16.0, 16.0, 16.0, 5.0] * 5)
    assert samples_in_step([record(), record(1, stamps=short)]) == (48.0, "")


@pytest.mark.parametrize(("other", "why"), [
    (None, "rank 1 left its record on another host: choose a folder that all share (--out)"),
    (record(1, no_samples="a model is called more than once in a step"),
     "samples are not known, as a model is called more than once in a step"),
    (record(1, stamps=stamps([0.01] * 25, [0.0] * 25)),
     "samples are not known, as no Keras model is called under a tape"),
    (record(1, stamps=stamps([0.01] * 3, [1.0] * 3, [0, 1, 0, 1])),
     "samples are not known, as there is more than one kind of step"),
])
def test_samples_that_are_not_known_have_a_reason(other: Record | None, why: str) -> None:
    assert samples_in_step([record(), other]) == (None, why)


@pytest.mark.parametrize(("logs", "last", "accuracy", "loss"), [
    ({"fit": {"accuracy": 0.9, "loss": 0.4}}, "fit", Number(0.9, "fit()"), Number(0.4, "fit()")),
    ({"fit": {"loss": 0.4, "val_loss": 0.5, "val_sparse_categorical_accuracy": 0.8}}, "fit",
     Number(0.8, "fit's validation"), Number(0.5, "fit's validation")),
    ({"fit": {"accuracy": 0.9, "loss": 0.4}, "evaluate": {"loss": 0.3, "acc": 0.7}}, "evaluate",
     Number(0.7, "evaluate()"), Number(0.3, "evaluate()")),
    ({"fit": {"loss": 0.4}}, "fit", Number(0.55, "what rank 0 printed last"), Number(0.4, "fit()")),
    ({}, "", Number(0.55, "what rank 0 printed last"), Number(2.0, "what rank 0 printed last")),
])
def test_what_keras_said_last_wins_over_what_was_printed(
    logs: dict[str, dict[str, float]], last: str, accuracy: Number, loss: Number,
) -> None:
    said, printed = record(logs=logs, last_logs=last), "accuracy: 0.5 loss 1\naccuracy: 0.55 loss 2\n"
    assert (final_number("accuracy", said, printed), final_number("loss", said, printed)) == (accuracy, loss)


@pytest.mark.parametrize(("printed", "accuracy", "loss"), [
    ("test accuracy: 0.9865\n", 0.9865, None),
    ("epoch 3/3: loss 0.0312, accuracy 98.5 %\n", 0.985, 0.0312),
    ("47/47 - 1s - 9ms/step - accuracy: 0.97 - loss: 1.5e-02 - val_accuracy: 0.96 - val_loss: 0.2\n", 0.96, 0.2),
    ("loss=nan", None, float("nan")),
    ("the loss is 3, the accuracy of 0.5", 0.5, 3.0),
    ("no gloss 3, inaccuracy 4; loss 3/4; accuracy: none\n", None, None),
])
def test_printed_numbers_are_found(printed: str, accuracy: float | None, loss: float | None) -> None:
    for what, expected in (("accuracy", accuracy), ("loss", loss)):
        found = final_number(what, record(), printed)
        assert (None if found is None else found.value) == pytest.approx(expected, nan_ok=True)


def weights(folder: Path, *values: object) -> Path:
    write_weights(folder, [np.asarray(value) for value in values])
    return folder


def test_the_weight_difference_is_relative_to_the_largest_weight(tmp_path: Path) -> None:
    first = weights(tmp_path / "a", [[1.0, -4.0]], np.float16(2.0), np.zeros((0, 3)))
    other = weights(tmp_path / "b", [[1.0, -4.0]], np.float16(2.5), np.zeros((0, 3)))
    assert weight_difference(first, other) == pytest.approx(0.5 / 4)
    assert weight_difference(first, first) == 0.0


@pytest.mark.parametrize(("other", "words"), [
    (([1.0, 2.0], 3.0), "other variables"), (([1.0, 2.0, 3.0],), "other shapes"), (([1.0, np.nan],), "not finite"),
    (([np.inf, 1.0],), "not finite"),
])
def test_weights_that_cannot_be_compared_are_said_to_be(other: tuple[object, ...], words: str, tmp_path: Path) -> None:
    assert weight_difference(weights(tmp_path / "a", [1.0, 2.0]), weights(tmp_path / "b", *other)) == words


def test_weights_that_are_not_there_are_not_compared(tmp_path: Path) -> None:
    assert weight_difference(weights(tmp_path / "a", 1.0), tmp_path / "b") is None


@pytest.mark.parametrize(("records", "reason"), [
    ([None, None], "rank 0 left no record: the script must call hvd.init()"),
    ([record(size=1), None], "the script ran on 1 rank instead of 2"),
    ([record(stamps=np.zeros((0, 3))), record(1)], "no training step was seen: the script needs hvd.DistributedOpti"),
])
def test_a_job_that_trained_otherwise_is_a_row_with_a_reason(records: list[Record | None], reason: str) -> None:
    assert result("tfdist", 2, records, "").reason.startswith(reason)


def test_a_script_that_chose_its_backend_is_reported() -> None:
    reason = "the script chose the backend tfdist itself: leave it out of hvd.init() and of the script's arguments"
    assert result("horovod", 2, [record(), record(1)], "").reason == reason
    assert not result(ONE_PROCESS, 1, [record(size=1)], "").reason


def test_a_step_that_xla_compiles_has_no_time_but_a_row() -> None:
    found = result(ONE_PROCESS, 1, [record(size=1, stamps=np.zeros((0, 3)), no_steps="XLA has no clock")], "loss: 2")
    assert (found.reason, found.step, found.samples, found.remarks) == ("", None, None, ("XLA has no clock",))
    assert found.loss == Number(2.0, "what rank 0 printed last")


def test_few_steps_are_said_to_be_few() -> None:
    few = [record(rank, stamps=stamps([0.01] * 14, [32.0] * 14)) for rank in range(2)]
    found = result("tfdist", 2, few, "")
    assert found.remarks == ("only 9 steps were timed: train for at least 16 steps",)
    assert found.samples == pytest.approx(6400, rel=1e-3)
    assert result("tfdist", 2, [record(), record(1)], "").remarks == ()


RESULTS = [
    Result("horovod", 2, "", (0.0141, 0.0141, 0.0149, 0.0160, 0.0160), 64.0, Number(0.98651, "evaluate()"),
           Number(0.04213, "fit()")),
    Result("tfdist", 2, "", (0.1981, 0.1981, 0.2012, 1.22, 1.22), 78.1, Number(0.9865, "evaluate()"), None, 2.34e-7),
    Result("native", 2, "rank 1 on node failed with ValueError: x"),
    Result(ONE_PROCESS, 1, "", (), None, Number(0.5, "fit()"), None, None, ("XLA has no clock",)),
]


def comparison(results: Sequence[Result], cores: str = "", repeat: int = 1) -> Comparison:
    """A comparison with these runs."""
    sizes = sorted({run.processes for run in results} - {1})
    return Comparison("train.py", tuple(sizes), repeat, rows_of(results), cores, Path("out"), 1.7e9, 60.0)


def drawn(made: Table, width: int) -> list[str]:
    screen = io.StringIO()
    Console(file=screen, width=width, highlight=False).print(made)
    return [line.rstrip() for line in screen.getvalue().splitlines()]


def shown(results: list[Result], width: int, repeat: int = 1) -> list[str]:
    made, notes = table(comparison(results, repeat=repeat))
    return [*drawn(made, width), *notes]


def test_the_table_has_a_row_for_every_job_and_fits_80_columns() -> None:
    lines = shown(RESULTS, 80)
    assert lines == shown(RESULTS, 200)
    assert [" ".join(line.split()) for line in lines] == [
        "share of weights", "step, ms samples 2 x one against",
        "backend (quartiles) per s process accuracy loss horovod", lines[3],
        "horovod 14.9 (14.1-16) 4,295 ? 0.9865 0.04213 -",
        "tfdist 201 (198-1,220) 388 ? 0.9865 - 2.3e-07",
        "native failed (1)",
        "one process ? (2) ? ? 0.5000 - -",
        "(1) rank 1 on node failed with ValueError: x",
        "(2) XLA has no clock",
    ]


SINGLE = Result(ONE_PROCESS, 1, "", (0.01,) * 5, 40.0)


def test_the_share_is_of_so_many_times_one_process() -> None:
    lines = [line.split() for line in shown([RESULTS[0], SINGLE], 80)]
    assert [line[4 if line[0] == "one" else 3] for line in lines[-2:]] == ["4,295", "4,000"]
    assert [line[5 if line[0] == "one" else 4] for line in lines[-2:]] == ["54%", "100%"]


def test_a_script_for_one_process_is_as_many_times_as_fast() -> None:
    made = replace(comparison([RESULTS[0], replace(SINGLE, samples_in_step=None, step_times=(0.0224,) * 5)]),
                   data_parallel=True)
    text, _ = table(made)
    found, single = (line.split() for line in drawn(text, 80)[-2:])
    assert (found[4], single[5]) == ("1.50", "1.00")
    assert (made.speed_up(made.rows[0]), made.share(made.rows[0])) == pytest.approx((0.0224 / 0.0149, 0.0112 / 0.0149))
    assert "With horovod, 2 processes train 1.50 times as fast as one process." in sentences(made)[2]
    slower = replace(made, rows=(made.rows[0], replace(made.rows[1], runs=(SINGLE,))))
    assert "train more slowly, at 0.67 times the speed of one process." in sentences(slower)[2]


def test_without_a_baseline_there_is_no_share() -> None:
    lines = shown(RESULTS[:3], 80)
    assert not any("share" in line or "one process" in line for line in lines)
    assert not any("share" in line for line in explanations(comparison(RESULTS[:3])))


def test_the_first_backend_that_ran_is_the_one_to_compare_with() -> None:
    lines = shown([RESULTS[2], RESULTS[1]], 80)
    assert lines[2].split()[-1] == "tfdist"


def test_the_lines_under_the_table_say_what_it_shows() -> None:
    lines = explanations(comparison(RESULTS, "on 1 of 2 cores"))
    assert "share: samples per s over 2 times those of one process (on 1 of 2 cores)" in lines
    known = replace(comparison(RESULTS), machine={"cpu": "a processor", "cores": [0, 1], "load_before": [0.44, 1, 2]})
    assert "machine: a processor, 2 cores, load before the first run: 0.4" in explanations(known)
    assert "accuracy of horovod and tfdist: from evaluate()" in lines
    assert "accuracy of one process, loss: from fit()" in lines
    assert any("to horovod's" in line for line in lines)


REPEATED = [
    Result("native", 2, "", (0.010,) * 4, 40.0), Result("tfdist", 2, "", (0.012,) * 4, 40.0, difference=1e-7),
    Result("native", 2, "", (0.011,) * 4, 40.0, difference=2e-8, round=2),
    Result("tfdist", 2, "it took too long", round=2),
]


def test_runs_of_one_job_are_a_row_with_its_spread() -> None:
    native, tfdist = comparison(REPEATED, repeat=2).rows
    assert native.step == pytest.approx((0.010, 0.0105, 0.011))
    assert (native.medians, native.spread) == ([0.010, 0.011], pytest.approx(0.001 / 0.0105))
    assert native.samples == pytest.approx(40 / 0.0105)
    assert native.samples_range == pytest.approx((40 / 0.011, 40 / 0.010))
    assert (native.difference, tfdist.difference) == (2e-8, 1e-7)
    assert (tfdist.reason, tfdist.spread) == ("", None)
    assert tfdist.remarks == ("run 2 failed: it took too long",)
    assert comparison(REPEATED).failed and not comparison(REPEATED[:3]).failed
    lines = [" ".join(line.split()) for line in shown(REPEATED, 80, repeat=2)]
    assert lines[-3:] == ["native 10.5 (10-11) 10% 3,810 - - 2.0e-08", "tfdist 12 (12-12) - 3,333 (1) - - 1.0e-07",
                          "(1) run 2 failed: it took too long"]


def test_rounds_have_every_job_once(tmp_path: Path) -> None:
    flags = parser().parse_args(["-np", "1,2,3", "--repeat", "2", "-H", "localhost:4", "--", "train", "-x"])
    jobs = [("native", 2), ("native", 3), (ONE_PROCESS, 1)]
    trials = trials_of(jobs, flags, tmp_path, {(ONE_PROCESS, 1): {"A_VARIABLE": "1"}})
    assert [(trial.name, trial.processes, trial.round) for trial in trials] == [
        (*job, number) for number in (1, 2) for job in jobs]
    folders = [str(trial.folder.relative_to(tmp_path)) for trial in trials[:3]]
    assert folders == ["native/np-2/run-1", "native/np-3/run-1", "one-process/run-1"]
    assert len({trial.folder for trial in trials}) == 6
    assert trials[2].arguments == ["-np", "1", "--backend", "local", "--output-filename", str(trials[2].folder), "-H",
                                   "localhost:4", "--", "--", "train", "-x"]
    assert [trial.environment.get("A_VARIABLE") for trial in trials[:3]] == [None, None, "1"]
    flags = parser().parse_args(["-np", "1,2", "train"])
    assert [trial.folder for trial in trials_of(jobs[::2], flags, tmp_path, {})] == [
        tmp_path / "native", tmp_path / "one-process"]


def test_backends_run_with_and_without_a_shared_update(tmp_path: Path) -> None:
    flags = parser().parse_args(["-np", "2", "--shard-update", "on,off", "train"])
    trials = trials_of([("native, shared update", 2), ("native", 2), (ONE_PROCESS, 1)], flags, tmp_path, {})
    assert [trial.environment["HVKERAS_SHARD_UPDATE"] for trial in trials] == ["1", "0", "0"]
    backends = [trial.arguments[trial.arguments.index("--backend") + 1] for trial in trials]
    assert backends == ["native", "native", "local"]
    assert trials[0].folder == tmp_path / "native-shared-update"
    plain = parser().parse_args(["-np", "2", "train"])
    assert "HVKERAS_SHARD_UPDATE" not in trials_of([("native", 2)], plain, tmp_path, {})[0].environment
    with pytest.raises(UsageError, match="it is on, off or on,off, not yes"):
        parser().parse_args(["-np", "2", "--shard-update", "yes", "train"])


def test_a_shared_update_is_compared_in_memory_too() -> None:
    results = [Result("native, shared update", 2, "", (0.010,) * 4, 80.0, peak_memory=1_234_567_890),
               Result("native", 2, "", (0.020,) * 4, 80.0)]
    assert [line.split()[-1] for line in shown(results, 100) if line.startswith("native")] == ["1,235", "?"]
    assert any("the most memory" in line for line in explanations(comparison(results)))


def test_backends_run_with_each_compression(tmp_path: Path) -> None:
    flags = parser().parse_args(["-np", "2", "--compression", "none,int8", "train"])
    trials = trials_of([("native", 2), ("native, int8", 2)], flags, tmp_path, {})
    assert [trial.environment["HVKERAS_COMPRESSION"] for trial in trials] == ["none", "int8"]
    assert all(trial.arguments[:4] == ["-np", "2", "--backend", "native"] for trial in trials)
    with pytest.raises(UsageError, match="they are none, fp16, bf16, int8, not int4"):
        parser().parse_args(["-np", "2", "--compression", "int4", "train"])


def test_a_compression_is_compared_in_bytes_and_in_its_loss() -> None:
    losses = [Number(loss, "fit()") for loss in (0.5, 0.51)]
    results = [Result("native", 2, "", (0.010,) * 4, 80.0, loss=losses[0], sent=16e6),
               Result("native, int8", 2, "", (0.020,) * 4, 80.0, loss=losses[1], difference=0.2, sent=4.07e6)]
    assert [line.split()[-1] for line in shown(results, 100) if line.startswith("native")] == ["16", "4.07"]
    assert any("its network cards" in line for line in explanations(comparison(results)))
    assert sentences(comparison(results))[1].startswith(
        "Compression changes the weights: the final loss is 0.51 with native, int8, and 0.5 with native.")


def test_bytes_that_were_sent_are_those_of_the_recorded_steps() -> None:
    pair = [record(rank, host=f"host{rank}", sent=[[10, 1000], [30, 5000]]) for rank in range(2)]
    assert result("tfdist", 2, pair, "").sent == 200
    assert result("tfdist", 2, [replace(one, host="here") for one in pair], "").sent is None
    assert result("tfdist", 2, [replace(one, sent=[[10, 1000]]) for one in pair], "").sent is None


def test_several_sizes_are_a_table_of_their_own() -> None:
    made = comparison([Result("native", 2, "", (0.010,) * 4, 80.0), Result("tfdist", 2, "no"),
                       Result("native", 4, "", (0.020,) * 4, 160.0), Result("tfdist", 4, "no"), SINGLE])
    assert (made.processes, [row.processes for row in made.shown]) == (4, [4, 4, 1])
    assert [" ".join(line.split()) for line in drawn(scaling_table(made), 80)][1:] == [
        "(share) on 2 4", drawn(scaling_table(made), 80)[2], "native 8,000 (100%) 8,000 (50%)", "tfdist failed failed"]


@pytest.mark.parametrize(("results", "words"), [
    (REPEATED[:3],
     "native was the fastest on 2 processes, with 10.5 ms per step, 10 to 11 in 2 runs: tfdist took 1.1 times as long"),
    ([RESULTS[0], Result("native", 2, "", (0.0150, 0.0155, 0.0170)), RESULTS[1]],
     "There is no clear difference on 2 processes between horovod (14.9 ms per step, 14.1 to 16 in half of the steps)"),
    (RESULTS[:2], "horovod was the fastest on 2 processes, with 14.9 ms per step, 14.1 to 16 in half of the steps:"),
    (RESULTS[2:], "No backend ran on 2 processes: the table gives the reason."),
    ([*RESULTS[2:], RESULTS[0]],
     "horovod took 14.9 ms per step, 14.1 to 16 in half of the steps on 2 processes; no other backend ran."),
    ([RESULTS[0]], "horovod took 14.9 ms per step, 14.1 to 16 in half of the steps on 2 processes; no other backend"),
    ([Result("native", 2, remarks=("XLA has no clock",))], "How fast the backends are on 2 processes is not known"),
])
def test_the_first_sentence_is_about_speed(results: list[Result], words: str) -> None:
    assert sentences(comparison(results))[0].startswith(words)


def pair(difference: float | str | None, losses: tuple[float, float] = (0.5, 0.5), own: float | None = None,
         ) -> list[Result]:
    """Runs of two backends, and a second one of the first."""
    one, other = (Number(loss, "fit()") for loss in losses)
    return [Result("native", 2, loss=one), Result("tfdist", 2, loss=other, difference=difference),
            Result("native", 2, loss=one, difference=own, round=2)]


@pytest.mark.parametrize(("results", "words"), [
    (pair(0.0), "The results agree: all backends end with the same weights, to the last bit, and the final loss is"),
    (pair(2e-7), "The results agree: final weights differ by at most 2.0e-07 of the largest one"),
    (pair(2e-7, (0.5, 0.6)), "The final weights agree (to 2.0e-07 of the largest one), but the final losses are 0.5"),
    (pair(0.5), "The results do not agree: tfdist's final weights differ from native's by 5.0e-01 of the largest one"),
    (pair(0.5, (0.5, np.nan)), "The results do not agree: tfdist's final weights differ from native's by 5.0e-01 of"),
    (pair(0.5, own=0.4), "Whether the results agree cannot be determined, as the script is not reproducible: native"),
    (pair("other shapes"), "The results do not agree: the weights cannot be compared with native's (tfdist's are othe"),
    (pair(None), "Whether the weights agree is not known, as none were recorded, and the final loss is 0.5."),
    (RESULTS[2:], "Whether the results agree cannot be determined with fewer than two backends that ran."),
])
def test_the_second_sentence_is_about_results(results: list[Result], words: str) -> None:
    assert sentences(comparison(results))[1].startswith(words)


def split(input: float, compute: float, wait: float | None, communication: float) -> TimeSplit:  # noqa: A002
    return TimeSplit(input + compute + (wait or 0.0) + communication, input, compute, wait, communication, 0.0, 1000)


def test_the_third_sentence_is_about_what_limits() -> None:
    slow = Finding("communication", 0.5, "Communication takes long.", f"Try less.{COMPARE}")
    run = Result("native", 2, "", (0.01,) * 5, 40.0, splits={0: split(0.0, 0.005, 0.0, 0.005)}, limits=[slow])
    words = "What limits training most: Communication takes long. Try less."
    assert sentences(comparison([run]))[2] == words
    kept = "With native, the scaling efficiency on 2 processes is 50%. "
    assert sentences(comparison([run, SINGLE]))[2] == kept + words
    slower = replace(run, step_times=(0.02,) * 5)
    slow_words = ": they are slower than one, with 0.5 times its samples per second. "
    kept = kept.replace("50%", "25%").replace(". ", slow_words)
    assert sentences(comparison([slower, SINGLE]))[2] == kept + words
    pauses = Finding("pauses", 0.9, "Validation.", "Validate less.")
    assert sentences(comparison([replace(run, limits=[pauses, slow])]))[2] == words
    assert sentences(comparison([replace(run, limits=())]))[2].startswith("Training is limited by computation alone.")
    assert sentences(comparison([replace(run, splits={}, limits=())]))[2].startswith("What limits the job is not known")
    assert sentences(comparison([RESULTS[2]]))[2] == "What limits the job is not known, as no step was timed."


def test_what_limits_is_found_in_the_records() -> None:
    for count, limits in ((40, []), (600, ["input"])):  # steps of 10 ms
        fetched = 1.7e9 + 25 + 0.01 * np.arange(count)
        waiting = record(inputs=np.stack([fetched, fetched + 0.006], axis=1),
                         stamps=stamps([5.0] * WARM_UP + [0.01] * count, [32.0] * (WARM_UP + count)))
        found = result("tfdist", 1, [replace(waiting, size=1)], "")
        assert found.splits[0].steps >= 20 and [each.what for each in found.limits] == limits


def test_a_machine_that_was_not_idle_and_ranks_that_shared_cores_are_warned_of() -> None:
    shared = "4 ranks share 2 cores on node, so each step takes longer than with 2 ranks: start fewer ranks there."
    made = comparison([replace(RESULTS[0], other_load=0.1), replace(RESULTS[1], oversubscription=(shared,))])
    assert warnings(made) == [shared]
    machine = {"busy_before": 0.62, "load_before": [5.23, 1, 1], "cores": [0, 1]}
    _, before = warnings(replace(made, machine=machine))
    assert before == (
        "The machine was not idle: other processes used 62% of the cores before the first run (load average 5.2 on 2"
        " cores). Differences between backends may come from this load. End the other processes before you compare, and"
        " use --repeat 3.")
    runs = [replace(RESULTS[0], other_load=0.2), replace(RESULTS[1], other_load=0.35)]
    (during,) = warnings(comparison(runs, repeat=2))
    assert during == ("The machine was not idle: other processes used up to 35% during the runs, most with tfdist."
                      " Differences between backends may come from this load. End the other processes before you"
                      " compare.")


def test_a_terminal_shows_the_summary_of_the_report() -> None:
    screen = io.StringIO()
    made = replace(comparison(RESULTS), machine={"busy_before": 0.62, "load_before": [5.2, 1, 1], "cores": [0, 1],
                                                 "cpu": "a processor"})
    print_table(made, Console(file=screen, highlight=False, soft_wrap=True, width=200))
    text = " ".join(screen.getvalue().split())
    assert all(" ".join(line.split()) in text for line in [*warnings(made), *sentences(made)])
    assert max(map(len, screen.getvalue().splitlines())) <= 160


def test_bytes_are_those_of_the_collectives_of_most_steps() -> None:
    known = record(buckets={"a": {"bytes": 100}, "b": {"bytes": 20}, "once": {"bytes": 7}},
                   collectives={"a": np.zeros((5, 2)), "b": np.zeros((25, 2)), "once": np.zeros((1, 2))},
                   first_runs={"a": 20})
    assert bytes_in_step(known) == 120
    assert bytes_in_step(record(buckets={"a": {"bytes": None}}, collectives={"a": np.zeros((5, 2))})) is None
    assert bytes_in_step(record()) is None


def test_results_are_written_for_other_programs(tmp_path: Path) -> None:
    runs = [replace(run, metrics={"auc": np.nan}, peak_memory=10**9, bytes_in_step=4e6,
                    splits={1: split(0.001, 0.004, 0.003, 0.002)}, losses=[(0.5, 2.0), (1.0, np.inf)],
                    compiling=1.25)
            for run in REPEATED]
    made = comparison([*runs, SINGLE], repeat=2)
    assert [line for line in explanations(made) if "compiling" in line] == [
        "compiling of the optimizer's update, not a part of any step: native 1.2 s, tfdist 1.2 s"]
    results_file.write(made, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    found = json.loads((tmp_path / "results.json").read_text(), parse_constant=pytest.fail)
    assert (found["schema"], found["command"], found["processes"], found["repeat"]) == (1, "train.py", 2, 2)
    native, tfdist, single = found["rows"]
    assert (native["backend"], native["runs"], native["steps_timed"], tfdist["runs"]) == ("native", 2, 8, 1)
    assert native["step_ms"] == pytest.approx(10.5) and native["metrics"] == {"auc": None}
    assert native["scaling_efficiency"] == pytest.approx(40 / 0.0105 / 8000)
    assert [native[f"{part}_ms"] for part in ("input", "compute", "wait", "communication", "hidden")] == pytest.approx(
        [1, 4, 3, 2, 0])
    assert (native["bytes_per_step"], native["peak_memory_bytes"]) == (4e6, 10**9)
    assert (single["scaling_efficiency"], single["wait_ms"], single["loss"]) == (1.0, None, None)
    assert set(native) == set(tfdist) == set(single)
    assert [(run["backend"], run["round"], run["failure"]) for run in found["runs"]] == [
        ("native", 1, ""), ("native", 2, ""), ("tfdist", 1, ""), ("tfdist", 2, "it took too long"),
        (ONE_PROCESS, 1, "")]
    assert [run["compile_seconds"] for run in found["runs"]] == [1.25, 1.25, 1.25, 1.25, 0.0]
    assert found["runs"][0]["ranks"] == [
        {"rank": 1, "input_ms": 1, "compute_ms": 4, "update_ms": 0, "wait_ms": 3, "communication_ms": 2,
         "hidden_ms": 0}]
    assert found["runs"][0]["losses"] == [[0.5, 2.0], [1.0, None]]


def test_every_key_of_the_results_is_documented(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "compare" / "results.md").read_text()
    made = results_file.document(comparison([*REPEATED, SINGLE]))
    keys = {*made, *made["rows"][0], *made["runs"][0]}
    assert not [key for key in sorted(keys) if f"`{key}`" not in text]


TRACE = "Traceback (most recent call last):\n  File ...\nValueError: the sky is falling"


@pytest.mark.parametrize(("stderr", "reason"), [
    (exit_report(Cause(CauseKind.EXCEPTION, 1, "node", 7, "failed with ValueError: x", TRACE), {1: 1}, ""),
     "rank 1 on node failed with ValueError: the sky is falling"),
    (exit_report(Cause(CauseKind.EXIT, 1, "node", 7, "exited with code 1", "", 1), {1: 1}, f"chatter\n{TRACE}\n"),
     "rank 1 on node failed with ValueError: the sky is falling"),
    (exit_report(Cause(CauseKind.EXIT, 0, "node", 7, "exited with code 2", "", 2), {0: 2},
                 "usage: x\nx: error: what\n"),
     "rank 0 on node exited with code 2: x: error: what"),
    (exit_report(Cause(CauseKind.SIGNAL, 0, "node", 7, "was killed by SIGKILL", "", 137), {0: -9}, ""),
     "rank 0 on node was killed by SIGKILL."),
    ("hvkeras run: Every host must answer.", "Every host must answer."),
    ("Segmentation fault", "hvkeras run was killed by SIGSEGV: Segmentation fault"),
    ("", "hvkeras run was killed by SIGSEGV"),
])
def test_the_root_cause_is_one_line(stderr: str, reason: str) -> None:
    found = root_cause(f"[0] hvkeras: something\n{stderr}\n" if "hvkeras run: " in stderr else stderr, -11)
    assert found.partition(" HINT: ")[0] == reason


@pytest.mark.parametrize(("arguments", "complaint"), [
    ([], "The command that the ranks run must be given"),
    (["-np", "2"], "The command that the ranks run must be given"),
    (["python", "train.py"],
     ("At least two processes are needed for a comparison with one. Received: np=None. HINT:"
      " hvkeras compare")),
    (["-np", "1", "true"], "Received: np='1'"),
    (["-np", "1,2", "--no-baseline", "true"], "1 in -np is the baseline. Received: np='1,2'"),
    (["-np", "2,x", "true"], "invalid sizes value: '2,x'"),
    (["-np", "0,2", "true"], "a number of processes must be positive, not 0"),
    (["-np", "2", "--repeat", "0", "true"], "a job runs at least once, not 0 times"),
    (["-np", "2,3", "-H", "localhost:2", "true"], "Received: np=3"),
    (["-np", "2", "--backend", "tfdist", "true"], "Received: flag='--backend'. HINT: did you mean --backends"),
    (["-np", "2", "--backends", "tfdist,tfidst", "true"], "Received: backend='tfidst'"),
    (["-np", "2", "--backends", ",", "true"], "--backends takes names"),
    (["-np", "2", "--timeout", "0", "true"], "positive"),
    (["-np", "3", "-H", "localhost:2", "true"], "Received: np=3"),
    (["-np", "2", "--out", "/dev/null/out", "true"], "must be writable"),
])
def test_a_wrong_command_line_is_one_line_with_a_hint_and_code_2(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["compare", *arguments]) == 2
    printed = capsys.readouterr()
    message, *hint = printed.err.splitlines()
    assert complaint in " ".join([message, *hint])
    assert all(line.startswith("HINT: ") for line in hint) and len(hint) < 2
    assert printed.out == ""


def test_a_wrong_setting_is_found_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HVKERAS_BUCKETSIZE", "1")
    assert main(["compare", "-np", "2", "true"]) == 2
    assert "did you mean HVKERAS_BUCKET_SIZE" in capsys.readouterr().err

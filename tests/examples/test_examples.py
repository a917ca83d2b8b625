"""The unmodified examples under every launcher and on every engine, with the same result."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from harness import OLDEST_IN_SOAK, Outcome

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TRAIN, CUSTOM_LOOP = EXAMPLES / "train.py", EXAMPLES / "custom_loop.py"
CUSTOM_TRAINING_LOOP = EXAMPLES / "custom_training_loop.py"
SHORT = ("--epochs", "1")
# Every engine with both scripts. tests/launch/test_init.py has all pairs, and test_readme.py README's launchers.
TRAIN_PAIRS = (pytest.param("hvkeras_run", "native", marks=pytest.mark.slow),
               *(pytest.param(*pair, marks=pytest.mark.nightly) for pair in (
                   ("mpirun", "horovod"), ("horovodrun_mpi", "native"), ("horovodrun_gloo", "horovod"),
                   ("tf_config", "tfdist"))))
LOOP_PAIRS = (pytest.param("tf_config", "native", marks=pytest.mark.slow),
              *(pytest.param(*pair, marks=pytest.mark.nightly) for pair in (
                  ("hvkeras_run", "horovod"), ("horovodrun_gloo", "tfdist"))))
GOOD = 0.97
SAME = 0.01
OF_EXAMPLE = Path(__file__).parent / "workers" / "of_example.py"


def accuracy(outcome: Outcome) -> float:
    """Return the accuracy that rank 0, and no other rank, printed."""
    found = re.findall(r"^test accuracy: (\d\.\d{4})$", outcome.stdout(0), re.MULTILINE)
    assert len(found) == 1, outcome.report()
    for rank in range(1, outcome.np):
        assert "accuracy" not in outcome.stdout(rank)
    return float(found[0])


@pytest.fixture(scope="module")
def reference(launch_once: Callable[..., Outcome]) -> Callable[[Path], float]:
    """Expected accuracy: that of a short training on two processes."""
    return lambda script: accuracy(launch_once("hvkeras_run", script, SHORT, np=2, backend="tfdist"))


@pytest.mark.parametrize(("launcher", "engine"), TRAIN_PAIRS)
def test_train_gives_the_same_everywhere(
    launcher: str, engine: str, launch_once: Callable[..., Outcome], reference: Callable[[Path], float]
) -> None:
    outcome = launch_once(launcher, TRAIN, SHORT, np=2, backend=engine)
    assert accuracy(outcome) == pytest.approx(reference(TRAIN), abs=SAME)


@pytest.mark.parametrize(("launcher", "engine"), LOOP_PAIRS)
def test_custom_loop_gives_the_same_everywhere(
    launcher: str, engine: str, launch_once: Callable[..., Outcome], reference: Callable[[Path], float]
) -> None:
    outcome = launch_once(launcher, CUSTOM_LOOP, SHORT, np=2, backend=engine)
    assert accuracy(outcome) == pytest.approx(reference(CUSTOM_LOOP), abs=SAME)


@pytest.mark.parametrize(
    ("script", "launcher", "np"),
    [
        pytest.param(TRAIN, "hvkeras_run", 4, marks=pytest.mark.nightly),
        pytest.param(CUSTOM_LOOP, "hvkeras_run", 2, marks=(*OLDEST_IN_SOAK, pytest.mark.nightly)),
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else value,
)
def test_digits_are_learnt(script: Path, launcher: str, np: int, launch: Callable[..., Outcome]) -> None:
    assert accuracy(launch(launcher, script, np=np)) >= GOOD


def test_the_list_of_examples_is_complete() -> None:
    listed = re.findall(r"\[(\S+\.py)\]\(\1\)", (EXAMPLES / "README.md").read_text())
    assert sorted(listed) == sorted(path.name for path in EXAMPLES.glob("*.py"))


def weights(outcome: Outcome) -> list[float]:
    """Return the sums of the trained model's weights, which all ranks have alike."""
    found = [rank["weights"] for rank in outcome.results("trained")]
    assert all(each == found[0] for each in found)
    assert np.isfinite(found[0]).all()
    sums: list[float] = found[0]
    return sums


@pytest.mark.slow
def test_ranks_read_one_folder_of_images_that_one_of_them_writes(launch: Callable[..., Outcome]) -> None:
    outcome = launch("hvkeras_run", OF_EXAMPLE, (str(EXAMPLES / "image_folder.py"),), np=2, backend="native")
    assert weights(outcome)
    assert accuracy(outcome) >= 0.95
    assert "shard: 2 ranks x 240 of 480 samples\n" in outcome.stderr(0)


@pytest.mark.slow
def test_rows_of_a_table_are_exchanged_with_the_result_of_whole_tables(launch: Callable[..., Outcome]) -> None:
    table, others = 8_000 * 32 * 4, 32 * 33 * 4
    arguments = (str(EXAMPLES / "recommendation.py"), "--items", "8000", "--epochs", "2")
    rows, whole = (launch("hvkeras_run", OF_EXAMPLE, (*arguments, *more), np=2, backend="native",
                          env={"HVKERAS_REPORT": "report"}) for more in ((), ("--dense",)))
    for outcome, largest in ((rows, others), (whole, table + others)):
        collectives = json.loads((outcome.cwd / "report" / "report.json").read_text())["collectives"]
        assert max(each["bytes"] or 0 for each in collectives) == largest
        assert any(each["label"].endswith(".values") for each in collectives) == (outcome is rows)
    assert weights(rows) == pytest.approx(weights(whole), rel=1e-3)
    [area] = re.findall(r"test AUC: (\d\.\d{4})$", rows.stdout(0), re.MULTILINE)
    assert float(area) >= 0.7


@pytest.mark.slow
def test_ranks_have_one_vocabulary_of_all_their_texts(launch: Callable[..., Outcome]) -> None:
    outcome = launch("hvkeras_run", OF_EXAMPLE, (str(EXAMPLES / "text_classification.py"),), np=2, backend="native")
    assert weights(outcome)
    assert accuracy(outcome) >= 0.95  # 0.75 without an understanding of "not"
    first, second = (rank["vocabulary"] for rank in outcome.results("trained"))
    assert first == second
    assert len(first) == len({"", "[UNK]"}) + 25, "all words of the texts"


@pytest.mark.slow
def test_windows_of_a_series_are_shared(launch: Callable[..., Outcome]) -> None:
    outcome = launch("hvkeras_run", OF_EXAMPLE, (str(EXAMPLES / "time_series.py"),), np=2, backend="native")
    assert weights(outcome)
    naive, error = map(float, re.findall(r"^mean error of .*: (\d\.\d\d) degrees$", outcome.stdout(0), re.MULTILINE))
    assert error < naive / 3
    assert "shard: 2 ranks x 1,570 of 3,141 samples, 1 dropped" in outcome.stderr(0)


@pytest.mark.slow
def test_a_frozen_base_is_trained_after_its_new_head(launch: Callable[..., Outcome]) -> None:
    outcome = launch("hvkeras_run", OF_EXAMPLE, (str(EXAMPLES / "fine_tuning.py"),), np=2, backend="native")
    assert weights(outcome)
    [head] = re.findall(r"^with a new head: (\d\.\d{4})$", outcome.stdout(0), re.MULTILINE)
    assert 0.5 < float(head) < accuracy(outcome)
    assert accuracy(outcome) >= 0.95


@pytest.mark.slow
def test_mixed_precision_learns_with_loss_scaling(launch: Callable[..., Outcome]) -> None:
    outcome = launch("hvkeras_run", OF_EXAMPLE, (str(EXAMPLES / "mixed_precision.py"),), np=2, backend="native")
    assert weights(outcome)
    assert "LossScaleOptimizer, float16 layers" in outcome.stdout(0)
    assert accuracy(outcome) >= 0.94


@pytest.mark.nightly
def test_the_loop_of_a_strategy_resumes_from_its_checkpoints(launch: Callable[..., Outcome], tmp_path: Path) -> None:
    options = ("--dataset", "digits", "--checkpoint-dir", str(tmp_path / "saved"), "--epochs")
    first = launch("tf_config", CUSTOM_TRAINING_LOOP, (*options, "2"), np=2)
    assert len(re.findall(r"^epoch \d/2: loss .*, accuracy .*, test accuracy ", first.stdout(0), re.MULTILINE)) == 2
    second = launch("hvkeras_run", CUSTOM_TRAINING_LOOP, (*options, "5"), np=2)
    assert "resumes after epoch 2" in second.stdout(0)
    assert accuracy(second) > max(accuracy(first), 0.93)


@pytest.mark.nightly
def test_a_dataset_that_cannot_be_downloaded_gives_way_to_digits_and_only_rank_0_saves(
    launch: Callable[..., Outcome], tmp_path: Path
) -> None:
    nowhere = {"https_proxy": "http://127.0.0.1:9", "KERAS_HOME": str(tmp_path)}
    arguments = (*SHORT, "--checkpoint-dir", "saved", "--backend", "tfdist", "--dataset", "mnist")
    outcome = launch("hvkeras_run", TRAIN, arguments, np=2, env=nowhere)
    assert sorted(path.name for path in (outcome.cwd / "saved").iterdir()) == ["best.keras"]
    assert "mnist cannot be downloaded: training on the digits in examples/digits.npz instead" in outcome.stdout(0)
    assert "cannot be downloaded" not in outcome.stdout(1)
    assert 0 <= accuracy(outcome) <= 1

"""docs/trackers.md with the real packages, on two ranks: one run, the metrics of all ranks, and one trial at a time.

`make test-trackers` installs them in an environment of its own. Nothing here needs the internet.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import Outcome
from harness.events import scalars
from harness.pages import ROOT, WITH_TRACKERS, scripts

pytestmark = list(WITH_TRACKERS)

PAGE = ROOT / "docs" / "trackers.md"
WORKER = Path(__file__).parent / "workers" / "of_page.py"
OF_EXAMPLE = ROOT / "tests" / "examples" / "workers" / "of_example.py"
OFFLINE = {"WANDB_MODE": "offline"}
RUNS_OF_MLFLOW = """
import json, mlflow
client = mlflow.MlflowClient()
runs = mlflow.search_runs(search_all_experiments=True, output_format="list")
print(json.dumps([{name: [one.value for one in client.get_metric_history(run.info.run_id, name)]
                   for name in run.data.metrics} for run in runs]))
"""

Run = Callable[..., Outcome]


@pytest.fixture
def run(tmp_path: Path, launch: Run) -> Run:
    """Runs a script of the page on two ranks, and one of the worker's checks; or the script with parts replaced."""
    for name, script in scripts(PAGE).items():
        (tmp_path / name).write_text(script)

    def start(script: str, check: str, *replaced: tuple[str, str], **options: Any) -> Outcome:
        path = tmp_path / script
        for part, by in replaced:
            assert path.read_text().count(part) == 1, f"{script} has no {part!r}"
            path.write_text(path.read_text().replace(part, by))
        return launch("hvkeras_run", WORKER, (str(path), check), np=2, backend="native", cold=True, env=OFFLINE,
                      **options)

    return start


def runs_of_mlflow(outcome: Outcome) -> list[dict[str, list[float]]]:
    """The metrics of each run in the job's folder."""
    done = subprocess.run([sys.executable, "-Ic", RUNS_OF_MLFLOW], cwd=outcome.cwd, capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, list[float]]] = json.loads(done.stdout.splitlines()[-1])
    return found


def history(outcome: Outcome) -> dict[str, list[float]]:
    """The logs of `fit`, which are the same on both ranks, and cover the data of both."""
    first, second = outcome.results("trained")
    assert first["history"] == second["history"]
    for rank in (first, second):
        for name in ("loss", "accuracy"):
            assert rank["history"][f"val_{name}"][-1] == pytest.approx(rank["alone"][name], abs=2e-6)
    logs: dict[str, list[float]] = first["history"]
    return logs


def test_mlflow_has_one_run_with_the_metrics_of_all_ranks(run: Run) -> None:
    outcome = run("with_mlflow.py", "trained")
    (found,) = runs_of_mlflow(outcome)
    logs = history(outcome)
    for name, values in logs.items():
        assert found[name] == pytest.approx(values)
    for name in ("loss", "accuracy"):
        assert found[f"validation_{name}"] == pytest.approx(logs[f"val_{name}"])
    assert list((outcome.cwd / "mlruns").rglob("*.keras")), "the model is there as well"


def test_wandb_has_one_run_with_the_metrics_of_all_ranks(run: Run) -> None:
    outcome = run("with_wandb.py", "trained")
    (folder,) = (outcome.cwd / "wandb").glob("offline-run-*")
    assert list(folder.glob("*.wandb"))
    summary = outcome.result("trained", 0)["summary"]
    assert {name: summary[f"epoch/{name}"] for name in history(outcome)} == pytest.approx(
        {name: values[-1] for name, values in history(outcome).items()})
    assert "wandb" not in outcome.stderr(1)


def test_tensorboard_has_one_run_with_the_metrics_of_all_ranks(run: Run) -> None:
    outcome = run("with_tensorboard.py", "trained")
    found = scalars(outcome.cwd / "logs")
    assert set(found) == {"train", "validation", "rank_0", "rank_1"}
    for name, values in history(outcome).items():
        of = "validation" if name.startswith("val_") else "train"
        assert [value for _, value in found[of][f"epoch_{name.removeprefix('val_')}"]] == pytest.approx(values)


@pytest.mark.parametrize(("tuner", "limit"), [
    ("RandomSearch", "max_trials=4"), ("BayesianOptimization", "max_trials=6, num_initial_points=3"),
    ("Hyperband", "max_epochs=3"), ("GridSearch", "max_trials=4"),
])
def test_keras_tuner_runs_the_same_trials_on_all_ranks(tuner: str, limit: str, run: Run) -> None:
    outcome = run("with_keras_tuner.py", "searched", ("RandomSearch", tuner), ("max_trials=4", limit))
    first, second = outcome.results("searched")
    assert len(first["trials"]) >= 4
    assert len({str(values) for values, _ in first["trials"].values()}) == len(first["trials"]), "trials that differ"
    assert first == second


def test_the_example_of_keras_tuner_has_one_search_and_one_best_model(launch: Run) -> None:
    arguments = (str(ROOT / "examples" / "tuning.py"), "--trials", "3", "--epochs", "2")
    outcome = launch("hvkeras_run", OF_EXAMPLE, arguments, np=2, backend="native", cold=True)
    first, second = outcome.results("trained")
    assert first == second
    assert len(list((outcome.cwd / "search" / "digits").glob("trial_*"))) == 3
    [accuracy] = re.findall(r"^test accuracy: (\d\.\d{4})$", outcome.stdout(0), re.MULTILINE)
    assert float(accuracy) >= 0.7
    assert outcome.stdout(1) == ""


DIES = """
class Dies(__import__("keras").callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        trials = pathlib.Path("{folder}/untitled_project/rank_1").glob("trial_*")
        if hvd.rank() == 1 and len(list(trials)) == 3 and not os.path.exists("{folder}/died"):
            open("{folder}/died", "w").close()
            os.kill(os.getpid(), 9)
"""


def test_a_search_of_keras_tuner_goes_on_where_a_rank_was_killed(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "search"
    dies = ("import keras_tuner\n", "import os, pathlib\nimport keras_tuner\n"), ("\n\nhvd.init", DIES.format(
        folder=folder) + "\n\nhvd.init"), ("[broadcast]", "[broadcast, Dies()]"), ('"search"', f'"{folder}"')
    run("with_keras_tuner.py", "searched", *dies, expect_failure=True)
    states = [json.loads(path.read_text())["status"] for path in sorted(folder.glob("*/trial_*/trial.json"))]
    assert states == ["COMPLETED", "COMPLETED", "RUNNING"], "no trial counts as failed because a rank is gone"
    first, second = run("with_keras_tuner.py", "searched").results("searched")
    assert len(first["trials"]) == 4
    assert all(score is not None for _, score in first["trials"].values())
    assert first == second


def test_the_same_seed_and_a_folder_for_each_rank_will_do_as_well(run: Run) -> None:
    outcome = run("with_keras_tuner.py", "searched", ("hvd.DistributedTuner(", "("),
                  ('directory="search"', 'directory=f"search/{hvd.rank()}", seed=1'))
    first, second = outcome.results("searched")
    assert first == second


def test_optuna_runs_the_same_trials_on_all_ranks(run: Run) -> None:
    first, second = run("with_optuna.py", "studied").results("studied")
    assert second["trials"] == [], "rank 0 alone has the study"
    assert len(first["trials"]) == 8
    assert {state for state, _, _ in first["trials"]} <= {"COMPLETE", "PRUNED"}
    assert first["last"] == second["last"] == first["trials"][-1][1]
    assert first["weights"] == second["weights"]


def test_an_objective_that_suggests_by_itself_gets_the_trial_of_rank_0(run: Run) -> None:
    suggesting = ('build(**{"units": fixed.suggest_int("units", 8, 128, log=True), "dropout": fixed.suggest_float('
                  '"dropout", 0.0, 0.5), "rate": fixed.suggest_float("rate", 1e-4, 1e-2, log=True)})')
    outcome = run("with_optuna.py", "studied", ("model = build(**params)",
                                                f"fixed = optuna.trial.FixedTrial(params)\n    model = {suggesting}"))
    first, second = outcome.results("studied")
    assert first["weights"] == second["weights"]


def test_without_the_line_mlflow_has_a_run_for_each_rank(run: Run) -> None:
    # The store is there before: ranks that create it at the same time may break it.
    store = "if hvd.rank() == 0:\n    mlflow.search_experiments()\nhvd.barrier()\nmlflow.keras.autolog()"
    outcome = run("with_mlflow.py", "trained", ("mlflow.keras.autolog(disable=hvd.rank() != 0)", store))
    assert len(runs_of_mlflow(outcome)) == 2


def test_without_the_line_wandb_has_a_run_for_each_rank(run: Run) -> None:
    outcome = run("with_wandb.py", "trained", ('mode=None if hvd.rank() == 0 else "disabled"', ""))
    assert len(list((outcome.cwd / "wandb").glob("offline-run-*"))) == 2


def test_with_the_callback_of_keras_tensorboard_has_each_curve_once_per_rank(run: Run) -> None:
    outcome = run("with_tensorboard.py", "trained", ("hvd.callbacks.TensorBoard", "keras.callbacks.TensorBoard"),
                  ("import hvkeras as hvd", "import keras\nimport hvkeras as hvd"))
    assert len(list((outcome.cwd / "logs" / "train").glob("events.out.tfevents.*"))) == 2


def test_without_the_line_keras_tuner_says_that_the_models_differ(run: Run) -> None:
    outcome = run("with_keras_tuner.py", "searched", ("hvd.DistributedTuner(", "("), expect_failure=True)
    last = outcome.output.strip().splitlines()[-1]
    assert last.startswith("hvkeras.errors.DivergenceError: All ranks must train the same model, but the models thems")
    hint = last[last.index("HINT: "):]
    assert "(Keras Tuner: hvd.DistributedTuner(tuner), or the same seed= and a directory of its own on every " in hint
    assert hint in PAGE.read_text()


def test_with_a_study_on_each_rank_an_error_says_that_the_models_differ(run: Run) -> None:
    outcome = run("with_optuna.py", "studied", ("params = hvd.broadcast_object(trial and trial.params)",
                                                'params = {"units": 8 + hvd.rank()}'), expect_failure=True)
    for rank in range(2):
        last = outcome.stderr(rank).strip().splitlines()[-1]
        assert "the models themselves differ in units of the layer " in last

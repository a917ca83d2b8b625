"""Resuming interrupted training: exact on the same number of workers; also on other numbers, and after SIGKILL."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import h5py  # type: ignore[import-untyped]
import pytest

from harness import Outcome, start_job
from harness.launchers import clean_environment
from launch.hvkeras_run import warm_ranks

WORKERS = Path(__file__).parent / "workers"
RUNS = {"native": ("hvkeras_run", "ranks", {"backend": "native"}), "strategy": ("tf_config", "workers", {})}


@pytest.fixture(params=[pytest.param(run, marks=pytest.mark.nightly if run == "strategy" else ()) for run in RUNS])
def outcome(request: pytest.FixtureRequest, launch_once: Callable[..., Outcome]) -> Outcome:
    launcher, kind, options = RUNS[request.param]
    return launch_once(launcher, WORKERS / "checkpoints.py", (kind,), np=2, **options)


@pytest.mark.slow
def test_resumed_training_is_the_same_to_the_last_bit(outcome: Outcome) -> None:
    for rank, found in enumerate(outcome.results("goes_on_exactly")):
        for case in found:
            assert case["same"]
            assert case["cut"]
            assert case["files"] == ([] if rank else ["latest.weights.h5"])
            assert case["left"] == []
    assert outcome.stderr(0).count("training resumes with epoch 2 after step 2, from the backup of 2 workers") == 1
    assert "training resumes" not in outcome.stderr(1)


@pytest.mark.slow
def test_the_chief_alone_keeps_plain_models(outcome: Outcome) -> None:
    chief, other = outcome.results("the_best_is_kept")
    assert chief["files"] == ["1-2.keras", "2-1.keras", "last.weights.h5"]
    assert chief["optimizer"].startswith("keras.")
    assert chief["apart"] == 0
    assert other["files"] == []
    assert outcome.results("what_others_wrote_opens_here") == [[0.0, 0.0]] * 2


@pytest.mark.nightly
def test_training_resumes_at_other_sizes_and_on_other_backends(tmp_path: Path) -> None:
    folder, worker = tmp_path / "backup", WORKERS / "relay.py"
    for launcher, np, how, where, options, lost in (
        ("hvkeras_run", 2, "ranks", ("1", "2", "1"), {"backend": "native"}, "rank 1"),  # only rank 1 is killed
        ("tf_config", 4, "ranks", ("1", "3", "0"), {"backend": "tfdist"}, "rank 0"),  # the chief
        ("tf_config", 2, "workers", ("2", "1"), {}, "all"),
        ("none", 1, "devices", ("2", "2"), {}, "all"),
    ):
        with start_job(launcher, worker, (how, str(folder), *where), np=np, folder=tmp_path,
                       expect_failure=True, **options) as job:
            said = job.wait().stderr(0)
        assert [path.name for path in folder.glob("[!.]*")] == ["latest.weights.h5"], lost
        with h5py.File(folder / "latest.weights.h5") as file:
            assert "hvkeras" in file
        begins = re.search(r"training resumes with epoch (\d+)", said)
        assert (begins is None) == (np == 2 and how == "ranks"), said
    with start_job("none", worker, ("plain", str(folder)), np=1, folder=tmp_path) as job:
        outcome = job.wait()
    assert outcome.results("how_far_apart")[0] < 1e-5
    assert re.search(r"training resumes with epoch 3( after step [12])?, from the backup of [12] workers?",
                     outcome.stderr(0))
    assert not folder.exists()


WRITER = """
import sys, keras
from pathlib import Path
from hvkeras.callbacks.backup_file import Backup, BackupFolder, Position
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(512), keras.layers.Dense(64)])
model.compile("adam", "mse")
model.optimizer.build(model.trainable_variables)
folder = BackupFolder(Path(sys.argv[1]), keeps_two=sys.argv[2] == "two")
folder.remove_leftovers()
found = folder.load(model, "Adam")
step = found[0].position.step if found else 0
print("read", step, [path.name for path in Path(sys.argv[1]).glob(".*")], flush=True)
while True:
    step += 1
    for variable in model.weights + model.optimizer.variables:
        variable.assign(keras.ops.full(variable.shape, step, variable.dtype))
    folder.write(model, Backup(Position(0, step), "Adam"))
    print("wrote", step, flush=True)
"""


@pytest.mark.parametrize("kept", [pytest.param("one", marks=pytest.mark.slow), "two"])
def test_a_kill_amid_writing_leaves_a_whole_file(kept: str, tmp_path: Path) -> None:
    """Each start loads the file of the previous one, and fails if it is incomplete."""
    wrote = 0
    folder = tmp_path / "backup"
    for _ in range(2):
        process = subprocess.Popen(warm_ranks([sys.executable, "-c", WRITER, str(folder), kept]),
                                   stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=clean_environment(tmp_path))
        assert process.stdout is not None
        with process:
            assert process.stdout.readline() == f"read {wrote} []\n" or wrote, "the first start finds nothing"
            assert process.stdout.readline().startswith("wrote ")
            time.sleep(random.uniform(0.05, 0.5))
            os.kill(process.pid, signal.SIGKILL)
            # The last line may be incomplete.
            lines = [line for line in process.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
        wrote = int(lines[-1].split()[-1]) if lines else wrote + 1
        found = folder / "latest.weights.h5"
        found = found if found.exists() else folder / "previous.weights.h5"
        with h5py.File(found) as file:
            step = file["optimizer"]["vars"]["0"][()]
            assert step >= wrote
            assert (file["layers/dense/vars/0"][()] == step).all()
            assert b'"step": %d' % step in file["hvkeras/state"][()].tobytes()
        wrote = int(step)

"""The multi-worker tutorial's example: both workers are killed and restarted, and train to the end."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import keras
import numpy as np
import pytest

from harness import start_job
from harness.events import scalars

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tutorial_multi_worker.py"
GOOD = 0.97


@pytest.mark.nightly
def test_it_resumes_after_both_workers_were_killed(tmp_path: Path) -> None:
    folder = tmp_path / "tutorial"
    arguments = ("--folder", str(folder), "--epochs")
    with start_job("tf_config", EXAMPLE, (*arguments, "1000"), np=2, folder=tmp_path,
                   expect_failure=True) as job:
        job.wait_for(0, "Epoch 4/1000")
        for rank in (1, 0):
            os.kill(job.pid(rank), signal.SIGKILL)
        job.wait()
    last = 20
    with start_job("tf_config", EXAMPLE, (*arguments, str(last), "--tensorboard"), np=2, folder=tmp_path) as job:
        outcome = job.wait()
    epochs = [int(number) for number in re.findall(rf"^Epoch (\d+)/{last}$", outcome.stdout(0), re.MULTILINE)]
    [resumed] = re.findall(r"training resumes with epoch (\d+), from the backup of 2 workers", outcome.stderr(0))
    assert int(resumed) >= 4
    assert epochs == list(range(int(resumed), last + 1))
    [accuracy] = re.findall(r"^test accuracy: (\d\.\d{4})$", outcome.stdout(0), re.MULTILINE)
    assert float(accuracy) >= GOOD
    assert f"loaded again: {accuracy}" in outcome.stdout(0)
    assert outcome.stdout(1) == ""
    assert sorted(path.name for path in folder.iterdir()) == ["best.keras", "logs", "trained.keras"]
    assert set(scalars(folder / "logs")) == {"rank_0", "train", "validation"}
    model = keras.saving.load_model(folder / "trained.keras")
    assert model.predict(np.zeros((1, 8, 8, 1), "float32"), verbose=0).shape == (1, 10)

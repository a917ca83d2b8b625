"""Runs a script of docs/trackers.md, and notes what came of it on this rank.

Arguments: the script, and one of the checks below, which all run it first.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np

import hvkeras as hvd
from harness.checks import check, run_checks

SCRIPT = Path(sys.argv[1])


def run() -> dict[str, Any]:
    """The script's variables, after it has run."""
    sys.path.insert(0, str(SCRIPT.parent))
    return runpy.run_path(str(SCRIPT))


@check
def trained() -> dict[str, Any]:
    """The logs of `fit` on this rank, what it finds by itself on the validation data of all, and what W&B recorded."""
    found = run()
    whole = [np.concatenate(parts) for parts in zip(*hvd.allgather_object(found["validation"]), strict=True)]
    with hvd.alone():
        alone = found["model"].evaluate(*whole, verbose=0, return_dict=True)
    summary = dict(found["wandb"].run.summary) if "wandb" in found else {}
    return {"history": found["history"].history, "alone": alone, "summary": summary}


@check
def searched() -> dict[str, Any]:
    """The trials that Keras Tuner ran on this rank, and the outputs of the best model."""
    found = run()
    tuner = found["tuner"]
    (best,) = tuner.get_best_models()
    trials = {name: [trial.hyperparameters.values, trial.score] for name, trial in tuner.oracle.trials.items()}
    return {"trials": trials, "best": best.predict(np.ones((1, 20)), verbose=0)}


@check
def studied() -> dict[str, Any]:
    """The trials that Optuna knows on this rank, and the last model that it trained."""
    found = run()
    study = found["study"]
    trials = [] if study is None else [[one.state.name, one.params, one.value] for one in study.trials]
    return {"trials": trials, "last": found["params"], "weights": [weight.sum() for weight in
                                                                   found["model"].get_weights()]}


if __name__ == "__main__":
    run_checks(chosen=sys.argv[2:])

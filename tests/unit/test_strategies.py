"""The repairs of Keras 3 for strategies, on a Keras that needs none."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import keras
import pytest

from hvkeras.compat import patches, strategies
from hvkeras.errors import UnsupportedError


class Whole:
    """A trainer's module that reduces over workers as it should."""

    class TensorFlowTrainer:
        def _maybe_symbolic_build(self, iterator: Any = None, data_batch: Any = None) -> Any:
            return iterator, data_batch

    @staticmethod
    def reduce_per_replica(values: Any, strategy: Any, reduction: str) -> Any:
        return strategy.reduce("MEAN", values, axis=None), reduction


TRAINER = "keras.src.backend.tensorflow.trainer"


def repaired(module: Any) -> Any:
    patches.Installer(patches.TABLE).install(patches.STRATEGIES, modules={TRAINER: module})
    return module


@pytest.fixture
def patched() -> Any:
    return repaired(SimpleNamespace(reduce_per_replica=Whole.reduce_per_replica,
                                    TensorFlowTrainer=type("TensorFlowTrainer", (Whole.TensorFlowTrainer,), {})))


def test_a_keras_that_is_whole_runs_its_own_code(patched: Any) -> None:
    probe = strategies._Probe()
    assert patched.reduce_per_replica(1.0, probe, "auto") == (1.0, "auto")
    model = patched.TensorFlowTrainer()
    model._distribute_strategy = probe
    assert model._maybe_symbolic_build("iterator") == ("iterator", None)


def test_a_keras_that_would_add_gradients_up_is_refused() -> None:
    def averages_rows(values: Any, strategy: Any, reduction: str) -> Any:
        return strategy.reduce("MEAN", values, axis=0)

    old = repaired(SimpleNamespace(reduce_per_replica=averages_rows, TensorFlowTrainer=object))
    with pytest.raises(UnsupportedError, match=r"divides the loss by the number of replicas.*HINT: pip install"):
        old.reduce_per_replica(1.0, strategies._Probe(), "auto")


def test_the_keras_at_hand_is_looked_at_and_given_back() -> None:
    trainer = pytest.importorskip(TRAINER)
    broken = trainer.reduce_per_replica
    assert broken.__wrapped__.__module__ == trainer.__name__  # `import hvkeras` has patched it
    patches.uninstall(patches.STRATEGIES)
    try:
        assert trainer.reduce_per_replica is broken.__wrapped__
        assert not hasattr(keras.Model._maybe_symbolic_build, "__wrapped__")
        optimizer = sys.modules["keras.src.backend.tensorflow.optimizer"]
        assert not strategies.sums_once(optimizer.TFOptimizer.__new__(optimizer.TFOptimizer))
    finally:
        patches.install(patches.STRATEGIES)
    assert trainer.reduce_per_replica.__wrapped__ is broken.__wrapped__

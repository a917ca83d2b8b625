"""`hvd.strategy`: names, options, and what is said where there is no such thing; strategies that reach all ranks."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import keras
import pytest
import tensorflow as tf

import hvkeras as hvd
from hvkeras import compat
from hvkeras.backends.local import LocalBackend
from hvkeras.compat import graphs
from hvkeras.control.launch_environments.tf_config import worker_variables
from hvkeras.gradients import replicas
from hvkeras.gradients.optimizer_classes import distributed_part
from hvkeras.gradients.step import GradientStep
from hvkeras.host.topology import topology_from_hosts
from hvkeras.job.plans import EntryCounts
from hvkeras.job.session import Session
from hvkeras.training import fit_hooks

SERVERS = {"chief": ["localhost:1"], "worker": ["localhost:2"], "ps": ["localhost:3"]}


@pytest.fixture(autouse=True)
def log_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """What init() would set for the rest of the process."""
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "warning")


def test_a_wrong_name_lists_the_strategies() -> None:
    with pytest.raises(hvd.UsageError, match=r"are multi_worker_mirrored, mirrored, parameter_server, tpu.*'mirror'"):
        hvd.strategy("mirror")


def test_a_wrong_option_lists_the_options() -> None:
    with pytest.raises(hvd.UsageError, match=r"options of mirrored are devices, cross_device_ops\. .*'device'"):
        hvd.strategy("mirrored", device="CPU:0")


def test_one_process_may_ask_for_a_strategy_of_several() -> None:
    strategy = hvd.strategy("multi_worker_mirrored")
    assert strategy.num_replicas_in_sync == 1
    assert hvd.size() == 1
    hvd.shutdown()


def test_mirrored_takes_its_devices() -> None:
    assert hvd.strategy("mirrored", devices=["CPU:0"]).num_replicas_in_sync == 1


@pytest.mark.parametrize(("role", "words"), [
    ("worker", r"workers and ps serve it.*Server\("), ("ps", r"workers and ps serve it.*Server\("),
    ("evaluator", "workers and ps serve it.*checkpoints"),
])
def test_the_chief_alone_builds_a_parameter_server_strategy(
    role: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"cluster": SERVERS, "task": {"type": role, "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(hvd.UsageError, match=words):
        hvd.strategy("parameter_server")


@pytest.mark.parametrize(("text", "words"), [
    ("{}", "from TF_CONFIG alone.*'chief', 'worker', 'ps'"), ("{", "must be readable"), ("3", "must be readable"),
    ('{"cluster": {"worker": ["a:1"]}}', "'chief', 'ps'"),
])
def test_parameter_servers_come_from_tf_config(text: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(hvd.UsageError, match=words):
        hvd.strategy("parameter_server")


def test_a_missing_tpu_is_reported_in_plain_words() -> None:
    with pytest.raises(hvd.MachineError, match=r'A TPU must be available.*without a TPU, use "mirrored"'):
        hvd.strategy("tpu")


def test_variables_of_a_worker() -> None:
    found = worker_variables(["a:1", "[::1]:2"], 1, {"no_proxy": "b"})
    assert json.loads(found["TF_CONFIG"]) == {"cluster": {"worker": ["a:1", "[::1]:2"]},
                                              "task": {"type": "worker", "index": 1}}
    assert found["no_grpc_proxy"] == "b,a,::1"


class Tpus(tf.distribute.TPUStrategy):  # type: ignore[misc]  # TensorFlow ships no types
    """A strategy of eight TPUs, as far as its interface tells what it is."""

    def __init__(self) -> None:
        """Connects to nothing."""

    num_replicas_in_sync = 8
    extended = SimpleNamespace(_in_multi_worker_mode=lambda: False)


@pytest.fixture
def tpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    strategy = Tpus()
    hvd.init()
    monkeypatch.setattr(tf.distribute, "get_strategy", lambda: strategy)
    yield strategy
    monkeypatch.undo()
    hvd.shutdown()


def test_the_wrapper_steps_aside_under_tpus(tpus: Any) -> None:
    assert graphs.reducing_strategy() is tpus
    assert replicas.strategy_within_rank() is None
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5), backward_passes_per_step=2)
    applied: list[Any] = []
    part = distributed_part(optimizer)
    assert part is not None
    GradientStep(part, optimizer, [1.0], ["variable"], applied.extend).run()
    assert applied == [1.0]  # as they are, and at once


def test_callbacks_and_fit_step_aside_under_tpus(tpus: Any) -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    assert fit_hooks.shared_by(model) is None
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    callback.set_model(model)
    callback.on_train_begin()
    assert callback.broadcast_done
    assert not compat.is_summed(model.optimizer)


def test_tpus_are_no_part_of_several_ranks(tpus: Any) -> None:
    two_ranks = Session(LocalBackend(), EntryCounts(), topology_from_hosts(0, ["a", "a"]))
    sentence = r"must be used in a job of one rank.*start one process"
    with two_ranks.made_current(), pytest.raises(hvd.UnsupportedError, match=sentence):
        replicas.strategy_within_rank()

"""What a distributed optimizer keeps, and which slot of an optimizer belongs to which variable."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
import tf_keras

import hvkeras as hvd
from hvkeras import compat
from hvkeras.gradients.optimizer_classes import distributed_part
from hvkeras.gradients.options import Options, ReductionOptions
from hvkeras.gradients.sharded_state import ShardedState
from hvkeras.gradients.shards import Shards


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "warning")  # init() would set it for the rest of the process
    hvd.init("local")
    yield
    hvd.shutdown()


@pytest.mark.parametrize("kind", [keras, tf_keras])
def test_neither_trackers_nor_checkpoints_see_what_is_kept(kind: Any, tmp_path: Path) -> None:
    def entries(wrap: Any) -> list[str]:
        variable = tf.Variable([1.0, 2.0], name="v")
        optimizer = wrap(kind.optimizers.SGD(0.1, momentum=0.9))
        optimizer.build([variable])
        optimizer.apply_gradients([(tf.ones(2), variable)])
        saved = tf.train.Checkpoint(one=optimizer).save(str(tmp_path / "one"))
        assert ("_hvkeras" in vars(optimizer)) == (distributed_part(optimizer) is not None)
        return [*(name for name, _ in tf.train.list_variables(saved)), *(one.name for one in optimizer.variables)]

    assert entries(hvd.DistributedOptimizer) == entries(lambda plain: plain)


def test_a_copy_keeps_local_variables_and_no_sums() -> None:
    variable = tf.Variable([0.0, 0.0])
    optimizer = hvd.DistributedOptimizer(tf_keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    optimizer.register_local_var(variable)
    optimizer.apply_gradients([(tf.ones(2), variable)])
    copied = distributed_part(copy.deepcopy(optimizer))
    original = distributed_part(optimizer)
    assert copied is not None and original is not None
    assert copied.local_keys() == original.local_keys() and copied.optimizer is not original.optimizer
    assert copied.accumulation is not original.accumulation


class Holder:
    """An optimizer, as far as its attributes tell what it is."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def test_slots_are_found_in_collections_with_an_entry_for_each_variable() -> None:
    one, two, three, four = (tf.Variable(float(number)) for number in range(4))
    lists = Holder(momentums=[one, two, None], velocities=[three, four, None], _variables=[four, three, one])
    assert list(compat.numbered_slots(lists, 3)) == [(0, one), (1, two), (0, three), (1, four)]
    nested = Holder(slots={"m": [one, two, None], "v": [three, None, four]}, rates=[one, two])
    assert list(compat.numbered_slots(nested, 3)) == [(0, one), (1, two), (0, three), (2, four)]
    by_name = Holder(slots={"a": (one, two), "b": (three, None), "c": ()})
    assert list(compat.numbered_slots(by_name, 3)) == [(0, one), (0, two), (1, three)]


def test_what_tensorflow_tracks_are_no_slots() -> None:
    for momentum, slots in ((0.0, 0), (0.9, 2)):
        optimizer = keras.optimizers.SGD(0.1, momentum=momentum)
        optimizer.build([tf.Variable([1.0, 2.0]), tf.Variable(0.0)])
        assert len(list(compat.numbered_slots(optimizer, 2))) == slots


def test_ranks_do_not_share_slots_that_nobody_finds() -> None:
    class Hiding(keras.optimizers.SGD):  # type: ignore[misc]  # Keras ships no types
        def build(self, variables: Any) -> None:
            super().build(variables)
            self.kept = Holder(slots=[self.add_variable(one.shape, name="hidden") for one in variables])

    for make, is_refused in ((keras.optimizers.Adam, False), (Hiding, True)):
        shards = Shards([keras.Variable([[1.0, 2.0], [3.0, 4.0]])], [(0, 2, 4)], (0, 1), 0)
        optimizer = make(0.1)
        optimizer.build([*shards.parts, shards.placeholder])
        options = Options(ReductionOptions("Hiding"), make, compat.KERAS, shard_kind="elements")
        if is_refused:
            with pytest.raises(hvd.UnsupportedError, match=r"keeps its slots in lists.*'hidden'"):
                ShardedState(optimizer, options, shards)
        else:
            state = ShardedState(optimizer, options, shards)
            assert [tuple(one.shape) for one in state.variables(optimizer.variables)] == [(), (), (2, 2), (2, 2)]

"""Train elastically for 4 epochs: all ranks raise once in epoch 1, one is killed in epoch 2, and one fails at the end.

Print the state at each start, and at the end whether the weights equal those of one process. If rank 1 is killed, it
corrupts the last commit first.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import hvkeras as hvd

BATCHES, EACH = 5, 4
keras: Any = tf.keras


def model_and_data() -> tuple[Any, Any, Any]:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(5), keras.layers.Dense(1)])
    random = np.random.default_rng(0)
    return model, *(random.normal(size=(BATCHES, EACH * hvd.size(), width)).astype("float32") for width in (6, 1))


def spoil(commit: Path) -> None:
    data = bytearray(commit.read_bytes())
    data[len(data) // 2] ^= 1
    commit.write_bytes(data)


class Stumble(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
    def __init__(self, state: Any, marker: Path, victim: int) -> None:
        super().__init__()
        self.elastic, self.marker, self.victim = state, marker, victim
        self.stumbled = False

    def on_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.elastic.epoch == 1 and batch == 2 and not self.stumbled and not self.marker.exists():
            self.stumbled = True
            for weight in self.model.weights:
                weight.assign(weight + 100.0)
            raise hvd.elastic.HorovodInternalError("all ranks stumble")
        if self.elastic.epoch == 2 and batch == 2 and hvd.rank() == self.victim and not self.marker.exists():
            self.marker.touch()
            if self.victim:  # rank 0 does not commit again: it waits for this rank in the next batch
                spoil(Path(os.environ["HVKERAS_ELASTIC_DIR"]) / "commit-0")
            os.kill(os.getpid(), signal.SIGKILL)


def main(marker: Path, victim: int) -> None:
    hvd.init()
    model, x, y = model_and_data()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse")
    state = hvd.elastic.TensorFlowKerasState(model, epoch=0, batch=0)
    state.register_reset_callbacks([lambda: print("built anew", flush=True)])
    mine = slice(EACH * hvd.rank(), EACH * (hvd.rank() + 1))
    callbacks = [Stumble(state, marker, victim), hvd.elastic.UpdateBatchStateCallback(state),
                 hvd.elastic.UpdateEpochStateCallback(state), hvd.elastic.CommitStateCallback(state, 2)]

    @hvd.elastic.run
    def train(state: Any, verbose: int) -> None:
        print(f"begins with epoch {state.epoch} at step {int(model.optimizer.iterations.numpy())}", flush=True)
        data = tf.data.Dataset.from_tensor_slices((x[:, mine], y[:, mine]))
        model.fit(data, epochs=4 - state.epoch, verbose=verbose, shuffle=False, callbacks=callbacks)

    train(state, verbose=0)
    print(f"trained {state.epoch} epochs, {int(model.optimizer.iterations.numpy())} steps", flush=True)
    found = model.get_weights()
    truth, x, y = model_and_data()
    truth.compile(keras.optimizers.Adam(0.01), loss="mse")
    truth.fit(tf.data.Dataset.from_tensor_slices((x, y)), epochs=4, verbose=0, shuffle=False)
    apart = max(float(np.max(np.abs(one - other))) for one, other in zip(found, truth.get_weights(), strict=True))
    print(f"right: {apart < 1e-5}", flush=True)
    hvd.barrier()
    end = marker.with_suffix(".end")
    if hvd.rank() == 1 and not end.exists():
        end.touch()
        sys.exit(3)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

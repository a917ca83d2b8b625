"""Train elastically with changing ranks; the model's weights count how often each sample was used.

Arguments: the kind of data, and events: a worker's number, an action on itself, and the number of its steps, as in
`1:kill:7 2:raise:9`. `0:hosts=4:7` sets the number of slots of a host discovery script, and 1 when the job has that
many ranks; `0:shrink=2:7` sets it and waits for the launcher, and `2:drop=2:7` sets it and kills the worker. Training
lasts for at least three epochs, and until the ranks have changed and the job has the requested number again. With the
kind `soak`, it lasts until the file `finish` exists.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import hvkeras as hvd
from harness.gpus import pretend

keras: Any = tf.keras
SAMPLES, EPOCHS, MOST = 503, 3, 60  # a prime, which no number of ranks divides
EVEN = SAMPLES - SAMPLES % 12  # datasets may drop samples, but not if all ranks can have equally many
PAUSE = float(os.environ.get("PAUSE", "0.005"))  # seconds after each step
WORKER = int(os.environ["HVKERAS_RUN_WORKER"])


class Counts(keras.Model):  # type: ignore[misc]  # Keras ships no types
    def __init__(self) -> None:
        super().__init__()
        self.counts = self.add_weight(shape=(SAMPLES,), initializer="zeros", name="counts")
        self.waves = self.add_weight(shape=(), initializer="ones", name="waves")  # depends on the order of the samples

    def call(self, numbers: Any) -> Any:
        numbers = tf.reshape(numbers, [-1])
        waves = tf.sin(tf.convert_to_tensor(self.waves) * tf.cast(numbers, tf.float32))
        return tf.gather(tf.convert_to_tensor(self.counts), numbers) + 1e-4 * waves


class Events(keras.callbacks.Callback):  # type: ignore[misc]  # Keras ships no types
    def __init__(self, events: list[list[str]], tells: bool) -> None:
        super().__init__()
        self.events = {int(steps): what for worker, what, steps in events if int(worker) == WORKER}
        self.steps, self.is_first, self.tells = 0, True, tells
        self.back_at = int(next((what[6:] for what in self.events.values() if what.startswith("hosts=")), 0))

    def on_train_begin(self, logs: Any = None) -> None:
        self.is_first = True

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.is_first and hvd.rank() == 0 and self.tells:
            print(f"first step at {time.time():.3f} with {hvd.size()} ranks", flush=True)
        self.is_first = False
        time.sleep(PAUSE)
        self.steps += 1
        what, _, slots = self.events.get(self.steps, "").partition("=")
        if what == "" and WORKER == 0 and hvd.size() == self.back_at:
            what, slots = "hosts", "1"
        if not what or Path(f"done.{WORKER}.{self.steps}").exists():  # not again after a restart of all ranks
            return
        Path(f"done.{WORKER}.{self.steps}").touch()
        if what == "raise":
            raise ArithmeticError("stumbles")
        if slots:
            Path("hosts.new").write_text(f"localhost:{slots}\n")
            Path("hosts.new").rename("hosts")  # it may be read at any time
        if what in ("hosts", "shrink"):
            time.sleep(2.5 if what == "shrink" else 0)
        else:
            number = {"stop": signal.SIGSTOP, "leave": signal.SIGTERM}.get(what, signal.SIGKILL)
            os.kill(os.getpid(), number)


class Batches(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches of 8 samples, in an order that changes at each end of an epoch."""

    def __init__(self) -> None:
        super().__init__(workers=2)
        self.order = np.arange(EVEN, dtype=np.int32)

    def __len__(self) -> int:
        return (EVEN + 7) // 8

    def __getitem__(self, index: int) -> Any:
        numbers = self.order[8 * index : 8 * index + 8]
        return numbers, np.zeros(len(numbers), np.float32)

    def on_epoch_end(self) -> None:
        np.random.shuffle(self.order)


class Training:
    """Parts of a training run."""

    def __init__(self, kind: str, events: list[list[str]]) -> None:
        numbers, nothing = np.arange(SAMPLES, dtype=np.int32), np.zeros(SAMPLES, np.float32)
        self.kind, self.does = kind, Events(events, tells=kind == "soak")
        self.model = Counts()
        self.model(numbers[:1])
        self.model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum),
                           lambda _, of: -tf.reduce_sum(of), jit_compile=False)
        if kind == "arrays":  # builds the optimizer, as in Horovod's elastic scripts
            self.model.fit(numbers[:8], nothing[:8], verbose=0)
            self.model.counts.assign(tf.zeros_like(self.model.counts))
            self.model.waves.assign(1.0)
        if kind == "batches":
            self.data: dict[str, Any] = {"x": hvd.shard(Batches())}
        elif kind not in ("dataset", "shuffled"):
            x, y = hvd.shard((numbers, nothing))
            self.data = {"x": x, "y": y, "batch_size": 8}
        else:
            samples = tf.data.Dataset.from_tensor_slices((numbers[:EVEN], nothing[:EVEN]))
            share = hvd.shard(samples, shuffle=100) if kind == "dataset" else hvd.shard(
                samples.shuffle(100).map(lambda number, nothing: (number, nothing + 0.0)))
            self.data = {"x": share.batch(8).prefetch(1), "shuffle": False}
        self.state: Any = hvd.elastic.TensorFlowKerasState(self.model, epoch=0, batch=0, wanted=hvd.size())
        # changes of the ranks; a start of this process after an event is one
        self.changes = int(any(Path().glob("done.*")))
        self.goes_to_1 = any("hosts" in what for _, what, _ in events)
        self.state.register_reset_callbacks([self.count_change])

    def count_change(self) -> None:
        self.changes += 1

    def goes_on(self) -> bool:
        if self.kind == "soak":  # until any rank finds the file
            over = hvd.allreduce(tf.constant(int(Path("finish").exists())), op=hvd.Max)
            return self.state.batch > 0 or not int(over)
        epoch, changes = self.state.epoch, int(hvd.allreduce(tf.constant(self.changes), op=hvd.Max))
        wanted = 1 if self.goes_to_1 else self.state.wanted
        is_over = epoch >= MOST or (epoch >= EPOCHS and bool(changes) and hvd.size() == wanted)
        return self.state.batch > 0 or not is_over  # a started epoch is completed

    def by_callback(self) -> None:
        self.state.epoch = 6
        history = self.model.fit(**self.data, epochs=6, verbose=0, callbacks=[
            self.does, hvd.elastic.ElasticCallback(batches_per_commit=5, learning_rate=lambda rate, *_: rate)])
        print("history", history.epoch, len(history.history["loss"]), flush=True)

    def by_fit(self, state: Any) -> None:
        while self.goes_on():
            self.model.fit(**self.data, initial_epoch=state.epoch, epochs=state.epoch + 1, verbose=0, callbacks=[
                self.does, hvd.elastic.UpdateEpochStateCallback(state), hvd.elastic.UpdateBatchStateCallback(state),
                hvd.elastic.CommitStateCallback(state, batches_per_commit=5)])

    def by_loop(self, state: Any) -> None:
        @tf.function(reduce_retracing=True)
        def step(some: Any) -> None:
            with tf.GradientTape() as tape:
                loss = -tf.reduce_sum(self.model(some))
            weights = self.model.trainable_variables
            self.model.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

        while self.goes_on():
            for some, _ in hvd.elastic.batches(**self.data):
                step(some)
                state.batch += 1
                if state.batch % 5 == 0:
                    state.commit()
                self.does.on_train_batch_end(state.batch)
            state.epoch, state.batch = state.epoch + 1, 0
            state.commit()


def main(kind: str, events: list[list[str]]) -> None:
    if os.environ.get("HVKERAS_BACKEND") == "tfdist":
        print("pid", os.getpid(), flush=True)
    pretend(int(os.environ.get("GPUS", "0")))
    hvd.init()
    training = Training(kind, events)
    if kind == "callback":
        training.by_callback()
    else:
        hvd.elastic.run(lambda _: (training.by_loop if kind == "loop" else training.by_fit)(training.state))(
            training.state)
    report(training.model, training.state.epoch, EVEN if kind in ("batches", "dataset", "shuffled") else SAMPLES)


def report(model: Any, epochs: int, samples: int) -> None:
    expected = np.where(np.arange(SAMPLES) < samples, epochs, 0)
    found = model.counts.numpy()
    is_right = np.array_equal(found, expected)
    times = "every sample once in each" if is_right else str(np.unique(found, return_counts=True))
    print(f"trained {epochs} epochs, {times}", flush=True)
    print(f"waves {float(model.waves.numpy()).hex()}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], [each.split(":") for each in sys.argv[2].split()])

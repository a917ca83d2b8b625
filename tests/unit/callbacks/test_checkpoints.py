"""`BackupAndRestore` and `ModelCheckpoint` in one process: what is kept, and what it is worth after a crash."""

from __future__ import annotations

import json
import random
import re
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py  # type: ignore[import-untyped]
import keras
import numpy as np
import pytest
import tensorflow as tf

import hvkeras as hvd
from harness import OLDEST_IN_SOAK, warm
from harness.cut_off import CutOff, CutOffError
from harness.launchers import clean_environment
from hvkeras.callbacks import BackupAndRestore, ModelCheckpoint
from hvkeras.callbacks.backup_file import Position
from hvkeras.callbacks.model_files import replacing

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras with NumPy 2
X = np.random.default_rng(1).normal(size=(24, 3)).astype("float32")
Y = X @ np.float32([[1], [-2], [3]])


class Numbers(keras.callbacks.Callback):  # type: ignore[misc]
    """Draws from the global generators, as a user's callback might, and notes the steps and what it drew."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[tuple[int, int, float, float, float]] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch
        random.random()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.drawn.append((self.epoch, batch, random.random(), float(np.random.rand()),
                           float(tf.random.uniform(()) + keras.random.uniform(()))))


class Batches(keras.utils.PyDataset):  # type: ignore[misc]
    """Shuffles its batches itself after each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.order = list(range(6))
        self.generator = np.random.default_rng(3)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        rows = slice(self.order[index] * 4, self.order[index] * 4 + 4)
        return X[rows], Y[rows]

    def on_epoch_end(self) -> None:
        self.generator.shuffle(self.order)


def dataset(**options: Any) -> Any:
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(24, seed=5, **options).batch(4)


def generator() -> Iterator[Any]:
    numbers = np.random.default_rng(8)
    while True:
        rows = numbers.integers(0, 24, 4)
        yield X[rows], Y[rows]


DATA: dict[str, Any] = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": 4},
    "shuffled dataset": lambda: {"x": dataset(), "shuffle": None},
    "unknown length": lambda: {"x": dataset().filter(lambda x, y: True), "shuffle": None},
    "endless dataset": lambda: {"x": dataset().repeat(), "steps_per_epoch": 5, "shuffle": None},
    "generator": lambda: {"x": generator(), "steps_per_epoch": 6, "shuffle": None},
    "PyDataset": lambda: {"x": Batches(), "shuffle": True},
}


def compiled(optimizer: Any = None, **options: Any) -> Any:
    keras.utils.clear_session()  # as in a new process
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.3), keras.layers.Dense(1)])
    model.compile(optimizer or keras.optimizers.SGD(0.02, momentum=0.9), "mse", **{"run_eagerly": True, **options})
    return model


def train(folder: Path | None, data: Any, cut: int | None = None, save_freq: Any = "epoch",
          more: Any = (), backup: Any = None, **options: Any) -> Any:
    """One run of the script: its model, and the numbers that it drew."""
    model, numbers = compiled(options.pop("optimizer", None), **options.pop("compiled", {})), Numbers()
    made = data()  # after the seeds are set
    callbacks = [BackupAndRestore(folder, save_freq, **(backup or {}))] if folder else []
    callbacks += [numbers, *more]
    callbacks += [] if cut is None else [CutOff(cut)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Your input ran out of data")
        if cut is None:
            model.fit(**made, epochs=3, verbose=0, callbacks=callbacks, **options)
        else:
            with pytest.raises(CutOffError):
                model.fit(**made, epochs=3, verbose=0, callbacks=callbacks, **options)
    return model, numbers.drawn


def assert_same_state(one: Any, other: Any) -> None:
    for mine, theirs in zip(one.variables + one.optimizer.variables, other.variables + other.optimizer.variables,
                            strict=True):
        assert np.array_equal(mine.numpy(), theirs.numpy()), mine.path


QUICK = ("endless dataset",)
OLDEST = {"arrays": [pytest.mark.oldest], "PyDataset": OLDEST_IN_SOAK}


@pytest.mark.parametrize(("kind", "save_freq", "cut"), [
    *(pytest.param(kind, 2, 9, marks=(*OLDEST.get(kind, ()), *([] if kind in QUICK else [pytest.mark.slow])))
      for kind in DATA),
    pytest.param("shuffled dataset", "epoch", 14, marks=pytest.mark.slow),
    pytest.param("unknown length", "epoch", 14, marks=pytest.mark.nightly)])
def test_training_resumes_as_if_it_had_not_been_cut_off(kind: str, save_freq: Any, cut: int, tmp_path: Path,
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    whole, drawn = train(None, DATA[kind])
    train(tmp_path / "backup", DATA[kind], cut, save_freq)
    resumed, drawn_again = train(tmp_path / "backup", DATA[kind], save_freq=save_freq)
    assert_same_state(resumed, whole)
    assert 0 < len(drawn_again) < len(drawn)
    if kind != "PyDataset":  # Keras shuffles it in a thread of its own, by the same global generator
        assert drawn_again == drawn[-len(drawn_again):]
    assert capsys.readouterr().err.count("training resumes with epoch") == 1
    assert not (tmp_path / "backup").exists()


@pytest.mark.slow
def test_executions_of_several_steps_resume_where_they_were(tmp_path: Path) -> None:
    several: dict[str, Any] = {"compiled": {"steps_per_execution": 2, "run_eagerly": False}}
    whole, _ = train(None, DATA["arrays"], **several)
    train(tmp_path, DATA["arrays"], 4, 2, **several)  # in the second epoch, after its first execution
    with h5py.File(tmp_path / "latest.weights.h5") as file:
        assert b'"epoch": 1, "step": 2' in file["hvkeras/state"][()].tobytes()
    resumed, _ = train(tmp_path, DATA["arrays"], save_freq=2, **several)
    assert_same_state(resumed, whole)


@pytest.mark.oldest
@pytest.mark.oldest_nightly
def test_callbacks_resume_with_what_they_have_seen(tmp_path: Path) -> None:
    def watching() -> Any:
        return [keras.callbacks.ReduceLROnPlateau("loss", 0.5, patience=2, min_delta=100),
                keras.callbacks.EarlyStopping("loss", patience=2, min_delta=100, restore_best_weights=True)]

    whole, undisturbed = train(None, DATA["arrays"], more=watching())
    train(tmp_path, DATA["arrays"], 13, more=watching())
    last = watching()
    resumed, _ = train(tmp_path, DATA["arrays"], more=last)
    assert_same_state(resumed, whole)
    assert resumed.optimizer.learning_rate.numpy() == pytest.approx(0.01)
    assert last[1].stopped_epoch == 2
    assert len(undisturbed) == 18


@pytest.mark.slow
def test_a_warm_up_resumes_within_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "warning")  # init() would set it for the rest of the process
    hvd.init("local")
    try:
        def schedule() -> Any:
            return [hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 1 / (1 + epoch), staircase=False)]

        whole, _ = train(None, DATA["arrays"], more=schedule())
        train(tmp_path, DATA["arrays"], 9, 1, more=schedule())
        resumed, _ = train(tmp_path, DATA["arrays"], save_freq=1, more=schedule())
        assert_same_state(resumed, whole)
    finally:
        hvd.shutdown()


def test_gradients_that_are_not_shared_yet_are_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_LOG_LEVEL", "warning")
    hvd.init("local")
    try:
        def optimizer() -> Any:
            return hvd.DistributedOptimizer(keras.optimizers.SGD(0.02), backward_passes_per_step=3)

        whole, _ = train(None, DATA["arrays"], optimizer=optimizer())
        train(tmp_path, DATA["arrays"], 11, 2, optimizer=optimizer())
        with h5py.File(tmp_path / "latest.weights.h5") as file:
            assert b'"epoch": 1, "step": 3' in file["hvkeras/state"][()].tobytes()
            names: list[str] = []
            file.visit(names.append)
            assert not [name for name in names if "hvkeras" in name and not name.startswith("hvkeras")]
        resumed, _ = train(tmp_path, DATA["arrays"], save_freq=2, optimizer=optimizer())
        assert_same_state(resumed, whole)
    finally:
        hvd.shutdown()


@pytest.mark.parametrize(("saved", "now", "step"), [
    (Position(1, 5, 10, 64, 2), (10, 64, 2), 5),
    (Position(1, 5, 10, 64, 2), (5, 128, 4), 2),  # half a step is done again
    (Position(1, 5, 10, 64, 2), (20, 32, 1), 10),
    (Position(1, 9, 10, None, 2), (5, None, 4), 4),  # by the share of the epoch
    (Position(1, 9, 10, None, 2), (5, 8, 4), 4),
    (Position(1, 10, 11, 30, 2), (5, 60, 2), 4),  # never the whole epoch
    (Position(1, 5, None, None, 2), (None, None, 2), 5),
    (Position(1, 5, None, None, 2), (None, None, 4), None),
    (Position(1, 5, None, 64, 2), (None, 32, 1), 10),
    (Position(1, 0, None, None, 2), (None, None, 4), 0),
])
def test_a_position_holds_at_other_sizes(saved: Position, now: Any, step: int | None) -> None:
    assert saved.step_for(*now) == step


def test_data_of_unknown_length_start_the_epoch_over_at_another_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                     capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(hvd.callbacks.training_group.TrainingGroup, "workers", 2)
    train(tmp_path, DATA["unknown length"], 9, 2)
    monkeypatch.undo()
    _, drawn = train(tmp_path, DATA["unknown length"])
    assert [step[:2] for step in drawn[:2]] == [(1, 0), (1, 1)]
    assert capsys.readouterr().err.count("the position of 1 workers cannot be derived from") == 1


def test_data_that_end_where_the_backup_was_made(tmp_path: Path) -> None:
    """Nobody knew at the sixth step that it was the last of the epoch."""
    train(tmp_path, DATA["unknown length"], 6, 6)
    _, drawn = train(tmp_path, DATA["unknown length"])
    assert [step[:2] for step in drawn] == [(epoch, step) for epoch in (1, 2) for step in range(6)]


@pytest.mark.parametrize(("arguments", "message"), [
    (("",), "needs a local folder.*pass backup_dir="), ((None,), "needs a local folder"),
    (("gs://bucket/backup",), "needs a local folder"),
    (("backup", "batch"), 'save_freq must be "epoch" or a positive number'), (("backup", 0), "save_freq must be"),
    (("backup", False), "save_freq must be"),
])
def test_wrong_arguments_are_reported(arguments: Any, message: str) -> None:
    with pytest.raises(hvd.UsageError, match=message):
        BackupAndRestore(*arguments)


def test_a_backup_of_something_else_is_refused(tmp_path: Path) -> None:
    train(tmp_path, DATA["arrays"], 7)
    with pytest.raises(hvd.UsageError, match=r"optimizer that it was made with.*backup='SGD', optimizer='Adam'"):
        train(tmp_path, DATA["arrays"], optimizer=keras.optimizers.Adam())
    wider = keras.Sequential([keras.Input((3,)), keras.layers.Dense(7), keras.layers.Dense(1)])
    wider.compile("sgd", "mse")
    with pytest.raises(hvd.UsageError, match="must belong to the model that is trained"):
        wider.fit(X, Y, verbose=0, callbacks=[BackupAndRestore(tmp_path)])
    with pytest.raises(hvd.UsageError, match="can have one BackupAndRestore"):
        compiled().fit(X, Y, verbose=0, callbacks=[BackupAndRestore(tmp_path / name) for name in "ab"])
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    callback = BackupAndRestore(tmp_path)
    callback.set_model(unbuilt)
    with pytest.raises(hvd.UsageError, match=r"needs a model whose weights exist.*call it on a batch"):
        callback.on_train_begin()


def test_a_damaged_backup_is_reported_and_the_previous_one_is_used(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, DATA["arrays"], 5, 2, backup={"double_checkpoint": True})
    (tmp_path / "latest.weights.h5").write_bytes(b"no HDF5")
    _, drawn = train(tmp_path, DATA["arrays"], cut=8, backup={"double_checkpoint": True})
    assert drawn[0][:2] == (0, 2)
    assert "previous.weights.h5, as latest.weights.h5 cannot be read" in capsys.readouterr().err
    for path in tmp_path.iterdir():
        path.write_bytes(b"no HDF5")
    with pytest.raises(hvd.UsageError, match=r"must be readable.*remove it to start over"):
        train(tmp_path, DATA["arrays"])


def test_a_folder_is_left_as_it_was_found(tmp_path: Path) -> None:
    left = tmp_path / ".partial-latest.weights.h5"
    left.mkdir()
    (left / "latest.weights.h5").write_bytes(b"half")
    (tmp_path / "of the user").touch()
    train(tmp_path, DATA["arrays"], backup={"double_checkpoint": True})
    assert [path.name for path in tmp_path.iterdir()] == ["of the user"]


def test_a_backup_that_cannot_be_written_ends_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(hvd.MachineError, match=r"must be writable.*folder with free space.*"):
        train(tmp_path / "file" / "backup", DATA["arrays"])


# In a process of its own: a file that HDF5 could not write to its end makes it crash when it closes another one.
FULL_DISK = """
import json, pathlib, resource, sys
import keras, numpy as np
import hvkeras as hvd

kind, share, path = sys.argv[1], float(sys.argv[2]), pathlib.Path(sys.argv[3])
written = (hvd.callbacks.BackupAndRestore(path.parent, delete_checkpoint=False) if kind == "backup"
           else hvd.callbacks.ModelCheckpoint(path))
before, former = resource.getrlimit(resource.RLIMIT_FSIZE), b""

class Full(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        global former
        if epoch == 1:
            former = path.read_bytes()
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(share * len(former)), before[1]))

model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(20_000), keras.layers.Dense(1)])
model.compile("adam", "mse")
try:
    model.fit(np.ones((24, 3)), np.ones((24, 1)), epochs=2, verbose=0, callbacks=[written, Full()])
except hvd.MachineError as error:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    left = [(each.name, each.read_bytes() == former) for each in path.parent.iterdir()]
    print("FOUND", json.dumps([str(error), len(former), left]), flush=True)
"""


@pytest.mark.parametrize(("kind", "share"), [
    ("backup", 0.5), pytest.param("backup", 0.999, marks=pytest.mark.slow),
    pytest.param("checkpoint", 0.5, marks=pytest.mark.slow)])
def test_a_full_disk_is_called_so_and_leaves_the_former_file(kind: str, share: float, tmp_path: Path) -> None:
    path = tmp_path / "kept" / ("latest.weights.h5" if kind == "backup" else "model.keras")
    environment = clean_environment(tmp_path)
    done = subprocess.run([*warm.python(environment), "-c", FULL_DISK, kind, str(share), str(path)], cwd=tmp_path,
                          env=environment, capture_output=True, text=True, timeout=100)
    (found,) = re.findall(r"^FOUND (.*)$", done.stdout, re.MULTILINE) or pytest.fail(done.stdout + done.stderr)
    said, length, left = json.loads(found)
    size = re.fullmatch(rf"A file must fit on its disk \(File too large\)\. Received: path='{path}', size=(\d+),"
                        r" room_left=\d+\. HINT: free space, or choose another folder; the previous file is still"
                        r" intact\.", said)
    assert size is not None, said
    assert 0 < int(size[1]) <= length
    assert left == [[path.name, True]]


def test_training_resumes_from_the_backup_of_keras_s_own_callback(tmp_path: Path) -> None:
    with pytest.raises(CutOffError):
        compiled().fit(X, Y, epochs=3, batch_size=4, verbose=0, callbacks=[
            keras.callbacks.BackupAndRestore(tmp_path), CutOff(7)])
    _, drawn = train(tmp_path, DATA["arrays"])
    assert [step[0] for step in drawn] == [1] * 6 + [2] * 6


def test_checkpoints_that_were_cut_off_are_removed(tmp_path: Path) -> None:
    for name in (".partial-03-0.25.keras", ".partial-best[1].keras", ".partial-of another.keras"):
        (tmp_path / name).mkdir()
    checkpoints = [ModelCheckpoint(tmp_path / "{epoch:02d}-{loss:.0f}.keras", save_freq=4, monitor="loss"),
                   ModelCheckpoint(tmp_path / "best[1].keras", "loss", save_best_only=True)]
    model = compiled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(X, Y, epochs=2, batch_size=4, verbose=0, callbacks=checkpoints)
    names = sorted(re.sub(r"-\d+", "", path.name) for path in tmp_path.iterdir())
    assert set(names) == {".partial-of another.keras", "01.keras", "02.keras", "best[1].keras"}
    opened = keras.models.load_model(tmp_path / "best[1].keras")
    assert np.array_equal(opened.layers[-1].kernel.numpy(), model.layers[-1].kernel.numpy())


def test_what_fails_amid_writing_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("former")
    with pytest.raises(OSError, match="full"), replacing(path) as partial:  # noqa: PT012
        partial.write_text("half")
        raise OSError("full")
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("file", "former")]

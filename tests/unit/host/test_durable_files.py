"""Files that must outlive a power loss, at whichever moment it comes: all that was not written to the disk is gone."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest

from hvkeras.callbacks.model_files import replacing
from hvkeras.elastic.commits import CommitFile
from hvkeras.host.files import replace_durably, write_durably
from hvkeras.parameter_server.checkpoints import Checkpoints


class PowerLossError(BaseException):
    """Nothing runs any more."""


class Disk:
    """What a disk holds: files since the last time that they were flushed, and names since their folder was.

    Args:
        folder: The folder of the files.
        steps: The calls that change the disk before the power is lost.
    """

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder, self._left = folder, steps
        self._content: dict[int, bytes] = {}
        self._fsync, self._replace = os.fsync, os.replace

    def attach(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "fsync", self.fsync)
        monkeypatch.setattr(os, "replace", self.replace)

    def fsync(self, descriptor: int) -> None:
        self._step()
        self._fsync(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}")
        if path.is_file():
            self._content[path.stat().st_ino] = path.read_bytes()

    def replace(self, source: str | Path, target: str | Path) -> None:
        self._step()
        self._replace(source, target)

    def _step(self) -> None:
        if self._left == 0:
            raise PowerLossError
        self._left -= 1

    def lose_power(self) -> None:
        """Leaves of each file what was flushed, which is nothing of those that never were."""
        for path in [path for path in self._folder.rglob("*") if path.is_file()]:
            path.write_bytes(self._content.get(path.stat().st_ino, b""))


def text_file(folder: Path, value: int) -> None:
    write_durably(folder / "results.json", f"{value} " * 1000)


def read_text_file(folder: Path) -> int:
    return int((folder / "results.json").read_text().split()[999])


def commit(folder: Path, value: int) -> None:
    CommitFile(folder, 0).write({"step": value})


def read_commit(folder: Path) -> int:
    found = CommitFile(folder, 0).read()
    assert found is not None
    return int(found.saved["step"])


MODEL = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, use_bias=False)])


def model_file(folder: Path, value: int) -> None:
    MODEL.weights[0].assign(np.full((3, 2), value, np.float32))
    with replacing(folder / "model.weights.h5") as partial:
        MODEL.save_weights(str(partial))


def read_model_file(folder: Path) -> int:
    MODEL.load_weights(folder / "model.weights.h5")
    return int(MODEL.weights[0].numpy()[2, 1])


def checkpoint(folder: Path, value: int) -> None:
    MODEL.weights[0].assign(np.full((3, 2), value, np.float32))
    Checkpoints(folder, keep=1).save(MODEL, value)


def read_checkpoint(folder: Path) -> int:
    checkpoints = Checkpoints(folder)
    checkpoints.restore(MODEL, checkpoints.epochs()[-1])
    return int(MODEL.weights[0].numpy()[2, 1])


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras's, as it saves a model
@pytest.mark.parametrize(("write", "read"), [
    (text_file, read_text_file), (commit, read_commit), (model_file, read_model_file), (checkpoint, read_checkpoint),
], ids=["text", "commit", "model", "checkpoint"])
def test_after_a_power_loss_the_old_one_or_the_new_one_is_there(
        write: Callable[[Path, int], None], read: Callable[[Path], int], tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for steps in range(20):
        folder = tmp_path / str(steps)
        folder.mkdir(mode=0o700)
        disk = Disk(folder, 1000)
        with monkeypatch.context() as patches:
            disk.attach(patches)
            write(folder, 1)
            write(folder, 2)
            disk._left = steps
            try:
                write(folder, 3)
            except PowerLossError:
                is_over = False
            else:
                is_over = True
            disk.lose_power()
        found.append(read(folder))
        if is_over:
            break
    assert set(found[:-1]) == {2, 3} and found[-1] == 3, found


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.json"
    write_durably(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_durably(path, "new")
    assert path.read_text() == "old" and [entry.name for entry in tmp_path.iterdir()] == ["results.json"]


def test_a_file_system_that_flushes_no_folders_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def of_files(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", of_files)
    (tmp_path / "new").write_text("new")
    replace_durably(tmp_path / "new", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "new"


def test_a_link_that_somebody_has_put_there_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    for name in ("results.json", f".results.json.{os.getpid()}"):
        (tmp_path / name).symlink_to(tmp_path / "mine")
    write_durably(tmp_path / "results.json", "results")
    assert (tmp_path / "mine").read_text() == "mine"
    assert (tmp_path / "results.json").read_text() == "results" and not (tmp_path / "results.json").is_symlink()

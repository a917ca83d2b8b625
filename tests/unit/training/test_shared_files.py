"""Files that Keras's own callbacks would write on several ranks."""

from __future__ import annotations

from pathlib import Path

import keras

import hvkeras as hvd
from hvkeras.training.shared_files import SharedFiles, files_of, note_save


class Own(keras.callbacks.CSVLogger):
    """A class of a script, which may write on one rank only."""


def test_keras_callbacks_that_write_files_are_found(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    callbacks = [keras.callbacks.ModelCheckpoint("{epoch}.keras"), keras.callbacks.CSVLogger("log.csv"),
                 keras.callbacks.BackupAndRestore("backup"), keras.callbacks.EarlyStopping(), Own("own.csv"),
                 hvd.callbacks.ModelCheckpoint("ours.keras"), hvd.callbacks.BackupAndRestore("ours")]
    assert files_of(callbacks) == [
        ("ModelCheckpoint", f"{tmp_path}/{{epoch}}.keras"), ("CSVLogger", f"{tmp_path}/log.csv"),
        ("BackupAndRestore", f"{tmp_path}/backup")]


def test_a_path_of_several_ranks_is_reported_once() -> None:
    shared, own = ("CSVLogger", "/a/log.csv"), ("ModelCheckpoint", "/a/model.keras")
    known = SharedFiles()
    (line,) = known.warnings([0, 1, 2], [[own], [shared], [shared]])
    assert line == ("ranks 1, 2 write to the same path with Keras's CSVLogger, which may damage it: /a/log.csv. HINT:"
                    " pass it as hvd.rank0_callbacks([CSVLogger(...)]), which writes on one rank only")
    assert known.warnings([0, 1, 2], [[own], [shared], [shared]]) == []
    (line,) = known.warnings([0, 1], [[own, own], [shared, own]])
    assert "HINT: use hvd.callbacks.ModelCheckpoint, " in line


def test_a_save_on_another_rank_is_named_once_unless_its_file_is_that_ranks() -> None:
    said: list[str] = []
    for path in ("model.keras", "model.keras", Path("rank1.keras"), "runs-1/model.keras"):
        note_save(path, said.append)
    assert [line.partition(":")[0] for line in said] == ["rank 1 saves model.keras", "rank 1 saves runs-1/model.keras"]

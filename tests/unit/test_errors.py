"""How uncaught exceptions are printed."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from hvkeras.errors import format_error, summary


@pytest.mark.parametrize(("code", "error", "fix"), [
    ("import importlib; importlib.import_module('horovod.that.is.not.there')", "ModuleNotFoundError: No module named",
     "HINT: import hvkeras as hvd instead, or start the script with --as-horovod, unchanged."),
    ("import os; os.environ['PYTHONPATH'] = str(hvkeras.horovod.as_horovod.SITE); import horovod.not_there",
     "ModuleNotFoundError: No module named",
     "HINT: start Python without -E, -I and -S, which keep it from what --as-horovod has added to its PYTHONPATH."),
    ("import h5py; h5py.File('x.h5', 'w')", "BlockingIOError: [Errno 11]",
     "HINT: let one rank write the file, as hvd.callbacks.BackupAndRestore and hvd.callbacks.ModelCheckpoint do."),
])
def test_common_exceptions_of_others_end_with_the_fix(tmp_path: Path, code: str, error: str, fix: str) -> None:
    holds = "import h5py, subprocess, sys; file = h5py.File('x.h5', 'w'); sys.exit(subprocess.call(sys.argv[1:]))"
    command = [sys.executable, "-c", f"import hvkeras.horovod.as_horovod; {code}"]
    done = subprocess.run([sys.executable, "-c", holds, *command], cwd=tmp_path, capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-2].startswith(error) and done.stderr.splitlines()[-1] == fix


def test_an_error_with_a_hint_gets_no_other(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import horovod.torch")
    command = [Path(sys.executable).with_name("hvkeras"), "exec", "--as-horovod", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(" HINT: run without --as-horovod, or with PYTHONPATH unset.")


def test_frames_of_hvkeras_commands_are_not_the_users(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise ValueError('x')")
    command = [Path(sys.executable).with_name("hvkeras"), "exec", "--as-horovod", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert [line.strip() for line in done.stderr.splitlines()[-4:]] == [
        "Traceback (most recent call last):", 'File "train.py", line 1, in <module>', "raise ValueError('x')",
        "ValueError: x"]


# Errors of many lines: AutoGraph, Keras and TensorFlow put the user's error behind or between lines of their own.
WRAPPED = """
import keras
import tensorflow as tf


class Layer(keras.layers.Layer):
    def call(self, inputs):
        raise ValueError("the layer needs five columns.")  # line 8


class Model(keras.Model):
    def call(self, inputs):
        return Layer()(inputs)

    def train_step(self, data):
        raise KeyError("no such entry")  # line 16


def helper(value):
    raise RuntimeError("the first line\\nthe second one")  # line 20


@tf.function
def by_autograph():
    for number in tf.range(3):
        helper(number)


@tf.function
def by_keras_and_autograph():
    return Model()(tf.ones([2, 4]))


def by_keras():
    return Model()(tf.ones([2, 4]))


def by_fit():
    model = Model()
    model.compile("sgd", "mse")
    model.fit(tf.ones([2, 4]), tf.ones([2]), verbose=0)


@tf.function
def graph(index):
    return tf.gather(tf.zeros([2]), index)  # line 46


def by_graph():
    graph(tf.constant(9))


@tf.function
def python_in_graph():
    return tf.py_function(helper, [tf.zeros([2])], tf.float32)


def by_operation():
    tf.gather(tf.zeros([2]), tf.constant(9))  # line 59


def by_nothing_else():
    helper(0)
"""


@pytest.mark.parametrize(("raises", "expected"), [
    ("by_autograph", "RuntimeError: the first line, at train.py:20 in helper"),
    ("by_keras_and_autograph", "ValueError: the layer needs five columns, at train.py:8 in call"),
    ("by_keras", "ValueError: the layer needs five columns, at train.py:8 in call"),
    ("by_fit", "KeyError: 'no such entry', at train.py:16 in train_step"),
    ("by_graph", "InvalidArgumentError: indices = 9 is not in [0, 2), at train.py:46 in graph"),
    ("python_in_graph", "UnknownError: RuntimeError: the first line, at train.py:20 in helper"),
    ("by_operation", "InvalidArgumentError: indices = 9 is not in [0, 2), at train.py:59 in by_operation"),
    ("by_nothing_else", "RuntimeError: the first line"),
])
@pytest.mark.parametrize("family", ["keras", pytest.param("tf_keras", marks=pytest.mark.slow)])
def test_errors_of_many_lines_have_their_reason_and_the_users_line(
        family: str, raises: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(WRAPPED.replace("import keras\n", f"import {family} as keras\n"))
    namespace = runpy.run_path(str(script))
    with pytest.raises(Exception) as raised:  # noqa: PT011 - of several types
        namespace[raises]()
    assert summary(raised.value) == expected
    if raises != "by_nothing_else":
        assert format_error(raised.value).splitlines()[-1] == summary(raised.value)

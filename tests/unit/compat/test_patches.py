"""The table of changes to classes and modules of others: what installs it, its page, and what finds others."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import pytest
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import atomic_function

from hvkeras import compat
from hvkeras.compat import patches, targets
from hvkeras.compat.adapters import always, around, repaired
from hvkeras.compat.patches import Installer, Patch
from hvkeras.errors import UnsupportedError
from hvkeras.global_batch import mode
from hvkeras.training import fit_hooks

ROOT = Path(__file__).parents[3]


class Base:
    def inherited(self) -> str:
        return "theirs"


class Theirs(Base):
    def own(self, word: str) -> str:
        """Answers."""
        return f"their {word}"


def adds(text: str) -> Callable[..., str]:
    return lambda original, *args, **kwargs: f"{text} of {original(*args, **kwargs)}"


def row(group: str, target: str, make: Any = None, part: str = "", adds: bool = False) -> Patch:
    return Patch(group, (target,), "any", "why", "until", make or around("function"), part, adds)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of others, which changes nothing for other tests."""
    monkeypatch.setattr(patches, "_is_loaded", lambda package: package == "library")
    module = SimpleNamespace(Theirs=type("Theirs", (Base,), dict(vars(Theirs))), function=lambda: "a function")
    monkeypatch.setattr(targets, "_imported", lambda name: module if name == "library" else None)
    return module


def test_groups_wrap_each_other_and_leave_in_any_order(library: Any) -> None:
    before = dict(vars(library.Theirs))
    installer = Installer((row("inner", "library:Theirs.own"), row("outer", "library:Theirs.own"),
                           row("outer", "library:Theirs.inherited")))
    installer.install("inner", SimpleNamespace(function=adds("inner")))
    installer.install("outer", SimpleNamespace(function=adds("outer")))
    theirs = library.Theirs()
    assert theirs.own(word="word") == "outer of inner of their word"
    assert theirs.inherited() == "outer of theirs"
    assert library.Theirs.own.__doc__ == "Answers."
    installer.uninstall("inner")
    assert theirs.own("word") == "outer of their word"
    installer.uninstall("outer", "never installed")
    assert dict(vars(library.Theirs)) == before


def test_a_group_is_installed_once_and_another_behaviour_replaces_the_first(library: Any) -> None:
    installer, first = Installer((row("one", "library:function"),)), SimpleNamespace(function=adds("first"))
    original = library.function
    assert installer.install("one", first) is first
    installer.install("one", first)
    assert library.function() == "first of a function"
    with installer.installed("one", SimpleNamespace(function=adds("second"))):
        assert library.function() == "second of a function"
    assert library.function is original
    assert installer.behaviour("one") is None


def test_of_alternatives_the_first_is_changed_and_attributes_can_be_added(library: Any) -> None:
    own = "library.newer|library:Newer|Theirs.newer|own"
    installer = Installer((row("one", own, repaired(adds("ours")), "own"), row("one", "library:Theirs.added", always(3),
                                                                              adds=True)))
    installer.install("one")
    assert library.Theirs().own("word") == "ours of their word"
    assert library.Theirs.added == 3
    installer.uninstall("one")
    assert not hasattr(library.Theirs, "added")
    assert library.Theirs().own("word") == "their word"
    installer.install("one", modules={"library.newer": library})
    assert library.Theirs().own("word") == "ours of their word"
    installer.install("two", modules={"other": library})
    assert installer.hidden("one") == installer.newly_hidden() == []


def test_what_is_hidden_is_told_once(library: Any) -> None:
    installer = Installer((row("one", "library:Theirs.gone", part="the logs"), row("one", "library:Theirs.optional"),
                           row("one", "library:Gone.fit", part="fit"), row("one", "other:Gone.fit", part="not loaded")))
    installer.install("one", SimpleNamespace())
    assert installer.newly_hidden() == [
        "this version of library hides internals that hvkeras needs; not supported: the logs, fit"]
    installer.install("one", SimpleNamespace(again=True))
    assert installer.newly_hidden() == []
    assert installer.hidden("one") == ["the logs", "fit"]
    assert installer.hidden("two") == []


def test_a_tensorflow_that_hides_its_functions_is_refused_by_data_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    mode.require_internals()
    monkeypatch.delattr(atomic_function, "AtomicFunction")
    with pytest.raises(UnsupportedError, match=r"lacks='functions'\. HINT: pip install 'tensorflow>=2\.16,<2\.22'"):
        mode.require_internals()


def test_keras_and_tensorflow_are_as_before_once_a_job_is_over() -> None:
    def state() -> dict[str, Any]:
        found = {}
        for each in patches.TABLE:
            for target in each.targets:
                owner, name = targets.find(target)
                found |= {f"{target} {name}": vars(owner).get(name, "none")} if owner else {}
        return found

    assert tf.keras.Model is keras.Model
    patches.uninstall_job()  # what another test has left
    before = state()
    fit_hooks.install()
    compat.passes()
    changed = {name for name, value in state().items() if before[name] is not value}
    assert "keras:Model.fit fit" in changed
    assert len(changed) > 20
    made = keras.Sequential()
    patches.uninstall_job()
    assert made.stop_training is False
    left = {name for name, value in state().items() if before[name] is not value}
    assert left <= {"keras:Model.stop_training stop_training", "tf_keras:Model.stop_training stop_training"}
    assert patches.newly_hidden() == []


def test_the_page_shows_the_table() -> None:
    assert patches.as_table() in (ROOT / "docs" / "architecture" / "patches.md").read_text()


FOUND = """
import keras, os, sys, threading, wrapt
import tensorflow as tf
from importlib import import_module
from ray import train as of_ray

keras.Model.fit = 1
tf.distribute.Strategy.run, other = 1, 2
setattr(keras.layers, "Dense", 1)
del os.path
name = tf.keras.Model
name.fit = 2
sys.modules["keras"].Model = 3
import_module("horovod").size = 4
wrapt.wrap_function_wrapper("keras", "Model.fit", print)
vars(os)["getpid"] = 1
keras.Model.__dict__.update(fit=1)
of_ray.report += 1
threading.Thread.run: object = 2

def anything(cls, model, module: ModuleType, kind: type[object]) -> None:
    setattr(cls, "fit", 1)
    module.x = 2
    kind.y = 3
    type(model).fit = 4
    object.__setattr__(model.__class__, "fit", 5)
    def inner() -> None:
        from pyspark.sql import DataFrame
        DataFrame.x = 6
"""
LEFT_ALONE = """
import argparse, sys, threading
import hvkeras
from hvkeras.job import state

sys.excepthook = print
sys.excepthook, before = print, sys.excepthook
setattr(sys, name, stream)
parser = argparse.ArgumentParser()
parser.description = "an object of ours"
hvkeras.x = state.y = 1
thread = threading.Thread()
thread.name = "ours"

class Ours:
    x = 1
    def __init__(self, cls: Ours, model: object) -> None:
        self.x = threading.Thread
        model.x = 1
        cls.x = 2
    @classmethod
    def make(cls) -> None:
        cls.x = 3
"""


def test_a_change_outside_of_the_table_is_found_whatever_makes_it() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "foreign_changes.py"))
    lines = FOUND.splitlines()
    first = lines.index("keras.Model.fit = 1")
    expected = [number for number, line in enumerate(lines, 1) if number > first and line.strip()
                and not line.lstrip().startswith(("def", "from")) and line != "name = tf.keras.Model"]
    assert [number for number, _ in tool["found"](FOUND)] == expected
    assert tool["found"](LEFT_ALONE) == []

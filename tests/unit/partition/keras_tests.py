"""Runs Keras's own tests, and compares each function that they call with what two simulated ranks make of it.

The tests go on with what TensorFlow computes, whatever the ranks do. Losses, metrics and operations that they call
outside of a function are traced, with any number of rows; a few tests expect otherwise, and fail.

Arguments: a file for what was found, in JSON; a folder of packages that Keras's tests import; files of tests.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
import types
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src import losses, metrics, ops
from keras.src.trainers import trainer

from hvkeras.partition import tensorflow_graphs
from hvkeras.partition.analysis import Plan
from hvkeras.partition.layouts import Divided, innermost, is_resolved
from unit.partition.called_functions import Comparisons

UNTRACED = (
    "associative_scan",  # nests 48 branches for any number of rows, which takes TensorFlow a minute
    "diag",  # TensorFlow takes a diagonal beside the main one, of any number of rows, for one without any
    "diagflat",
)
LEFT_OUT = (
    # It makes uint8 of negative numbers: others of a vector than of single ones, in TensorFlow itself.
    "layers/preprocessing/image_preprocessing/random_posterization_test.py::RandomPosterizationTest::test_layer",
    # A sound is not a batch, and its spectrogram has another number of rows: refused, with an error that says so.
    "layers/preprocessing/mel_spectrogram_test.py::MelSpectrogramTest::test_mel_spectrogram_basics",
)


class Found:
    """Plug-in of pytest that notes what became of tests and functions, and which operations were gathered."""

    def __init__(self) -> None:
        self._test = ""
        self._tests, self._absent = Counter[str](), dict[str, str]()
        self._functions, self._divided, self._gathered = Counter[str](), Counter[str](), Counter[str]()
        self._examples: dict[str, str] = {}
        self._failures: list[str] = []

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Note the test that runs."""
        self._test = item.nodeid

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note what became of a test."""
        self._tests[report.outcome] += report.when == "call" or report.skipped

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that cannot be imported."""
        if report.failed:
            self._absent[report.nodeid] = str(report.longrepr).splitlines()[-1]

    def note(self, outcome: str, plan: Plan | None) -> None:
        """Note what became of a function: "compared", why it was not, or how it failed."""
        is_failure = ": " in outcome
        self._functions["failed" if is_failure else outcome] += 1
        if is_failure:
            self._failures.append(f"{self._test}: {outcome[:100]}{outcome[100:][-1500:]}")
        if plan is not None:
            self._count(plan)

    def _count(self, plan: Plan) -> None:
        for node, decision in zip(plan.program.nodes, plan.decisions, strict=True):
            values = [
                (plan.values[number], needed) for number, needed in zip(node.inputs, decision.operands, strict=True)
            ]
            divided = [(value, needed) for value, needed in values if isinstance(innermost(value.layout), Divided)]
            moved = [f"{value.shape} {value.layout}" for value, needed in divided if is_resolved(value.layout, needed)]
            self._divided[node.type] += bool(divided)
            self._gathered[node.type] += bool(moved)
            if moved:
                line = tensorflow_graphs.user_line(node.operation)
                self._examples.setdefault(node.type, f"{self._test}: {node.operation.name}, {line}: {', '.join(moved)}")
            for inner in decision.plans:
                self._count(inner)

    def write(self, path: Path) -> None:
        """Write what was found to a file, what was gathered most often first."""
        gathered = [
            {"type": type_, "gathered": number, "of": self._divided[type_], "example": self._examples[type_]}
            for type_, number in self._gathered.most_common()
            if number
        ]
        found = {
            "tests": self._tests,
            "not imported": self._absent,
            "functions": self._functions,
            "divided": sum(self._divided.values()),
            "gathered": gathered,
            "failures": self._failures,
        }
        path.write_text(json.dumps(found, indent=1))


def traced(function: Callable[..., Any], takes_lists: bool = False) -> Callable[..., Any]:
    """Return a function that is traced where it is called with arrays, if it can be.

    Args:
        function: The function.
        takes_lists: Whether lists are arrays to it, all of which have as many rows; otherwise, those of one shape have.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        structure = (
            ([*map(_as_array, args)], {name: _as_array(value) for name, value in kwargs.items()})
            if takes_lists
            else (args, kwargs)
        )
        leaves = tf.nest.flatten(structure)
        places = [place for place, leaf in enumerate(leaves) if _is_array(leaf)]
        if not tf.executing_eagerly() or not places or any(hasattr(leaf, "_keras_mask") for leaf in leaves):
            return function(*args, **kwargs)
        tensors = [tf.convert_to_tensor(leaves[place]) for place in places]
        known = [tensor.shape[:1] if takes_lists else tensor.shape for tensor in tensors]

        def of_tensors(*given: tf.Tensor) -> Any:
            filled = list(leaves)
            for place, tensor in zip(places, given, strict=True):
                filled[place] = tensor
            its_args, its_kwargs = tf.nest.pack_sequence_as(structure, filled)
            return function(*its_args, **its_kwargs)

        specs = [
            tf.TensorSpec([None, *tensor.shape[1:]] if shape == known[0] else tensor.shape, tensor.dtype)
            for shape, tensor in zip(known, tensors, strict=True)
        ]
        try:
            concrete = tf.function(of_tensors, autograph=False).get_concrete_function(*specs)
        except Exception:  # noqa: BLE001 - for instance, it needs values, or a known shape
            return function(*args, **kwargs)
        return concrete(*tensors)

    return call


def _as_array(value: Any) -> Any:
    return keras.ops.convert_to_tensor(value) if isinstance(value, list) else value


def _is_array(leaf: Any) -> bool:
    is_array = isinstance(leaf, tf.Tensor) or (isinstance(leaf, np.ndarray) and leaf.dtype.kind != "O")
    return is_array and len(leaf.shape) > 0


def trace_calls() -> None:
    """Trace losses, updates of metrics, and operations."""
    losses.Loss.__call__ = traced(losses.Loss.__call__, takes_lists=True)
    for cls in {value for value in vars(metrics).values() if isinstance(value, type)}:
        if "update_state" in vars(cls):
            cls.update_state = traced(cls.update_state, takes_lists=True)
    for module in (ops.numpy, ops.math, ops.nn, ops.linalg, ops.image, ops.core):
        for name, value in list(vars(module).items()):
            if inspect.isfunction(value) and value.__module__ == module.__name__ and name not in UNTRACED:
                setattr(module, name, value if name.startswith("_") else traced(value))


def main(path: str, packages: str, *files: str) -> None:
    """Run the tests of files."""
    sys.path.append(packages)
    sys.modules["conftest"] = conftest = types.ModuleType("conftest")  # a file of Keras's that is not installed
    conftest.skip_if_backend = lambda name, reason: pytest.mark.skipif(name == "tensorflow", reason=reason)  # type: ignore[attr-defined]
    trainer.model_supports_jit = lambda _model: False  # XLA draws other random numbers
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})  # which takes longer than to run
    trace_calls()
    found, root = Found(), Path(inspect.getfile(keras)).parent / "src"
    Comparisons(found.note).start()
    options = ["--import-mode=importlib", "--disable-plugin-autoload", "-p", "no:cacheprovider", "-W", "ignore"]
    options += [
        "-q",
        "--tb=no",
        "--continue-on-collection-errors",
        "-o",
        "python_files=*_test.py",
        "-k",
        "not DtypeTest",
    ]
    options += [f"--deselect={test}" for test in LEFT_OUT]
    pytest.main(
        ["-c", os.devnull, "--rootdir", str(root), *options, *(str(root / file) for file in files)], plugins=[found]
    )
    found.write(Path(path))


if __name__ == "__main__":
    main(*sys.argv[1:])

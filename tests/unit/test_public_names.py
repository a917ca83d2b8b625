"""What type checkers and editors see of lazily loaded packages is what their `__getattr__` finds at run time."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import keras  # noqa: F401 - with TensorFlow it sets variables, which are then no test's
import pytest

import hvkeras
from harness.processes import run_python

pytestmark = pytest.mark.check

# Packages whose names are looked up on first use. What `hvkeras.elastic` loads late are its callbacks.
LAZY = ("hvkeras", "hvkeras.elastic", "hvkeras.tensorflow", "hvkeras.tensorflow.sync_batch_norm")


def _tree(module: str) -> ast.Module:
    return ast.parse(Path(str(importlib.import_module(module).__file__)).read_text())


def _for_checkers(module: str) -> dict[str, str]:
    """The names that a module imports under `if TYPE_CHECKING:`, and the module of each."""
    blocks = [node for node in _tree(module).body
              if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block.body]
    assert imports and all(isinstance(node, ast.ImportFrom) and node.level == 0 for node in imports)
    return {alias.asname or alias.name: str(node.module) for node in imports if isinstance(node, ast.ImportFrom)
            for alias in node.names}


def test_checkers_see_the_names_of_the_table():
    seen = _for_checkers("hvkeras")
    assert seen == {**hvkeras._ORIGIN, **dict.fromkeys(hvkeras._MODULES, "hvkeras")}
    assert {*seen, "__version__"} == set(hvkeras.__all__)


def test_checkers_see_the_names_of_spark():
    from hvkeras import spark  # its names themselves need pyspark

    assert _for_checkers("hvkeras.spark") == spark._ORIGIN
    assert set(spark.__all__) == set(spark._ORIGIN)


def test_every_import_for_checkers_is_an_explicit_export():
    aliases = [alias for node in ast.walk(_tree("hvkeras")) if isinstance(node, ast.ImportFrom)
               for alias in node.names if alias.name in hvkeras.__all__]
    assert [alias.name for alias in aliases if alias.asname not in (alias.name, None)] == []
    exported = {alias.name for alias in aliases if alias.asname == alias.name}
    assert exported == set(hvkeras.__all__) - {"__version__"}


@pytest.mark.parametrize("module", LAZY)
def test_checkers_see_no_getattr(module):
    body = _tree(module).body
    assert not [node for node in body if isinstance(node, ast.FunctionDef) and node.name == "__getattr__"]
    assert inspect.isfunction(vars(importlib.import_module(module))["__getattr__"])


def test_names_of_the_table_are_where_it_says():
    for name, module in hvkeras._ORIGIN.items():
        assert getattr(hvkeras, name) is getattr(importlib.import_module(module), name), name


@pytest.mark.parametrize("module", LAZY[1:])
def test_late_names_are_public_and_exist(module):
    package = importlib.import_module(module)
    late = {name for name in _for_checkers(module) if name in package.__all__}
    assert late == set(package.__all__) - set(vars(package))
    for name in late:
        assert getattr(package, name).__name__ == name


def test_import_loads_neither_tensorflow_nor_keras():
    loaded = "print(*{name.split('.')[0] for name in sys.modules} & {'tensorflow', 'keras', 'numpy'})"
    source = f"import sys, hvkeras, hvkeras.typing, hvkeras.backends.interface; {loaded}"
    done = run_python(source, cwd=Path(str(hvkeras.__file__)).parents[2])
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_types_for_annotations_cannot_be_used_for_checks():
    from hvkeras import typing

    for name in ("Tensor", "Model", "Callback", "OptimizerLike"):
        with pytest.raises(TypeError):
            isinstance(1, getattr(typing, name))

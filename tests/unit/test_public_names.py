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

# Modules with some names that are looked up on first use, such as the callbacks of `hvkeras.elastic`.
LAZY = ("hvkeras.elastic", "hvkeras.tensorflow", "hvkeras.tensorflow.sync_batch_norm")


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


def _stub(module: str) -> dict[str, str]:
    """The names in the stub of a package, and the module of each; "" for submodules."""
    path = Path(str(importlib.import_module(module).__file__)).with_suffix(".pyi")
    imports = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)]
    assert imports and all(node.level == 1 for node in imports)
    assert all(alias.asname == alias.name for node in imports for alias in node.names)  # an explicit export
    return {alias.name: node.module or "" for node in imports for alias in node.names}


@pytest.mark.parametrize("module", ["hvkeras", "hvkeras.spark"])
def test_the_stub_names_what_the_package_has(module):
    package = importlib.import_module(module)
    assert _stub(module).keys() == set(package.__all__) <= set(dir(package))
    for name, home in _stub(module).items():
        if module == "hvkeras" and home:  # those of Spark need pyspark
            assert getattr(package, name) is getattr(importlib.import_module(f"{module}.{home}"), name), name
        path = Path(package.__path__[0]).joinpath(*(home or name).split("."))
        assert path.with_suffix(".py").is_file() or path.is_dir()


def test_a_name_that_is_misspelt_is_no_attribute():
    with pytest.raises(AttributeError, match="module 'hvkeras' has no attribute 'shrad'") as raised:
        hvkeras.shrad  # noqa: B018
    assert (raised.value.name, raised.value.obj) == ("shrad", hvkeras)  # by which Python suggests `shard`


@pytest.mark.parametrize("module", LAZY)
def test_checkers_see_no_getattr(module):
    body = _tree(module).body
    assert not [node for node in body if isinstance(node, ast.FunctionDef) and node.name == "__getattr__"]
    assert inspect.isfunction(vars(importlib.import_module(module))["__getattr__"])


@pytest.mark.parametrize("module", LAZY)
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

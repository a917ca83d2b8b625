"""Finds changes to classes and modules of others outside of `hvkeras/compat/patches.py`; a part of `make lint`.

Others are all packages but hvkeras, and Python itself. A name stands for a class or module of others if it was imported
from there, was taken from something that was, or is a parameter that takes a class or a module. What is meant to be
set, as `sys.excepthook`, is no finding.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("hvkeras", "backends")
TABLE = Path("hvkeras/compat/patches.py")
WISH = "a change to what is not hvkeras's own must be a row of hvkeras/compat/patches.py"
# Places that are documented as such; `sys.exit`, which job/failure.py restores like Python's hooks; and what a loader
# sets. Streams are set by their names.
MEANT_TO_BE_SET = {"sys.argv", "sys.excepthook", "sys.exit", "threading.excepthook", "mpi4py.rc.initialize",
                   "module.__spec__"}
STREAMS = "sys"
SETTERS = ("setattr", "delattr", "object.__setattr__", "object.__delattr__", "type.__setattr__", "type.__delattr__")
KINDS = ("type", "ModuleType", "types.ModuleType")
NAMES = ("cls", "klass", "module", "owner")  # of parameters that take a class or a module
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class Finder:
    """Looks for changes in one file.

    Args:
        tree: Its content.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.found: list[tuple[int, str]] = []  # lines, and what is changed there
        self._visit(tree, set())

    def _visit(self, scope: ast.AST, foreign: set[str]) -> None:
        """Looks at a scope, in which these names are foreign, and then at those in it."""
        own = set(foreign)
        if isinstance(scope, SCOPES):
            own -= {each.arg for each in ast.walk(scope.args) if isinstance(each, ast.arg)}
            own |= set(_parameters(scope))
        inner = list(_nodes(scope))
        for node in inner:
            own |= set(_imported(node))
        for node in inner:  # in the order of the source, so that what a name was taken from is known
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                (own.add if self._is_foreign(node.value, own) else own.discard)(node.targets[0].id)
        for node in inner:
            for target in _changed(node):
                if self._is_foreign(target, own) and not _is_meant_to_be_set(node, target):
                    self.found.append((node.lineno, ast.unparse(node).splitlines()[0]))  # type: ignore[attr-defined]
            if isinstance(node, SCOPES):
                self._visit(node, own)

    def _is_foreign(self, node: ast.AST, names: set[str]) -> bool:
        """Whether an expression is a class or module of others, rather than an object that they have made."""
        if isinstance(node, ast.Name):
            return node.id in names
        if isinstance(node, ast.Attribute):
            return node.attr == "__class__" or self._is_foreign(node.value, names)
        if isinstance(node, ast.Subscript):
            return ast.unparse(node.value) == "sys.modules"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in ("type", "import_module", "importlib.import_module", "__import__", "sys.modules.get"):
                return len(node.args) == 1 or called != "type"
            return called in ("getattr", "vars") and self._is_foreign(node.args[0], names)
        return False


def _nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Yields what belongs to a scope itself, inner functions without what is in them."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, SCOPES):
            yield from _nodes(child)


def _imported(node: ast.AST) -> Iterator[str]:
    """Yields the names that an import of others' modules or of their content makes."""
    if isinstance(node, ast.Import):
        yield from ((each.asname or each.name).partition(".")[0] for each in node.names
                    if each.name.partition(".")[0] != "hvkeras")
    elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] != "hvkeras":
        yield from (each.asname or each.name for each in node.names)


def _parameters(scope: ast.AST) -> Iterator[str]:
    """Yields the parameters of a function that take a class or a module."""
    assert isinstance(scope, SCOPES)
    arguments = [each for each in ast.walk(scope.args) if isinstance(each, ast.arg)]
    decorators = [ast.unparse(each) for each in getattr(scope, "decorator_list", ())]
    is_method_of_class = "classmethod" in decorators or getattr(scope, "name", "") in ("__new__", "__init_subclass__")
    for each in arguments[is_method_of_class:]:
        kind = "Any" if each.annotation is None else ast.unparse(each.annotation)
        if kind.partition("[")[0] in KINDS or (kind == "Any" and each.arg in NAMES):
            yield each.arg


def _changed(node: ast.AST) -> Iterator[ast.AST]:
    """Yields whatever a statement or a call changes an attribute of."""
    targets = (node.targets if isinstance(node, (ast.Assign, ast.Delete)) else
               [node.target] if isinstance(node, (ast.AugAssign, ast.AnnAssign)) else [])
    for each in targets:
        for target in each.elts if isinstance(each, (ast.Tuple, ast.List)) else [each]:
            if isinstance(target, ast.Attribute):
                yield target.value
            elif isinstance(target, ast.Subscript):
                yield from _owner_of_namespace(target.value)
    if isinstance(node, ast.Call):
        called = ast.unparse(node.func)
        if called in SETTERS and node.args:
            yield node.args[0]
        elif called.rpartition(".")[2].startswith(("wrap_function_wrapper", "wrap_object", "patch_function_wrapper")):
            yield ast.parse("type(anything)", mode="eval").body
        elif isinstance(node.func, ast.Attribute) and node.func.attr in ("update", "pop", "setdefault"):
            yield from _owner_of_namespace(node.func.value)


def _owner_of_namespace(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Attribute) and node.attr == "__dict__":
        yield node.value
    elif isinstance(node, ast.Call) and ast.unparse(node.func) == "vars" and node.args:
        yield node.args[0]


def _is_meant_to_be_set(node: ast.AST, owner: ast.AST) -> bool:
    name = ast.unparse(owner)
    if isinstance(node, ast.Call) and name == STREAMS:
        return not isinstance(node.args[1], ast.Constant)
    return any(isinstance(each, ast.Attribute) and each.value is owner and ast.unparse(each) in MEANT_TO_BE_SET
               for each in ast.walk(node))


def found(source: str) -> list[tuple[int, str]]:
    """Returns the lines of a file that change something foreign, and what is written there."""
    return sorted(set(Finder(ast.parse(source)).found))


def main() -> int:
    """Prints what it finds, and fails if there is anything."""
    files = sorted(path for folder in FOLDERS for path in Path(folder).rglob("*.py"))
    indices = [(path, *finding) for path in files if path != TABLE and not path.is_symlink()
              and "hvkeras/backends" not in path.as_posix() for finding in found(path.read_text())]
    for path, line, text in indices:
        print(f"{path}:{line}: {text}: {WISH}")
    return 1 if indices else 0


if __name__ == "__main__":
    sys.exit(main())

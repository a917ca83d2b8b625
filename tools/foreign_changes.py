"""Find patches of foreign classes and modules outside of `hvkeras/compat/patches.py`; part of `make lint`.

Foreign are all packages except hvkeras, including the standard library. A name refers to a foreign object if it was
imported from such a package, was assigned from such an object, or is a parameter for a class or a module. Attributes
that programs may set, such as `sys.excepthook`, are exempt.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("hvkeras", "backends")
TABLE = Path("hvkeras/compat/patches.py")
RULE = "a patch of a foreign class or module must be a row of hvkeras/compat/patches.py"
# Documented hooks; `sys.exit`, which job/failure.py restores like these hooks; the attributes that a loader sets; what
# global_batch/rank_process.py must change before TensorFlow is imported; and what a fork server watches while it
# imports, and sets as a new Python process does.
# Streams (`sys.stdout`) are set by `setattr` with a variable name.
SETTABLE = {"sys.argv", "sys.excepthook", "sys.exit", "threading.excepthook", "mpi4py.rc.initialize",
            "module.__spec__", "module.__loader__", "os.listdir", "os.scandir", "builtins.__import__",
            "os.environ.__class__", "random.random", "random.getrandbits", "sys.orig_argv", "tempfile.tempdir"}
STREAMS = "sys"
SETTERS = ("setattr", "delattr", "object.__setattr__", "object.__delattr__", "type.__setattr__", "type.__delattr__")
KINDS = ("type", "ModuleType", "types.ModuleType")
NAMES = ("cls", "klass", "module", "owner")  # of parameters that take a class or a module
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


class Finder:
    """Search of one file for patches.

    Args:
        tree: The syntax tree of the file.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.found: list[tuple[int, str]] = []  # line number and statement
        self._visit(tree, set())

    def _visit(self, scope: ast.AST, foreign: set[str]) -> None:
        """Search a scope, in which the names `foreign` are foreign, and then its inner scopes."""
        own = set(foreign)
        if isinstance(scope, SCOPES):
            own -= {each.arg for each in ast.walk(scope.args) if isinstance(each, ast.arg)}
            own |= set(_parameters(scope))
        inner = list(_nodes(scope))
        for node in inner:
            own |= set(_imported(node))
        for node in inner:  # in source order, so that the origin of a name is known
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                (own.add if self._is_foreign(node.value, own) else own.discard)(node.targets[0].id)
        for node in inner:
            for target in _changed(node):
                if self._is_foreign(target, own) and not _is_settable(node, target):
                    self.found.append((node.lineno, ast.unparse(node).splitlines()[0]))  # type: ignore[attr-defined]
            if isinstance(node, SCOPES):
                self._visit(node, own)

    def _is_foreign(self, node: ast.AST, names: set[str]) -> bool:
        """Return whether an expression is a foreign class or module; instances do not count."""
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
    """Yield the nodes of a scope: inner functions, but not their bodies."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, SCOPES):
            yield from _nodes(child)


def _imported(node: ast.AST) -> Iterator[str]:
    """Yield the names that an import statement binds to foreign modules or their content."""
    if isinstance(node, ast.Import):
        yield from ((each.asname or each.name).partition(".")[0] for each in node.names
                    if each.name.partition(".")[0] != "hvkeras")
    elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] != "hvkeras":
        yield from (each.asname or each.name for each in node.names)


def _parameters(scope: ast.AST) -> Iterator[str]:
    """Yield the parameters of a function that take a class or a module."""
    assert isinstance(scope, SCOPES)
    arguments = [each for each in ast.walk(scope.args) if isinstance(each, ast.arg)]
    decorators = [ast.unparse(each) for each in getattr(scope, "decorator_list", ())]
    is_method_of_class = "classmethod" in decorators or getattr(scope, "name", "") in ("__new__", "__init_subclass__")
    for each in arguments[is_method_of_class:]:
        kind = "Any" if each.annotation is None else ast.unparse(each.annotation)
        if kind.partition("[")[0] in KINDS or (kind == "Any" and each.arg in NAMES):
            yield each.arg


def _changed(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the objects of which a statement or a call changes an attribute."""
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


def _is_settable(node: ast.AST, owner: ast.AST) -> bool:
    name = ast.unparse(owner)
    if isinstance(node, ast.Call) and name == STREAMS:
        return not isinstance(node.args[1], ast.Constant)
    return any(isinstance(each, ast.Attribute) and each.value is owner and ast.unparse(each) in SETTABLE
               for each in ast.walk(node))


def found(source: str) -> list[tuple[int, str]]:
    """Return the patches in a source text, as pairs of a line number and a statement."""
    return sorted(set(Finder(ast.parse(source)).found))


def main() -> int:
    """Print the findings, and return 1 if there are any."""
    files = sorted(path for folder in FOLDERS for path in Path(folder).rglob("*.py"))
    findings = [(path, *finding) for path in files if path != TABLE and not path.is_symlink()
                and "hvkeras/backends" not in path.as_posix() for finding in found(path.read_text())]
    for path, line, text in findings:
        print(f"{path}:{line}: {text}: {RULE}")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())

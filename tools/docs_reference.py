"""API reference of the documentation site: a page for each module with public names, and an index of all names.

The names are read from the sources, which need not be importable: those of `hvkeras` from its stub, those of its public
modules from `__all__` or from their stub.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
SECTION = "Reference"  # of the navigation, to which the pages are added
FOLDER = "reference"
INTERFACE = "hvkeras.backends.interface"  # what a backend implements
MODULES = ("hvkeras.callbacks", "hvkeras.elastic", "hvkeras.parameter_server", "hvkeras.ray", "hvkeras.spark",
           INTERFACE)
ALIASES = ("hvkeras.tensorflow", "hvkeras.tensorflow.keras", "hvkeras.keras")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def on_config(config: Any) -> Any:
    """Add the pages to the navigation."""
    section = next(entry[SECTION] for entry in config.nav if SECTION in entry)
    section.append({"API": [f"{FOLDER}/index.md", *({_short(module): f"{FOLDER}/{module}.md"} for module in _pages())]})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""
    for module, (names, prefix) in _pages().items():
        content = _alias_page(module, names) if module in ALIASES else _module_page(module, names, prefix)
        files.append(File.generated(config, f"{FOLDER}/{module}.md", content=content))
    files.append(File.generated(config, f"{FOLDER}/index.md", content="\n".join(_index())))
    return files


def _pages() -> dict[str, tuple[Sequence[str], str]]:
    """Return the public names of each module that has a page, and the prefix with which users write them."""
    pages: dict[str, tuple[Sequence[str], str]] = {
        module: (names, "hvd") for module, names in _stub("hvkeras").items()}
    for module in (*MODULES, *ALIASES):
        names = _names(module) if module != INTERFACE else [
            statement.name for statement in _tree(module).body
            if isinstance(statement, ast.ClassDef) and not statement.name.startswith("_")]
        pages[module] = (names, "hvd" + module.removeprefix("hvkeras") if module != INTERFACE else module)
    return dict(sorted(pages.items()))


def _names(module: str) -> Sequence[str]:
    try:
        return _literal(module, "__all__")
    except LookupError:  # a package that loads its names lazily
        return [name for names in _stub(module).values() for name in names]


def _stub(package: str) -> dict[str, list[str]]:
    """Return the names that the stub of a package exports, by defining module."""
    tree = ast.parse((ROOT.joinpath(*package.split(".")) / "__init__.pyi").read_text())
    found: dict[str, list[str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            found.setdefault(f"{package}.{node.module}", []).extend(alias.name for alias in node.names)
    return found


def _module_page(module: str, names: Sequence[str], prefix: str) -> str:
    where = "These are names of `hvkeras` itself, which scripts import as `hvd`." if prefix == "hvd" else ""
    lines = [f"# {module}", _docstring(_tree(module)), where]
    for name in names:
        home = _home(module, name)
        lines.append(f"::: {home}.{name}" if home else f"## {name}\n\n`{prefix}.{name}` is a constant.")
    return "\n\n".join(filter(None, lines)) + "\n"


def _alias_page(module: str, names: Sequence[str]) -> str:
    own = [name for name in names if _defines(_tree(module), name)]
    shared = ", ".join(_link(name) for name in names if name not in own)
    lines = [f"# {module}", _docstring(_tree(module)),
             f"The same as in `hvkeras`: {shared}.", *(f"::: {module}.{name}" for name in own)]
    return "\n\n".join(lines) + "\n"


def _index() -> Iterator[str]:
    yield ("# API reference\n\n`import hvkeras as hvd` provides all names that begin with `hvd.`; the modules"
           " `hvd.callbacks`, `hvd.elastic`, `hvd.parameter_server` and `hvd.spark` are loaded on first use.\n\n"
           "| name | summary |\n| --- | --- |")
    rows = {}
    for module, (names, prefix) in _pages().items():
        for name in names if module not in ALIASES else ():
            home = _home(module, name)
            docstring = _docstring(_definition(_tree(home), name)) if home else ""
            summary = docstring.splitlines()[0] if docstring else "A constant."
            rows[f"{prefix}.{name}"] = f"| {_link(name, module, prefix)} | {summary} |"
    yield from (rows[name] for name in sorted(rows, key=lambda name: (name.count("."), name.lower())))
    yield ("\nHorovod's import paths have separate pages: "
           + ", ".join(f"[`{module}`]({module}.md)" for module in ALIASES) + ".")


def _link(name: str, module: str = "", prefix: str = "") -> str:
    """Return a link to a name on the page of `module` or, if that is empty, of the module that exports the name."""
    pages = _pages()
    module = module or next((page for page, (names, _) in pages.items() if name in names and page not in ALIASES), "")
    if not module:
        return f"[`{name}`](hvkeras.{name}.md)" if f"hvkeras.{name}" in pages else f"`{name}`"
    home = _home(module, name)
    return f"[`{f'{prefix}.' if prefix else ''}{name}`]({module}.md#{f'{home}.{name}' if home else name.lower()})"


def _home(module: str, name: str) -> str:
    """Return the module that defines a public name of a module; "" if the name is a constant."""
    if _defines(_tree(module), name):
        return module
    folder = ROOT / _folder(module)
    for path in sorted(folder.glob("*.py")):
        if path.stem != "__init__" and _defines(ast.parse(path.read_text()), name):
            return f"{module}.{path.stem}"
    for statement in ast.walk(_tree(module)):  # imported from another package
        if isinstance(statement, ast.ImportFrom) and name in {alias.name for alias in statement.names}:
            assert statement.module is not None
            return _home(statement.module, name)
    return ""


def _defines(tree: ast.Module, name: str) -> bool:
    return _definition(tree, name) is not tree


def _definition(tree: ast.Module, name: str) -> ast.AST:
    """Return the function or class with a name; `tree` if there is none."""
    return next((statement for statement in tree.body
                 if isinstance(statement, _DEFINITIONS) and statement.name == name), tree)


def _docstring(node: ast.AST) -> str:
    assert isinstance(node, (ast.Module, *_DEFINITIONS))
    return ast.get_docstring(node) or ""


def _folder(module: str) -> Path:
    path = Path(*module.split("."))
    # The sources have backends/ next to hvkeras/.
    return Path(*path.parts[1:]) if path.parts[1:2] == ("backends",) else path


def _tree(module: str) -> ast.Module:
    path = ROOT / _folder(module)
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def _literal(module: str, name: str) -> Any:
    """Return the literal that a module assigns to a name."""
    for statement in _tree(module).body:
        if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", "") == name:
            return ast.literal_eval(statement.value)
    raise LookupError(f"{module} has no {name}")


def _short(module: str) -> str:
    return module.removeprefix("hvkeras.")

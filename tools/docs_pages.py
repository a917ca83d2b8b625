"""The pages of the site that are written elsewhere: README, CHANGELOG, examples, API reference and so on."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md"}
# What comes between the brackets and the anchor of a link within the repository.
_LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages to those in docs/."""
    made = {page: _relinked((ROOT / source).read_text(), "") for source, page in PAGES.items()}
    for example in sorted((ROOT / "examples").glob("*.py")):
        made[f"examples/{example.stem}.md"] = f"# {example.name}\n\n```python\n{example.read_text()}```\n"
    titles = {path.stem: path.read_text().splitlines()[0].lstrip("# ")
              for path in sorted((ROOT / "docs" / "decisions").glob("*.md"))}
    made["decisions.md"] = "# Decisions\n\n" + "\n".join(f"- [{title}](decisions/{stem}.md)"
                                                          for stem, title in titles.items())
    made["reference.md"] = "\n".join(_reference())
    for page, content in made.items():
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Has links from docs/ to the files above lead to their pages."""
    return _relinked(markdown, "docs/") if page.file.src_uri not in PAGES.values() else markdown


def _relinked(markdown: str, folder: str) -> str:
    """Rewrites links between files of the repository into links between pages.

    Args:
        markdown: The text.
        folder: Where the file is: "" or "docs/".
    """

    def link(found: re.Match[str]) -> str:
        target, anchor = found[1], found[2] or ""
        path = str((ROOT / folder / target).resolve().relative_to(ROOT)) if folder else target
        if path in PAGES:
            return f"]({PAGES[path]}{anchor})"
        if path == "docs/decisions":
            return "](decisions.md)"
        if path.startswith("examples/") and path.endswith(".py"):
            return f"]({path.removesuffix('.py')}.md)"
        return f"]({target.removeprefix('docs/')}{anchor})"

    return _LINK.sub(link, markdown)


def _reference() -> Iterator[str]:
    """Every public name of `hvkeras`, from the tables of its `__init__`."""
    yield "# API reference\n\nAll of these are names of `hvkeras` itself, which scripts import as `hvd`.\n"
    homes = _table(ROOT / "hvkeras" / "__init__.py", "_HOMES")
    for module, names in homes.items():
        for name in names:
            if f"def {name}" in _source(module) or f"class {name}" in _source(module):
                yield f"::: {module}.{name}\n"
    yield "# Callbacks\n\n`hvd.callbacks`.\n"
    for name in _table(ROOT / "hvkeras" / "callbacks" / "__init__.py", "__all__"):
        home = next(path for path in sorted((ROOT / "hvkeras" / "callbacks").glob("*.py"))
                    if f"class {name}(" in path.read_text())
        yield f"::: hvkeras.callbacks.{home.stem}.{name}\n"


def _source(module: str) -> str:
    path = ROOT / Path(*module.split("."))
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


def _table(path: Path, name: str) -> Any:
    """The literal that a module assigns to a name."""
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", "") == name:
            return ast.literal_eval(statement.value)
    raise LookupError(f"{path} has no {name}")

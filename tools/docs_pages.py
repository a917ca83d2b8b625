"""Pages of the site from outside docs/: CONTRIBUTING, CHANGELOG, examples, and the list of decisions."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md", "examples/README.md": "examples/index.md"}
SOURCES = {page: source for source, page in PAGES.items()}
# The landing page is its own navigation; wide tables need the space of the table of contents.
_HIDDEN = {"index.md": ["navigation", "toc"], "settings.md": ["toc"], "troubleshooting.md": ["toc"],
           "reference/index.md": ["toc"]}
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".sbatch": "bash", ".toml": "toml", ".md": "markdown"}
# A link within the repository: path and anchor.
_LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages to those in docs/."""
    made = {page: (ROOT / source).read_text() for source, page in PAGES.items()}
    for example in sorted((ROOT / "examples").glob("*.py")):
        made[f"examples/{example.stem}.md"] = f"# {example.name}\n\n```python\n{example.read_text()}```\n"
    for folder in sorted(path for path in (ROOT / "examples").iterdir() if path.is_dir()):
        made[f"examples/{folder.name}.md"] = f"# {folder.name}\n" + "".join(
            f"\n## {path.name}\n\n```{_LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}```\n"
            for path in sorted(folder.rglob("*")) if path.suffix in _LANGUAGES or path.name == "Dockerfile")
    titles = {path.stem: path.read_text().splitlines()[0].lstrip("# ")
              for path in sorted((ROOT / "docs" / "decisions").glob("*.md"))}
    made["decisions.md"] = "# Decisions\n\n" + "\n".join(f"- [{title}](decisions/{stem}.md)"
                                                          for stem, title in titles.items())
    for page, content in made.items():
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, files: Files, **_: Any) -> str:
    """Rewrite links between files of the repository into links between pages of the site."""
    uri = page.file.src_uri
    page.meta["hide"] = _HIDDEN.get(uri, [])
    source = SOURCES.get(uri, f"docs/{uri}")
    if not (ROOT / source).exists():
        return markdown  # a generated page, with links of the site

    def link(found: re.Match[str]) -> str:
        path = os.path.relpath((ROOT / source).parent / found[1], ROOT)
        target = _page(path)
        if files.get_file_from_path(target) is None:
            return found[0]  # mkdocs reports it
        return f"]({os.path.relpath(target, os.path.dirname(uri) or '.')}{found[2] or ''})"

    return _LINK.sub(link, markdown)


def _page(path: str) -> str:
    """Return the page of the site that shows a file of the repository."""
    if path in PAGES:
        return PAGES[path]
    if path == "docs/decisions":
        return "decisions.md"
    if path.startswith("examples/"):
        return f"examples/{Path(path.split('/')[1]).stem}.md"
    return path.removeprefix("docs/")

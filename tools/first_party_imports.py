"""Finds imports of hvkeras inside functions that do not say why they are there; a part of `make lint`.

ruff's PLC0415 holds for all imports or none, and third parties' are imported where they are needed. So pyproject.toml
turns it off, and this turns it on for hvkeras alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("hvkeras", "backends", "examples", "tools")
WISH = "a first-party import must be at the top of the file, or say why not after # noqa: PLC0415 -"


def found() -> Iterator[str]:
    """Names the place of each such import, as `file:line`."""
    ruff = [sys.executable, "-m", "ruff", "check", "--select", "PLC0415", "--output-format", "json", "--exit-zero"]
    findings = json.loads(subprocess.run([*ruff, *FOLDERS], check=True, stdout=subprocess.PIPE).stdout)
    for finding in findings:
        path, line = Path(finding["filename"]), finding["location"]["row"]
        if path.read_text().splitlines()[line - 1].split()[1].startswith(("hvkeras", ".")):
            yield f"{path.relative_to(Path.cwd())}:{line}"


def main() -> int:
    """Prints what it finds, and fails if there is anything."""
    indices = list(found())
    for index in indices:
        print(f"{index}: {WISH}")
    return 1 if indices else 0


if __name__ == "__main__":
    sys.exit(main())

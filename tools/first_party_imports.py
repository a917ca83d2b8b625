"""Find imports of hvkeras inside functions without a `noqa` comment that gives the reason; part of `make lint`.

ruff's PLC0415 applies to all imports or to none, and third-party packages are imported lazily. Therefore pyproject.toml
disables the rule, and this script enables it for hvkeras only.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("hvkeras", "backends", "examples", "tools")
RULE = "a first-party import must be at the top of the file, or give the reason after # noqa: PLC0415 -"


def found() -> Iterator[str]:
    """Yield the location of each such import, as `file:line`."""
    ruff = [sys.executable, "-m", "ruff", "check", "--select", "PLC0415", "--output-format", "json", "--exit-zero"]
    findings = json.loads(subprocess.run([*ruff, *FOLDERS], check=True, stdout=subprocess.PIPE).stdout)
    for finding in findings:
        path, line = Path(finding["filename"]), finding["location"]["row"]
        if path.read_text().splitlines()[line - 1].split()[1].startswith(("hvkeras", ".")):
            yield f"{path.relative_to(Path.cwd())}:{line}"


def main() -> int:
    """Print the findings, and return 1 if there are any."""
    locations = list(found())
    for location in locations:
        print(f"{location}: {RULE}")
    return 1 if locations else 0


if __name__ == "__main__":
    sys.exit(main())

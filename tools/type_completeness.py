"""Measure the share of symbols with types that type checkers know; part of `make lint`.

pyright examines every symbol of every module. Subclasses of Keras classes count as incomplete, because Keras ships no
types.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

MINIMUM = 0.95
ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Print the share of known types, and return 1 if it is too small."""
    # pyright takes the location of packages from the first Python in the PATH.
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                   "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pyright", "--verifytypes", "hvkeras", "--ignoreexternal", "--outputjson"]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, check=False)
    report = json.loads(done.stdout)["typeCompleteness"]
    score, unknown = report["completenessScore"], [each for each in report["symbols"] if not each["isTypeKnown"]]
    print(f"{score:.1%} of {len(report['symbols'])} symbols have known types")
    if score >= MINIMUM:
        return 0
    for symbol in unknown:
        print(symbol["name"], *(problem["message"].splitlines()[0] for problem in symbol["diagnostics"]), sep="\n  ")
    print(f"at least {MINIMUM:.0%} must have known types")
    return 1


if __name__ == "__main__":
    sys.exit(main())

"""Repeat tests while other processes load every core, and report the failed rounds.

    python tools/stress.py --times 3 -- .venv/bin/pytest -n 2 tests/launch

This reveals timing assumptions in tests. The output of each round is written to `build/stress/`; the last lines of
failed rounds are also printed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path("build/stress")


def burn() -> None:
    """Keep a core busy until the process is terminated."""
    while True:
        pass


def main() -> int:
    """Run the rounds, and return 1 if one failed."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--times", type=int, default=3, help="number of rounds (default: %(default)s)")
    options.add_argument("--burners", type=int, default=len(os.sched_getaffinity(0)),
                         help="processes that each load a core (default: one per core, %(default)s here)")
    options.add_argument("command", nargs="+", help="the command that runs the tests")
    chosen = options.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    burners = [multiprocessing.Process(target=burn, daemon=True) for _ in range(chosen.burners)]
    for burner in burners:
        burner.start()
    failed = []
    try:
        for number in range(1, chosen.times + 1):
            began = time.monotonic()
            log = FOLDER / f"round-{number}.log"
            with log.open("wb") as out:
                code = subprocess.run(chosen.command, stdout=out, stderr=subprocess.STDOUT, check=False).returncode
            sys.stdout.write(f"round {number} of {chosen.times}: exit code {code} after"
                             f" {time.monotonic() - began:.0f} s; {log}\n")
            if code:
                failed.append(number)
                sys.stdout.write("\n".join(log.read_text(errors="replace").splitlines()[-80:]) + "\n")
            sys.stdout.flush()
    finally:
        for burner in burners:
            burner.terminate()
    sys.stdout.write(f"{chosen.times - len(failed)} of {chosen.times} rounds passed with {chosen.burners} busy"
                     f" processes\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

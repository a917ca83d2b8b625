"""Duration of an elastic job in which a rank raises or is killed, on each engine and with Horovod's elastic driver.

All jobs run `train.py` with tf_keras: four local ranks, three epochs of 100 steps, a commit every 10 steps. Horovod's
driver is `horovodrun` over Gloo. It gets two names of this host, because it blacklists a host after its first failure.

Example:
    python tools/elastic_recovery
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

SCRIPT = Path(__file__).with_name("train.py")
EVENTS = ("nothing", "raises", "killed")
DEADLINE = 240.0  # seconds
BIN = Path(sys.executable).parent


def command(engine: str, folder: Path, event: str) -> list[str]:
    """Return the command line of a job."""
    job = [sys.executable, str(SCRIPT), str(folder), event]
    if engine == "Horovod":
        return [str(BIN / "horovodrun"), "--gloo", "-np", "4", "--min-np", "2", "--max-np", "4", "--reset-limit", "10",
                "--host-discovery-script", str(folder / "hosts.sh"), *job]
    return [str(BIN / "hvkeras"), "run", "--as-horovod", "--backend", engine, "-np", "4", "--min-np", "2",
            "--failures-per-host", "9", *job]


def seconds(engine: str, event: str) -> float | str:
    """Run a job, and return its seconds or, if it failed, the reason."""
    with tempfile.TemporaryDirectory(prefix="hvkeras-recovery-") as name:
        folder = Path(name)
        script = folder / "hosts.sh"
        script.write_text(f"#!/bin/sh\necho localhost:2\necho {socket.gethostname()}:2\n")
        script.chmod(0o755)
        environment = os.environ | {"TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        began = time.monotonic()
        try:
            done = subprocess.run(command(engine, folder, event), cwd=folder, env=environment, capture_output=True,
                                  text=True, timeout=DEADLINE, check=False)
        except subprocess.TimeoutExpired:
            return f"timeout after {DEADLINE:g} s"
        took = time.monotonic() - began
        ended = "trained 3 epochs" in done.stdout and (event == "nothing" or (folder / "happened").exists())
        if done.returncode or not ended:
            print(done.stdout[-2000:], done.stderr[-4000:], file=sys.stderr)
            return f"failed with exit code {done.returncode}"
        return took


def main(engines: list[str], times: int) -> None:
    """Run all jobs alternately, and print the shortest time of each."""
    found: dict[tuple[str, str], list[float | str]] = {}
    for _ in range(times):
        for event in EVENTS:
            for engine in engines:
                found.setdefault((engine, event), []).append(seconds(engine, event))
    table = Table("engine", *EVENTS, "extra when a rank raises", "extra when a rank is killed")
    for engine in engines:
        best = [min((took for took in found[engine, event] if isinstance(took, float)), default=float("nan"))
                for event in EVENTS]
        table.add_row(engine, *(f"{took:.1f} s" for took in best), *(f"{took - best[0]:.1f} s" for took in best[1:]))
    Console(width=110).print(table)
    for (engine, event), results in found.items():
        for result in results:
            if isinstance(result, str):
                print(f"{engine}, {event}: {result}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("engines", nargs="*", default=["native", "horovod", "tfdist", "Horovod"])
    given = parser.parse_args()
    main(given.engines, given.times)

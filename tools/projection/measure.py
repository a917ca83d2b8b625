"""Measures allreduces and training steps between hosts at set bandwidths, to check projections against.

Hosts are network namespaces of this machine, behind a switch whose cables `tc` limits; it needs root, iproute2, and
UCX for the backend native. From the repository's folder:

    python tools/projection/measure.py measured.json
    python tools/projection/judge.py measured.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from harness import hosts as machines  # noqa: E402 - it is found by the line above
from harness.launchers import clean_environment  # noqa: E402
from hvkeras.settings import size_in_bytes  # noqa: E402

SIZES = {"4KiB": 20, "64KiB": 10, "1MiB": 4, "4MiB": 2, "16MiB": 1}  # and how many in a chain
MODELS = ("mlp", "transformer")
BUCKET = "4MiB"  # so that a model has several
RATES = {"100mbit": "16kb", "1gbit": "128kb", "10gbit": "512kb"}  # and what may pass at once after a pause
PROBED = 0.2  # seconds that the long message of the probe takes at the rate
LAYOUTS = ("1x2", "1x4", "2x1", "4x1", "2x2")  # hosts x ranks on each
DEADLINE = 900.0  # seconds for a job


def main() -> None:
    """Runs all jobs but those that are in the file already, and writes what they have measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--backends", default="native,horovod,tfdist")
    parser.add_argument("--layouts", default=",".join(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=4, help="Of all bandwidths in turn, in each job.")
    parser.add_argument("--repeats", type=int, default=2, help="In each round.")
    flags = parser.parse_args()
    if machines.missing() or shutil.which("tc") is None:
        sys.exit(machines.missing() or "tc not found (Debian: apt-get install iproute2)")
    jobs = json.loads(flags.results.read_text()) if flags.results.exists() else []
    known = {(job["backend"], job["layout"]) for job in jobs}  # of a run that was cut off
    for backend, layout in itertools.product(flags.backends.split(","), flags.layouts.split(",")):
        if (backend, layout) in known:
            continue
        with tempfile.TemporaryDirectory() as folder:
            jobs.append({"backend": backend, "layout": layout, **_job(backend, layout, flags, Path(folder))})
        flags.results.write_text(json.dumps(jobs, indent=1))


def _job(backend: str, layout: str, flags: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Runs a job, and returns what its rank 0 has found."""
    count, on_each = map(int, layout.split("x"))
    with machines.network(count) as network:
        conditions: dict[str, Any] = {"unlimited": ([], 0)}
        if count > 1:
            conditions = {rate: (network.limits(rate, burst), int(_bytes_per_second(rate) * PROBED))
                          for rate, burst in RATES.items()}
        plan = folder / "plan.json"
        plan.write_text(json.dumps({
            "backend": backend, "rounds": flags.rounds, "repeats": flags.repeats, "models": MODELS,
            "sizes": {label: (size_in_bytes(label), links) for label, links in SIZES.items()},
            "conditions": conditions, "address": network.hosts[0].address, "results": str(folder / "results.json")}))
        script = [sys.executable, str(Path(__file__).parent / "rank.py"), str(plan)]
        environment = clean_environment(folder) | {"HVKERAS_RENDEZVOUS_DIR": str(folder), "HVKERAS_BUCKET_SIZE": BUCKET,
                                                   "HVKERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "2"}
        print(f"{backend} on {layout} ...", flush=True)
        _await(_with_tf_config(network.hosts, on_each, script, environment, folder))
        found: dict[str, Any] = json.loads((folder / "results.json").read_text())
        return found


def _bytes_per_second(rate: str) -> float:
    number, unit = rate[:-4], rate[-4:]
    return float(number) * {"mbit": 1e6, "gbit": 1e9}[unit] / 8


def _with_tf_config(hosts: Sequence[machines.Host], on_each: int, script: Sequence[str],
                    environment: Mapping[str, str], folder: Path) -> list[subprocess.Popen[str]]:
    places = [host for host in hosts for _ in range(on_each)]
    cluster = {"worker": [f"{host.address}:{2222 + rank}" for rank, host in enumerate(places)]}
    return [_start(host.command(*script), {**environment, "TF_CONFIG": json.dumps(
        {"cluster": cluster, "task": {"type": "worker", "index": rank}})}, folder) for rank, host in enumerate(places)]


def _start(command: Sequence[str], environment: Mapping[str, str], folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(command, env=dict(environment), cwd=folder, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, start_new_session=True)


def _await(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Waits until all have ended well; otherwise says what they said, and ends them."""
    try:
        outputs = [process.communicate(timeout=DEADLINE)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    for process, output in zip(processes, outputs, strict=True):
        if process.returncode:
            sys.exit(f"a rank ended with {process.returncode}:\n{output}")


if __name__ == "__main__":
    main()

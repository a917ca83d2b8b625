"""`hvkeras bench` on two ranks: verified results, engines that cannot run, and one that computes wrong results."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from harness.launchers import TESTS
from launch.hvkeras_run import Started, run

LIAR = Path(__file__).parent / "workers" / "liar"
DEADLINE = 300.0  # seconds for a job whose ranks import TensorFlow


def search_in(*folders: Path) -> dict[str, str]:
    """Return PYTHONPATH with these folders first."""
    own = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [*map(str, folders), str(TESTS), own]))}


def plug_in(folder: Path, names: dict[str, str]) -> dict[str, str]:
    """Install the test's backends like a package, and return the variables for it."""
    info = folder / "site" / "liar-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: liar\nVersion: 1.0\n")
    points = "".join(f"{name} = liar_backends:{cls}\n" for name, cls in names.items())
    (info / "entry_points.txt").write_text(f"[hvkeras.backends]\n{points}")
    return search_in(folder / "site", LIAR)


def rows(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["work"], row["name"]): row for row in json.loads(path.read_text())["rows"]}


def check_blocks(row: dict[str, Any], rounds: int) -> None:
    assert row["reason"] == "" and not row["wrong"], row
    assert len(row["blocks"]) == rounds and min(row["blocks"]) > 0 and row["calls"] >= 1
    assert row["quartiles"][0] <= row["median"] <= row["quartiles"][1]


def bench(arguments: Sequence[str], folder: Path, env: dict[str, str] | None = None) -> Any:
    """Run `hvkeras bench` to its end. Fail the test if it leaves processes."""
    return run([*arguments, "--json", "out.json", "--timeout", "200"], folder, env or search_in(), command="bench",
               deadline=DEADLINE)


@pytest.mark.nightly
def test_allreduces_are_verified_and_failures_are_rows(tmp_path: Path) -> None:
    backends = {"liar": "Liar", "broken": "Broken", "mortal": "Mortal"}
    names = [*backends, "local"]
    done = bench(["allreduce", "--backends", ",".join(names), "--sizes", "40B,1KiB", "--rounds", "2", "--plot",
                  "out.png"], tmp_path, plug_in(tmp_path, backends))
    assert done.returncode == 1, done.stdout + done.stderr
    found = rows(tmp_path / "out.json")
    assert list(found) == [(size, name) for size in ("40B", "1KiB") for name in names]
    for size in ("40B", "1KiB"):
        lie = found[size, "liar"]
        assert lie["wrong"] and lie["blocks"] == []
        assert "Every element of an allreduce must be what NumPy computes. Received: engine='liar'" in lie["reason"]
        assert f"size='{size}', element=7, got=" in lie["reason"]
        assert f"hvkeras bench: liar is wrong: {lie['reason']}" in done.stderr
        assert "rank 1" in found[size, "broken"]["reason"]
        assert "OSError: the cable is unplugged" in found[size, "broken"]["reason"]
        assert found[size, "local"]["reason"].startswith("local serves one process")
    check_blocks(good := found["40B", "mortal"], 2)
    assert (good["bytes"], good["links"], good["kind"]) == (40, 100, "engine")
    assert good["algorithm_bandwidth"] == good["bus_bandwidth"] > 0  # 2 (n - 1) / n is 1
    assert "rank 1" in found["1KiB", "mortal"]["reason"] and "SIGKILL" in found["1KiB", "mortal"]["reason"]
    content = json.loads((tmp_path / "out.json").read_text())
    assert (content["kind"], content["ranks"], content["launcher"]) == ("allreduce", 2, "hvkeras")
    assert content["command"][:3] == ["hvkeras", "bench", "allreduce"]
    assert content["machine"]["cpu"] and content["machine"]["cores"] and content["machine"]["versions"]["numpy"]
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert "wrong (1)" in done.stdout and "failed (2)" in done.stdout
    kept = list(tmp_path.glob("hvkeras-bench-*"))  # the output of the ranks that failed
    assert [sorted(path.name for path in folder.glob("*/stderr")) for folder in kept] == [["stderr"] * 3]
    assert f"output of all ranks: {kept[0]}" in found["1KiB", "mortal"]["reason"]


@pytest.mark.nightly
@pytest.mark.parametrize(("arguments", "names"), [
    (["--backends", "tfdist", "--jit"], ["one process", "one process, XLA", "local only", "local only, XLA", "tfdist"]),
    (["--backends", "horovod,tfdist", "--peers"],
     ["one process", "local only", "horovod", "tfdist", "horovod alone", "tf.distribute alone"]),
], ids=["XLA", "peers"])
def test_steps_train_as_one_process_does(arguments: list[str], names: list[str], tmp_path: Path) -> None:
    done = bench(["step", "--models", "mlp", *arguments, "--rounds", "1"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = rows(tmp_path / "out.json")
    assert [name for _, name in found] == names
    for (_, name), row in found.items():
        check_blocks(row, 1)
        assert row["bytes"] == 4 * (784 * 1024 + 1024 + 1024 * 1024 + 1024 + 1024 * 10 + 10)
        if row["kind"] == "reference":
            assert (row["samples"], row["difference"]) == (64 if name.startswith("one process") else 128, None)
        else:
            assert row["samples"] == 128 and 0 <= row["difference"] < 0.01 and row["efficiency"] > 0
    assert done.stderr == ""  # no progress without a terminal


def test_a_benchmark_that_is_ended_leaves_no_orphan(tmp_path: Path) -> None:
    started = Started(["allreduce", "--backends", "tfdist", "--sizes", "4KiB"], tmp_path, search_in(), command="bench",
                      deadline=DEADLINE)
    deadline = time.monotonic() + 60
    while started.living() < 6 and time.monotonic() < deadline:  # bench, its guard, hvkeras run, its agent, and ranks
        time.sleep(0.1)
    started.process.send_signal(signal.SIGTERM)
    done = started.finish()
    assert done.returncode == 143
    assert not started.orphans, done.stderr
    assert done.stdout == ""


@pytest.mark.nightly
def test_killing_a_benchmark_leaves_no_rank_that_stands_still(tmp_path: Path) -> None:
    started = Started(["allreduce", "--backends", "tfdist,native", "--sizes", "4KiB", "--time", "60"], tmp_path,
                      search_in(), command="bench", deadline=DEADLINE)
    deadline = time.monotonic() + 60
    while not _standing_still(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert _standing_still(tmp_path) == 2
    started.process.kill()
    deadline = time.monotonic() + 60
    while started.living() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert started.living() == 0
    started.finish()
    assert not started.orphans


def _standing_still(folder: Path) -> int:
    """Return the number of stopped ranks of this test."""
    return sum(process.info["cwd"] == str(folder) and process.info["status"] == psutil.STATUS_STOPPED
               for process in psutil.process_iter(["cwd", "status"]))

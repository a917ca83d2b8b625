"""What this host, or the container, has left, and what a process keeps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hvkeras.host import memory


def test_a_container_may_have_less_than_its_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = tmp_path / "meminfo"
    monkeypatch.setattr(memory, "_HOST", host)
    monkeypatch.setattr(memory, "_CONTAINER", tmp_path)
    assert memory.available() is None
    host.write_text("MemTotal:       9000 kB\nMemAvailable:   5000 kB\n")
    assert memory.available() == 5000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.available() == 5000 * 1024
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("2500000\n")
    (tmp_path / "memory.stat").write_text("anon 1000\ninactive_file 500000\n")  # files that may be dropped
    assert memory.available() == 1_000_000


def test_this_host_has_memory() -> None:
    assert (memory.available() or 0) > 0


CLEARED_PAGES = """
import ctypes, resource, sys, threading
from hvkeras.host.memory import keep_freed

if sys.argv[1] == "keep":
    keep_freed(1)
c = ctypes.CDLL(None)
c.malloc.restype, c.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def steps(count):
    for _ in range(count):
        blocks = [c.malloc(24 << 20) for _ in range(8)]
        for block in blocks:
            ctypes.memset(block, 1, 24 << 20)
        for block in blocks:
            c.free(block)

def measure():
    steps(2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    steps(3)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 3)

thread = threading.Thread(target=measure)
thread.start()
thread.join()
"""


def test_freed_memory_is_kept_for_the_next_step() -> None:
    pages = {how: int(subprocess.run([sys.executable, "-I", "-c", CLEARED_PAGES, how], check=True, capture_output=True,
                                     text=True, env={}).stdout) for how in ("keep", "return")}
    assert pages["return"] > 10_000  # of 49,152 in each step
    assert pages["keep"] < 100

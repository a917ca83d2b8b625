"""What this host, or the container, has left."""

from __future__ import annotations

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

"""What this host, or the container, has left."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvkeras.host import machine


def test_a_container_may_have_less_than_its_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host = tmp_path / "meminfo"
    monkeypatch.setattr(machine, "_HOST", host)
    monkeypatch.setattr(machine, "_CONTAINER", tmp_path)
    assert machine.available_memory() is None
    host.write_text("MemTotal:       9000 kB\nMemAvailable:   5000 kB\n")
    assert machine.available_memory() == 5000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.available_memory() == 5000 * 1024
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("2500000\n")
    (tmp_path / "memory.stat").write_text("anon 1000\ninactive_file 500000\n")  # files that may be dropped
    assert machine.available_memory() == 1_000_000


def test_this_host_has_memory() -> None:
    assert (machine.available_memory() or 0) > 0

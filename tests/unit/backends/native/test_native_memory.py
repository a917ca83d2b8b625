"""Shared memory of ranks that were killed as a job started: the next start of the same user removes it, no other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hvkeras.backends import cpp_library
from hvkeras.backends.native.engine import Engine
from hvkeras.backends.native.groups import owned_name, remove_abandoned, shared_memory_of
from hvkeras.backends.native.ucx import Costs
from hvkeras.errors import MachineError

SHM = Path("/dev/shm")
# Makes memory as a leader does, says its name, and waits to be killed.
OWNER = """
import sys
from pathlib import Path
from hvkeras.backends.native.groups import owned_name

with owned_name() as name:
    for ending in ("", ".notifier"):
        Path(f"/dev/shm{name}{ending}").touch()
    print(name, flush=True)
    sys.stdin.read()
"""


def names_like(name: str) -> list[str]:
    return sorted(path.name for path in SHM.glob(f"{name[1:]}*"))


def test_what_a_killed_owner_has_left_is_removed_and_a_living_ones_is_not() -> None:
    with subprocess.Popen([sys.executable, "-I", "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as owner:
        try:
            assert owner.stdout is not None
            name = owner.stdout.readline().strip()
            everything = [name[1:], f"{name[1:]}.notifier", f"{name[1:]}.owner"]
            remove_abandoned()
            assert names_like(name) == everything
        finally:
            owner.kill()
    remove_abandoned()
    assert names_like(name) == []


def test_a_name_is_nobody_elses_within_the_block_and_leaves_nothing() -> None:
    with owned_name() as name:
        (SHM / name[1:]).touch()
        remove_abandoned()
        assert names_like(name) == [name[1:], f"{name[1:]}.owner"]
        (SHM / name[1:]).unlink()
    assert names_like(name) == []


def test_an_owner_whose_file_is_taken_for_abandoned_takes_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    opened = os.open

    def open_and_lose(path: Path, *arguments: int) -> int:
        descriptor = opened(path, *arguments)
        made.append(path)
        if len(made) == 1:
            path.unlink()
        return descriptor

    with monkeypatch.context() as patches:
        patches.setattr(os, "open", open_and_lose)
        with owned_name() as name:
            assert len(made) == 2 and made[1].name == f"{name[1:]}.owner" and made[1].exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_another_users_are_left_alone_and_so_are_links(tmp_path: Path) -> None:
    theirs, link, odd = (SHM / f"hvkeras-{digit * 16}.owner" for digit in "01x")
    try:
        theirs.touch()
        os.chown(theirs, 12345, -1)
        (tmp_path / "file").touch()
        link.symlink_to(tmp_path / "file")
        odd.touch()
        remove_abandoned()
        assert theirs.exists() and link.is_symlink() and odd.exists()
    finally:
        for path in (theirs, link, odd):
            path.unlink(missing_ok=True)


def test_shared_memory_that_is_not_there_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch,
                                                                  tmp_path: Path) -> None:
    monkeypatch.setattr("hvkeras.backends.native.groups.SHARED_MEMORY", tmp_path / "none")
    remove_abandoned()
    with pytest.raises(MachineError, match=r"needs shared memory \(No such file or directory\).*HINT: free space"):
        owned_name().__enter__()


@pytest.mark.skipif(bool(cpp_library.objection()), reason=cpp_library.objection() or "-")
@pytest.mark.parametrize(("ranks", "hosts"), [(2, 1), (3, 1), (64, 1), (300, 1), (8, 2), (64, 8)])
def test_the_memory_of_a_group_is_what_the_core_allocates(ranks: int, hosts: int) -> None:
    engine, group = Engine(cpp_library.library()), 987_654_321
    with owned_name() as name:
        try:  # the second of the ranks on the first host, which needs no link
            engine.open_group(group, name, True, 1, range(ranks), [rank * hosts // ranks for rank in range(ranks)],
                              True, Costs())
            allocated = (SHM / name[1:]).stat().st_size
        finally:
            engine.close_group(group, "it was measured")
            engine.unlink(name)
    estimate = shared_memory_of(ranks // hosts, hosts)
    assert allocated <= estimate <= 1.02 * allocated

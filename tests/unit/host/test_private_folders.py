"""Private folders: what processes see of each other's files, and what is removed."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hvkeras.errors import MachineError
from hvkeras.host import private_folders
from hvkeras.host.files import make_private

KEY, STRANGER = "0123456789abcdef", 12345

# Each process works in the folder, and prints what it sees when the others have written.
PROCESS = """
import os, sys, time
from pathlib import Path
from hvkeras.host import overlays, private_folders

is_first, how = sys.argv[1] == "first", sys.argv[2]
if how == "copy":
    def refuse(*_):
        raise OSError
    overlays._enter_namespace = refuse
elif how == "failed":
    overlays._escaped, how = lambda path: "none", "copy"
private_folders.ENTRIES = int(sys.argv[3])
found = private_folders.enter("0123456789abcdef", [Path.cwd()], is_first, 30)
assert found.how == ("common" if is_first else how), found
print("entered", flush=True)
sys.stdin.readline()
Path("new").mkdir()
for name in ("new/file", "text", "deep/er/text"):
    Path(name).write_text(sys.argv[1])
print("written", flush=True)
sys.stdin.readline()
seen = [Path(name).read_text() for name in ("new/file", "text", "deep/er/text", "deep/er/other")]
if not is_first:
    found.show("new", found.common("new"))
    seen.append(Path("new/file").read_text())
    found.show("text", found.common("none"))
    seen.append(Path("text").exists())
print(*seen, os.path.samefile(found.common("deep"), "deep"), flush=True)
sys.stdin.readline()
found.leave()
"""


class Process:
    """A process that goes on when it is told to."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", PROCESS, *arguments], cwd=folder, text=True,
                                        env=os.environ | {"TMPDIR": str(folder.parent / "temporary")},
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "temporary").mkdir(0o755)
    made = tmp_path / "work"
    (made / "deep" / "er").mkdir(parents=True)
    for name in ("text", "deep/er/text", "deep/er/other"):
        (made / name).write_text("before")
    (made / "large").write_bytes(bytes(private_folders._SMALL + 1))
    (made / "link").symlink_to("text")
    return made


@pytest.mark.parametrize(("how", "entries"), [("overlay", 1000), ("overlay", 5), ("copy", 1000),
                                              ("failed", 1000)])
def test_each_process_sees_its_own_changes(folder: Path, how: str, entries: int) -> None:
    if how == "overlay" and not permits_overlays(folder):
        pytest.skip("overlays are not permitted here")
    names = ("first", "second", "third")
    processes = [Process(folder, name, how, str(entries)) for name in names]
    try:
        assert [process.line() for process in processes] == ["entered"] * 3
        for process in processes:  # one after the other
            process.go_on()
            assert process.line() == "written"
        for process in processes:
            process.go_on()
        assert [process.line() for process in processes] == [
            "first first first before True", *(f"{name} {name} {name} before first False False" for name in names[1:])]
        for process in processes:
            process.go_on()
        assert [process.process.wait(30) for process in processes] == [0] * 3
    finally:
        for process in processes:
            process.process.kill()
            process.process.communicate()
    assert list((folder.parent / "temporary").iterdir()) == []
    assert (folder.parent / "temporary").stat().st_mode & 0o777 == 0o755
    assert sorted(path.name for path in folder.rglob("*")) == ["deep", "er", "file", "large", "link", "new", "other",
                                                               "text", "text"]
    assert (folder / "large").stat().st_nlink == 1


def permits_overlays(folder: Path) -> bool:
    code = """
import sys; from pathlib import Path; from hvkeras.host import private_folders
found = private_folders.enter("fedcba9876543210", [Path.cwd()], False, 30)
print(found.how); found.leave()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True,
                          env=os.environ | {"TMPDIR": str(folder.parent / "temporary")}, timeout=60)
    return done.stdout == "overlay\n"


def test_nothing_is_removed_while_something_is_mounted_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mounted").mkdir()
    mounts = f"1 2 0:1 / {tmp_path}/mounted rw - ext4 /dev/vda rw\n"
    monkeypatch.setattr(Path, "read_text", lambda _: mounts)
    with pytest.raises(OSError, match="busy"):
        private_folders._remove(tmp_path)
    assert (tmp_path / "mounted").is_dir()


def test_a_folder_with_the_temporary_files_stays_common(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_folders.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(private_folders.tempfile, "tempdir", str(tmp_path))
    found = private_folders.enter(KEY, [tmp_path], False, 10)
    assert found is not None
    assert (found.how, found.pairs) == ("common", ())
    assert private_folders.PrivateFolders.from_text(found.to_text()) == found
    found.leave()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("made_by_others", "reason"), [
    (lambda path: path.mkdir(0o700), f"it belongs to user {STRANGER}, and this is user 0"),
    (lambda path: path.symlink_to("."), f"it is a symbolic link of user {STRANGER}, who may change where it leads"),
    (lambda path: path.write_text(""), "it cannot be created or accessed (File exists)"),
], ids=["folder", "link", "file"])
@pytest.mark.skipif(os.geteuid() != 0, reason="makes another user's files")
def test_what_another_user_has_put_in_its_place_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                           made_by_others: Callable[[Path], object],
                                                           reason: str) -> None:
    monkeypatch.setattr(private_folders.tempfile, "gettempdir", lambda: str(tmp_path))
    tmp_path.chmod(0o700)  # the target of the link
    path = tmp_path / "hvkeras-private-0"
    made_by_others(path)
    os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
    before = os.lstat(path)
    with pytest.raises(MachineError, match=f"must belong to you alone, but {re.escape(reason)}. Received: folder="):
        private_folders.enter(KEY, [], False, 1)
    private_folders.remove_abandoned()
    assert (os.lstat(path), os.listdir(tmp_path)) == (before, [path.name])


def test_nothing_is_accessible_to_other_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_folders.tempfile, "gettempdir", lambda: str(tmp_path))
    found = private_folders.enter(KEY, [], False, 10)
    assert found is not None
    modes = {path.relative_to(tmp_path).as_posix(): path.stat().st_mode & 0o7777
             for path in (*tmp_path.iterdir(), *tmp_path.glob("*/*"))}
    place = f"hvkeras-private-{os.geteuid()}"
    assert modes == {place: 0o700, f"{place}/{KEY}": 0o700, f"{place}/{KEY}.owner": 0o600}
    (tmp_path / place).chmod(0o755)
    with pytest.raises(MachineError, match=r"but its mode is 0755\. .* HINT: chmod 700 \S+, or set TMPDIR"):
        private_folders.enter(KEY, [], False, 10)
    (tmp_path / place).chmod(0o700)
    found.leave()
    assert list(tmp_path.iterdir()) == []


def test_the_place_may_be_removed_by_another_job_at_any_time(tmp_path: Path) -> None:
    place, ends = tmp_path / "place", threading.Event()

    def remove() -> None:
        while not ends.wait(0.0002):
            with contextlib.suppress(OSError):
                place.rmdir()

    remover = threading.Thread(target=remove)
    remover.start()
    try:
        assert {make_private(place) for _ in range(5000)} == {""}
    finally:
        ends.set()
        remover.join()

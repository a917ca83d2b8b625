"""Parts of `hvkeras run` that need no process: output, hosts and slots, final report."""

from __future__ import annotations

import io
import math
import os
import re
import shutil
import tracemalloc
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

from hvkeras.control.cause import Cause, CauseKind
from hvkeras.errors import MachineError, UsageError
from hvkeras.host.ssh import Ssh
from hvkeras.launcher.echoes import DELAY, MIB, Echoes
from hvkeras.launcher.exit_report import exit_code, exit_report, root_cause
from hvkeras.launcher.host_agents import exported, remote_agent_command
from hvkeras.launcher.placement import HostRanks, place_ranks
from hvkeras.launcher.printer import Printer


def screen(live: bool = True) -> tuple[Printer, io.BytesIO]:
    """A printer on a terminal that is one buffer."""
    terminal = io.BytesIO()
    return Printer(2, terminal, terminal, live), terminal


def shown(terminal: io.BytesIO) -> list[str]:
    """Return the terminal's lines after these bytes, which contain carriage returns and ESC [K (clear to the end)."""
    lines = [""]
    column = 0
    text = terminal.getvalue().decode()
    while text:
        if text.startswith("\x1b[K"):
            lines[-1], text = lines[-1][:column], text[3:]
            continue
        character, text = text[0], text[1:]
        if character == "\n":
            lines.append("")
            column = 0
        elif character == "\r":
            column = 0
        else:
            lines[-1] = lines[-1][:column] + character + lines[-1][column + 1 :]
            column += 1
    return lines


def test_a_progress_bar_moves_in_place() -> None:
    printer, terminal = screen()
    for state in (b"Epoch 1\n", b"\r1/9 [>..]", b"\b" * 10 + b"\r5/9 [=>.]"):
        printer.show(0, "stdout", state)
    assert shown(terminal) == ["[0] Epoch 1", "[0] 5/9 [=>.]"]
    printer.show(0, "stdout", b"\r9/9\n")
    assert shown(terminal) == ["[0] Epoch 1", "[0] 9/9", ""]


def test_another_ranks_line_goes_above_the_bar() -> None:
    printer, terminal = screen()
    printer.show(0, "stdout", b"\r50 %")
    printer.show(1, "stderr", b"careful\nunfinished")
    assert shown(terminal) == ["[1] careful", "[0] 50 %"]
    printer.show(0, "stdout", b"\r60 %")
    assert shown(terminal) == ["[1] careful", "[0] 60 %"]
    printer.finish()
    assert shown(terminal) == ["[1] careful", "[0] 60 %", "[1] unfinished", ""]


def test_a_carriage_return_works_across_pieces() -> None:
    printer, terminal = screen(live=False)
    for piece in (b"first\r", b"second", b"\r", b"third\r\n"):
        printer.show(0, "stdout", piece)
    assert terminal.getvalue() == b"[0] third\n"


def test_bars_of_other_ranks_are_shown_when_they_end() -> None:
    printer, terminal = screen()
    printer.show(1, "stdout", b"\r10 %\r20 %")
    assert terminal.getvalue() == b""
    printer.show(1, "stdout", b"\r30 %\n")
    assert shown(terminal) == ["[1] 30 %", ""]


def test_characters_that_are_cut_in_two_arrive_whole() -> None:
    printer, terminal = screen(live=False)
    for byte in "Größe\n".encode():
        printer.show(0, "stdout", bytes([byte]))
    assert terminal.getvalue().decode() == "[0] Größe\n"


def test_a_screen_that_is_gone_leaves_the_files(tmp_path: Path) -> None:
    class Gone(io.BytesIO):
        def write(self, data: object) -> int:
            raise BrokenPipeError

    printer = Printer(1, Gone(), Gone(), folder=tmp_path)
    with pytest.raises(BrokenPipeError):
        printer.show(0, "stdout", b"one\n")
    printer.show(0, "stdout", b"two\n")
    printer.finish()
    assert (tmp_path / "rank.0" / "stdout").read_bytes() == b"one\ntwo\n"


def test_ranks_that_run_one_script_speak_with_one_voice(tmp_path: Path) -> None:
    now, output, errors = [0.0], io.BytesIO(), io.BytesIO()
    printer = Printer(3, output, errors, folder=tmp_path, as_one=True, clock=lambda: now[0])
    printer.show(1, "stderr", b"warning\nwarning\nonly 1\n")
    for worker in range(3):
        printer.show(worker, "stdout", b"step 1\rstep 2\nloss\n")
    printer.show(0, "stderr", b"warning\n")
    printer.show(2, "stderr", b"warning\n")
    printer.show_late()
    assert (output.getvalue(), errors.getvalue()) == (b"step 2\nloss\n", b"warning\n")
    now[0] = DELAY
    printer.show_late()
    assert errors.getvalue() == b"warning\n[1] warning\n[1] only 1\n"
    printer.show(2, "stderr", b"last")
    printer.show(2, "stderr", b" words\nand")
    printer.finish()
    assert errors.getvalue().endswith(b"[2] last words\n[2] and\n")
    assert (tmp_path / "rank.2" / "stdout").read_bytes() == b"step 1\rstep 2\nloss\n"


@pytest.mark.parametrize("remembered", [2_000, MIB])
def test_of_lines_that_ranks_have_in_common_none_is_lost_and_few_are_shown_twice(
        remembered: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvkeras.launcher.echoes.REMEMBERED", remembered)
    monkeypatch.setattr("hvkeras.launcher.echoes.WAITING", remembered)
    random, echoes, now = Random(1), Echoes(), 0.0
    printed: list[list[bytes]] = [[], [], []]
    shown: list[list[bytes]] = [[], [], []]
    for _ in range(2_000):
        worker = random.randrange(3)
        lines = [b"%d" % random.randrange(30) for _ in range(random.randrange(5))]
        printed[worker] += lines
        shown[worker] += echoes.add(worker, lines, now)
        now += random.choice((0.0, 0.01))
        for late, its_lines in echoes.due(now):
            shown[late] += its_lines
    for late, its_lines in echoes.due(math.inf):
        shown[late] += its_lines
    for worker in (1, 2):
        rest = iter(printed[worker])
        assert all(line in rest for line in shown[worker]), "in the order in which it printed them"
        missing = Counter(printed[worker]) - Counter(printed[0]) - Counter(shown[worker])
        assert not missing
        twice = Counter(shown[worker]) - (Counter(printed[worker]) - Counter(printed[0]))
        assert twice.total() < (1_200 if remembered == 2_000 else 60)
    assert shown[0] == []


@pytest.mark.parametrize("case", ["echoed", "distinct", "behind", "ahead", "long", "tracebacks", "without newline"])
def test_the_memory_for_output_is_bounded(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, most = (10_000, 64 * 1024) if case == "echoed" else (3_000, 16 * 1024)
    for name in ("echoes.REMEMBERED", "echoes.WAITING", "last_words.MOST", "printer.TAILS", "printer.UNFINISHED"):
        monkeypatch.setattr(f"hvkeras.launcher.{name}", most)
    errors, now = Counted(), [0.0]
    printer = Printer(3, io.BytesIO(), errors, as_one=True, reports_failures=True, clock=lambda: now[0])
    tracemalloc.start()
    try:
        for first in range(0, lines, 100):
            numbers = range(first, first + 100)
            equal, other = (b"".join(b"%s%d\n" % (text, number) for number in numbers) for text in (b"a", b"b"))
            for worker, data in {
                    "echoed": [(0, equal), (1, equal), (2, equal)], "distinct": [(0, equal), (1, other)],
                    "behind": [(0, equal)], "ahead": [(1, equal)], "long": [(1, 9_000 * b"x" + b"\n"), (0, equal)],
                    "tracebacks": [(1, b"Traceback (most recent call last):\n" + 9_000 * b"x" + b"\n")],
                    "without newline": [(1, 9_000 * b"x"), (2, b"\ry" * 4_000)]}[case]:
                printer.show(worker, "stderr", data)
            if first % 1000 == 0:
                now[0] += 0.2
                printer.show_late()
        kept = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    printer.finish()
    assert kept < 5 * most + 256 * 1024  # the rest is the text itself, on its way
    assert errors.lines(b"[1] a") == (lines if case == "ahead" else 0)
    assert errors.lines(b"[1] b") == (lines if case == "distinct" else 0)
    assert errors.lines(b"hvkeras run: ranks print more lines than can be compared") == (
        case not in ("echoed", "behind"))


class Counted(io.RawIOBase):
    """A screen that counts what is written to it."""

    def __init__(self) -> None:
        self._counts: Counter[bytes] = Counter()

    def write(self, data: Any) -> int:
        self._counts.update(re.sub(rb"\d{2,}|x+", b"", line)[:80] for line in data.splitlines())
        return len(data)

    def lines(self, start: bytes) -> int:
        return sum(count for line, count in self._counts.items() if line.startswith(start))


def test_more_files_than_may_be_open_get_every_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvkeras.launcher.printer.OPEN_FILES", 3)

    def count_open() -> int:
        return sum(os.path.realpath(link).startswith(str(tmp_path)) for link in Path("/proc/self/fd").iterdir())

    printer = Printer(8, io.BytesIO(), io.BytesIO(), folder=tmp_path)
    for number in range(5):
        for worker in range(8):
            for stream in ("stdout", "stderr"):
                printer.show(worker, stream, f"{stream} {number}\n".encode())
                assert count_open() <= 3
    printer.finish()
    assert count_open() == 0
    for worker in range(8):
        for stream in ("stdout", "stderr"):
            assert (tmp_path / f"rank.{worker}" / stream).read_text() == "".join(
                f"{stream} {number}\n" for number in range(5))


def test_a_file_that_cannot_be_opened_again_is_named_and_left_out(tmp_path: Path,
                                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvkeras.launcher.printer.OPEN_FILES", 1)
    screen = io.BytesIO()
    printer = Printer(2, screen, screen, folder=tmp_path)
    printer.show(0, "stdout", b"one\n")
    printer.show(1, "stdout", b"one\n")
    shutil.rmtree(tmp_path / "rank.0")
    with pytest.raises(MachineError, match=r"No such file or directory.* path='\S+/rank\.0/stdout', size=0"):
        printer.show(0, "stdout", b"two\n")
    for worker in (0, 1):
        printer.show(worker, "stdout", b"three\n")
    printer.finish()
    assert (tmp_path / "rank.1" / "stdout").read_bytes() == b"one\nthree\n"
    assert screen.getvalue() == b"[0] one\n[1] one\n[0] three\n[1] three\n"


def test_what_is_kept_of_all_workers_together_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvkeras.launcher.printer.TAILS", 64 * 1024)
    monkeypatch.setattr("hvkeras.launcher.printer.UNFINISHED", 128 * 1024)
    screen = io.BytesIO()
    printer = Printer(2, io.BytesIO(), screen)
    for worker in range(8):  # an elastic job that grows
        for number in range(64):
            printer.show(worker, "stderr", f"{number:02}".encode() * 512)
    tails = [printer.tail(worker) for worker in range(8)]
    assert all(tail.endswith(512 * "63") for tail in tails)
    assert [len(tail) for tail in tails[3:]] == [64 * 1024 // workers for workers in range(4, 9)]
    printer.finish()
    lines = screen.getvalue().decode().splitlines()
    assert max(map(len, lines)) <= len("[0] ") + 32 * 1024 + 1024
    for worker in range(8):
        assert "".join(line[4:] for line in lines if line.startswith(f"[{worker}] ")) == "".join(
            f"{number:02}" * 512 for number in range(64))


def test_a_bar_that_is_redrawn_at_once_more_often_than_a_line_is_long_stays_one_line(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvkeras.launcher.printer.LONGEST_LINE", 4096)
    screen = io.BytesIO()
    printer = Printer(1, screen, screen)
    for _ in range(3):
        printer.show(0, "stdout", b"".join(b"\r%4d/1000 [====]" % number for number in range(1001)))
    assert screen.getvalue() == b""
    printer.show(0, "stdout", b"\n")
    assert screen.getvalue() == b"[0] 1000/1000 [====]\n"


def test_folders_of_many_ranks_sort_by_number(tmp_path: Path) -> None:
    Printer(11, io.BytesIO(), io.BytesIO(), folder=tmp_path).finish()
    assert sorted(path.name for path in tmp_path.iterdir())[:3] == ["rank.00", "rank.01", "rank.02"]


@pytest.mark.parametrize(("count", "hosts", "placed"), [
    (2, None, [("localhost", (0, 1), True)]),
    (None, "a.invalid:2,b.invalid", [("a.invalid", (0, 1), False), ("b.invalid", (2,), False)]),
    (2, "a.invalid:2,b.invalid:2", [("a.invalid", (0, 1), False)]),
    (None, "a.invalid:1,localhost:1,a.invalid:1,127.0.0.1:1",
     [("a.invalid", (0, 1), False), ("localhost", (2, 3), True)]),
])
def test_ranks_fill_the_hosts_slots_in_order(count: int | None, hosts: str | None,
                                             placed: list[tuple[str, tuple[int, ...], bool]]) -> None:
    assert place_ranks(count, hosts, None) == [HostRanks(*each) for each in placed]


@pytest.mark.parametrize("hosts", ["a:0", "a:-1", ":2", "a;b", "a:1,,b:1", "a b", "-oProxyCommand", "-v:1"])
def test_hosts_that_cannot_be_read_are_refused(hosts: str) -> None:
    with pytest.raises(UsageError):
        place_ranks(None, hosts, None)


def test_a_host_cannot_be_an_option_of_ssh(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("-oProxyCommand slots=1\n")
    with pytest.raises(UsageError, match="must be a host with its slots"):
        place_ranks(None, None, str(tmp_path / "hosts"))


@pytest.mark.parametrize(("hosts", "hostfile", "flag"), [("", None, "-H"), (None, " ", "-hostfile")])
def test_no_hosts_are_not_this_host(hosts: str | None, hostfile: str | None, flag: str) -> None:
    with pytest.raises(UsageError, match=f"{flag} must be followed by at least one host.*leave {flag} out"):
        place_ranks(2, hosts, hostfile)


def test_an_empty_hostfile_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# none\n\n")
    with pytest.raises(UsageError, match="at least one host"):
        place_ranks(None, None, str(tmp_path / "hosts"))


def test_what_belongs_to_this_host_is_not_exported() -> None:
    mine = {"MINE": "1", "PATH": "/bin"}
    assert exported({**mine, "SSH_AUTH_SOCK": "/x", "HOME": "/root"}) == mine


def test_ssh_asks_for_no_password() -> None:
    assert "BatchMode=yes" in remote_agent_command(Ssh(), "node2", 15.0)


KILLED = Cause(CauseKind.LOST, 1, "node1", 7, "ended unexpectedly")


@pytest.mark.parametrize(("cause", "codes", "code"), [
    (None, {0: 0, 1: 0}, 0),
    (None, {0: 0, 1: 3}, 3),
    (KILLED, {0: 1, 1: -9}, 137),
    (KILLED, {0: 1}, 1),
    (Cause(CauseKind.EXCEPTION, 1, "node1", 7, "failed"), {0: 5, 1: 1}, 1),
    (Cause(CauseKind.EXIT, 1, "node1", 7, "exited", "", 7), {0: 5}, 7),
    (Cause(CauseKind.MISMATCH, None, "", None, "they differ"), {0: 1, 1: 1}, 1),
])
def test_the_exit_code_is_that_of_the_rank_that_failed_first(cause: Cause | None, codes: dict[int, int],
                                                             code: int) -> None:
    assert exit_code(cause, codes) == code


def test_the_exit_report_leaves_out_tensorflows_chatter() -> None:
    tail = "I0000 00:00:1795.1 7 port.cc:153] oneDNN\nout of memory\n"
    assert exit_report(KILLED, {1: -9}, tail).splitlines()[:-1] == [
        "hvkeras run: the standard error of rank 1 ends with", "out of memory",
        "hvkeras run: rank 1 on node1 (pid 7) was killed by SIGKILL."]


def test_a_traceback_is_the_very_last() -> None:
    cause = Cause(CauseKind.EXCEPTION, 1, "node1", 7, "failed with ValueError: x", "Traceback ...\nValueError: x\n")
    assert exit_report(cause, {1: 1}, "other").splitlines()[-2:] == ["Traceback ...", "ValueError: x"]


def test_tensorflows_lines_about_itself_are_left_out_when_quiet() -> None:
    chatter = (b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
               b"I0000 00:00:1795182673.650290    3305 port.cc:153] oneDNN custom operations are on.\n")
    for quiet in (True, False):
        screen = io.BytesIO()
        Printer(1, screen, screen, quiet=quiet).show(0, "stderr", chatter + b"E0000 00:00: an error\n")
        assert (b"oneDNN" in screen.getvalue()) is not quiet and b"an error" in screen.getvalue()


TRACEBACK = b'Traceback (most recent call last):\n  File "x.py", line 3, in <module>\nValueError: %d\n'


def test_a_traceback_waits_for_the_exit_report_of_the_job_and_is_shown_if_its_rank_goes_on() -> None:
    now, errors = [100.0], io.BytesIO()
    printer = Printer(3, io.BytesIO(), errors, reports_failures=True, clock=lambda: now[0])
    assert printer.last_words is not None
    printer.show(0, "stderr", b"before\n" + TRACEBACK % 7)
    printer.show_late()
    assert errors.getvalue() == b"[0] before\n"
    now[0] += 6
    printer.show_late()
    assert errors.getvalue().endswith(b"[0] ValueError: 7\n"), "it was only logged"
    shown = errors.getvalue()
    for rank in (0, 1):
        printer.show(rank, "stderr", TRACEBACK % rank)
    printer.show(2, "stderr", b"hvkeras: rank 2 on vm ends because rank 1 on vm (pid 3) exited with code 1\n")
    printer.last_words.job_ends = True
    now[0] += 60
    printer.show_late()
    lines, alike = printer.last_words.take(1)
    assert b"\n".join(lines) + b"\n" == TRACEBACK % 1
    assert alike == [0]
    printer.finish()
    assert errors.getvalue() == shown


def test_an_exit_report_is_that_of_the_job_and_what_differs_is_shown() -> None:
    errors = io.BytesIO()
    printer = Printer(3, io.BytesIO(), errors, reports_failures=True)
    assert printer.last_words is not None
    report = b"hvkeras: rank 1 on vm (pid 3) failed; the job ends on all ranks\n" + TRACEBACK % 1
    printer.show(1, "stderr", b"Traceback (most recent call last):\nKeyError: 'caught'\n" + report)
    printer.show(0, "stderr", b"hvkeras: rank 0 on vm failed in the same way as rank 1 on vm\n")
    printer.show(2, "stderr", b"Traceback (most recent call last):\nOSError: another\n")
    assert printer.last_words.take(1) == ([], [0])
    printer.finish()
    assert errors.getvalue() == (b"[1] Traceback (most recent call last):\n[1] KeyError: 'caught'\n"
                                 b"[2] Traceback (most recent call last):\n[2] OSError: another\n")


def test_ranks_that_failed_alike_are_named_and_the_hint_is_last() -> None:
    trace = "Traceback ...\nhvkeras.errors.UsageError: x must be y. Received: x=1.\nHINT: pass y.\n"
    cause = Cause(CauseKind.EXCEPTION, 1, "node1", 7, "failed with hvkeras.errors.UsageError: x", trace)
    report = exit_report(cause, {1: 1}, "", failed_alike=[0, 2, 3, 4, 5])
    assert report.splitlines()[0] == (
        "hvkeras run: rank 1 on node1 (pid 7) failed; so did ranks 0, 2 to 5, in the same way")
    assert report.splitlines()[-1] == "HINT: pass y."
    assert root_cause(report, 1) == (
        "rank 1 on node1 failed with hvkeras.errors.UsageError: x must be y. Received: x=1. HINT: pass y.")


def test_a_killed_ranks_cause_names_memory() -> None:
    report = exit_report(KILLED, {1: -9}, "")
    assert report.splitlines()[0] == "hvkeras run: rank 1 on node1 (pid 7) was killed by SIGKILL."
    assert report.splitlines()[1].startswith("HINT: the kernel kills processes when memory runs out")

"""`hvkeras.run`: functions on several processes, from Python."""

from __future__ import annotations

import inspect
import io
import linecache
import os
import pickle
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hvkeras as hvd
from hvkeras.launcher.calls import loaded_call, pickled_call
from launch.notebook import outputs


def rank_and() -> Callable[..., tuple[Any, ...]]:
    """A function that is pickled by value, as in scripts and notebooks, because ranks cannot import this module."""

    def answer(*values: Any, **named: Any) -> tuple[Any, ...]:
        print(f"hello from {os.environ['HVKERAS_RUN_RANK']}")
        return int(os.environ["HVKERAS_RUN_RANK"]), os.getpid(), values, named

    return answer


def test_every_rank_returns_its_result(capsys: pytest.CaptureFixture[str]) -> None:
    offset, answer = 10, rank_and()
    found = hvd.run(lambda *values, **named: (answer(*values, **named), offset), args=(1, [2]), kwargs={"three": 3},
                    np=3)
    assert [(rank, values, named) for (rank, _, values, named), _ in found] == [
        (rank, (1, [2]), {"three": 3}) for rank in range(3)]
    assert len({pid for (_, pid, _, _), _ in found} - {os.getpid()}) == 3
    assert [added for _, added in found] == [10] * 3
    printed = capsys.readouterr().out.splitlines()
    assert sorted(printed) == [f"[{rank}] hello from {rank}" for rank in range(3)]


def test_modules_are_found_where_the_caller_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "of_the_user.py").write_text("def word():\n    return 'found'\n")
    (tmp_path / "hvkeras").mkdir()
    (tmp_path / "hvkeras" / "__init__.py").write_text("raise RuntimeError('the current folder was searched')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    import of_the_user  # type: ignore[import-not-found]  # written above

    assert hvd.run(of_the_user.word, np=2) == ["found", "found"]


@pytest.mark.slow
def test_ranks_reduce() -> None:
    def total() -> float:
        import hvkeras as hvd

        hvd.init("native")
        return float(hvd.allreduce(float(hvd.rank() + 1), op=hvd.Sum))

    assert hvd.run(total, num_proc=2) == [3.0, 3.0]


def test_a_failure_is_raised_with_the_ranks_last_lines() -> None:
    def fail() -> None:
        if os.environ["HVKERAS_RUN_RANK"] == "1":
            raise ArithmeticError("of rank 1")

    text = r"The function must succeed on every rank, but rank 1 on \S+ failed with ArithmeticError: of rank 1"
    with pytest.raises(hvd.PeerError, match=f"{text}$"):
        hvd.run(fail, np=2)


def test_all_are_started_again_where_that_is_allowed(tmp_path: Path) -> None:
    def stumble() -> str:
        if not (tmp_path / "marker").exists():
            (tmp_path / "marker").touch()
            raise ArithmeticError("once")
        return "done"

    assert hvd.run(stumble, reset_limit=1) == ["done"]


@pytest.mark.slow
def test_an_elastic_job_goes_on_without_a_process_that_was_killed(tmp_path: Path) -> None:
    def train() -> tuple[int, int]:
        import signal

        import hvkeras as hvd

        hvd.init("native")
        state: Any = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0)

        @hvd.elastic.run
        def steps(state: Any) -> None:
            while state.step < 20:
                state.step += int(hvd.allreduce(1.0, op=hvd.Average))
                state.commit()
                if state.step == 10 and hvd.rank() == 1 and not (tmp_path / "killed").exists():
                    (tmp_path / "killed").touch()
                    os.kill(os.getpid(), signal.SIGKILL)

        steps(state)
        return state.step, os.getpid()

    found = hvd.run(train, np=2, min_np=1, max_np=2)
    assert [step for step, _ in found] == [20] * len(found)
    assert 1 <= len(found) <= 2  # the replacement of the killed process may be too late
    assert (tmp_path / "killed").exists()


@pytest.mark.parametrize(("call", "kind", "words"), [
    ({"func": threading.get_ident, "args": (threading.Lock(),)}, hvd.UsageError, "must be picklable"),
    ({"func": 3}, hvd.UsageError, "takes a function"),
    ({"func": print, "np": 0}, hvd.UsageError, "at least 1"),
    ({"func": print, "np": 2, "min_np": 3}, hvd.PeerError, "1 <= --min-np <= -np"),
    ({"func": print, "mpi_args": "--x"}, hvd.UnsupportedError, "start it by mpirun"),
])
def test_misuse(call: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        hvd.run(**call)


def test_what_cannot_be_pickled_is_no_result() -> None:
    with pytest.raises(hvd.PeerError, match="What the function returns must be picklable"):
        hvd.run(threading.Lock)


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


class Cell(io.StringIO):
    """A stream like that of a notebook's cell."""

    __module__ = "ipykernel.iostream"


@pytest.mark.parametrize(("screen", "wipe"), [(Screen, "\r\x1b[K"), (Cell, "\r" + 99 * " " + "\r")],
                         ids=["terminal", "notebook"])
def test_a_progress_bar_moves(screen: type[io.StringIO], wipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def progress() -> bool:
        import sys
        import time

        print("50 %", end="", flush=True)
        time.sleep(0.5)  # otherwise the launcher might read both at once
        print("\r100 %", flush=True)
        return sys.stdout.isatty()

    monkeypatch.setattr(sys, "stdout", shown := screen())
    assert hvd.run(progress, np=2) == [True, False]  # rank 0 draws a bar
    text = shown.getvalue()
    assert "[0] 50 %" in text and "[0] 100 %\n" in text and "[1] 100 %\n" in text
    assert "[1] 50 %" not in text and wipe in text


def test_output_goes_to_files_too_and_any_python_may_run_it(tmp_path: Path) -> None:
    assert len(hvd.run(rank_and(), np=1, output_filename=str(tmp_path / "logs"), executable=sys.executable)) == 1
    assert (tmp_path / "logs" / "rank.0" / "stdout").read_text() == "hello from 0\n"
    assert os.listdir(tmp_path) == ["logs"]


def test_a_function_brings_its_source_along(monkeypatch: pytest.MonkeyPatch) -> None:
    source, defined = "def double(x):\n    return [2 * each for each in x]\n", {"__name__": "__main__"}
    monkeypatch.setitem(linecache.cache, "<cell 7>", (len(source), None, source.splitlines(True), "<cell 7>"))
    exec(compile(source, "<cell 7>", "exec"), defined)
    call = pickled_call(defined["double"], ([1, 2],), None)
    linecache.clearcache()
    assert loaded_call(call)() == [2, 4]
    function, *_ = pickle.loads(call)
    assert inspect.getsource(function) == source


HELPER = """
def rounded(x):
    if x > 3:  # of a tensor: AutoGraph needs the source
        x = -x
    return x
"""
CELL = """
def train():
    import tensorflow as tf
    import hvkeras as hvd
    hvd.init("native")
    numbers = [int(x) for x in tf.data.Dataset.range(5).map(rounded)]
    if hvd.rank() == 1:
        raise ValueError(f"no images in {numbers}")
    hvd.allreduce(1.0)

hvd.run(train, np=2)"""


@pytest.mark.slow
def test_a_notebook_names_hvd_run_and_the_rank_that_failed(tmp_path: Path) -> None:
    [said, _], _, [shown, _] = outputs(tmp_path, "import hvkeras as hvd\nhvd.init()", HELPER, CELL)
    text = "".join(output["data"] for output in said)
    assert "HINT: hvd.run(train, np=2) runs a function that calls hvd.init() on two" in text
    printed = "".join(output["data"] for output in shown if output["kind"] == "stderr")
    assert re.search(r"hvkeras run: rank 1 on \S+ \(pid \d+\) failed\nTraceback \(most recent call last\):\n"
                     r"  File .*, in train\n    raise .*\nValueError: no images in \[0, 1, 2, 3, -4\]\n$", printed)
    assert "AutoGraph" not in printed
    [error] = [output["data"] for output in shown if output["kind"] == "error"]
    assert error.splitlines()[-1].startswith(
        "hvkeras.errors.PeerError: The function must succeed on every rank, but rank 1 on ")
    assert error.endswith(" failed with ValueError: no images in [0, 1, 2, 3, -4]")
    assert "functions.py" not in error

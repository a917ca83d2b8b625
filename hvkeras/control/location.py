"""Location of this process: its phase and step, and the frames of its stack in user code."""

from __future__ import annotations

import linecache
import os
import sys
import threading
from types import FrameType

from hvkeras.control import activity, stalls
from hvkeras.frames import folders_of, frame_text, innermost, is_library, short_frame_text
from hvkeras.host.console import say

MAX_LINES = 12  # of a printed stack
MAX_THREADS = 3  # data-producing threads to print
# The files in which TensorFlow calls Python for data, and Keras fills its queues.
_DATA_FILES = ("script_ops.py", "py_dataset_adapter.py", "data_utils.py")


def call_site() -> str:
    """Return the line of user code from which this thread is being called; "" if there is none.

    In eager mode, this takes a few microseconds.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            return short_frame_text(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return ""


def here(steps: str) -> tuple[activity.Doing, str]:
    """Return what this rank is doing, and a description of it with the line of user code.

    Args:
        steps: A description of what a custom training loop has done so far.
    """
    doing = activity.doing(steps)
    producers = _data_threads() if doing.lacks_batch else []
    line = _user_line(producers[0] if producers else activity.frames_of(activity.thread()))
    return doing, doing.text + (f", at {line}" if line else "")


def report(rank: int, host: str, steps: str, still: float, stall: str | None) -> str:
    """Print this rank's location and stack; called from a thread other than the reported one.

    Args:
        steps: A description of what a custom training loop has done so far.
        still: Seconds since it last made progress.
        stall: The reason for the report if the rank is late; None if it was requested.

    Returns:
        A description of what it is doing.
    """
    _, text = here(steps)
    state = f"has made no progress for {still:.0f} s" if still >= 1.0 else "is here"
    line = f"rank {rank} on {host} (pid {os.getpid()}) {state}: {text}"
    lines = _lines(activity.frames_of(activity.thread()))
    for producer in _data_threads():
        lines += ["  a thread that produces data:", *_lines(producer)]
    say(f"{line}; the innermost call last:\n" + "\n".join(lines))
    if stall is not None:
        stalls.notify(stall if text in stall else "; ".join(filter(None, (stall, line))))
    return text


def blocking_exit() -> tuple[str, list[str]]:
    """Return what keeps this process from exiting: the line of a non-daemon thread, and all such threads' stacks.

    At exit, Python first waits for non-daemon threads, and then runs the `atexit` functions.
    """
    main = threading.main_thread()
    others = [thread for thread in threading.enumerate() if not thread.daemon and thread is not main]
    stacks = [(thread.name, activity.frames_of(thread.ident or 0)) for thread in (*others, main)]
    stacks = [(name, frames) for name, frames in stacks if frames]
    lines = [line for name, frames in stacks for line in (f"  thread {name}:", *_lines(frames))]
    own = [(name, _user_line(frames)) for name, frames in stacks]
    name, where = next(((name, where) for name, where in own if where), own[0] if own else ("", ""))
    frames = stacks[0][1] if stacks else []
    return f"thread {name} at {where or (_line(frames[0]).strip() if frames else '?')}", lines


def outside_tensorflow() -> str:
    """Return the main thread's location if it is outside TensorFlow, and so in no TensorFlow collective; else ""."""
    frames = activity.frames_of(threading.main_thread().ident or 0)
    inside = not frames or frames[0].f_code.co_filename.startswith(folders_of("tensorflow"))
    return "" if inside else _line(frames[0]).strip()


def _lines(frames: list[FrameType]) -> list[str]:
    own = [frame for frame in reversed(frames[1:]) if not is_library(frame.f_code.co_filename)][-MAX_LINES + 1:]
    return [_line(frame) for frame in [*own, *frames[:1]]]


def _line(frame: FrameType) -> str:
    path = frame.f_code.co_filename
    text = linecache.getline(path, frame.f_lineno).strip() or "?"
    return f"  {frame_text(path, frame.f_lineno, frame.f_code.co_name)}: {text}"


def _user_line(frames: list[FrameType]) -> str:
    return innermost((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) for frame in frames)


def _data_threads() -> list[list[FrameType]]:
    """Return the stacks of threads in which user code produces data."""
    mine = (threading.get_ident(), activity.thread())
    stacks = [activity.frames_of(ident) for ident in activity.all_threads() if ident not in mine]
    return [frames for frames in stacks
            if any(frame.f_code.co_filename.endswith(_DATA_FILES) for frame in frames)
            and any(not is_library(frame.f_code.co_filename) for frame in frames)][:MAX_THREADS]

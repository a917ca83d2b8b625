"""The location of this process: its phase and step, and the part of its stack that is the user's own code."""

from __future__ import annotations

import linecache
import os
import threading
from types import FrameType

from hvkeras.control import activity, stall_listeners
from hvkeras.control.user_code import folders_of, innermost, is_library, place
from hvkeras.host.console import say

MAX_LINES = 12  # lines of a stack
MAX_THREADS = 3  # threads that produce data
# Files in which TensorFlow calls Python for data, and Keras fills its queues.
_MAKES_DATA = ("script_ops.py", "py_dataset_adapter.py", "data_utils.py")


def here(steps: str) -> tuple[activity.Doing, str]:
    """What this rank is doing, and a description of it with the line of the user's code.

    Args:
        steps: A description of what a custom training loop has done so far.
    """
    doing = activity.doing(steps)
    makers = _data_makers() if doing.lacks_batch else []
    line = _place(makers[0] if makers else activity.frames_of(activity.thread()))
    return doing, doing.text + (f", at {line}" if line else "")


def report(rank: int, host: str, steps: str, still: float, stall: str | None) -> str:
    """Prints this rank's location and stack; called from a thread other than the one reported.

    Args:
        rank: This rank.
        host: Its host.
        steps: A description of what a custom training loop has done so far.
        still: Seconds since it last made progress.
        stall: The reason for the report if the rank is late; None if somebody asked.

    Returns:
        A description of what it is doing.
    """
    _, text = here(steps)
    moved = f"has not moved for {still:.0f} s" if still >= 1.0 else "is here"
    line = f"rank {rank} on {host} (pid {os.getpid()}) {moved}: {text}"
    lines = _lines(activity.frames_of(activity.thread()))
    for maker in _data_makers():
        lines += ["  a thread that makes data:", *_lines(maker)]
    say(f"{line}; the innermost call last:\n" + "\n".join(lines))
    if stall is not None:
        stall_listeners.note(stall if text in stall else "; ".join(filter(None, (stall, line))))
    return text


def blocking_exit() -> tuple[str, list[str]]:
    """What keeps this process from exiting: the line of a non-daemon thread, and the stacks of all such threads.

    At exit, Python first waits for non-daemon threads, and then runs the `atexit` functions.
    """
    main = threading.main_thread()
    others = [thread for thread in threading.enumerate() if not thread.daemon and thread is not main]
    stacks = [(thread.name, activity.frames_of(thread.ident or 0)) for thread in (*others, main)]
    stacks = [(name, frames) for name, frames in stacks if frames]
    lines = [line for name, frames in stacks for line in (f"  thread {name}:", *_lines(frames))]
    own = [(name, _place(frames)) for name, frames in stacks]
    name, where = next(((name, where) for name, where in own if where), own[0] if own else ("", ""))
    frames = stacks[0][1] if stacks else []
    return f"thread {name} at {where or (_line(frames[0]).strip() if frames else '?')}", lines


def outside_tensorflow() -> str:
    """The main thread's location if it is outside TensorFlow, and so waits for no TensorFlow collective; else ""."""
    frames = activity.frames_of(threading.main_thread().ident or 0)
    inside = not frames or frames[0].f_code.co_filename.startswith(folders_of("tensorflow"))
    return "" if inside else _line(frames[0]).strip()


def _lines(frames: list[FrameType]) -> list[str]:
    """A stack, one line per frame: the user's code, and the innermost call."""
    own = [frame for frame in reversed(frames[1:]) if not is_library(frame.f_code.co_filename)][-MAX_LINES + 1:]
    return [_line(frame) for frame in [*own, *frames[:1]]]


def _line(frame: FrameType) -> str:
    path = frame.f_code.co_filename
    text = linecache.getline(path, frame.f_lineno).strip() or "?"
    return f"  {place(path, frame.f_lineno, frame.f_code.co_name)}: {text}"


def _place(frames: list[FrameType]) -> str:
    return innermost((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) for frame in frames)


def _data_makers() -> list[list[FrameType]]:
    """The stacks of threads in which the user's code produces data."""
    mine = (threading.get_ident(), activity.thread())
    stacks = [activity.frames_of(ident) for ident in activity.all_threads() if ident not in mine]
    return [frames for frames in stacks
            if any(frame.f_code.co_filename.endswith(_MAKES_DATA) for frame in frames)
            and any(not is_library(frame.f_code.co_filename) for frame in frames)][:MAX_THREADS]

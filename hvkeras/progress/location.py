"""Where this process is: its phase and step, and its stack, as far as it is the user's own code."""

from __future__ import annotations

import linecache
import os
import threading
from types import FrameType

from hvkeras.host.console import say
from hvkeras.progress import activity, stalls
from hvkeras.progress.user_code import folders_of, innermost, is_library, place

MOST = 12  # lines of a stack
MOST_THREADS = 3  # of those that make data
# Where TensorFlow calls Python for data, and Keras fills its queues.
_MAKES_DATA = ("script_ops.py", "py_dataset_adapter.py", "data_utils.py")


def here(steps: str) -> tuple[activity.Doing, str]:
    """What this rank is doing, and the same in words, with the line of the user's code.

    Args:
        steps: What a loop of one's own has done so far, in words.
    """
    doing = activity.doing(steps)
    makers = _data_makers() if doing.lacks_batch else []
    line = _place(makers[0] if makers else activity.frames_of(activity.thread()))
    return doing, doing.text + (f", at {line}" if line else "")


def tell(rank: int, host: str, steps: str, still: float, stall: str | None) -> str:
    """Prints where this rank is; from another thread than the one that is told of.

    Args:
        rank: This rank.
        host: Its host.
        steps: What a loop of one's own has done so far, in words.
        still: For how many seconds it has not moved.
        stall: Why it is told, if because it is late; None if somebody asked.

    Returns:
        What it is doing, in words.
    """
    _, text = here(steps)
    moved = f"has not moved for {still:.0f} s" if still >= 1.0 else "is here"
    line = f"rank {rank} on {host} (pid {os.getpid()}) {moved}: {text}"
    lines = _lines(activity.frames_of(activity.thread()))
    for maker in _data_makers():
        lines += ["  a thread that makes data:", *_lines(maker)]
    say(f"{line}; the innermost call last:\n" + "\n".join(lines))
    if stall is not None:
        stalls.note(stall if text in stall else "; ".join(filter(None, (stall, line))))
    return text


def keeping() -> tuple[str, list[str]]:
    """What keeps this process from ending: the line of a thread that is no daemon, and the stacks of all such.

    At exit Python waits for threads that are no daemons first, and runs the functions of `atexit` then.
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
    """Where the main thread is, if it is in no call of TensorFlow's, and so waits for no collective of its; else ""."""
    frames = activity.frames_of(threading.main_thread().ident or 0)
    inside = not frames or frames[0].f_code.co_filename.startswith(folders_of("tensorflow"))
    return "" if inside else _line(frames[0]).strip()


def _lines(frames: list[FrameType]) -> list[str]:
    """A stack, a line a frame: the user's code, and the call in which it is."""
    own = [frame for frame in reversed(frames[1:]) if not is_library(frame.f_code.co_filename)][-MOST + 1:]
    return [_line(frame) for frame in [*own, *frames[:1]]]


def _line(frame: FrameType) -> str:
    path = frame.f_code.co_filename
    text = linecache.getline(path, frame.f_lineno).strip() or "?"
    return f"  {place(path, frame.f_lineno, frame.f_code.co_name)}: {text}"


def _place(frames: list[FrameType]) -> str:
    return innermost((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name) for frame in frames)


def _data_makers() -> list[list[FrameType]]:
    """The stacks of threads in which the user's code makes data."""
    mine = (threading.get_ident(), activity.thread())
    stacks = [activity.frames_of(ident) for ident in activity.all_threads() if ident not in mine]
    return [frames for frames in stacks
            if any(frame.f_code.co_filename.endswith(_MAKES_DATA) for frame in frames)
            and any(not is_library(frame.f_code.co_filename) for frame in frames)][:MOST_THREADS]

"""Where this process is: the stack of its main thread, as far as it is the user's own code."""

from __future__ import annotations

import os
import sys
import threading
import traceback

from hvkeras.output import say
from hvkeras.user_code import is_library, place

MOST = 12  # lines of a stack
_TENSORFLOW = f"{os.sep}site-packages{os.sep}tensorflow{os.sep}"


def tell(rank: int, host: str) -> None:
    """Prints where the main thread of this rank is; from another thread, whatever the main one waits for.

    Args:
        rank: This rank.
        host: Its host.
    """
    say(f"rank {rank} on {host} (pid {os.getpid()}) is here, the innermost call last:\n" + "\n".join(stack()))


def stack() -> list[str]:
    """The main thread's stack, a line a frame: the user's code, and the call in which it is."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = traceback.extract_stack(frame) if frame is not None else []
    own = [one for one in frames[:-1] if not is_library(one.filename)][-MOST + 1:]
    return [f"  {place(one.filename, one.lineno, one.name)}: {one.line or '?'}" for one in [*own, *frames[-1:]]]


def outside_tensorflow() -> str:
    """Where the main thread is, if it is in no call of TensorFlow's, and so waits for no collective of its; else ""."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    inside = frame is None or _TENSORFLOW in frame.f_code.co_filename
    return "" if inside else stack()[-1].strip()

"""Exceptions of hvkeras (usage errors, machine problems, failures of peers), and how uncaught ones are printed."""

from __future__ import annotations

import itertools
import os
import re
import sys
import textwrap
import traceback
from importlib.util import find_spec
from types import FrameType, TracebackType
from typing import Any

from hvkeras.frames import innermost_of_user

# `hvkeras.settings` has a row for it; it is read here, as errors must print even if another setting is invalid.
FULL_TRACEBACK = "HVKERAS_FULL_TRACEBACK"
# Top-level modules whose frames are no frames of the user: in all tracebacks, and in those of hvkeras's own errors.
_OURS = frozenset({"hvkeras", "wrapt", "lazy_loader", "runpy"})
_LIBRARIES = frozenset({"keras", "tf_keras", "tensorflow", "horovod", "keras_tuner", "concurrent", "asyncio"})
# Parts of the names of files whose frames are no frames of the user, in the same order.
_OUR_FILES = (".hvkeras-run-",)
_GENERATED_FILES = ("__autograph_generated_file", "<frozen ")
_HINT = " HINT: "
_ALIAS = os.path.join(os.path.dirname(__file__), "horovod", "site")  # --as-horovod adds it to PYTHONPATH
_COMMANDS = ("hvkeras", "horovodrun")  # files that pip makes from the entry points
_FRAMEWORKS = frozenset({"keras", "tf_keras", "tensorflow"})
# The first lines of messages: of AutoGraph (frames follow, and then the reason), of Keras (the reason, and then the
# arguments) and of graphs (the node's origin, and then the reason).
_AUTOGRAPH_ERROR = "in user code:"
_KERAS_ERROR = "Exception encountered when calling "
_GRAPH_ERROR = "Graph execution error:"
_FRAME = re.compile(r'^\s*File "(.+)", line (\d+), in (.*?)(?:  \*{1,2})?$', re.MULTILINE)
_AUTOGRAPH_FRAMES = re.compile(r'(?:\s*File ".+", line \d+, in .*\n(?:    .*\n)?)*')
_KERAS_ARGUMENTS = re.compile(r"^(?:Arguments|Call arguments) received by ", re.MULTILINE)
_GRAPH_ORIGIN = re.compile(r'\s*File "|    |<stack traces unavailable>|Node: |Detected at |\s*\d+ root error')
_MODULE = re.compile(r"^(?:keras|tf_keras|tensorflow)\..*\.")  # before the name of an exception
_MARKUP = re.compile(r"\x1b\[\d*m|\{\{function_node \S+\}\} ")  # colors, and names of functions of TensorFlow
_OWN_NODE = "{{node Hvkeras"  # in TensorFlow's errors, of an operation of hvkeras
INSTALL_TENSORFLOW = ("pip install 'tensorflow>=2.16,<2.22', or tensorflow-cpu, or tensorflow[and-cuda] for NVIDIA's"
                      " GPUs")


class HorovodInternalError(RuntimeError):
    """Horovod's exception for a collective that failed because of another rank; caught by elastic scripts."""


class HostsUpdatedInterrupt(RuntimeError):  # noqa: N818 - Horovod's name
    """Horovod's exception for the interruption of training because hosts were added or removed.

    Args:
        skip_sync: Whether the state need not be synchronised afterwards.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("hosts were added or removed")
        self.skip_sync = skip_sync


class HorovodVersionMismatchError(ImportError):
    """Horovod's exception for a framework of another version than in its build; hvkeras never raises it.

    Args:
        name: The framework.
        version: Version of the framework.
        installed_version: Version that Horovod was built with.
    """

    def __init__(self, name: str, version: str, installed_version: str) -> None:
        super().__init__(f"{name} {version} is not the {name} {installed_version} that Horovod was built with",
                         name=name)
        self.version: str = version
        self.installed_version: str = installed_version


class HvkerasError(RuntimeError):
    """Base class of the exceptions of hvkeras."""

    # Otherwise AutoGraph would raise another class, with the message within a traceback of generated code.
    ag_pass_through = True
    # Whether a job that failed with this error may succeed after a restart.
    may_pass = True

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython prints for this exception, in a notebook for example."""
        return format_error(self).splitlines()


class UsageError(HvkerasError, ValueError):
    """Invalid use of hvkeras: a wrong argument, name or order of calls."""


class NotInitializedError(UsageError):
    """A function was called before `init()` or after `shutdown()`."""


class CommitError(UsageError):
    """The commit to resume from is damaged, or other users may have written it; a restart would not help."""

    may_pass = False


class DivergenceError(UsageError):
    """The ranks train different models, or the weights of their models have diverged."""


class UnsupportedError(HvkerasError, NotImplementedError):
    """A backend does not support an operation; the message names both, and an alternative."""


class MachineError(HvkerasError):
    """A requirement of the job is missing on this machine: a package, a port, a variable of the launcher."""


class NotInstalledError(MachineError, ModuleNotFoundError):
    """A package that hvkeras needs is missing."""


class PeerError(HvkerasError, HorovodInternalError):
    """Another rank is missing, has failed, or does not match this one."""


def explain(must_hold: str, hint: str = "", **received: object) -> str:
    """Format a message as `<what must hold>. Received: name=value. HINT: <fix>.`, the form of all our errors.

    Args:
        must_hold: The violated condition, without a full stop.
        hint: The fix, without a full stop; omitted if empty.
        **received: The invalid values by name.

    Returns:
        The message, one line.
    """
    parts = [f"{must_hold}."]
    if received:
        parts.append("Received: " + ", ".join(f"{name}={value!r}" for name, value in received.items()) + ".")
    if hint:
        parts.append(f"HINT: {hint}.")
    return " ".join(parts)


def format_error(error: BaseException, trace: TracebackType | None = None) -> str:
    """Format an exception with its traceback, as Python does, but without frames that are not the user's.

    Omitted are the frames of hvkeras and, in tracebacks of its own errors, those of Keras and TensorFlow, and the
    exceptions that the error was raised from. The hint is on a line of its own, the last one. The last line of an error
    of Keras or TensorFlow is its `summary`. If an exception that is not of hvkeras was raised by hvkeras itself, all
    frames are kept, as for `HVKERAS_FULL_TRACEBACK=1`.

    Args:
        error: The exception.
        trace: Its traceback; by default, `error.__traceback__`.

    Returns:
        The lines, each with its end.
    """
    trace = trace or error.__traceback__
    if shows_all_frames() or _is_ours_alone(error, trace):
        return "".join(traceback.format_exception(type(error), error, trace))
    formatted = traceback.TracebackException(type(error), error, _of_user(error, trace))
    if _is_own(error):
        formatted.__cause__ = formatted.__context__ = None
    else:
        _omit_frames(formatted, error)
    lines = list(formatted.format())
    if not isinstance(error, HvkerasError) and _is_own(error):
        lines = [*lines[: 1 + len(formatted.stack)], f"{summary(error)}\n"]
    if not formatted.stack and lines[0].startswith("Traceback"):
        del lines[0]  # the heading of a traceback without frames
    return with_hint_last(_with_summary_last("".join(lines), error)) + _hint_about(error)


def _with_summary_last(text: str, error: BaseException) -> str:
    """Let the last line of a formatted exception be its summary, if that says more."""
    told, lines = summary(error), text.rstrip().splitlines()
    if _is_own(error) or told in {_MODULE.sub("", line) for line in lines}:
        return text
    if _MODULE.sub("", lines[-1].strip()) == _reason(error)[0]:
        del lines[-1]
    return "\n".join([*lines, told, ""])


def _hint_about(error: BaseException) -> str:
    """Return a line with the fix for an exception of Python's; "" if there is none."""
    if _HINT.strip() in str(error):
        return ""
    if isinstance(error, ModuleNotFoundError) and str(error.name).partition(".")[0] == "horovod":
        if _ALIAS in os.environ.get("PYTHONPATH", "").split(os.pathsep):
            return ("HINT: start Python without -E, -I and -S, which keep it from what --as-horovod has added to its"
                    " PYTHONPATH.\n")
        return "HINT: import hvkeras as hvd instead, or start the script with --as-horovod, unchanged.\n"
    if isinstance(error, OSError) and "unable to lock file" in str(error):  # of HDF5
        return ("HINT: let one rank write the file, as hvd.callbacks.BackupAndRestore and hvd.callbacks.ModelCheckpoint"
                " do.\n")
    return ""


def summary(error: BaseException) -> str:
    """Return an exception as one line: its reason and, if it came through Keras or TensorFlow, the user's line.

    Their messages have many lines: AutoGraph, Keras and graphs put locations and arguments around the reason.
    """
    reason, stack = _reason(error)
    if _is_own(error):
        return reason
    place = innermost_of_user(stack[::-1]) or _place(error.__traceback__, anywhere=bool(stack))
    return f"{reason.removesuffix('.')}, at {place}" if place else reason


def _reason(error: BaseException) -> tuple[str, list[tuple[str, int, str]]]:
    """Return the reason of an exception in one line, and the stack in its message, the innermost frame last."""
    parts = itertools.dropwhile(lambda part: part[0].isspace(), traceback.format_exception_only(type(error), error))
    kind, colon, message = _MARKUP.sub("", "".join(parts)).strip().partition(": ")
    stack: list[Any] = []
    while True:
        first, _, rest = message.lstrip().partition("\n")
        if first.startswith(_AUTOGRAPH_ERROR):
            rest = textwrap.dedent(rest)
            frames = _AUTOGRAPH_FRAMES.match(rest)
            kind, colon, message = rest[frames.end() if frames else 0 :].strip().partition(": ")
            stack = _FRAME.findall(frames[0]) if frames else stack
        elif first.startswith(_KERAS_ERROR):
            message = _KERAS_ARGUMENTS.split(rest)[0]
            message = message.partition("Error encountered:\n")[2] or message
        elif first == _GRAPH_ERROR:
            stack, message = _FRAME.findall(rest) or stack, _graph_reason(rest)
        else:
            break
    stack = stack or _FRAME.findall(message)
    reason = re.split(r"\s\[Op:", f"{_MODULE.sub('', kind)}{colon}{first}")[0]
    return reason, [(file, int(line), function) for file, line, function in stack]


def _graph_reason(text: str) -> str:
    """Return the reason in the message of a graph's error, which follows the origin of its nodes."""
    lines = re.split(r"\nTraceback \(most recent|\n\s*\[\[\{\{", text)[0].splitlines()
    origin = max((number for number, line in enumerate(lines) if _GRAPH_ORIGIN.match(line)), default=-1)
    reason = next((line for line in lines[origin + 1 :] if line.strip()), "")
    return re.sub(r"^\s*(\(0\) [A-Z_]+:\s+)?", "", reason)  # "(0)": the first of several errors


def _place(trace: TracebackType | None, anywhere: bool) -> str:
    """Return the user's innermost line in the traceback of an exception that came through Keras or TensorFlow.

    Args:
        anywhere: Whether it may have come from anywhere.
    """
    stack = []
    while trace is not None:
        code = trace.tb_frame.f_code
        anywhere = anywhere or _module_of(trace.tb_frame) in _FRAMEWORKS
        stack.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    named = [frame for frame in stack[::-1] if not any(part in frame[0] for part in _OUR_FILES + _GENERATED_FILES)]
    return innermost_of_user(named) if anywhere else ""


def with_callers(error: BaseException) -> TracebackType | None:
    """Return the traceback of an exception that is being handled, from the program's first frame on."""
    trace = error.__traceback__
    frame = trace.tb_frame.f_back if trace is not None else None
    while frame is not None:
        trace, frame = TracebackType(trace, frame, frame.f_lasti, frame.f_lineno), frame.f_back
    return trace


def with_hint_last(text: str) -> str:
    """Put the last hint of a text on a line of its own."""
    before, hint, after = text.rpartition(_HINT)
    return f"{before}\n{hint.lstrip()}{after}" if hint else text


def shows_all_frames() -> bool:
    """Return whether tracebacks contain all frames: `HVKERAS_FULL_TRACEBACK=1`."""
    return os.environ.get(FULL_TRACEBACK, "").strip().lower() in ("1", "true", "yes", "on")


def print_errors_briefly() -> None:
    """Print uncaught exceptions of this process by `format_error`, unless the program has a hook of its own."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = print_error


def print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an uncaught exception, as `sys.excepthook`."""
    if not (_is_own(error) or _hint_about(error)) and (
            _is_ours_alone(error, trace) or trace is _of_user(error, trace)):
        sys.__excepthook__(kind, error, trace)
        return
    sys.stderr.write(format_error(error, trace))
    sys.stderr.flush()


def _omit_frames(formatted: traceback.TracebackException, error: BaseException) -> None:
    """Omit frames from the exceptions that an exception was raised from, or while they were handled."""
    for inner, cause in ((formatted.__cause__, error.__cause__), (formatted.__context__, error.__context__)):
        if inner is not None and cause is not None:
            inner.stack = traceback.TracebackException(type(cause), cause, _of_user(cause, cause.__traceback__)).stack
            _omit_frames(inner, cause)


def _of_user(error: BaseException, trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the frames that are not the user's; the same object if there are none of them."""
    if trace is None:
        return None
    rest = _of_user(error, trace.tb_next)
    omitted, files = (_OURS | _LIBRARIES, _OUR_FILES + _GENERATED_FILES) if _is_own(error) else (_OURS, _OUR_FILES)
    file = trace.tb_frame.f_code.co_filename
    if _module_of(trace.tb_frame) in omitted or any(part in file for part in files):
        return rest
    if rest is trace.tb_next:
        return trace
    return TracebackType(rest, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)


def _is_own(error: BaseException) -> bool:
    """Return whether hvkeras has found the error, be it in an operation, so that TensorFlow raises it."""
    return isinstance(error, HvkerasError) or _OWN_NODE in str(error)


def _is_ours_alone(error: BaseException, trace: TracebackType | None) -> bool:
    """Return whether an exception of another kind was raised by hvkeras itself, which then has an error."""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and not _is_own(error) and _module_of(trace.tb_frame) == "hvkeras"


def _module_of(frame: FrameType) -> str:
    """Return the top-level module of a frame; for one that runs as `__main__`, by the name that it was found by."""
    name: Any = frame.f_globals.get("__name__", "")
    if name == "__main__":
        command = os.path.basename(frame.f_code.co_filename)
        name = "hvkeras" if command in _COMMANDS else getattr(frame.f_globals.get("__spec__"), "name", name)
    return str(name).partition(".")[0]


def require_linux() -> None:
    """Check that this is Linux, whose interfaces hvkeras uses throughout.

    Raises:
        MachineError: It is another system.
    """
    if sys.platform != "linux":
        raise MachineError(explain("hvkeras runs on Linux", "use WSL 2 on Windows, and a Linux container or virtual"
                                   " machine on macOS", platform=sys.platform))


def require_tensorflow() -> None:
    """Check that TensorFlow is installed, without importing it.

    Raises:
        NotInstalledError: TensorFlow is not installed.
    """
    if find_spec("tensorflow") is None:
        raise NotInstalledError(explain("TensorFlow must be installed where ranks run, and hvkeras leaves the choice"
                                        " of package to you", INSTALL_TENSORFLOW))

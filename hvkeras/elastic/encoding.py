"""Encoding of values as bytes: JSON for their structure, raw bytes for array elements, pickles for other objects.

Decoding tensors, numbers, text and containers of them executes no code. Only other objects are pickled.

A backend that cannot start again in a process, such as `tfdist`, restarts the program in the same process. The commits
are handed over in a file that has no name and no disk (memfd_create), which only this process can open.
"""

from __future__ import annotations

import json
import os
import pickle
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hvkeras.elastic.snapshot import Snapshot

MAGIC = b"hvkeras values 1\n"
_LENGTH, _SUM = 8, 4  # sizes in bytes of the little-endian header length, and of the CRC-32 at the end
_PLAIN = (type(None), bool, int, float, str)
_GROUPS: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}


def encode(value: Any) -> Iterator[Any]:
    """Encodes a value piece by piece, so that large arrays are not copied into one buffer.

    Args:
        value: Anything that can be pickled.

    Yields:
        Pieces of bytes; the last one is a checksum of the others.

    Raises:
        Exception: Whatever an object's own pickling raises.
    """
    parts: list[Any] = []
    tree = _tree(value, parts)
    header = json.dumps({"value": tree, "sizes": [len(part) for part in parts]}).encode()
    checksum = 0
    for piece in (MAGIC, len(header).to_bytes(_LENGTH, "little"), header, *parts):
        checksum = zlib.crc32(piece, checksum)
        yield piece
    yield checksum.to_bytes(_SUM, "little")


def decode(data: bytes) -> Any:
    """Decodes the output of `encode`.

    Args:
        data: All pieces together.

    Returns:
        The value.

    Raises:
        ValueError: The data are damaged, or not the output of `encode`.
        Exception: Whatever an object's own unpickling raises.
    """
    if not data.startswith(MAGIC):
        raise ValueError("it does not begin as one that hvkeras wrote")
    whole = memoryview(data)
    if zlib.crc32(whole[:-_SUM]) != int.from_bytes(whole[-_SUM:], "little"):
        raise ValueError("its checksum is wrong")
    start = len(MAGIC) + _LENGTH
    end = start + int.from_bytes(whole[len(MAGIC) : start], "little")
    header = json.loads(bytes(whole[start:end]))
    parts = []
    for size in header["sizes"]:
        parts.append(whole[end : end + size])
        end += size
    return _value(header["value"], parts)


def _tree(value: Any, parts: list[Any]) -> Any:
    """Returns the part of a value that JSON can hold; appends the rest to `parts`."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in (list, Snapshot):
        return [_tree(each, parts) for each in (value if kind is list else value.arrays())]
    if kind in _GROUPS:
        return {_GROUPS[kind]: [_tree(each, parts) for each in value]}
    if kind is dict:
        return {"dict": [[_tree(key, parts), _tree(each, parts)] for key, each in value.items()]}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind is bytes:
        return _stored("bytes", value, parts)
    if kind is np.ndarray or isinstance(value, np.generic):
        array = np.asarray(value)
        if name := _name_of(array.dtype):
            flat = np.ascontiguousarray(array).reshape(-1)
            raw = flat.view(np.uint8) if flat.size and flat.itemsize else b""
            facts = {"dtype": name, "shape": list(array.shape), "scalar": kind is not np.ndarray}
            return {**_stored("array", raw, parts), **facts}
        if array.dtype == object and all(type(each) in (bytes, str) for each in array.flat):  # TensorFlow's strings
            return {"strings": [_tree(each, parts) for each in array.flat], "shape": list(array.shape)}
    return _stored("pickle", pickle.dumps(value, protocol=5), parts)


def _stored(kind: str, raw: Any, parts: list[Any]) -> dict[str, Any]:
    parts.append(raw)
    return {kind: len(parts) - 1}


def _name_of(dtype: np.dtype[Any]) -> str:
    """Returns a name from which NumPy can recreate a type of plain numbers or text; "" if there is none."""
    if dtype.kind in "biufcSUMm":
        return str(dtype.str)
    try:
        name = str(dtype.name)  # bfloat16 and similar types
        return name if not dtype.hasobject and np.dtype(name) == dtype else ""
    except TypeError:
        return ""


def _value(tree: Any, parts: list[memoryview]) -> Any:
    """The inverse of `_tree`."""
    if isinstance(tree, list):
        return [_value(each, parts) for each in tree]
    if not isinstance(tree, dict):
        return tree
    kind = next(iter(tree))
    for group, name in _GROUPS.items():
        if kind == name:
            return group(_value(each, parts) for each in tree[kind])
    if kind == "dict":
        return {_value(key, parts): _value(each, parts) for key, each in tree["dict"]}
    if kind == "complex":
        return complex(*tree["complex"])
    if kind == "strings":
        strings = np.empty(len(tree["strings"]), object)
        strings[:] = _value(tree["strings"], parts)
        return strings.reshape(tree["shape"])
    raw = parts[tree[kind]]
    if kind == "bytes":
        return bytes(raw)
    if kind == "array":
        dtype = np.dtype(tree["dtype"])
        array = np.frombuffer(raw, dtype) if len(raw) else np.empty(0, dtype)
        array = array.reshape(tree["shape"]).copy() if len(raw) else np.zeros(tree["shape"], dtype)
        return array[()] if tree["scalar"] else array
    return pickle.loads(raw)


Commits = dict[int, dict[str, Any]]  # of each elastic function, by its index


def written(commits: Mapping[int, Mapping[str, Any]]) -> int:
    """Writes commits to memory.

    Args:
        commits: The last commit of each elastic function.

    Returns:
        The descriptor of the file.
    """
    descriptor = os.memfd_create("hvkeras-commits", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        for piece in encode({number: dict(commit) for number, commit in commits.items()}):
            file.write(piece)
    return descriptor


def read(descriptor: int) -> Commits:
    """Reads what `written` has written; the file stays open."""
    with os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(0)
        found: Commits = decode(file.read())
    return found

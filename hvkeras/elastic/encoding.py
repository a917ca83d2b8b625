"""Serialization of values: JSON for the structure, raw bytes for arrays, pickle for other objects.

Only other objects are pickled, so that decoding tensors, numbers, strings and containers of them executes no code.

Backends that start only once per process, such as `tfdist`, re-execute the program in the same process. Commits are
passed to it in an anonymous file in memory (memfd_create), which only this process can open.
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
_LENGTH, _SUM = 8, 4  # bytes of the little-endian header length, and of the CRC-32 at the end
_PLAIN = (type(None), bool, int, float, str)
_GROUPS: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}


def encode(value: Any) -> Iterator[Any]:
    """Serialize a value in chunks, so that large arrays are not copied into one buffer.

    Args:
        value: Anything that can be pickled.

    Yields:
        Chunks of bytes; the last one is a checksum of the others.

    Raises:
        Exception: Any exception that pickling raises.
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
    """Deserialize the output of `encode`.

    Returns:
        The value.

    Raises:
        ValueError: The data are damaged, or not the output of `encode`.
        Exception: Any exception that unpickling raises.
    """
    if not data.startswith(MAGIC):
        raise ValueError("it does not begin as one that hvkeras wrote")
    view = memoryview(data)
    if zlib.crc32(view[:-_SUM]) != int.from_bytes(view[-_SUM:], "little"):
        raise ValueError("its checksum is wrong")
    start = len(MAGIC) + _LENGTH
    end = start + int.from_bytes(view[len(MAGIC) : start], "little")
    header = json.loads(bytes(view[start:end]))
    parts = []
    for size in header["sizes"]:
        parts.append(view[end : end + size])
        end += size
    return _value(header["value"], parts)


def _tree(value: Any, parts: list[Any]) -> Any:
    """Return the structure of a value for JSON; append its binary data to `parts`."""
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
    """Return a name from which NumPy can recreate a dtype of numbers or text; "" if there is none."""
    if dtype.kind in "biufcSUMm":
        return str(dtype.str)
    try:
        name = str(dtype.name)  # extension types such as bfloat16
        return name if not dtype.hasobject and np.dtype(name) == dtype else ""
    except TypeError:
        return ""


def _value(tree: Any, parts: list[memoryview]) -> Any:
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


Commits = dict[int, dict[str, Any]]  # last commit by index of the elastic function


def write_commits(commits: Mapping[int, Mapping[str, Any]]) -> int:
    """Write commits to an anonymous file in memory.

    Args:
        commits: Last commit of each elastic function.

    Returns:
        File descriptor.
    """
    descriptor = os.memfd_create("hvkeras-commits", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(descriptor), "wb") as file:
        for piece in encode({number: dict(commit) for number, commit in commits.items()}):
            file.write(piece)
    return descriptor


def read_commits(descriptor: int) -> Commits:
    """Read the commits that `write_commits` wrote; the file stays open."""
    with os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(0)
        commits: Commits = decode(file.read())
    return commits

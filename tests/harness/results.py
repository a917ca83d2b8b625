"""Compare what two runs of a script leave: the arrays in `result.npz`, files, and lines of standard output."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

RESULT = "result.npz"  # every compared script writes its weights and results into it
WEIGHT = "weight."  # the names of weights begin with it
FLOOR = 1.0  # arrays whose root mean square is smaller are compared absolutely

Arrays = Mapping[str, Any]
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|\b(?:nan|inf)\b")
_STYLE = re.compile(r"\x1b\[[\d;]*[A-Za-z]")
_ADDRESS = re.compile(r"\bfile:\S+")  # it contains the folder of the run
_PROGRESS = re.compile(r"^\s*(\d+)/(\d+|Unknown)\s")
_RANK = re.compile(r"^\[\d+\] ?")
_PICTURES = (".png", ".jpg")
_ARCHIVES = (".keras", ".zip")


def arrays(folder: Path) -> dict[str, Any]:
    """Return the arrays of a run."""
    return _arrays_in((folder / RESULT).read_bytes())


def differences(found: Arrays, expected: Arrays, tolerance: float, floor: float = FLOOR) -> list[str]:
    """Return a line for each array that differs; an empty list if the results are the same.

    Arrays are the same if the root mean square of their differences is at most `tolerance` times that of the expected
    values, or times `floor` if that is larger.
    """
    lines = [f"{name}: only in {'the expected' if name in expected else 'the found'} results"
             for name in sorted(found.keys() ^ expected.keys())]
    for name in sorted(found.keys() & expected.keys()):
        one, other = np.asarray(found[name]), np.asarray(expected[name])
        if one.shape != other.shape or one.dtype.kind != other.dtype.kind:
            lines.append(f"{name}: {one.dtype}{one.shape} instead of {other.dtype}{other.shape}")
        elif other.dtype == np.uint8:  # pixels, of which rounding may move some to the next value
            lines += [f"{name}: other pixels"] if np.abs(one.astype(int) - other.astype(int)).max(initial=0) > 1 else []
        elif other.dtype.kind not in "fiub":
            lines += [f"{name}: other values"] if (one != other).any() else []
        elif (np.isfinite(one) != np.isfinite(other)).any():
            lines.append(f"{name}: not finite, or not expected to be")
        else:
            apart, scale = root_mean_square({name: one}, {name: other}), root_mean_square({name: other})
            if apart > tolerance * max(scale, floor):
                lines.append(f"{name}: apart by {apart:.3g}, values have the scale {scale:.3g}")
    return lines


def weights(results: Arrays) -> dict[str, Any]:
    """Return the weights among the arrays of a run."""
    return {name: value for name, value in results.items() if name.startswith(WEIGHT)}


def root_mean_square(some: Arrays, others: Arrays | None = None) -> float:
    """Return the root mean square of all values, or of their differences from others."""
    parts = [np.asarray(some[name], "float64") - (0 if others is None else np.asarray(others[name], "float64"))
             for name in sorted(some)]
    flat = np.concatenate([part[np.isfinite(part)] for part in parts]) if parts else np.zeros(0)
    return float(np.sqrt(np.mean(flat**2))) if flat.size else 0.0


def files(folder: Path) -> set[str]:
    """Return the names of all files below a folder; those of TensorBoard's without host, time and process."""
    return {re.sub(r"(events\.out\.tfevents)\..*", r"\1", path.relative_to(folder).as_posix())
            for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts}


def different_files(found: Path, expected: Path, tolerance: float) -> list[str]:
    """Return a line for each file whose numbers differ, or that only one run has left.

    Compared are the arrays of NumPy's and HDF5's files, pixels, archives of Keras, and the numbers and words of texts.
    """
    lines = [f"{name}: only {'expected' if name in files(expected) else 'found'}"
             for name in sorted(files(found) ^ files(expected))]
    for name in sorted(files(found) & files(expected)):
        if (found / name).is_file() and (expected / name).is_file():
            one, other = (dict(_contents(name, (folder / name).read_bytes())) for folder in (found, expected))
            lines += [f"{name}: {line}" for line in differences(one, other, tolerance)]
    return lines


def lines_of(text: str) -> Counter[str]:
    """Return how often each line was printed, with `#` for numbers, and without spaces that align them.

    Of a progress bar, the complete one counts: its number of steps, and the names of the metrics. Empty lines, and the
    rank with which the launcher begins each line, do not count.
    """
    found: Counter[str] = Counter()
    for printed in text.split("\n"):
        if printed.endswith("\b"):  # what follows "\r", which may be read as "\n", is printed over it
            continue
        last = _STYLE.sub("", printed.rstrip("\r").split("\r")[-1])
        last = _RANK.sub("", last).rstrip()
        progress = _PROGRESS.match(last)
        if progress and progress[1] == progress[2]:
            metrics = sorted(part.split(": ")[0] for part in last.split(" - ") if ": " in part)
            found[f"{progress[1]}/{progress[2]} {metrics}"] += 1
        elif last and not progress:
            found[" ".join(_NUMBER.sub("#", _ADDRESS.sub("file:", last)).split()).replace("[ ", "[")] += 1
    return found


def _contents(name: str, content: bytes) -> Iterator[tuple[str, Any]]:
    suffix = Path(name).suffix
    if suffix == ".npz":
        yield from _arrays_in(content).items()
    elif suffix == ".h5":
        yield from _arrays_in_hdf5(content)
    elif suffix in _ARCHIVES:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for member in archive.namelist():
                if member != "metadata.json":  # the date
                    yield from ((f"{member}:{key}", value) for key, value in _contents(member, archive.read(member)))
    elif suffix in _PICTURES:
        from PIL import Image

        with Image.open(io.BytesIO(content)) as picture:
            yield "pixels", np.asarray(picture)
    elif suffix in (".csv", ".json", ".txt"):
        text = content.decode()
        if suffix == ".json":
            text = json.dumps(json.loads(text, object_hook=_without_identities), sort_keys=True)
        yield "words", np.asarray(_NUMBER.sub("#", text))
        yield "numbers", np.asarray([float(number) for number in _NUMBER.findall(text)])


def _without_identities(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name != "shared_object_id"}


def _arrays_in(content: bytes) -> dict[str, Any]:
    with np.load(io.BytesIO(content)) as found:
        return dict(found)


def _arrays_in_hdf5(content: bytes) -> Iterator[tuple[str, Any]]:
    import h5py  # type: ignore[import-untyped]

    found: dict[str, Any] = {}
    with h5py.File(io.BytesIO(content)) as file:
        file.visititems(lambda name, item: found.update({name: item[()]}) if isinstance(item, h5py.Dataset) else None)
    yield from found.items()

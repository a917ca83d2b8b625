"""The wheel and the source distribution hold what they should, whatever lies about in the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE", ".gitignore")
FOLDERS = ("hvkeras", "backends")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, with the link and the folders that a developer's checkout has as well."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in FILES:
        shutil.copy(ROOT / name, folder)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=lambda _, found: {"__pycache__", "backends"} & set(found))
    (folder / "hvkeras" / "backends").symlink_to("../backends")
    for name in (".venv/lib", "build", "hvkeras/__pycache__", "tests/unit"):
        (folder / name).mkdir(parents=True)
        (folder / name / "rubbish.py").touch()
    return folder


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The wheel, built with no compiler in the PATH."""
    out = tmp_path_factory.mktemp("wheel")
    for tool in ("cmake", "ninja"):
        (out / tool).symlink_to(str(shutil.which(tool, path=f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}")))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir",
               str(out), str(checkout)]
    done = subprocess.run(command, env={"PATH": str(out)}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.whl")
    assert path.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def _metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return message_from_bytes(wheel.read(name))


def test_the_wheel_holds_both_folders_once(wheel: zipfile.ZipFile) -> None:
    sources = {str(path.relative_to(ROOT)) for name in FOLDERS for path in (ROOT / name).rglob("*")
               if path.is_file() and "__pycache__" not in path.parts
               and path.suffix not in (".cc", ".h", ".so") and path.name != "CMakeLists.txt"}
    sources -= {name for name in sources if name.startswith("hvkeras/backends/")}
    expected = {name.replace("backends/", "hvkeras/backends/", 1) if name.startswith("backends/") else name
                for name in sources}
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == expected
    assert "hvkeras/py.typed" in expected


def test_the_wheel_asks_for_no_flavour_of_tensorflow(wheel: zipfile.ZipFile) -> None:
    needed = [line for line in _metadata(wheel).get_all("Requires-Dist", []) if "extra ==" not in line]
    assert needed
    assert not [line for line in needed if "tensorflow" in line or "keras" in line]


def test_the_wheel_has_the_extras_and_the_version(wheel: zipfile.ZipFile) -> None:
    metadata = _metadata(wheel)
    assert set(metadata.get_all("Provides-Extra", [])) == {
        "tensorflow", "cpu", "cuda", "mpi", "horovod", "bench", "report", "test", "lint", "docs"}
    assert f'__version__ = "{metadata["Version"]}"' in (ROOT / "hvkeras" / "__init__.py").read_text()


def test_the_source_distribution_leaves_the_link_and_the_rest_out(checkout: Path, tmp_path: Path) -> None:
    program = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=checkout, capture_output=True, text=True,
                          timeout=120)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    assert {"backends/interface.py", "hvkeras/settings.py", "pyproject.toml", "LICENSE"} <= names
    assert not [name for name in names if name.startswith(("hvkeras/backends", ".venv", "build"))]
    assert not [name for name in names if "__pycache__" in name]


def test_the_checkout_says_why_it_cannot_be_imported(checkout: Path) -> None:
    (checkout / "hvkeras" / "backends").unlink()
    try:
        done = subprocess.run([sys.executable, "-c", "import hvkeras"], cwd=checkout, capture_output=True, text=True,
                              timeout=60)
    finally:
        (checkout / "hvkeras" / "backends").symlink_to("../backends")
    assert done.returncode == 1
    assert "hvkeras must be installed to be imported" in done.stderr.splitlines()[-1]
    assert "HINT: run from another folder" in done.stderr.splitlines()[-1]

"""The wheel and the source distribution hold what they should, whatever lies about in the checkout."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from email.message import Message
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from harness.launchers import clean_environment
from harness.processes import run_python
from hvkeras.backends import cpp_library as paths
from hvkeras.backends.cpp_library import path_of

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
    for name in (".venv/lib", "build", "hvkeras/__pycache__", "tests/unit", "hvkeras-report/ranks", "runs/today"):
        (folder / name).mkdir(parents=True)
        (folder / name / "rubbish.py").touch()
    (folder / "trace.json").touch()
    return folder


def _link_build_tools(folder: Path) -> None:
    """Makes a folder for the PATH in which CMake is found and no compiler."""
    for tool in ("cmake", "ninja"):
        found = shutil.which(tool, path=f"{Path(sys.executable).parent}{os.pathsep}{os.defpath}")
        (folder / tool).symlink_to(str(found))


@pytest.fixture(scope="module")
def source_distribution(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution."""
    out = tmp_path_factory.mktemp("sdist")
    program = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    done = run_python(program, str(out), cwd=checkout)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.tar.gz")
    return path


@pytest.fixture(scope="module")
def wheel(source_distribution: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[zipfile.ZipFile]:
    """The wheel, built from the source distribution with no compiler in the PATH."""
    out = tmp_path_factory.mktemp("wheel")
    _link_build_tools(out)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir",
               str(out), str(source_distribution)]
    done = subprocess.run(command, env={"PATH": str(out)}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.whl")
    assert path.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def _metadata(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return message_from_bytes(wheel.read(name))


@pytest.mark.slow
def test_the_wheel_holds_both_folders_once(wheel: zipfile.ZipFile) -> None:
    sources = {str(path.relative_to(ROOT)) for name in FOLDERS for path in (ROOT / name).rglob("*")
               if path.is_file() and "__pycache__" not in path.parts
               and path.suffix not in (".cc", ".h", ".map", ".so") and path.name != "CMakeLists.txt"}
    sources -= {name for name in sources if name.startswith("hvkeras/backends/")}
    expected = {name.replace("backends/", "hvkeras/backends/", 1) if name.startswith("backends/") else name
                for name in sources}
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == expected
    assert "hvkeras/py.typed" in expected


@pytest.mark.slow
def test_the_wheel_asks_for_no_flavour_of_tensorflow(wheel: zipfile.ZipFile) -> None:
    needed = [line for line in _metadata(wheel).get_all("Requires-Dist", []) if "extra ==" not in line]
    assert needed
    assert not [line for line in needed if "tensorflow" in line or "keras" in line]


@pytest.mark.slow
def test_the_wheel_has_the_extras_and_the_version(wheel: zipfile.ZipFile) -> None:
    metadata = _metadata(wheel)
    assert set(metadata.get_all("Provides-Extra", [])) == {
        "tensorflow", "cpu", "cuda", "mpi", "hosts", "horovod", "ray", "spark", "bench", "report", "test", "lint",
        "docs"}
    assert f'__version__ = "{metadata["Version"]}"' in (ROOT / "hvkeras" / "__init__.py").read_text()


@pytest.mark.slow
def test_the_wheel_names_where_the_project_is(wheel: zipfile.ZipFile) -> None:
    metadata = _metadata(wheel)
    assert metadata["Author"] == "hvkeras contributors"
    urls = dict(url.split(", ") for url in metadata.get_all("Project-URL", []))
    assert set(urls) == {"Homepage", "Documentation", "Changelog", "Issues", "Source"}
    readme = str(metadata.get_payload())
    assert readme.startswith("# hvkeras") and not re.findall(r"\]\((?!https?:|#)", readme)
    assert f"]({urls['Source']}/blob/main/docs/settings.md)" in readme


def test_dependency_groups_are_the_extras_of_their_names() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    groups = project["dependency-groups"]
    assert set(groups) == {"test", "lint", "docs"}
    assert groups == {name: project["project"]["optional-dependencies"][name] for name in groups}


@pytest.mark.slow
def test_a_wheel_that_must_have_the_library_is_not_built_without_it(checkout: Path, tmp_path: Path) -> None:
    _link_build_tools(tmp_path)
    program = "import sys; from scikit_build_core.build import build_wheel; build_wheel(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=checkout, capture_output=True, text=True,
                          timeout=120, env={"PATH": str(tmp_path), "NATIVE_ENGINE_REQUIRED": "1"})
    assert done.returncode == 1 and "CMAKE_CXX_COMPILER" in done.stdout + done.stderr
    assert not list(tmp_path.glob("*.whl"))


@pytest.mark.slow
def test_the_source_distribution_leaves_the_link_and_the_rest_out(source_distribution: Path) -> None:
    with tarfile.open(source_distribution) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    assert {"backends/interface.py", "hvkeras/settings.py", "pyproject.toml", "LICENSE"} <= names
    assert {name.split("/")[0] for name in names} == {*FILES, *FOLDERS, "tests", "PKG-INFO"}
    assert not [name for name in names if name.startswith("hvkeras/backends") or "__pycache__" in name]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a clone")
def test_the_source_distribution_names_all_that_belongs_to_it() -> None:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    named = set(re.findall(r'"!/(.+?)"', (ROOT / "pyproject.toml").read_text()))
    assert {line.split("/")[0] for line in done.stdout.splitlines()} == {*named, ".ci"}
    folders = ["hvkeras-report/report.html", "report/results.json", "trace.rank.0.json", "timeline.json"]
    done = subprocess.run(["git", "check-ignore", *folders], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == folders


@contextlib.contextmanager
def _without_link(checkout: Path) -> Iterator[None]:
    """A context in which the checkout is as it was cloned."""
    (checkout / "hvkeras" / "backends").unlink()
    try:
        yield
    finally:
        (checkout / "hvkeras" / "backends").symlink_to("../backends")


# Says whether the native engine is there, and which of some files count as the user's code.
PROGRAM = """from importlib.util import find_spec
from hvkeras.backends.native import NativeBackend
from hvkeras.frames import is_library
print(NativeBackend.availability().ok, NativeBackend.availability().reason)
names = ("hvkeras.cli.main", "hvkeras.backends.native", "tensorflow", "rich")
print("own code:", [not is_library(find_spec(name).origin) for name in names])
"""

# Imports every path that Horovod's scripts or our documents name. Spark and Ray need not be installed.
PUBLIC_PATHS = """import importlib, pkgutil
names = ["hvkeras." + name for name in (
    "callbacks", "elastic", "parameter_server", "typing", "errors", "runner", "backends.interface",
    "backends.capabilities", "backends.contract", "horovod.as_horovod", "spark", "ray.ray_settings", "common",
    "tensorflow", "keras")]
for name in list(names)[-3:]:
    names += [found.name for found in pkgutil.walk_packages(importlib.import_module(name).__path__, name + ".")]
for name in names:
    importlib.import_module(name)
import hvkeras
print(len(names), len([getattr(hvkeras, name) for name in hvkeras.__all__]))
"""


def _imports_every_public_path(python: Path | str, folder: Path, **variables: str) -> None:
    done = subprocess.run([python, "-c", PUBLIC_PATHS], cwd=folder, capture_output=True, text=True, timeout=120,
                          env={**clean_environment(folder), **variables})
    assert done.returncode == 0, done.stderr
    paths, names = map(int, done.stdout.split())
    assert paths > 25 and names > 80


def test_the_source_tree_can_be_imported_as_it_stands(checkout: Path) -> None:
    with _without_link(checkout):
        done = run_python(PROGRAM, cwd=checkout)
        assert done.stdout.startswith("False its C++ library was not built in the source tree"), done.stderr
        assert done.stdout.splitlines()[-1] == "own code: [False, False, False, True]"


@pytest.mark.slow
def test_the_source_distribution_has_every_public_path(source_distribution: Path, tmp_path: Path) -> None:
    with tarfile.open(source_distribution) as archive:
        archive.extractall(tmp_path, filter="data")
    [folder] = tmp_path.iterdir()
    _imports_every_public_path(sys.executable, folder)


@pytest.mark.slow
def test_the_wheel_has_every_public_path(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "installed")
    _imports_every_public_path(sys.executable, tmp_path, PYTHONPATH=str(tmp_path / "installed"))


def _installed_in_place(checkout: Path, folder: Path, path: str) -> Path:
    """The Python of a new environment that has all packages of this one, and hvkeras by `pip install -e`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    others = folder / "others"
    others.mkdir()
    for index in map(Path, site.getsitepackages()):
        for package in index.iterdir():
            if not package.name.startswith("hvkeras") and package.suffix != ".pth":
                (others / package.name).symlink_to(package)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text(f"{others}\n")
    python = folder / "bin" / "python"
    command = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "-e", checkout]
    done = subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return python


@pytest.mark.slow
@pytest.mark.parametrize(("link", "compiler"), [
    pytest.param(False, False, id="as cloned"),
    pytest.param(True, False, id="with the link", marks=pytest.mark.nightly),
    pytest.param(False, True, id="with a compiler", marks=pytest.mark.nightly)])
def test_an_editable_installation_works(link: bool, compiler: bool, checkout: Path, tmp_path: Path) -> None:
    _link_build_tools(tmp_path)
    path = f"{tmp_path}{os.pathsep}{os.defpath}" if compiler else str(tmp_path)
    script = tmp_path / "script.py"
    script.write_text("import sys, hvkeras as hvd, tensorflow as tf\nhvd.init()\n"
                      "print(hvd.__file__, hvd.allreduce(tf.constant(2.0), op=hvd.Sum).numpy())\n")
    with contextlib.nullcontext() if link else _without_link(checkout):
        python = _installed_in_place(checkout, tmp_path / "environment", path)
        _imports_every_public_path(python, tmp_path)
        for folder in (tmp_path, checkout):
            done = subprocess.run([python, "-c", PROGRAM], cwd=folder, capture_output=True, text=True, timeout=60)
            assert done.stdout.startswith("True" if compiler else "False its C++ library was not built"), done.stderr
            assert done.stdout.splitlines()[-1] == "own code: [False, False, False, True]"
        if compiler:
            command = [python.with_name("hvkeras"), "run", "-np", "2", "--backend", "native", python, script]
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
            assert sorted(done.stdout.splitlines()) == [f"[{rank}] {checkout / 'hvkeras' / '__init__.py'} 4.0"
                                                        for rank in (0, 1)], done.stderr


def test_a_library_is_found_in_any_folder_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = [tmp_path / name for name in ("sources", "built", "older")]
    for folder in folders:
        folder.mkdir()
    spec = ModuleSpec("native", None, is_package=True)
    spec.submodule_search_locations = [str(folder) for folder in folders]
    monkeypatch.setattr(paths, "find_spec", lambda _: spec)
    assert path_of("library.so") == folders[0] / "library.so"
    for age, folder in enumerate(folders[1:]):
        (folder / "library.so").touch()
        os.utime(folder / "library.so", (1000 - age, 1000 - age))
    assert path_of("library.so") == folders[1] / "library.so"


def test_a_misspelt_name_is_reported_with_the_one_that_was_meant(tmp_path: Path) -> None:
    done = run_python("import hvkeras as hvd; hvd.DistributedOptimiser", cwd=tmp_path)
    assert done.stderr.splitlines()[-1].endswith("Did you mean: 'DistributedOptimizer'?")

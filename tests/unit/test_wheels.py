"""The wheels in dist/: what their names promise holds, and the installed package is what is in this machine's one."""

from __future__ import annotations

import importlib.metadata
import io
import platform
import re
import zipfile
from pathlib import Path

import pytest
from auditwheel.architecture import Architecture
from auditwheel.libc import Libc
from auditwheel.wheel_abi import analyze_wheel_abi
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "hvkeras/backends/native"
CORE = f"{FOLDER}/libhvkeras_native.so"
WHEELS = sorted((ROOT / "dist").glob("*manylinux*.whl"))
HERE = [path for path in WHEELS if path.stem.endswith(f"_{platform.machine()}")]
# Of the system, and in every manylinux; the last is the name of the loader on each processor.
SYSTEM = re.compile(r"lib(c|m|dl|rt|pthread)\.so\.\d+|ld-linux-[\w-]+\.so\.\d+")
wheels = pytest.mark.parametrize("path", [pytest.param(path, id=path.stem.rpartition("-")[2]) for path in WHEELS])


def libraries(path: Path) -> dict[str, ELFFile]:
    """The compiled files of a wheel."""
    with zipfile.ZipFile(path) as archive:
        return {name: ELFFile(io.BytesIO(archive.read(name))) for name in archive.namelist() if name.endswith(".so")}


@wheels
def test_a_wheel_keeps_what_its_tag_promises(path: Path) -> None:
    tag = path.stem.rpartition("-")[2]
    assert tag.startswith("manylinux_2_28_")
    found = analyze_wheel_abi(Libc.GLIBC, Architecture(tag.removeprefix("manylinux_2_28_")), path,
                              frozenset(), disable_isa_ext_check=False, allow_graft=False)
    # Its tag is the policy that auditwheel gives it, or a newer one.
    assert not found.overall_policy < found.policies.get_policy_by_name(tag), found
    with zipfile.ZipFile(path) as archive:
        [text] = [archive.read(name).decode() for name in archive.namelist() if name.endswith(".dist-info/WHEEL")]
    assert re.findall(r"(?m)^Tag: (.*)$", text) == [f"py3-none-{tag}"]
    assert "Root-Is-Purelib: false" in text


@wheels
def test_its_libraries_need_the_system_alone_and_export_our_functions_alone(path: Path) -> None:
    found = libraries(path)
    assert set(found) == {CORE}
    for library in found.values():
        dynamic = library.get_section_by_name(".dynamic")
        assert isinstance(dynamic, DynamicSection)
        needed = {tag.needed for tag in dynamic.iter_tags("DT_NEEDED")}
        assert {one for one in needed if not SYSTEM.fullmatch(one)} == set()
        assert not [tag for kind in ("DT_RPATH", "DT_RUNPATH") for tag in dynamic.iter_tags(kind)]
        symbols = library.get_section_by_name(".dynsym").iter_symbols()
        exported = {symbol.name for symbol in symbols if symbol["st_shndx"] != "SHN_UNDEF"}
        assert exported and {symbol for symbol in exported if not symbol.startswith("hvkeras_")} == set()
        assert library.get_section_by_name(".symtab") is None


@pytest.mark.skipif(not HERE, reason="there is no wheel for this machine in dist/")
def test_the_tests_run_on_what_is_in_the_wheel() -> None:
    installed = importlib.metadata.distribution("hvkeras")
    [path] = HERE
    if installed.read_text("direct_url.json") is not None and "dir_info" in str(installed.read_text("direct_url.json")):
        pytest.skip("hvkeras is installed from its sources")
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if ".dist-info/" not in name:
                assert archive.read(name) == Path(str(installed.locate_file(name))).read_bytes(), name

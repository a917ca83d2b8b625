"""The build of Horovod: prerequisites, stand-in headers, record; and the Horovod that `make test` built."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from hvkeras.errors import MachineError, UsageError
from hvkeras.horovod import building, stubs
from hvkeras.horovod import prerequisites as needs


@pytest.fixture
def tools(tmp_path: Path) -> Callable[..., str]:
    """Makes a PATH that holds only the named programs, each printing what it is given to print."""

    def make(**programs: str) -> str:
        for name, text in programs.items():
            path = tmp_path / name.replace("gxx", "g++")
            path.write_text(f"#!/bin/sh\necho '{text}'\n")
            path.chmod(0o755)
        return str(tmp_path)

    return make


def test_headers_keep_gpu_code_out_of_a_real_compilation(tmp_path: Path) -> None:
    folder = stubs.write_stubs(tmp_path)
    includes = "".join(f'#include "{name}"\n' for name in stubs.HEADERS)
    source = tmp_path / "probe.cc"
    source.write_text(f"#define HAVE_GPU 1\n{includes}\n#if HAVE_GPU\n#error GPU code\n#endif\n")
    command = ["g++", f"-I{folder}", "-fsyntax-only", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_debug_information_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "probe.cc").write_text("int probe() { return 0; }\n")
    compiler = stubs.write_compiler(tmp_path, needs.find_compiler("", os.environ["PATH"]))
    subprocess.run([compiler, "-g", "-O3", "-c", "probe.cc"], cwd=tmp_path, check=True, timeout=60)
    assert b".debug_info" not in (tmp_path / "probe.o").read_bytes()


def test_cmake_builds_for_tensorflow_alone_in_few_units(tmp_path: Path) -> None:
    (tmp_path / "wrapper").mkdir()
    (tmp_path / "real").write_text("#!/bin/sh\nfor one; do echo \"[$one]\"; done\n")
    (tmp_path / "real").chmod(0o755)

    def called(few_units: bool, *arguments: str) -> list[str]:
        cmake = stubs.write_cmake(tmp_path / "wrapper", str(tmp_path / "real"), few_units)
        return subprocess.run([cmake, *arguments], capture_output=True, text=True, check=True).stdout.split()

    building_it = ["[--build]", "[.]", "[--target]", "[tensorflow]", "[--]", "[-j2]"]
    assert called(True, "--build", ".", "--", "-j2") == building_it
    assert called(False, "/source", "-DA=1") == ["[/source]", "[-DA=1]"]
    assert "[-DCMAKE_UNITY_BUILD=ON]" in called(True, "/source")


@pytest.mark.parametrize("version", [(3, 9), (3, 14)])
def test_other_pythons_are_refused(version: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match=r"Python 3.10 to 3.13\..*HINT: create a virtual environment"):
        needs.check_python(version)


def test_no_tensorflow() -> None:
    with pytest.raises(MachineError, match=r"an installed TensorFlow, and there is none\. HINT: pip install"):
        needs.check_tensorflow("")


@pytest.mark.parametrize("version", ["2.15.1", "2.22.0", "3.0.0"])
def test_other_tensorflows_are_refused(version: str) -> None:
    with pytest.raises(UsageError, match=f"TensorFlow 2.16 to 2.21.*tensorflow='{version}'"):
        needs.check_tensorflow(version)


def test_no_compiler(tools: Callable[..., str]) -> None:
    with pytest.raises(MachineError, match=r"needs a C\+\+ compiler.*HINT: install one"):
        needs.find_prerequisites(None, None, {"PATH": tools()})
    with pytest.raises(MachineError, match=r"CXX must name a C\+\+ compiler.*CXX='icpx'"):
        needs.find_prerequisites(None, None, {"PATH": tools(), "CXX": "icpx"})


def test_no_make(tools: Callable[..., str]) -> None:
    with pytest.raises(MachineError, match="needs make in the PATH"):
        needs.find_prerequisites(None, None, {"PATH": tools(gxx="")})


def test_no_mpi_is_an_error_or_a_notice_or_nothing(tools: Callable[..., str]) -> None:
    environ = {"PATH": tools(gxx="", make="")}
    with pytest.raises(MachineError, match=r"mpicxx in the PATH.*hvkeras\[mpi\].*--without-mpi"):
        needs.find_prerequisites(True, None, environ)
    found = needs.find_prerequisites(None, None, environ)
    assert found.mpi == ""
    assert "with Gloo only" in found.notices[0]
    assert needs.find_prerequisites(False, None, environ).notices == ()


def test_mpi_is_used_where_it_is(tools: Callable[..., str]) -> None:
    environ = {"PATH": tools(gxx="", make="", mpicxx="")}
    found = needs.find_prerequisites(None, None, environ)
    assert found.mpi == f"{environ['PATH']}/mpicxx"
    variables = building.horovod_variables(found, Path("stubs"), 3, None, {"CXXFLAGS": "-O2"})
    assert variables["CXXFLAGS"] == "-Istubs -O2"
    assert variables["MAKEFLAGS"] == "-j3"
    assert "HOROVOD_WITH_MPI" in variables
    assert "HOROVOD_GPU_OPERATIONS" not in variables
    assert "HOROVOD_WITHOUT_MPI" in building.horovod_variables(
        needs.find_prerequisites(False, None, environ), Path("stubs"), 1, None, environ)


def test_cuda_needs_its_compiler(tools: Callable[..., str], tmp_path: Path) -> None:
    environ = {"PATH": tools(gxx="", make="")}
    with pytest.raises(MachineError, match=r"needs nvcc in the PATH.*--cuda FOLDER"):
        needs.find_prerequisites(False, "", environ)
    (tmp_path / "cuda" / "bin").mkdir(parents=True)
    (tmp_path / "nvcc").touch(mode=0o755)
    (tmp_path / "nvcc").rename(tmp_path / "cuda" / "bin" / "nvcc")
    found = needs.find_prerequisites(False, str(tmp_path / "cuda"), environ)
    assert "do not cover" in found.notices[0]
    variables = building.horovod_variables(found, Path("stubs"), 1, str(tmp_path / "cuda"), environ)
    assert variables["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert variables["HOROVOD_CUDA_HOME"] == str(tmp_path / "cuda")


@pytest.mark.parametrize(
    ("version", "good"), [("3.12.4", False), ("3.13.0", True), ("3.31.10", True), ("4.0.1", False)]
)
def test_cmake_4_and_old_ones_are_replaced(version: str, good: bool, tools: Callable[..., str]) -> None:
    assert (needs.CMAKE not in needs.missing_packages(tools(cmake=f"cmake version {version}"))) is good


def test_no_cmake_is_brought_in(tools: Callable[..., str]) -> None:
    assert needs.CMAKE in needs.missing_packages(tools())


def test_a_failing_step_shows_its_output_and_keeps_it() -> None:
    program = "import sys; print('[  5%] Building'); print('[ 40%] Building'); print('the reason'); sys.exit(3)"
    screen = io.StringIO()
    with pytest.raises(MachineError, match=r"(?s)the reason\n.*exit_code=3") as raised:
        building.run_shown([sys.executable, "-c", program], os.environ, Console(file=screen), "Building")
    assert [line.split(" %")[0] for line in screen.getvalue().splitlines()] == ["Building: 5", "Building: 40"]
    log = Path(str(raised.value).split("the complete output is in ")[1].rstrip("."))
    assert log.read_text().endswith("the reason\n")
    log.unlink()


def test_the_command_says_what_is_missing_and_fails(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "hvkeras", "build-horovod", "--force"], env={"PATH": str(tmp_path)},
                          cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("hvkeras build-horovod: Building Horovod needs a C++ compiler")


@pytest.mark.slow
def test_the_built_horovod_imports_with_mpi_and_gloo() -> None:
    environ = needs.build_environment(os.environ)
    assert building.verify(with_mpi=True, environ=environ) == {"mpi": True, "gloo": True, "nccl": False}


@pytest.mark.nightly
def test_a_build_that_would_do_is_not_repeated(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "hvkeras", "build-horovod", "--with-mpi"], cwd=tmp_path,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    tensorflow = needs.installed_tensorflow()
    assert done.stdout == f"Horovod is already built against TensorFlow {tensorflow}, with MPI, Gloo.\n"

"""Build the wheel into a folder, replacing older ones for the same machine, and print its path.

    python tools/build_wheel.py dist                        # with Zig, for every Linux with glibc 2.28 or later
    python tools/build_wheel.py --machine aarch64 dist      # the same for another processor
    python tools/build_wheel.py --compiler system dist      # as `pip install .` does

Needs scikit-build-core, CMake, Ninja and, unless with `--compiler system`, `ziglang`, all in the environment of the
running Python. With `--compiler system` on a machine without a compiler, the wheel lacks the C++ library.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = """import json, sys
from scikit_build_core.build import build_wheel
build_wheel(sys.argv[1], json.loads(sys.argv[2]))
"""


def for_every_linux(machine: str) -> dict[str, str]:
    """Return the build settings for a processor, `x86_64` or `aarch64`."""
    return {"wheel.tags": f"py3-none-manylinux_2_28_{machine}", "build-dir": f"build/manylinux-{machine}",
            "cmake.define.MACHINE": machine,
            "cmake.define.CMAKE_TOOLCHAIN_FILE": str(ROOT / "tools" / "manylinux.cmake")}


def build(folder: Path, machine: str, compiler: str) -> Path:
    """Build the wheel, and return its path.

    Raises:
        SystemExit: The build failed. The message is its output.
    """
    for old in (*folder.glob(f"*_{machine}.whl"), *folder.glob("*-any.whl")):
        old.unlink()
    before = set(folder.glob("*.whl"))
    by_zig = compiler == "zig"
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    if by_zig:
        environment["NATIVE_ENGINE_REQUIRED"] = "1"  # see pyproject.toml
    settings = for_every_linux(machine) if by_zig else {}
    done = subprocess.run([sys.executable, "-I", "-c", BUILD, str(folder), json.dumps(settings)], cwd=ROOT, text=True,
                          env=environment, capture_output=True, check=False)
    if done.returncode != 0:
        raise SystemExit(done.stdout + done.stderr)
    (path,) = set(folder.glob("*.whl")) - before
    return path


def main() -> None:
    """Parse the command line, build, and print the path."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--machine", choices=("x86_64", "aarch64"), default=platform.machine())
    parser.add_argument("--compiler", choices=("zig", "system"), default="zig")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    print(build(given.folder.resolve(), given.machine, given.compiler))


if __name__ == "__main__":
    main()

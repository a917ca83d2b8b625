"""Stubs of TensorFlow's headers, and wrappers of the compiler and CMake, for Horovod's build.

Horovod 0.28.1 includes headers that TensorFlow 2.16 and later lack.
"""

from __future__ import annotations

import shlex
from pathlib import Path

# Only Horovod's xla_mpi_ops.cc includes these headers, and its code depends on HAVE_GPU. So they may be empty, except
# that the first one must undefine HAVE_GPU.
HEADERS = {
    "tensorflow/compiler/tf2xla/xla_op_kernel.h": "#undef HAVE_GPU\n",
    "tensorflow/compiler/tf2xla/xla_op_registry.h": "",
    "tensorflow/compiler/xla/client/xla_builder.h": "",
    "tensorflow/compiler/xla/service/custom_call_target_registry.h": "",
    "tensorflow/compiler/xla/service/hlo.pb.h": "",
    "tensorflow/compiler/xla/shape.h": "",
    "tensorflow/compiler/xla/xla_data.pb.h": "",
}


def write_stubs(folder: Path) -> Path:
    """Write the headers into an existing folder, and return it. It must be first in the include path."""
    for name, text in HEADERS.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def write_compiler(folder: Path, compiler: str) -> str:
    """Write a wrapper of the compiler that disables debug information, which Horovod's build enables.

    Returns:
        The path of the wrapper.
    """
    path = folder / Path(compiler).name
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(compiler)} "$@" -g0\n')
    path.chmod(0o755)
    return str(path)


def write_cmake(folder: Path, cmake: str, few_units: bool) -> str:
    """Write a wrapper of CMake that builds Horovod only for TensorFlow, as a unity build.

    The normal build compiles Gloo twice, for other frameworks, and TensorFlow's headers for each of 40 source files.
    In two units, these take two thirds of the time.

    Args:
        cmake: Path of CMake, or its name in the PATH.
        few_units: Whether to use a unity build; Gloo does not support it.

    Returns:
        The path of the wrapper.
    """
    each = folder / "each.cmake"
    each.write_text("set(CMAKE_UNITY_BUILD OFF)\n")
    units = f"-DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=25 -DCMAKE_PROJECT_gloo_INCLUDE={each}"
    path = folder / "cmake"
    path.write_text(f"""#!/bin/sh
if [ "$1" = --build ]; then shift 2; exec {shlex.quote(cmake)} --build . --target tensorflow "$@"; fi
exec {shlex.quote(cmake)} "$@" {units if few_units else ""}
""")
    path.chmod(0o755)
    return str(path)

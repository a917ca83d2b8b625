"""Stand-ins that Horovod's build uses: for TensorFlow's headers, for the compiler, and for CMake.

Horovod 0.28.1 includes headers that TensorFlow 2.16 and later lack.
"""

from __future__ import annotations

import shlex
from pathlib import Path

# Only Horovod's xla_mpi_ops.cc includes any of these, and its whole body depends on HAVE_GPU. So the headers may be
# empty, provided that the one it includes before that test undefines HAVE_GPU.
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
    """Write the headers into a folder.

    Args:
        folder: An existing folder.

    Returns:
        The folder, to be put first in the include path.
    """
    for name, text in HEADERS.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def write_compiler(folder: Path, compiler: str) -> str:
    """Write a wrapper of the compiler that omits the debug information that Horovod's build requests.

    Args:
        folder: An existing folder.
        compiler: The compiler's path.

    Returns:
        The path of the wrapper.
    """
    path = folder / Path(compiler).name
    path.write_text(f'#!/bin/sh\nexec {shlex.quote(compiler)} "$@" -g0\n')
    path.chmod(0o755)
    return str(path)


def write_cmake(folder: Path, cmake: str, few_units: bool) -> str:
    """Write a wrapper of CMake that has Horovod built for TensorFlow alone, and with less repetition.

    Horovod's own build compiles Gloo a second time, for other frameworks, and TensorFlow's headers again for each of
    its 40 source files; in two units they take two thirds of the time.

    Args:
        folder: An existing folder.
        cmake: CMake's path, or its name in the PATH.
        few_units: Whether to compile many source files at once; Gloo's cannot be.

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

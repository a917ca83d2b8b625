"""Stand-ins for the TensorFlow headers that Horovod 0.28.1 includes and TensorFlow 2.16 and later lack."""

from __future__ import annotations

from pathlib import Path

# Only Horovod's xla_mpi_ops.cc includes any of these, and all of its body depends on HAVE_GPU. So the
# headers may be empty, if the one that it includes before that test takes HAVE_GPU away.
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
    """Writes the headers below a folder.

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
